"""The configuration of a run: one dataclass tree. What is checked before anything heavy starts is in checks.py.

A preset is a file: examples/<name>/preset.py, beside its task and its model.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

ROW_BYTES = 2**18  # of a dataset row on its way to the verifier, at most


class ConfigError(Exception):
    """Bad input, with a message that names the value and the remedy; the launcher exits with code 2."""


@dataclass(frozen=True)
class PromptConfig:
    """From a dataset row to what the engine sees."""

    template: Literal["auto", "chat", "plain"] = "auto"  # auto: the tokenizer's chat template if it has one.
    system: str = ""  # System message, before messages that have none (chat only).
    few_shot: str = ""  # Text before every prompt: solved examples (plain only).
    wrap: str = "{prompt}"  # What is made of a row's prompt, say "{prompt}\nThink step by step."
    prompt_key: str = "prompt"  # The row's field with the prompt; a row may have `messages` instead.
    answer_key: str = "answer"  # The row's field with the answer.
    malformed: Literal["stop", "skip"] = "stop"  # Rows that cannot be used: an error, or skipped and counted.


@dataclass(frozen=True)
class RewardConfig:
    """Verification, in processes of its own so that decoding never waits for it."""

    # exact, number, choice, math, gym, or `python:file.py:function`: (completion text, row) -> a number, or
    # {"reward": number, further names: numbers}, which become metrics.
    function: str = "exact"
    workers: int = 1  # Processes that verify.
    timeout_s: float = 10.0  # Hard limit of a call, in seconds: a longer one is killed and counted as failed.
    memory_gib: float = 4.0  # Memory a worker may take on top of what it has at its start.
    # A function that raises or returns no number: ends the run, or the call is counted as failed.
    errors: Annotated[Literal["stop", "count"], tyro.conf.arg(aliases=("--reward-errors",))] = "stop"
    soft_limit_tokens: int = 0  # Over the last so many tokens before the limit, 0 to 1 is taken from the reward.


@dataclass(frozen=True)
class ActorConfig:
    """Generation (vLLM)."""

    sequences: int = 256  # H: sequences each actor keeps in flight.
    temperature: float = 1.0  # Sampling temperature; the trainer divides its logits by the same number.
    stop: tuple[str, ...] = ()  # Texts that end a completion, as an end-of-sequence token does.
    top_p: float = 1.0  # Must be 1: the trainer cannot mirror a truncated distribution.
    top_k: int = 0  # Must be 0 (off): the trainer cannot mirror a truncated distribution.
    max_prompt_tokens: int = 512  # Longer prompts are skipped and counted.
    max_completion_tokens: int = 1024  # Longer completions are cut (finish reason "length").
    update: Literal["inflight", "drain"] = "inflight"  # New weights come in between decode steps, or sequences.
    kv: Literal["keep", "recompute"] = "keep"  # What becomes of running sequences' KV cache at an update.
    # Of the engine and of the weights on their way to it; auto: bfloat16 on a GPU, float32 on a CPU.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    tp: int = 1  # Tensor parallelism: GPUs (or processes) that share one engine, on one machine.
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
    truncated: Literal["train", "mask"] = "train"  # Samples cut at the limit: mask keeps them out of the loss.
    max_tokens_per_microbatch: int = 4096  # To which sequences are packed (a longer one has a micro-batch to itself).
    order: Literal["started", "finished"] = "started"  # In which the pipeline trains groups (schedule.py).
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
    # Several machines: rank 0 copies the weights and sends them while it trains on; off: training waits instead.
    overlap_sending: bool = True


@dataclass(frozen=True)
class EvalConfig:
    """Held-out success on one fixed version, sampled by actor 0 between training sequences."""

    data: tuple[str, ...] = ()  # Held-out rows, as `data`. Their prompts are never trained on.
    every: int = 50  # Optimizer steps between evaluations (one at the start and one at the end as well); 0: none.
    prompts: int = 256  # At most so many held-out prompts, always the same ones.
    greedy: bool = True  # One greedy sample a prompt: pass@1.
    samples: int = 1  # k: samples a prompt at `temperature`, whose mean is the success rate.
    temperature: float = 1.0  # Of the k samples.
    keep_best: bool = True  # Keep the weights that scored best, in best/ of the run folder.


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
    # Training rows: `rows.jsonl` or `rows.parquet`, `hf:org/name[/subset][:split]`, `gym:task[:{"option": value}]`, or
    # `file.py:function`, seed -> rows. Several are mixed, by weight: `one.jsonl@3 gym:leg_counting@1`. Begun again,
    # reshuffled or with another seed, when they are used up.
    data: tuple[str, ...] = ()
    actors: int = 1  # Generation processes.
    trainers: int = 1  # Training processes; they share each batch and the sharded model (FSDP2).
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if there is one for every actor and trainer.
    steps: int = 100  # Optimizer steps.
    batch_size: int = 128  # Samples an optimizer step trains on.
    group_size: int = 8  # Samples of each prompt.
    # When what may happen (schedule.py): generation and training at the same time, weights in flight; the next B·G
    # samples while G steps train on the last; or one after the other, on the same cores or GPUs.
    schedule: Literal["pipeline", "async", "conventional"] = "pipeline"
    # G: optimizer steps of a phase of async and conventional.
    phase_steps: Annotated[int, tyro.conf.arg(aliases=("--G",))] = 1
    max_lag: int | None = None  # Hard bound, in optimizer steps, on the lag of any trained token; None: no bound.
    show_every: int = 25  # Optimizer steps between decoded rollouts on the screen; 0: none.
    # Seconds without a sign of life after which a process counts as lost; then the run ends.
    timeout_s: Annotated[float, tyro.conf.arg(aliases=("--timeout",))] = 60.0
    max_actor_restarts: int = 3  # Actors that died and were started again, in a run on one machine.
    log: str = "auto"  # Of tensorboard,wandb,trackio, beside metrics.jsonl. auto: tensorboard if installed; or none.
    prompt: PromptConfig = field(default_factory=PromptConfig)
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

    def evaluated_dir(self, version: int) -> Path:
        """Where weights are written that are being evaluated; if none are better, it becomes best/."""
        return self.run_dir / f"evaluated-{version}.unfinished"


@dataclass(frozen=True)
class Start:
    """Where a run starts: anew, or where `step` optimizer steps had left it. A group's id is its row in the stream."""

    step: int = 0
    folder: Path | None = None  # of the checkpoint
    next_group: int = 0  # no group from here on had started
    unfinished: list[int] = field(default_factory=list)  # those before that were neither trained nor dropped
    dropped: dict = field(default_factory=dict)  # counters
    next_eval: int = 0  # version at which an evaluation is due
    actor_restarts: int = 0  # so far


def load_function(spec: str) -> Callable:
    """`path/file.py:name`, with or without `python:` before it -> the function. Raises ConfigError if there is none."""
    path, _, name = spec.removeprefix("python:").rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(f"{spec!r}: want `file.py:function`")
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file (named by {spec!r})")
    # Under a name that is none of ours, and known: a verifier may pickle what it defines.
    spec_of_file = importlib.util.spec_from_file_location(f"file_{Path(path).stem}", path)
    module = sys.modules[spec_of_file.name] = importlib.util.module_from_spec(spec_of_file)
    try:
        spec_of_file.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {error!r} (named by {spec!r})") from error
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(f"{path} has no function {name!r} (named by {spec!r})")
    return function


def presets() -> dict[str, Callable[[], Config]]:
    """Name -> the function that makes it; its docstring is what --help says of it."""
    folder = Path(__file__).parent / "examples"
    return {path.parent.name: load_function(f"{path}:preset") for path in sorted(folder.glob("*/preset.py"))}
