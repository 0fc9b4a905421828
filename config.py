"""The configuration of a run: one dataclass tree, and the checks made before anything heavy starts.

A preset is a file: examples/<name>/preset.py, beside its task and its model.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from safetensors import SafetensorError, safe_open


class ConfigError(Exception):
    """Bad input, with a message that names the value and the remedy; the launcher exits with code 2."""


@dataclass(frozen=True)
class RewardConfig:
    """Verification, in processes of its own so that decoding never waits for it."""

    function: str = "exact"  # `exact` (equals the answer) or `file.py:function`: (completion text, row) -> float.
    workers: int = 1  # Processes that compute rewards.


@dataclass(frozen=True)
class ActorConfig:
    """Generation (vLLM)."""

    sequences: int = 256  # H: sequences each actor keeps in flight.
    temperature: float = 1.0  # Sampling temperature; the trainer divides its logits by the same number.
    top_p: float = 1.0  # Must be 1: the trainer cannot mirror a truncated distribution.
    top_k: int = 0  # Must be 0 (off): the trainer cannot mirror a truncated distribution.
    max_prompt_tokens: int = 512  # Longer prompts are skipped and counted.
    max_completion_tokens: int = 1024  # Longer completions are cut (finish reason "length").
    update: Literal["inflight", "drain"] = "inflight"  # New weights come in between decode steps, or sequences.
    kv: Literal["keep", "recompute"] = "keep"  # What becomes of running sequences' KV cache at an update.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # Of the engine and of the weights on their way to it.
    kv_cache_gib: int = 4  # KV cache of an actor without a GPU.
    gpu_memory_utilization: float = 0.8  # Share of the GPU's memory for vLLM; a second copy of the weights is on top.
    prefix_caching: bool = True  # Share the prompt's KV cache within a group (never between versions).
    enforce_eager: bool = False  # Do not capture CUDA graphs or compile.


@dataclass(frozen=True)
class PreprocessConfig:
    """Advantages and batches."""

    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"  # Mean reward of the group's others, or of all.
    divide_by_std: bool = False  # Divide advantages by the group's standard deviation of rewards (as GRPO does).
    zero_variance: Literal["keep", "drop"] = "keep"  # Groups of equal rewards: advantage 0, or dropped and counted.
    max_tokens_per_microbatch: int = 4096  # To which sequences are packed (a longer one has a micro-batch to itself).
    ready_batches: int = 4  # No new group starts while so many batches wait for the trainer or are in training.


@dataclass(frozen=True)
class TrainConfig:
    """The optimizer and the loss."""

    lr: float = 1e-6  # Learning rate after warm-up.
    warmup_steps: int = 0  # Optimizer steps over which the learning rate rises linearly.
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # To 0 at the last step, unless constant.
    adam_betas: tuple[float, float] = (0.9, 0.95)  # Adam's decay rates.
    weight_decay: float = 0.0  # Decoupled weight decay, of matrices only (not of norms and biases).
    max_grad_norm: float = 1.0  # Gradients are clipped to this global norm.
    clamp: float = 5.0  # c: importance ratios are clamped to at most this.
    normaliser: Literal["token", "sequence"] = "token"  # Which of the two all weigh the same in the loss.
    kl_coef: float = 0.0  # Weight of the KL penalty against the initial model; 0: no reference model is loaded.
    activation_checkpointing: bool = False  # Keep only each block's input for backward; compute the rest again.
    compile: bool = False  # Compile the model's blocks (torch.compile).


@dataclass(frozen=True)
class EvalConfig:
    """Held-out success, sampled at the training temperature by actor 0 between training sequences."""

    data: str = ""  # Held-out rows, as `data`.
    every: int = 50  # Optimizer steps between evaluations (one at the start and one at the end as well); 0: none.
    prompts: int = 256  # Held-out prompts, one sample each, always the same ones.


@dataclass(frozen=True)
class Config:
    """A run. One optimizer step trains on `batch_size` samples, which are batch_size / group_size groups."""

    name: str = "run"  # The run's folder under `runs_dir`.
    runs_dir: Path = Path("runs")  # Where run folders are made.
    overwrite: bool = False  # Replace a run folder that already holds a run.
    resume: bool = False  # Go on from the newest checkpoint of the run folder.
    checkpoint_every: int = 0  # Optimizer steps between checkpoints (there is one at the end as well); 0: none.
    keep_checkpoints: int = 2  # The newest ones are kept.
    seed: int = 0  # Seeds prompts, sampling and everything else.
    model: Path = Path("model")  # Folder of the initial model, Hugging Face format with safetensors and tokenizer.
    # Training rows: `rows.jsonl`, a line {"prompt": …, "answer": …} each, or `file.py:function`, seed -> such rows.
    # Begun again, reshuffled or with another seed, when they are used up.
    data: str = ""
    actors: int = 1  # Generation processes.
    trainers: int = 1  # Training processes; they share each batch and the sharded model (FSDP2).
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if there is one for every actor and trainer.
    steps: int = 100  # Optimizer steps.
    batch_size: int = 128  # Samples an optimizer step trains on.
    group_size: int = 8  # Samples of each prompt.
    max_lag: int | None = None  # Hard bound, in optimizer steps, on the lag of any trained token; None: no bound.
    show_every: int = 25  # Optimizer steps between decoded rollouts on the screen; 0: none.
    reward: RewardConfig = field(default_factory=RewardConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    def checkpoint_dir(self, step: int) -> Path:
        """Where a checkpoint is written; complete, it loses the ending."""
        return self.run_dir / "checkpoints" / f"step-{step}.unfinished"


@dataclass(frozen=True)
class Start:
    """Where a run starts: anew, or where `step` optimizer steps had left it. A group's id is its row in the stream."""

    step: int = 0
    folder: Path | None = None  # of the checkpoint
    next_group: int = 0  # no group from here on had started
    unfinished: list[int] = field(default_factory=list)  # those before that were neither trained nor dropped
    dropped: dict = field(default_factory=dict)  # counters
    next_eval: int = 0  # version at which an evaluation is due


