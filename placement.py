"""Placement: which role runs where. Every rank of a torchrun job finds its own from the configuration.

    ranks       0 .. trainers - 1        train-0 ..; beside rank 0 also preprocess and reward
                then tp for each actor   actor-0 ..: the first of them runs the engine, the others lend it their GPU

With schedule conventional trainers and actors take turns: both are placed from rank 0 on, on the same cores and GPUs.

`python launch.py PRESET --plan --nodes N --gpus-per-node M` prints it, with what a GPU has to hold and what the paper's
model (bench/model.py) expects of the split.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.model import H100_FLOPS_PER_S, Split, best_split, conventional, pipeline, uniform
from config import Config, ConfigError

# glibc gives large blocks back to the kernel at once, to get them again page by page: a fifth of a CPU trainer's time.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass(frozen=True)
class Ranks:
    """What torchrun says of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # of the store
    port: int
    agent_store: bool  # the store is there; else rank 0 has to keep it

    @property
    def here(self) -> range:
        """Ranks on this machine."""
        return range(self.rank - self.local_rank, self.rank - self.local_rank + self.local_size)

    @property
    def machines(self) -> int:
        return self.size // self.local_size


def from_environment() -> Ranks | None:
    """None if torchrun has not started us. What it set is taken out of the environment: vLLM would read some of it."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    numbers = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ranks = Ranks(*numbers, host, port, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    for name in list(os.environ):
        if name.startswith(("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE")):
            del os.environ[name]
    return ranks


@dataclass(frozen=True)
class Place:
    """Where a role runs."""

    device: str  # torch device as the role sees it
    cores: tuple[int, ...]
    threads: int  # of each part
    gpu: str = ""  # CUDA_VISIBLE_DEVICES
    parts: int = 1  # processes that share the cores: the workers of a tensor-parallel engine

    def enter(self) -> None:
        """For the processes started from here on: what one has at its start it has in all its threads."""
        os.sched_setaffinity(0, self.cores)
        workers = [self.cores[i * self.threads : (i + 1) * self.threads] for i in range(self.parts)]
        bind = "|".join(",".join(map(str, cores)) for cores in workers)
        os.environ |= {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": bind if len(self.cores) == self.threads * self.parts else "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",  # models are folders
        } | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else KEEP_MEMORY)


def first_actor_rank(cfg: Config) -> int:
    return 0 if cfg.schedule == "conventional" else cfg.trainers


def world_size(cfg: Config) -> int:
    return max(cfg.trainers, first_actor_rank(cfg) + cfg.actors * cfg.actor.tp)


def roles(cfg: Config, rank: int) -> list[str]:
    """Of a rank; none, if it only lends its GPU to an actor."""
    names = [f"train-{rank}"] * (rank < cfg.trainers) + ["preprocess", "reward"] * (rank == 0)
    actor, part = divmod(rank - first_actor_rank(cfg), cfg.actor.tp)
    return names + [f"actor-{actor}"] * (part == 0 and 0 <= actor < cfg.actors)


def check_split(cfg: Config, nodes: int, per_node: int) -> None:
    """Raises ConfigError, with the arithmetic, unless the roles fit the ranks of so many machines."""
    total, tp = nodes * per_node, cfg.actor.tp
    have = f"{nodes} × {per_node} = {total} ranks"
    if cfg.schedule == "conventional" and cfg.trainers != total:
        raise ConfigError(
            f"schedule conventional trains on all of the {have}, not on {cfg.trainers}: --trainers {total}"
        )
    if cfg.schedule != "conventional" and cfg.trainers >= total:
        raise ConfigError(f"no actor left: {cfg.trainers} trainers take all of the {have}; lower --trainers")
    if cfg.trainers < 1:
        raise ConfigError(f"no trainer left: trainers is {cfg.trainers} of {have}; want at least 1")
    if tp > per_node:
        raise ConfigError(f"actor.tp {tp} is over the {per_node} ranks of a machine: an engine lives on one")
    first_rank = first_actor_rank(cfg)
    trainers = f"{first_rank} trainers + " if first_rank else ""
    wanted = f"{trainers}{cfg.actors} actors × tp {tp} = {world_size(cfg)}"
    if world_size(cfg) != total:
        fits = (total - first_rank) // tp
        fits = fits if fits and first_rank + fits * tp == total else 0
        remedy = f"--actors {fits} would" if fits else f"({total} - {first_rank}) is no multiple of tp {tp}"
        raise ConfigError(f"{wanted}, but there are {have}: {remedy if fits else 'change --trainers, ' + remedy}")
    for actor in range(cfg.actors):
        first = first_rank + actor * tp
        if first // per_node != (first + tp - 1) // per_node:
            where = f"ranks {first} to {first + tp - 1} of machines with {per_node}"
            raise ConfigError(
                f"actor-{actor} (tp {tp}) would take {where}: across two of them; choose other --trainers"
            )


def plan(cfg: Config, cores: Sequence[int], gpus: Sequence[str], ranks: range | None = None) -> dict[str, Place]:
    """Role -> place, of the ranks on this machine (None: all). Trainers first on the GPUs, actors after them; without
    GPUs each rank gets cores of its own. The light roles share the trainers' cores: the decode loop must not be
    disturbed. Raises ConfigError if there are not the GPUs that `device` asks for."""
    ranks = range(world_size(cfg)) if ranks is None else ranks
    use_gpus = cfg.device == "cuda" or (cfg.device == "auto" and len(gpus) >= len(ranks))
    if use_gpus and len(gpus) < len(ranks):
        raise ConfigError(f"device cuda: trainers and actors need {len(ranks)} GPUs, there are {len(gpus)} here")
    share, own = len(cores) // len(ranks), {}
    for i, rank in enumerate(ranks):  # actors take the first cores; what is left over goes to the first trainer
        begin = share * (len(ranks) - 1 - i)
        mine = cores[begin : begin + share] if i else cores[begin:]
        own[rank] = tuple(mine if share else cores)  # fewer cores than ranks: all for all
    places = {}
    for rank in ranks:
        for name in roles(cfg, rank):
            parts = cfg.actor.tp if name.startswith("actor") else 1
            all_cores = tuple(sorted({core for r in range(rank, rank + parts) for core in own[r]}))
            gpu = ",".join(gpus[r - ranks[0]] for r in range(rank, rank + parts)) if use_gpus else ""
            device = "cuda:0" if use_gpus else "cpu"
            places[name] = Place(device, all_cores, len(own[rank]) if share else 1, gpu, parts)
    trainers = [place for name, place in places.items() if name.startswith("train")] or list(places.values())
    light = tuple(sorted({core for place in trainers for core in place.cores}))
    reference = places.get("train-0", Place("cpu", light, 1))
    ours = {"preprocess": Place(reference.device, light, 1, reference.gpu), "reward": Place("cpu", light, 1)}
    return places | (ours if 0 in ranks else {})


def gpus() -> list[str]:
    import torch

    found = [str(i) for i in range(torch.cuda.device_count())]
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",") if found and "CUDA_VISIBLE_DEVICES" in os.environ else found


# ---------------------------------------------------------------- --plan


@dataclass(frozen=True)
class Size:
    """Of a model, from its config.json."""

    parameters: int
    kv_bytes_per_token: int  # keys and values of all layers, bfloat16


def size(model: Path, preset: Path) -> Size | None:
    """From the model's folder, the preset's own config.json, or the hub; None if there is none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = [path for path in (model, preset) if (path / "config.json").is_file()]
    try:
        config = AutoConfig.from_pretrained(*known[:1] or [str(model)])
    except (OSError, ValueError):
        return None
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Size(parameters, 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head)


