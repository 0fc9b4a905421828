"""Checks: everything that can be known to be wrong before anything heavy starts, each with the value and the remedy."""

import importlib.util
import itertools
import json
import math
import operator
from collections.abc import Iterator

from safetensors import SafetensorError

from config import Config, ConfigError, load_function
from data import check_source
from model_files import has_chat_template, model_layout, uses_chat_template
from record import SINKS
from verify import PACKAGES, VERIFIERS


def check(cfg: Config) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    for problem in itertools.chain(_wrong_values(cfg), _wrong_model(cfg), _wrong_sources(cfg)):
        raise ConfigError(problem)


def _wrong_values(cfg: Config) -> Iterator[str]:
    counts = "actors batch_size group_size reward.workers actor.sequences actor.max_prompt_tokens "
    counts += "actor.max_completion_tokens preprocess.max_tokens_per_microbatch preprocess.ready_batches eval.prompts "
    counts += "actor.kv_cache_gib actor.tp keep_checkpoints phase_steps"
    counts += " steps trainers" if cfg.steps or cfg.trainers else ""
    positive = "actor.gpu_memory_utilization train.lr train.clamp train.max_grad_norm reward.timeout_s "
    positive += "reward.memory_gib"
    others = "seed max_lag eval.every show_every train.warmup_steps train.kl_coef train.weight_decay checkpoint_every "
    others += "eval.samples reward.soft_limit_tokens max_actor_restarts"
    for names, want, right in (
        (counts, "at least 1", lambda value: value >= 1),
        ("actor.temperature eval.temperature", "at least 0.01, vLLM's least", lambda value: value >= 0.01),
        ("timeout_s", "at least 5, for a process that is only slow", lambda value: value >= 5),
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
    if cfg.schedule != "pipeline" and cfg.max_lag is not None:
        most = cfg.phase_steps * (2 if cfg.schedule == "async" else 1) - 1
        if most > cfg.max_lag:
            lags = f"schedule {cfg.schedule} with G = {cfg.phase_steps} has lags up to {most}"
            yield f"{lags}, over max_lag {cfg.max_lag}: take --max-lag {most}, or a lower --G"
    if cfg.schedule != "pipeline" and cfg.checkpoint_every % cfg.phase_steps:
        whole = math.ceil(cfg.checkpoint_every / cfg.phase_steps) * cfg.phase_steps
        yield f"checkpoint_every {cfg.checkpoint_every} is not a multiple of G = {cfg.phase_steps}: take {whole}"
    if cfg.schedule == "conventional" and cfg.steps and cfg.trainers != cfg.actors * cfg.actor.tp:
        sides = f"{cfg.trainers} trainers, {cfg.actors} actors × tp {cfg.actor.tp}"
        yield f"schedule conventional takes turns on the same cores or GPUs, but there are {sides}: take as many"
    if cfg.schedule != "pipeline" and (cfg.actor.update, cfg.actor.kv) != ("inflight", "keep"):
        given = f"actor.update {cfg.actor.update}, actor.kv {cfg.actor.kv}"
        yield f"{given}: with schedule {cfg.schedule} weights never change within a sequence; leave both out"
    if cfg.actor.top_p != 1.0 or cfg.actor.top_k != 0:
        given = f"top_p {cfg.actor.top_p}, top_k {cfg.actor.top_k}"
        yield f"{given}: the trainer cannot mirror a truncated distribution; take 1 and 0, and sharpen with temperature"
    if cfg.eval.every and not cfg.eval.greedy and not cfg.eval.samples:
        yield "eval.greedy is False and eval.samples 0: nothing to evaluate; take --eval.every 0 for no evaluation"
    if cfg.reward.soft_limit_tokens > cfg.actor.max_completion_tokens:
        yield f"reward.soft_limit_tokens {cfg.reward.soft_limit_tokens} is over actor.max_completion_tokens"
    if "{prompt}" not in cfg.prompt.wrap:
        yield f"prompt.wrap {cfg.prompt.wrap!r} has no {{prompt}}: every prompt would be the same"


def _wrong_model(cfg: Config) -> Iterator[str]:
    files = {path.name for path in cfg.model.iterdir()} if cfg.model.is_dir() else set()
    if not cfg.model.is_dir():
        how = "".join(f": make it with python {path}" for path in cfg.model.parent.glob("make_model.py"))
        yield f"model folder {cfg.model}: no such folder{how}"
    if "config.json" not in files:
        yield f"model folder {cfg.model} has no config.json: want a model in Hugging Face format"
    if not any(name.endswith(".safetensors") for name in files):
        yield f"model folder {cfg.model} has no *.safetensors: save it with save_pretrained()"
    if not files & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        yield f"model folder {cfg.model} has no tokenizer: save it there with tokenizer.save_pretrained()"
    try:
        config = json.loads((cfg.model / "config.json").read_text())
        context, heads = config.get("max_position_embeddings") or math.inf, config.get("num_attention_heads", 0)
        model_layout(cfg.model)
        chat = has_chat_template(cfg.model)
    except (ValueError, SafetensorError) as error:
        yield f"model folder {cfg.model}: a file is damaged or not fetched whole ({error!r})"
    prompt, completion = cfg.actor.max_prompt_tokens, cfg.actor.max_completion_tokens
    if prompt + completion > context:
        budget = f"max_prompt_tokens {prompt} + max_completion_tokens {completion} = {prompt + completion}"
        yield f"{budget} is over the model's context of {context} tokens: lower one of them"
    if heads % cfg.actor.tp:
        yield f"actor.tp {cfg.actor.tp} does not divide the model's {heads} attention heads: take a divisor"
    if cfg.prompt.template == "chat" and not chat:
        yield f"prompt.template chat: the tokenizer in {cfg.model} has no chat template"
    if cfg.prompt.few_shot and uses_chat_template(cfg):
        yield "prompt.few_shot stands before plain prompts only: give --prompt.template plain, or write `messages`"
    if cfg.prompt.system and not uses_chat_template(cfg):
        yield "prompt.system needs a chat template: put it into prompt.few_shot or prompt.wrap"


def _wrong_sources(cfg: Config) -> Iterator[str]:
    """Datasets, the verifier, the logs."""
    if not any(cfg.data) and cfg.steps:
        yield "data is empty: name a .jsonl or .parquet file, hf:…, gym:… or `file.py:function`"
    if not any(cfg.eval.data) and (cfg.eval.every or not cfg.steps):
        remedy = "or turn evaluation off with --eval.every 0" if cfg.steps else "with --data"
        yield f"eval.data is empty: name held-out rows, {remedy}"
    for spec in (*(cfg.data if cfg.steps else ()), *(cfg.eval.data if cfg.eval.every else ())):
        check_source(spec, cfg)
    name = cfg.reward.function
    if name not in VERIFIERS and not name.removeprefix("python:").rpartition(":")[0]:
        yield f"reward.function {name!r}: want one of {', '.join(VERIFIERS)}, or `python:file.py:function`"
    if name not in VERIFIERS:
        load_function(name)
    elif name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        yield f"reward.function {name}: package {PACKAGES[name]} is not installed (requirements-extras.txt)"
    for log in cfg.log.split(",") if cfg.log not in ("auto", "none") else ():
        if log not in SINKS:
            yield f"log {log!r}: want auto, none, or some of {','.join(SINKS)}"
        if importlib.util.find_spec(log) is None:
            yield f"log {log}: package {log} is not installed (requirements-extras.txt)"
