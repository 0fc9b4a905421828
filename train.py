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
import functools
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from bench.flops import matmul_flops_per_s, training_flops
from config import Config, Start
from model_files import copy_model_files
from policy import load_policy, to_device
from queues import Channels, MicroBatch, Report, StepBatch, Stopped
from schedule import publishes
from weights import A_DAY, BroadcastWeights, SharedMemoryWeights, gathered

# C completion tokens of a packed micro-batch enter the loss.


def policy_loss(logprobs: torch.Tensor, micro_batch: MicroBatch, clamp: float, kl_coef: float = 0.0):
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


def step_metrics(loss: float, ratio, entropy, lag, clamp: float, device: torch.device) -> dict:
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
    means = {"clamp_fraction": clamped, "kl_behaviour": kl_sum, "entropy": entropy_sum, "lag_mean": lag_sum}
    return {key: value / tokens for key, value in means.items()} | {
        "loss": loss,
        "tokens": int(total),
        "ess": r_sum**2 / max(tokens * r_squared, 1e-300),
        "ratio_max": ratio_max,
        "lag_max": int(lag_max),
        "lag_min": int(-minus_lag_min),
    }


def learning_rate(cfg: Config, step: int) -> float:
    """Of the optimizer step taken after `step` others: linear warm-up, then the schedule, 0 after the last step."""
    done = step / cfg.steps
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[cfg.train.lr_schedule]
    return cfg.train.lr * min(left, (step + 1) / max(1, cfg.train.warmup_steps))


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
        options, parameters = {"lr": cfg.train.lr, "betas": cfg.train.adam_betas}, list(self.policy.parameters())
        self.groups = [  # norms and biases do not decay
            options | {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.train.weight_decay},
            options | {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(map(dict, self.groups), fused=True)
        self.skipped_steps = 0
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=A_DAY) if dist.is_initialized() else None
        self.checkpoint_written = threading.Event()  # the last one, or it failed
        self.checkpoint_written.set()

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
        if finite := math.isfinite(grad_norm):
            self.optimizer.step()
        self.skipped_steps += not finite
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
        """Every travelling weight, whole. A collective: all ranks iterate together."""
        return gathered(((name, self.parameters[name].detach()) for name in self.layout), dtype)

    def publish(self, channel: SharedMemoryWeights | BroadcastWeights, version: int) -> None:
        """A collective: weights are cast to the engine's dtype, then gathered and written."""
        weights = self.weights(getattr(torch, self.cfg.actor.dtype))
        try:
            if self.rank == 0:
                channel.publish(version, weights)
        finally:
            deque(weights, maxlen=0)  # the other ranks only take part; whatever happens, none is left waiting for one

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format, beside `folder` first. A collective."""
        state = {name: tensor.cpu() for name, tensor in self.weights() if self.rank == 0}
        if self.rank:
            return
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.policy.lm.save_pretrained(unfinished, state_dict=state)
        copy_model_files(self.cfg.model, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def state(self) -> dict:
        """What a checkpoint holds, under names that do not depend on the number of ranks. A collective."""
        untouched = not self.optimizer.state
        model, optimizer = get_state_dict(self.policy, self.optimizer)
        for moments in self.optimizer.state.values() if untouched else ():
            moments["step"].zero_()  # torch fills empty states by a step of length 0, and counts it
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state(), "skipped": self.skipped_steps}

    def write_checkpoint(self, batch: StepBatch, report: Callable[[str, dict], None]) -> None:
        """Of the moment after this batch's step: the state is copied, then written in the background. A collective."""
        self.checkpoint_written.wait()
        self.checkpoint_written.clear()
        step, folder = batch.step + 1, self.cfg.checkpoint_dir(batch.step + 1)
        options = {"process_group": self.checkpoint_group, "no_dist": not dist.is_initialized()}

        def when_written(written: Future) -> None:
            """Runs in the writer's thread, once all ranks have written theirs. The launcher gives it its name then."""
            kind, values = "checkpoint", {"step": step} | batch.stream
            if error := written.exception():
                why = "".join(str(error).strip().splitlines()[-1:])
                with contextlib.suppress(OSError):  # torch does not always say that a disk is full
                    why += f" ({shutil.disk_usage(self.cfg.run_dir).free / 2**20:,.0f} MiB free)"
                kind, values = "trouble", {"what": f"the checkpoint of step {step} was not written: {why}"}
                shutil.rmtree(folder, ignore_errors=True)  # room for the next, if the disk is full
            report(kind, values)
            self.checkpoint_written.set()  # after the report: this process may end then

        dcp.async_save(self.state(), checkpoint_id=folder, **options).add_done_callback(when_written)

    def load_checkpoint(self, folder: Path) -> None:
        """Written by any number of ranks. The optimizer's settings stay those of this run's configuration."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.policy, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for group, own in zip(self.optimizer.param_groups, self.groups, strict=True):
            group |= own
        torch.set_rng_state(state["random"])
        self.skipped_steps = state["skipped"]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded (then a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def init_process_group(cfg: Config, rank: int, device: torch.device, link=None) -> None:
    """Join the other trainers: through a file in the run folder (no port to collide on), or the store of a link."""
    if cfg.trainers == 1 and device.type == "cpu":
        return
    if link:
        meeting = {"store": dist.PrefixStore("trainers", link.client())}
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = {"init_method": f"file://{(cfg.run_dir / 'trainers.rendezvous').resolve()}"}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=cfg.trainers,
        timeout=A_DAY,  # waiting for a batch may be long; the launcher sees who dies
        device_id=device if device.type == "cuda" else None,
        **meeting,
    )


def next_batch(cfg: Config, channels: Channels, rank: int) -> StepBatch | None:
    """This rank's part of the next step, or None when the run is to stop: all ranks get the same answer.

    Rank 0 decides. Its part is put last, so when it is there the others' parts are too.
    """
    batch = None
    if rank == 0:
        with contextlib.suppress(Stopped):
            batch = channels.batches[0].get()
    if dist.is_initialized():
        go_on = torch.tensor([batch is not None], dtype=torch.int32)  # by gloo: nccl would spin on a GPU that decodes
        dist.broadcast(go_on, src=0)
        if rank and go_on.item():
            batch = channels.batches[rank].get(timeout_s=cfg.timeout_s)
            assert batch is not None, "rank 0 has its part of the step, this rank has none"
    return batch


def main(cfg: Config, channels: Channels, start: Start, rank: int, device_name: str) -> None:
    device, batch = torch.device(device_name), None
    torch.manual_seed(cfg.seed)
    init_process_group(cfg, rank, device, channels.link)
    trainer = Trainer(cfg, channels.weights.layout, rank, device)
    if rank == 0:
        channels.weights.join(0, device, channels.stop)
    if start.folder:
        trainer.load_checkpoint(start.folder)
        trainer.publish(channels.weights, start.step)

    def report(kind: str, values: dict) -> None:
        if rank == 0:
            with contextlib.suppress(Stopped):  # no room, and all are to stop
                channels.reports.put(Report(kind, values))

    for step in range(start.step, cfg.steps):
        began = time.monotonic()
        following = next_batch(cfg, channels, rank)
        if following is None:
            break
        batch, waited = following, time.monotonic()
        assert batch.step == step, f"batch of step {batch.step} arrived at step {step}"
        metrics = {"step": step + 1, "version": step + 1} | batch.metrics | trainer.step(batch)
        stepped = time.monotonic()
        try:
            if publishes(cfg, step + 1):
                trainer.publish(channels.weights, step + 1)
        except ConnectionError:
            if not channels.stop.value:  # else the actors were told before us; all ranks end at their next batch
                raise
        times = {"wait_s": waited - began, "publish_s": time.monotonic() - stepped}
        times["transfer_s"] = channels.weights.transfer_s
        report("step", metrics | times | {"queue_batches": len(channels.batches[0])})
        if cfg.checkpoint_every and (step + 1) % cfg.checkpoint_every == 0:
            trainer.write_checkpoint(batch, report)
    if batch is not None and cfg.checkpoint_every and (batch.step + 1) % cfg.checkpoint_every:
        trainer.write_checkpoint(batch, report)  # of a run that ended or was interrupted
    try:
        trainer.save(cfg.run_dir / "model")
    except (OSError, SafetensorError) as error:
        report("trouble", {"what": f"the model was not saved: {error}"})
    trainer.checkpoint_written.wait()
    if rank == 0:
        channels.weights.close()
    if dist.is_initialized():
        dist.destroy_process_group()
