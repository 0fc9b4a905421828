"""Train: importance-weighted REINFORCE on mixed-policy sequences; every optimizer step's weights are published at once.

consumes  batches: `StepBatch`, this rank's packed micro-batches of one optimizer step
emits     weights: version v after v steps, to the weight channel; a "step" report; the final model on disk

    for step in range(steps):
        batch = batches.get()
        for micro_batch in batch: backward(policy_loss(π(micro_batch), μ, advantages) / normaliser)
        clip, optimizer.step()
        publish(version = step + 1)          # waits for nobody: actors load it in the middle of their sequences

As in the paper (section 2): ratio clamped from above only, no gradient through it, no value network. Unlike it: a KL
penalty is optional and off. Several ranks share the model by FSDP2; one rank on a CPU is the same code unsharded.
"""

import contextlib
import datetime
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from config import Config
from queues import Channels, MicroBatch, Report, StepBatch, Stopped

# T tokens in a packed micro-batch, C of them completion tokens that enter the loss, V entries in the vocabulary.


def sequence_attention(module, query, key, value, attention_mask, scaling, position_ids=None, **_):
    """Causal attention inside each sequence of a packed row: transformers' attention interface, SDPA underneath.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D). Sequences begin where `position_ids` (1, T) is 0.
    They become the S rows of a batch padded to the longest, L: S · L² work and torch's flash kernels, where the way of
    transformers, a dense mask, is T² (and takes twice as long for a whole step of `tiny`).
    """
    T = query.shape[2]
    starts = (position_ids[0] == 0).nonzero().squeeze(1)  # (S,)
    lengths = torch.diff(starts, append=starts.new_tensor([T]))  # (S,)
    offsets = torch.arange(int(lengths.max()), device=starts.device)  # (L,)
    real = offsets < lengths[:, None]  # (S, L)
    index = (starts[:, None] + offsets).clamp(max=T - 1).flatten()  # past its end a row reads its neighbour, unused

    def rows(x: torch.Tensor) -> torch.Tensor:  # (1, H, T, D) -> (S, H, L, D)
        return x[0].index_select(1, index).unflatten(1, real.shape).transpose(0, 1)

    out = torch.nn.functional.scaled_dot_product_attention(
        rows(query), rows(key), rows(value), is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )  # (S, H, L, D)
    return out.transpose(1, 2)[real][None], None


AttentionInterface.register("sequence", sequence_attention)


