"""Train: importance-weighted REINFORCE on mixed-policy sequences; every optimizer step's weights are published at once.

consumes  batches: `StepBatch`, this rank's packed micro-batches of one optimizer step
emits     weights: version v after v steps, to the weight channel; a "step" report; checkpoints; the final model

    for step in range(start, steps):
        batch = batches.get()
        for micro_batch in batch: backward(policy_loss(π(micro_batch), μ, advantages) / normaliser)
        clip, optimizer.step()
        publish(version = step + 1)          # waits for nobody: actors load it in the middle of their sequences
        now and then: checkpoint             # written in the background

As in the paper (section 2): ratio clamped from above only, no gradient through it, no value network. Unlike it: a KL
penalty is optional and off. Several ranks share the model by FSDP2; one rank on a CPU is the same code unsharded.
"""

import contextlib
import datetime
import functools
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from config import Config, Start, checkpoint_folder
from queues import Channels, MicroBatch, Report, SharedMemoryQueue, SharedMemoryWeights, StepBatch, Stopped

SAVE_ERRORS = (OSError, CheckpointException, SafetensorError, RuntimeError)  # of a disk that is full or read-only
A_DAY = datetime.timedelta(days=1)

# T tokens in a packed micro-batch, S sequences, C completion tokens that enter the loss, V entries in the vocabulary,
# D the width of the model.


def sequence_attention(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, max_length_q=None, **_):
    """Causal attention inside each sequence of a packed row: transformers' attention interface.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D). Sequence s is at cu_seq_lens_q[s:s+2]. In half
    precision on a GPU: torch's flash kernels for ragged rows. Otherwise sequences become the S rows of a batch padded
    to the longest, L: S · L² work, where the way of transformers, a dense mask, is T² (a whole step of `tiny` takes
    twice as long with it).
    """
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
        ends, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
        return out[None], None
    lengths = cu_seq_lens_q.diff()  # (S,)
    offsets = torch.arange(max_length_q, device=query.device)  # (L,)
    real = offsets < lengths[:, None]  # (S, L)
    # Past its end a row reads its neighbour, unused.
    index = (cu_seq_lens_q[:-1, None] + offsets).clamp(max=query.shape[2] - 1).flatten()

    def rows(x: torch.Tensor) -> torch.Tensor:  # (1, H, T, D) -> (S, H, L, D)
        return x[0].index_select(1, index).unflatten(1, real.shape).transpose(0, 1)

    out = torch.nn.functional.scaled_dot_product_attention(
        rows(query), rows(key), rows(value), is_causal=True, scale=scaling, enable_gqa=grouped
    )  # (S, H, L, D)
    return out.transpose(1, 2)[real][None], None


AttentionInterface.register("sequence", sequence_attention)