def ranges(names: list[str]) -> str:
    """["actor-0", "actor-1", "actor-2"] -> "actor-0 – actor-2"."""
    return names[0] if len(names) == 1 else f"{names[0]} – {names[-1]}" if names else "–"


def table(cfg: Config, nodes: int, per_node: int, gpu_gib: float, model: Size | None) -> str:
    """The placement, the memory and the expected throughput. Raises ConfigError for a split that does not fit."""
    check_split(cfg, nodes, per_node)
    turns = ", in turns on the same GPUs" * (cfg.schedule == "conventional")
    sides = f"{cfg.trainers} train, {cfg.actors} actors × tp {cfg.actor.tp}{turns}"
    lines = [f"{nodes} machines of {per_node} GPUs: {sides}"]
    lines += ["", f"{'machine':<10}{'trainers':<24}{'actors':<24}beside them, on the CPU"]
    for node in range(nodes):
        names = [name for rank in range(node * per_node, (node + 1) * per_node) for name in roles(cfg, rank)]
        train, actors = ([n for n in names if n.startswith(kind)] for kind in ("train", "actor"))
        light = ", ".join(name for name in names if name in ("preprocess", "reward"))
        lines.append(f"{node:<10}{ranges(train):<24}{ranges(actors):<24}{light or '–'}".rstrip())
    if model is None:
        return "\n".join([*lines, "", f"no config.json of {cfg.model}, here or on the hub: memory and speed unknown"])
    return "\n".join([*lines, "", *memory(cfg, gpu_gib, model), "", *throughput(cfg, nodes * per_node, model)])