def load_function(spec: str) -> Callable:
    """`path/file.py:name` -> the function. Raises ConfigError if there is none."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(f"{spec!r}: want `file.py:function`")
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file (named by {spec!r})")
    # Under a name that is none of ours, and known: a verifier may pickle what it defines.
    spec_of_file = importlib.util.spec_from_file_location(f"file_{Path(path).stem}", path)
    module = sys.modules[spec_of_file.name] = importlib.util.module_from_spec(spec_of_file)
    try:
        spec_of_file.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {error!r} (named by {spec!r})") from error
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(f"{path} has no function {name!r} (named by {spec!r})")
    return function


def presets() -> dict[str, Callable[[], Config]]:
    """Name -> the function that makes it; its docstring is what --help says of it."""
    folder = Path(__file__).parent / "examples"
    return {path.parent.name: load_function(f"{path}:preset") for path in sorted(folder.glob("*/preset.py"))}


def read_jsonl(path: Path) -> list[dict]:
    """Rows with a `prompt` and an `answer`, both strings. Raises ConfigError that names the file and the line."""
    if not path.is_file():
        raise ConfigError(f"dataset {path}: no such file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        where = f"dataset {path}, line {number}"
        try:
            if line.strip():
                rows.append(checked_row(json.loads(line), where))
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None
    if not rows:
        raise ConfigError(f'dataset {path} is empty: want a line {{"prompt": …, "answer": …}} a row')
    return rows


def checked_row(row: object, where: str) -> dict:
    """Raises ConfigError unless `row` is a dict of plain values with strings `prompt`, not empty, and `answer`."""
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: want an object with "prompt" and "answer", got {row!r}')
    for key in ("prompt", "answer"):
        if not isinstance(row.get(key), str) or (key == "prompt" and not row[key]):
            raise ConfigError(f'{where}: "{key}" is missing or not a string: {row!r}')
    with contextlib.suppress(TypeError, OverflowError, UnicodeError):
        if msgspec.msgpack.decode(msgspec.msgpack.encode(row)) == row:
            return row
    raise ConfigError(f"{where}: {row!r} would not reach the verifier as it is: want text, numbers, lists and dicts")


def model_layout(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight in the folder's safetensors files: what travels from trainer to actors."""
    layout = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            layout |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return layout


def check(cfg: Config) -> None:
    """Raises ConfigError for everything that can be known to be wrong before anything heavy starts."""
    for problem in itertools.chain(_wrong_values(cfg), _wrong_model(cfg), _wrong_sources(cfg)):
        raise ConfigError(problem)