class HeadLogprobs(torch.autograd.Function):
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), without ever holding (C, V) numbers.

    hidden (C, D), weight (V, D), targets (C,) -> log-probs and, without gradient, entropies: both (C,) float32. Tokens
    go through the head in chunks, and backward computes the logits of a chunk again: one more product beside the other
    three, and 1/13 of the memory at V = 151,936 (bench/head.py).
    """

    LOGITS = {"cpu": 2**26, "cuda": 2**28}  # of a chunk

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        chunk, parts = max(1, HeadLogprobs.LOGITS[weight.device.type] // len(weight)), []
        for h, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = (h @ weight.T).float().div_(temperature)  # (chunk, V)
            chosen, norm = logits.gather(-1, target[:, None]).squeeze(-1), logits.logsumexp(-1)
            entropy = norm - torch.linalg.vecdot((logits - norm[:, None]).exp_(), logits)
            parts.append((chosen - norm, entropy, norm))
        logprobs, entropy, norm = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, norm = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        chunk = max(1, HeadLogprobs.LOGITS[weight.device.type] // len(weight))
        chunks = (x.split(chunk) for x in (hidden, targets, norm, grad, grad_hidden))
        for h, target, n, g, grad_h in zip(*chunks, strict=True):
            d = (h @ weight.T).float().div_(ctx.temperature).sub_(n[:, None]).exp_()  # softmax, (chunk, V)
            g = g[:, None] / ctx.temperature
            d = d.mul_(-g).scatter_add_(1, target[:, None], g).to(weight.dtype)  # (onehot(target) - softmax) · g
            torch.mm(d, weight, out=grad_h)
            if weight.dtype == torch.float32:
                grad_weight.addmm_(d.T, h)
            else:
                grad_weight.add_(d.T @ h)  # summed in float32 over the chunks
        return grad_hidden, grad_weight.to(weight.dtype), None, None


class Policy(torch.nn.Module):
    """A causal language model of transformers that says how likely the tokens of a packed row are."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, micro_batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of the masked tokens at the sampler's temperature, both (C,) float32.

        The hidden state at t - 1 predicts token t; a masked token is never the first of its sequence, so t - 1 is in
        the same one.
        """
        index = micro_batch.mask.nonzero().squeeze(1)  # (C,)
        starts = (micro_batch.position_ids == 0).nonzero().squeeze(1)  # (S,)
        ends = torch.cat([starts, starts.new_tensor([len(micro_batch.mask)])])  # (S + 1,)
        hidden = self.lm.base_model(
            input_ids=micro_batch.input_ids[None],
            position_ids=micro_batch.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=ends.int(),
            max_length_q=int(ends.diff().max()),
        ).last_hidden_state[0]  # (T, D)
        head = self.lm.get_output_embeddings()
        return HeadLogprobs.apply(hidden[index - 1], head.weight, micro_batch.input_ids[index], temperature)


@torch.no_grad()
def _head_is_all(policy: Policy) -> bool:
    """Whether our log-probs are those of transformers' own attention and head and of what it does to logits then."""
    ids, zeros, attention = torch.arange(8), torch.zeros(8), policy.lm.config._attn_implementation
    logprobs, _ = policy(MicroBatch(ids, ids, ids > 0, zeros, ids, zeros, zeros, None), 1.0)
    policy.lm.set_attn_implementation("sdpa")
    logits = policy.lm(input_ids=ids[None]).logits[0, :-1]
    policy.lm.set_attn_implementation(attention)
    return torch.allclose(logprobs, logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1), atol=0.01)


def load_policy(folder: Path, dtype: torch.dtype, device: torch.device) -> Policy:
    """Not in training mode: dropout would make π another policy than the one the engine samples from.

    Raises ValueError for a model that does more to its logits than a matrix product (a bias, a scale, a cap).
    """
    config = AutoConfig.from_pretrained(folder)
    full_attention = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    attention = "sequence" if full_attention and getattr(config, "sliding_window", None) is None else "sdpa"
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval())
    if policy.lm.get_output_embeddings().bias is not None or (dtype == torch.float32 and not _head_is_all(policy)):
        raise ValueError(f"{folder}: this model does more to its logits than a matrix product, which is not handled")
    return policy.to(device)