def memory(cfg: Config, gpu_gib: float, model: Size) -> list[str]:
    """GiB a GPU: trainers in float32 with Adam, sharded; actors in bfloat16, every worker staging the whole model."""
    gib, t, tp = 2**30, cfg.trainers, cfg.actor.tp
    whole, share = 2 * model.parameters / gib, model.parameters / t / gib
    copy = whole if cfg.train.overlap_sending else min(whole, 1 / 16)
    tokens = cfg.actor.max_prompt_tokens + cfg.actor.max_completion_tokens
    full_kv = cfg.actor.sequences * tokens * model.kv_bytes_per_token / tp / gib
    room = cfg.actor.gpu_memory_utilization * gpu_gib - whole / tp
    rows = [
        ("weights", 4 * share, whole / tp),
        ("gradients", 4 * share, 0.0),
        ("optimizer (Adam)", 8 * share, 0.0),
        ("staging (rank 0's copy to send)", copy, whole),
        ("KV cache", 0.0, max(0.0, room)),
    ]
    lines = [f"{f'memory, GiB a GPU of {gpu_gib:g}':<34}{'trainer':>9}{'actor':>9}"]
    lines += [f"{name:<34}{a:>9.1f}{b:>9.1f}" for name, a, b in rows]
    lines.append(f"{'sum (activations not counted)':<34}{sum(r[1] for r in rows):>9.1f}{sum(r[2] for r in rows):>9.1f}")
    enough = f"{full_kv:.1f} GiB would hold {cfg.actor.sequences} sequences of {tokens:,} tokens"
    lines.append(f"KV cache: {cfg.actor.gpu_memory_utilization:g} of the GPU less the weights; {enough}")
    trainer, actor = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if cfg.schedule == "conventional":
        lines.append(f"both on the same GPU: {trainer + actor:.1f} GiB")
        trainer += actor
    if max(trainer, actor) > gpu_gib or room <= 0:
        lines.append("IT DOES NOT FIT: more trainers, a higher actor.tp, or a lower actor.gpu_memory_utilization")
    return lines


def throughput(cfg: Config, gpus: int, model: Size) -> list[str]:
    """By the paper's model: H100, lengths uniform up to the limit, nothing lost to communication."""
    flash_s = 2 * model.parameters / H100_FLOPS_PER_S
    lengths, tp = uniform(cfg.actor.max_completion_tokens), cfg.actor.tp
    ours = pipeline(gpus, cfg.actor.sequences // tp or 1, cfg.actors * tp, cfg.batch_size)
    if cfg.schedule == "conventional":
        ours = conventional(gpus, cfg.batch_size, cfg.phase_steps, lengths)
    most = 2 * cfg.phase_steps - 1 if cfg.schedule == "async" else ours.max_lag
    lag = cfg.max_lag if cfg.max_lag is not None else most
    tokens = cfg.batch_size * lengths.sum()
    rows = [] if cfg.schedule == "async" else [("this split", ours)]  # the paper has no formula for it
    rows.append((f"the model's, lag ≤ {lag:g}", best_split(gpus, cfg.batch_size, lag)))
    lines = ["expected at best (arXiv 2509.19128, appendix A: H100, lengths uniform on 1..L; U(h) in bench/model.py)"]
    lines.append(f"{'':<26}{'H a GPU':>8}{'I of N':>11}{'tokens/s':>12}{'s a step':>10}{'g_max':>7}  bound by")
    for name, split in rows:
        if split is None:
            lines.append(f"{name:<26}none: the least lag of any split is over it")
            continue
        rate, h, where, bound = split.r / flash_s, "–", f"all {gpus}", "both, in turns"
        if isinstance(split, Split):
            h, where = split.sequences, f"{split.generating} of {gpus}"
            bound = "generation" if split.r_gen <= split.r_train else "training"
        numbers = f"{h:>8}{where:>11}{rate:>12,.0f}{tokens / rate:>10.3g}{split.max_lag:>7}"
        lines.append(f"{name:<26}{numbers}  {bound}")
    if cfg.schedule == "pipeline" and cfg.max_lag is not None and ours.max_lag > cfg.max_lag:
        lines.append(
            f"max_lag {cfg.max_lag} is under this split's g_max {ours.max_lag}: admission would hold actors back"
        )
    return lines


def show(argv: list[str], parse: Callable[[list[str]], Config]) -> str:
    """`PRESET --plan --nodes N --gpus-per-node M [--gpu-gib G] …` -> the table. Nothing is started."""
    parser = argparse.ArgumentParser(prog="launch.py PRESET --plan", allow_abbrev=False)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-gib", type=float, default=80.0)
    options, rest = parser.parse_known_args(argv)
    cfg = parse(rest)
    if min(options.nodes, options.gpus_per_node) < 1:
        raise ConfigError(f"{options.nodes} nodes of {options.gpus_per_node} GPUs: want at least 1 of each")
    model = size(cfg.model, Path(__file__).parent / "examples" / rest[0])
    return table(cfg, options.nodes, options.gpus_per_node, options.gpu_gib, model)