def _wrong_values(cfg: Config) -> Iterator[str]:
    counts = "actors trainers steps batch_size group_size reward.workers actor.sequences actor.max_prompt_tokens "
    counts += "actor.max_completion_tokens preprocess.max_tokens_per_microbatch preprocess.ready_batches eval.prompts "
    counts += "actor.kv_cache_gib keep_checkpoints"
    positive = "actor.gpu_memory_utilization train.lr train.clamp train.max_grad_norm"
    others = "seed max_lag eval.every show_every train.warmup_steps train.kl_coef train.weight_decay checkpoint_every"
    for names, want, right in (
        (counts, "at least 1", lambda value: value >= 1),
        ("actor.temperature", "at least 0.01, vLLM's least", lambda value: value >= 0.01),
        (positive, "more than 0", lambda value: value > 0),
        (others, "0 or more", lambda value: value >= 0),
    ):
        for name in names.split():
            value = operator.attrgetter(name)(cfg)
            if value is not None and not right(value):
                yield f"{name} is {value}: want {want}"
    if cfg.actor.gpu_memory_utilization > 1:
        yield f"actor.gpu_memory_utilization is {cfg.actor.gpu_memory_utilization}: want a share, at most 1"
    if not all(0 <= beta < 1 for beta in cfg.train.adam_betas):
        yield f"train.adam_betas is {cfg.train.adam_betas}: want two numbers from 0 to below 1"
    if cfg.batch_size % cfg.group_size:
        whole = cfg.batch_size // cfg.group_size * cfg.group_size or cfg.group_size
        yield f"batch_size {cfg.batch_size} is not a multiple of group_size {cfg.group_size}: take {whole}"
    if cfg.group_size == 1:
        yield f"group_size 1 leaves nothing for a {cfg.preprocess.baseline} baseline: take group_size 2 or more"
    if cfg.actor.top_p != 1.0 or cfg.actor.top_k != 0:
        given = f"top_p {cfg.actor.top_p}, top_k {cfg.actor.top_k}"
        yield f"{given}: the trainer cannot mirror a truncated distribution; take 1 and 0, and sharpen with temperature"


def _wrong_model(cfg: Config) -> Iterator[str]:
    files = {path.name for path in cfg.model.iterdir()} if cfg.model.is_dir() else set()
    if not cfg.model.is_dir():
        yield f"model folder {cfg.model}: no such folder"
    if "config.json" not in files:
        yield f"model folder {cfg.model} has no config.json: want a model in Hugging Face format"
    if not any(name.endswith(".safetensors") for name in files):
        yield f"model folder {cfg.model} has no *.safetensors: save it with save_pretrained()"
    if not files & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        yield f"model folder {cfg.model} has no tokenizer: save it there with tokenizer.save_pretrained()"
    try:
        context = json.loads((cfg.model / "config.json").read_text()).get("max_position_embeddings") or math.inf
        model_layout(cfg.model)
    except (ValueError, SafetensorError) as error:
        yield f"model folder {cfg.model}: a file is damaged or not fetched whole ({error!r})"
    prompt, completion = cfg.actor.max_prompt_tokens, cfg.actor.max_completion_tokens
    if prompt + completion > context:
        budget = f"max_prompt_tokens {prompt} + max_completion_tokens {completion} = {prompt + completion}"
        yield f"{budget} is over the model's context of {context} tokens: lower one of them"


def _wrong_sources(cfg: Config) -> Iterator[str]:
    """Datasets and the verifier."""
    if not cfg.data:
        yield "data is empty: name a .jsonl file or `file.py:function`"
    if cfg.eval.every and not cfg.eval.data:
        yield "eval.data is empty: name held-out rows, or turn evaluation off with --eval.every 0"
    for source in (cfg.data, cfg.eval.data) if cfg.eval.every else (cfg.data,):
        rows = read_jsonl(Path(source)) if source.endswith(".jsonl") else load_function(source)(cfg.seed)
        first = next(iter(rows), None)
        if first is None:
            yield f"{source} yields no rows"
        checked_row(first, f"first row of {source}")
    if cfg.reward.function != "exact":
        load_function(cfg.reward.function)