def policy_loss(
    logprobs: torch.Tensor, micro_batch: MicroBatch, clamp: float, kl_coef: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of weighted token losses (PAPER section 2, arXiv 2509.19128), not yet normalised; and the ratios (C,).

        ratio = π(y_t) / μ(y_t)                                   no gradient through it
        loss  = Σ_t weights_t · ( - min(clamp, ratio) · advantages_t · log π(y_t)  +  kl_coef · kl_t )
        kl_t  = exp(ref - log π) - (ref - log π) - 1              unbiased and never negative, for y_t sampled from π

    logprobs: log π of the masked tokens, (C,). What stands at unmasked positions of the micro-batch is never read.
    """
    mask = micro_batch.mask
    ratio = (logprobs.detach() - micro_batch.logprobs[mask]).exp()  # (C,)
    losses = -ratio.clamp(max=clamp) * micro_batch.advantages[mask] * logprobs  # (C,)
    if kl_coef:
        delta = micro_batch.ref_logprobs[mask] - logprobs
        losses = losses + kl_coef * (delta.exp() - delta - 1)
    return (micro_batch.weights[mask] * losses).sum(), ratio


def step_metrics(
    loss: float, ratio: torch.Tensor, entropy: torch.Tensor, lag: torch.Tensor, clamp: float, device: torch.device
) -> dict:
    """Metrics of one optimizer step from this rank's share of its loss and its tokens' values, each (C,). A collective.

    ess = (Σ r)² / (N · Σ r²) with the unclamped ratios, over the N tokens of all ranks (PAPER section 2).
    """
    r = ratio.double()
    kl = r - 1 - r.log()  # KL(μ‖π), unbiased for tokens sampled from μ
    sums = torch.stack([x.double().sum() for x in (torch.ones_like(r), r, r**2, r > clamp, kl, entropy, lag)])
    sums = torch.cat([torch.tensor([loss], dtype=torch.float64), sums.cpu()]).to(device)
    nothing = torch.tensor([-torch.inf], dtype=torch.float64, device=device)  # a rank may have no token
    maxima = torch.stack([torch.cat([x.double(), nothing]).max() for x in (r, lag, -lag)])
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    loss, total, r_sum, r_squared, clamped, kl_sum, entropy_sum, lag_sum = sums.tolist()
    ratio_max, lag_max, minus_lag_min = maxima.nan_to_num(neginf=0.0).tolist()
    tokens = max(total, 1)  # a step in which no token counts is all zeros
    return {
        "loss": loss,
        "tokens": int(total),
        "ess": r_sum**2 / max(tokens * r_squared, 1e-300),
        "ratio_max": ratio_max,
        "clamp_fraction": clamped / tokens,
        "kl_behaviour": kl_sum / tokens,
        "entropy": entropy_sum / tokens,
        "lag_mean": lag_sum / tokens,
        "lag_max": int(lag_max),
        "lag_min": int(-minus_lag_min),
    }


def learning_rate(cfg: Config, step: int) -> float:
    """Of the optimizer step taken after `step` others: linear warm-up, then the schedule, 0 after the last step."""
    done = step / cfg.steps
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[cfg.train.lr_schedule]
    return cfg.train.lr * min(left, (step + 1) / max(1, cfg.train.warmup_steps))


def training_flops(lm: torch.nn.Module, micro_batches: list[MicroBatch]) -> float:
    """Floating-point operations that forward and backward of these micro-batches take, by the model's definition.

        6 · (N · T  +  V · D · C  +  layers · heads · D_head · Σ S²)

    Two for each multiply-add, once forward and twice backward (PaLM, arXiv 2204.02311, appendix B). N: weights of the
    blocks, met by all T tokens; V · D: the head, met by the C completion tokens; causal attention inside sequences of
    length S has S²/2 pairs of tokens, each met twice. Recomputation (checkpointed blocks, the head's backward) is left
    out: it is not the model's.
    """
    config, embedding, head = lm.config, lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    outside = {id(embedding), id(head)}
    blocks = sum(p.numel() for p in lm.parameters() if p.ndim > 1 and id(p) not in outside)
    tokens = sum(len(m.mask) for m in micro_batches)
    completion_tokens = sum(int(m.mask.sum()) for m in micro_batches)
    starts = [(m.position_ids == 0).nonzero().squeeze(1) for m in micro_batches]
    ends = [torch.cat([start, start.new_tensor([len(m.mask)])]) for start, m in zip(starts, micro_batches, strict=True)]
    pairs = sum(float((e.diff().double() ** 2).sum()) for e in ends)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * pairs
    return 6.0 * (blocks * tokens + head.numel() * completion_tokens + attention)


def matmul_flops_per_s(device: torch.device) -> float:
    """What a large square product reaches here: bfloat16 on a GPU, float32 on a CPU. The best of a few."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, best = torch.randn(n, n, dtype=dtype, device=device), math.inf
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the product
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


class Trainer:
    """The model, its optimizer and one rank's share of both."""

    def __init__(self, cfg: Config, layout: dict[str, tuple[int, ...]], rank: int, device: torch.device):
        self.cfg, self.rank, self.device, self.layout = cfg, rank, device, layout
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.peak_flops_per_s = matmul_flops_per_s(device)
        self.sharded = self.world_size > 1 or device.type == "cuda"
        # FSDP2 takes each block to the GPU when it shards it: the whole never has to fit there.
        self.policy = load_policy(cfg.model, torch.float32, torch.device("cpu") if self.sharded else device)
        self._prepare_blocks()
        self.parameters = dict(self.policy.lm.named_parameters(remove_duplicate=False))
        travelling = {id(self.parameters.get(name)) for name in layout}  # a tied head travels as the embedding
        lost = [name for name, parameter in self.parameters.items() if id(parameter) not in travelling]
        unknown = sorted(set(layout) - set(self.parameters))
        if lost or unknown:
            raise ValueError(f"model and checkpoint disagree: {lost[:5]} not in the files, {unknown[:5]} only there")
        matrices = [p for p in self.policy.parameters() if p.ndim > 1]
        vectors = [p for p in self.policy.parameters() if p.ndim <= 1]  # norms and biases do not decay
        decay = cfg.train.weight_decay
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=cfg.train.lr, betas=cfg.train.adam_betas, fused=True)
        self.skipped_steps = 0
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=A_DAY) if dist.is_initialized() else None
        self.checkpoint_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.checkpoint_in_writing: Future | None = None

    def _prepare_blocks(self) -> None:
        """Per block and then for the rest: activation checkpointing, torch.compile, FSDP2; all in place, names stay.

        Master weights and the optimizer's state are float32 everywhere; GPUs compute in bfloat16.
        """
        on_gpu = self.device.type == "cuda"
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": half if on_gpu else MixedPrecisionPolicy()}
        if self.sharded:
            options["mesh"] = init_device_mesh(self.device.type, (self.world_size,))
        for block in self.policy.modules():
            if type(block).__name__ not in self.policy.lm._no_split_modules:
                continue
            if self.cfg.train.compile:  # inside of checkpointing, which is never traced, and of FSDP's hooks
                block.forward = torch.compile(block.forward, dynamic=True)
            if self.cfg.train.activation_checkpointing:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if self.sharded:
                fully_shard(block, **options)
        if self.sharded:
            fully_shard(self.policy, **options)

    def backward(self, batch: StepBatch) -> dict:
        """Gradient of the whole batch's loss, over micro-batches and ranks; returns the step's metrics."""
        cfg, total_loss, tokens = self.cfg.train, torch.zeros((), device=self.device), []
        for micro_batch in batch.micro_batches:
            micro_batch = to_device(micro_batch, self.device)
            logprobs, entropy = self.policy(micro_batch, self.cfg.actor.temperature)
            loss, ratio = policy_loss(logprobs, micro_batch, cfg.clamp, cfg.kl_coef)
            loss = loss / max(batch.normaliser, 1e-8)
            (loss * self.world_size).backward()  # FSDP averages gradients over ranks; the loss is already global
            total_loss += loss.detach()
            tokens.append((ratio, entropy, batch.step - micro_batch.versions[micro_batch.mask]))
        return step_metrics(total_loss.item(), *map(torch.cat, zip(*tokens, strict=True)), cfg.clamp, self.device)

    def step(self, batch: StepBatch) -> dict:
        """One optimizer step, skipped and counted if its gradient is not finite. Returns the metrics of the step."""
        start, lr = time.monotonic(), learning_rate(self.cfg, batch.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = self.backward(batch)
        grad_norm = full(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.train.max_grad_norm)).item()
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self.skipped_steps += not math.isfinite(grad_norm)
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's kernels count
        seconds = time.monotonic() - start
        metrics |= {
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_steps": self.skipped_steps,
            "train_s": seconds,
            "rank_tokens_per_s": sum(len(m.mask) for m in batch.micro_batches) / seconds,
            "mfu": training_flops(self.policy.lm, batch.micro_batches) / seconds / self.peak_flops_per_s,
        }
        return {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON has no infinity

    def weights(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        """Every travelling weight, whole, one at a time. A collective: all ranks iterate together."""
        for name in self.layout:
            yield name, full(self.parameters[name].detach().to(dtype))

    def publish(self, channel: SharedMemoryWeights, version: int) -> None:
        """A collective: weights are cast to the engine's dtype, then gathered and written one at a time."""
        weights = self.weights(getattr(torch, self.cfg.actor.dtype))
        if self.rank == 0:
            channel.publish(version, weights)
        for _ in weights:  # the other ranks only take part
            pass

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format, beside `folder` first. A collective."""
        if self.rank:
            for _ in self.weights():  # only take part
                pass
            return
        state = {name: tensor.cpu() for name, tensor in self.weights()}
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.policy.lm.save_pretrained(unfinished, state_dict=state)
        for path in self.cfg.model.iterdir():  # the tokenizer and whatever else belongs to the model
            if path.is_file() and "safetensors" not in path.name and not (unfinished / path.name).exists():
                shutil.copy(path, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def state(self) -> dict:
        """What a checkpoint holds, under names that do not depend on the number of ranks. A collective."""
        untouched = not self.optimizer.state
        model, optimizer = get_state_dict(self.policy, self.optimizer)
        for moments in self.optimizer.state.values() if untouched else ():
            moments["step"].zero_()  # torch fills empty states by a step of length 0, and counts it
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state(), "skipped": self.skipped_steps}

    def write_checkpoint(self, batch: StepBatch, reports: SharedMemoryQueue | None) -> None:
        """Of the moment after this batch's step: the state is copied, then written in the background. A collective."""
        if self.checkpoint_in_writing:
            self.checkpoint_in_writing.exception()  # waits for it
        folder, alone = checkpoint_folder(self.cfg, batch.step + 1), not dist.is_initialized()
        written = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.checkpoint_group, no_dist=alone)
        values = {"step": batch.step + 1, "stream": batch.stream}
        self.checkpoint_in_writing = self.checkpoint_thread.submit(self._report_checkpoint, values, written, reports)

    def _report_checkpoint(self, values: dict, written: Future, reports: SharedMemoryQueue | None) -> None:
        """Once all ranks have written theirs; the launcher gives it its name then. Runs in a thread."""
        report = Report("checkpoint", values)
        try:
            written.result()
        except SAVE_ERRORS as error:
            what = f"the checkpoint of step {values['step']} was not written: {str(error).strip().splitlines()[-1]}"
            report = Report("trouble", {"what": what})
            shutil.rmtree(checkpoint_folder(self.cfg, values["step"]), ignore_errors=True)  # room, if the disk is full
        if reports is not None:  # an empty queue is false
            reports.put(report)

    def load_checkpoint(self, folder: Path) -> None:
        """Written by any number of ranks. The optimizer's settings stay those of this run's configuration."""
        state = self.state()
        settings = [{k: group[k] for k in ("betas", "weight_decay")} for group in self.optimizer.param_groups]
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        set_state_dict(
            self.policy, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group |= own
        torch.set_rng_state(state["random"])
        self.skipped_steps = state["skipped"]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded (then a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    return MicroBatch(**{k: None if v is None else v.to(device) for k, v in vars(micro_batch).items()})


def init_process_group(cfg: Config, rank: int, device: torch.device) -> None:
    """Join the other trainers, through a file in the run folder: no port to collide on."""
    if cfg.trainers == 1 and device.type == "cpu":
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{(cfg.run_dir / 'trainers.rendezvous').resolve()}",
        rank=rank,
        world_size=cfg.trainers,
        timeout=A_DAY,  # waiting for a batch may be long; the launcher sees who dies
        device_id=device if device.type == "cuda" else None,
    )


def next_batch(channels: Channels, rank: int, device: torch.device) -> StepBatch | None:
    """This rank's part of the next step, or None when the run is to stop: all ranks get the same answer.

    Rank 0 decides. Its part is put last, so when it is there the others' parts are too.
    """
    batch = None
    if rank == 0:
        with contextlib.suppress(Stopped):
            batch = channels.batches[0].get()
    if dist.is_initialized():
        go_on = torch.tensor([batch is not None], dtype=torch.int32, device=device)
        dist.broadcast(go_on, src=0)
        if rank and go_on.item():
            batch = channels.batches[rank].try_get()
            assert batch is not None, "rank 0 has its part of the step, this rank has none"
    return batch


def main(cfg: Config, channels: Channels, start: Start, rank: int, device_name: str) -> None:
    device = torch.device(device_name)
    torch.manual_seed(cfg.seed)
    init_process_group(cfg, rank, device)
    trainer = Trainer(cfg, channels.weights.layout, rank, device)
    if start.folder:
        trainer.load_checkpoint(start.folder)
        trainer.publish(channels.weights, start.step)
    reports, batch = channels.reports if rank == 0 else None, None
    for step in range(start.step, cfg.steps):
        began = time.monotonic()
        following = next_batch(channels, rank, device)
        if following is None:
            break
        batch, waited = following, time.monotonic()
        assert batch.step == step, f"batch of step {batch.step} arrived at step {step}"
        metrics = trainer.step(batch)
        stepped = time.monotonic()
        trainer.publish(channels.weights, step + 1)
        metrics |= {"step": step + 1, "version": step + 1, "queue_batches": len(channels.batches[0])}
        metrics |= {"wait_s": waited - began, "publish_s": time.monotonic() - stepped}
        if reports is not None:
            with contextlib.suppress(Stopped):  # then there is no next batch, and the model is saved
                reports.put(Report("step", batch.metrics | metrics))
        if cfg.checkpoint_every and (step + 1) % cfg.checkpoint_every == 0:
            trainer.write_checkpoint(batch, reports)
    if batch is not None and cfg.checkpoint_every and (batch.step + 1) % cfg.checkpoint_every:
        trainer.write_checkpoint(batch, reports)  # of a run that ended or was interrupted
    try:
        trainer.save(cfg.run_dir / "model")
    except SAVE_ERRORS as error:
        if reports is None:
            raise
        reports.put(Report("trouble", {"what": f"the model was not saved: {error}"}))
    trainer.checkpoint_thread.shutdown()  # waits for the checkpoint in writing
    if dist.is_initialized():
        dist.destroy_process_group()