def load_policy(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A causal language model that takes packed rows. Not in training mode: dropout would make π another policy than
    the one the engine samples from."""
    config = AutoConfig.from_pretrained(folder)
    full_attention = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    attention = "sequence" if full_attention and getattr(config, "sliding_window", None) is None else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval().to(device)


def token_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of the masked tokens under `model` at the sampler's temperature, both (C,) float32.

    The logits at t - 1 predict token t; a masked token is never the first of its sequence, so t - 1 is in the same one.
    The head runs on those C positions only.
    """
    index = micro_batch.mask.nonzero().squeeze(1)  # (C,)
    logits = model(
        input_ids=micro_batch.input_ids[None],
        position_ids=micro_batch.position_ids[None],
        logits_to_keep=index - 1,
        use_cache=False,
    ).logits[0]  # (C, V)
    log_softmax = torch.log_softmax(logits.float() / temperature, dim=-1)  # (C, V)
    logprobs = log_softmax.gather(1, micro_batch.input_ids[index, None]).squeeze(1)  # (C,)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)  # (C,)
    return logprobs, entropy


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
    """Of the optimizer step taken after `step` others: linear warm-up, then constant or linear to 0 after the last."""
    left = 1.0 if cfg.train.lr_schedule == "constant" else 1 - step / cfg.steps
    return cfg.train.lr * min(left, (step + 1) / max(1, cfg.train.warmup_steps))


class Trainer:
    """The model, its optimizer and one rank's share of both."""

    def __init__(self, cfg: Config, layout: dict[str, tuple[int, ...]], rank: int, device: torch.device):
        self.cfg, self.rank, self.device = cfg, rank, device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.model = load_policy(cfg.model, torch.float32, device)
        if self.world_size > 1 or device.type == "cuda":
            self._shard()
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.layout = layout
        travelling = {id(self.parameters.get(name)) for name in layout}  # a tied head travels as the embedding
        lost = [name for name, parameter in self.parameters.items() if id(parameter) not in travelling]
        unknown = sorted(set(layout) - set(self.parameters))
        if lost or unknown:
            raise ValueError(f"model and checkpoint disagree: {lost[:5]} not in the files, {unknown[:5]} only there")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cfg.train.lr, betas=cfg.train.adam_betas, weight_decay=cfg.train.weight_decay
        )

    def _shard(self) -> None:
        """FSDP2, a block at a time, then the rest; on GPUs bf16 compute over fp32 master weights."""
        on_gpu = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = on_gpu if self.device.type == "cuda" else MixedPrecisionPolicy()
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for module in self.model.modules():
            if type(module).__name__ in self.model._no_split_modules:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def backward(self, batch: StepBatch) -> dict:
        """Gradient of the whole batch's loss, over micro-batches and ranks; returns the step's metrics."""
        cfg, total_loss, tokens = self.cfg.train, 0.0, []
        for micro_batch in batch.micro_batches:
            micro_batch = to_device(micro_batch, self.device)
            logprobs, entropy = token_logprobs(self.model, micro_batch, self.cfg.actor.temperature)
            loss, ratio = policy_loss(logprobs, micro_batch, cfg.clamp, cfg.kl_coef)
            loss = loss / max(batch.normaliser, 1e-8)
            (loss * self.world_size).backward()  # FSDP averages gradients over ranks; the loss is already global
            total_loss += loss.item()
            tokens.append((ratio, entropy, batch.step - micro_batch.versions[micro_batch.mask]))
        return step_metrics(total_loss, *map(torch.cat, zip(*tokens, strict=True)), cfg.clamp, self.device)

    def step(self, batch: StepBatch) -> dict:
        """One optimizer step. Returns its metrics, the same on every rank."""
        lr = learning_rate(self.cfg, batch.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = self.backward(batch)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics | {"grad_norm": float(full(grad_norm)), "lr": lr}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every travelling weight, whole, one at a time. A collective: all ranks iterate together."""
        for name in self.layout:
            yield name, full(self.parameters[name].detach())

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format, beside `folder` first. A collective."""
        state = {name: tensor.cpu() for name, tensor in self.weights()}
        if self.rank:
            return
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.model.save_pretrained(unfinished, state_dict=state)
        for path in self.cfg.model.iterdir():  # the tokenizer and whatever else belongs to the model
            if path.is_file() and "safetensors" not in path.name and not (unfinished / path.name).exists():
                shutil.copy(path, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


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
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{(cfg.run_dir / 'trainers.rendezvous').resolve()}",
        rank=rank,
        world_size=cfg.trainers,
        timeout=datetime.timedelta(days=1),  # waiting for a batch may be long; the launcher sees who dies
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


def main(cfg: Config, channels: Channels, rank: int, device_name: str) -> None:
    device = torch.device(device_name)
    torch.manual_seed(cfg.seed)
    init_process_group(cfg, rank, device)
    trainer = Trainer(cfg, channels.weights.layout, rank, device)
    for step in range(cfg.steps):
        start = time.monotonic()
        batch = next_batch(channels, rank, device)
        if batch is None:
            break
        waited = time.monotonic()
        assert batch.step == step, f"batch of step {batch.step} arrived at step {step}"
        metrics = trainer.step(batch)
        stepped = time.monotonic()
        if rank == 0:
            channels.weights.publish(step + 1, trainer.weights())
        else:
            for _ in trainer.weights():
                pass
        metrics |= {"step": step + 1, "version": step + 1, "queue_batches": len(channels.batches[0])}
        metrics |= {"wait_s": waited - start, "train_s": stepped - waited, "publish_s": time.monotonic() - stepped}
        if rank == 0:
            with contextlib.suppress(Stopped):  # then there is no next batch, and the model is saved
                channels.reports.put(Report("step", batch.metrics | metrics))
    trainer.save(cfg.run_dir / "model")
    if dist.is_initialized():
        dist.destroy_process_group()
