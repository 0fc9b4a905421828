"""Actor: one generation engine that never stops, and takes new weights in the middle of what it is writing.

consumes  prompts: leave to sample a group; weights: the newest version
emits     completions: `RolloutGroup`s with a log-prob and a version for every token, not yet scored

    while True:
        if newer weights are staged: load them            # between two decode steps; running sequences go on
        while fewer than H sequences in flight: submit the next sample
        for each sequence finished by engine.step(): add it to its group; a whole group goes out

As in the paper: a constant number of sequences in flight, kept KV cache by default, no drain. Unlike it: rewards are
computed in a process of their own (reward.py), weights travel beside decoding so that only their swap stops it, and a
prompt names the oldest weights that may sample it, which is how `max_lag` is kept.
"""

import functools
import json
import os
import time
from collections import Counter, deque
from pathlib import Path

import torch

from config import Config, Start
from life import ActorState
from queues import Channels, Prompt, Report, Rollout, RolloutGroup
from schedule import drains, may_load_weights
from weights import BroadcastWeights, SharedMemoryWeights, WeightReceiver

REPORT_S = 0.5  # at the latest after the last report


def end_of_sequence_ids(model: Path) -> list[int]:
    """All of the checkpoint's end-of-sequence ids: a second one must not count as text that was cut."""
    files = [model / name for name in ("config.json", "generation_config.json") if (model / name).is_file()]
    values = [json.loads(file.read_text()).get("eos_token_id") for file in files]
    return sorted({i for value in values if value is not None for i in (value if isinstance(value, list) else [value])})


class Engine:
    """vLLM in this process, behind the paper's three calls: submit/step, join the weight channel, load weights."""

    def __init__(self, cfg: Config, seed: int, device: str):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `step` is ours: nothing decodes between two of its calls
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.actor.kv_cache_gib)
        if cfg.actor.enforce_eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles some of its sampler even so: seconds, for nothing
        import vllm
        from vllm.sampling_params import RequestOutputKind

        on_cpu = {"worker_cls": "cpu_worker.UnpackedWorker"}
        on_gpu = {"gpu_memory_utilization": cfg.actor.gpu_memory_utilization}
        self.kv, self.requests = cfg.actor.kv, 0
        self.version = self.staged = self.offered = 0  # loaded, beside the model (-1: on its way), to be had
        self.engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(cfg.model),
                dtype=cfg.actor.dtype,
                tensor_parallel_size=cfg.actor.tp,
                seed=seed,
                max_model_len=cfg.actor.max_prompt_tokens + cfg.actor.max_completion_tokens,
                max_num_seqs=cfg.actor.sequences,
                enable_prefix_caching=cfg.actor.prefix_caching,
                enforce_eager=cfg.actor.enforce_eager,
                logprobs_mode="processed_logprobs",  # after the temperature: log μ, not the raw model's
                generation_config="vllm",  # the checkpoint's own top_p, top_k and penalties must not apply
                async_scheduling=False,  # else a step in flight would be labelled with the next version
                worker_extension_cls=f"{WeightReceiver.__module__}.WeightReceiver",
                disable_log_stats=True,
                **(on_cpu if device == "cpu" else on_gpu),
            )
        )
        self.engine.set_weight_version("0")
        self.sampling = functools.partial(
            vllm.SamplingParams,
            max_tokens=cfg.actor.max_completion_tokens,
            stop_token_ids=end_of_sequence_ids(cfg.model),
            stop=list(cfg.actor.stop),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(cfg.actor.stop),  # text is for the verifier, which makes its own
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def submit(self, prompt_ids: list[int], temperature: float) -> str:
        """Start a sequence; returns its request id. Its prefix-cache blocks are shared within one version only."""
        self.requests += 1
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": str(self.version)}
        self.engine.add_request(str(self.requests), prompt, self.sampling(temperature=temperature))
        return str(self.requests)

    def step(self) -> dict[str, Rollout]:
        """One decode step of everything in flight; request id -> rollout of the sequences that it finished."""
        finished = {}
        for output in self.engine.step():
            completion = output.outputs[0]
            versions = [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]
            finished[output.request_id] = Rollout(
                completion_ids=torch.tensor(completion.token_ids),
                logprobs=torch.tensor(completion.logprobs.logprobs),
                versions=torch.tensor(versions),
                finish_reason=completion.finish_reason,
            )
        return finished

    def join_weight_channel(self, weights: SharedMemoryWeights | BroadcastWeights, first_rank: int = 1) -> None:
        """Raises RuntimeError if there is a weight that no worker would load."""
        without = self.engine.collective_rpc("join_weight_channel", args=(weights, first_rank))
        if lost := set.intersection(*map(set, without)):
            raise RuntimeError(f"weight updates would not reach the engine: {sorted(lost)[:5]}")

    def look_for_weights(self) -> None:
        """Ask the workers what there is: sets `offered` and `staged`."""
        offered, staged = zip(*self.engine.collective_rpc("weights_state"), strict=True)
        self.offered, self.staged = max(offered), min(staged)

    def stage_weights(self) -> None:
        """If there are newer weights than those that lie staged, begin to stage them, beside decoding."""
        if 0 <= self.staged < self.offered:
            self.engine.collective_rpc("stage_weights")
            self.staged = -1

    def load_weights(self) -> float:
        """Swap in the staged weights. Returns the stall: seconds for which decoding stood still."""
        start = time.monotonic()
        self.engine.collective_rpc("swap_weights")
        self.version = self.staged
        self.engine.set_weight_version(str(self.version))
        if self.kv == "recompute":
            self.engine.reset_prefix_cache(reset_running_requests=True)
        return time.monotonic() - start

    def save_weights(self, folder: Path) -> None:
        """Copy the weights that are loaded now, and begin to write them to a file."""
        self.engine.collective_rpc("save_weights", args=(folder,))

    def saved_weights(self) -> str | None:
        """None while they are being written; then why that failed, or ""."""
        results = self.engine.collective_rpc("saved_weights")
        return None if None in results else "".join(results)


class Actor:
    """Keeps H sequences in flight and puts finished ones together to groups."""

    def __init__(self, cfg: Config, channels: Channels, engine: Engine, index: int):
        self.cfg, self.channels, self.engine, self.index = cfg, channels, engine, index
        self.waiting: deque[Prompt] = deque()  # samples admitted to this actor, not yet submitted
        self.in_flight: dict[str, Prompt] = {}  # request id -> prompt
        self.groups: dict[int, list[Rollout]] = {}  # group id -> its finished samples
        self.outbox: deque[RolloutGroup] = deque()
        self.evals_left = 0  # samples of the running evaluation not finished; weights stand still until it is 0
        self.saving: int | None = None  # version whose weights are being written
        self.done, self.reported = Counter(), time.monotonic()  # since the last report

    def update(self) -> None:
        """Load newer weights, if there are any, and the schedule lets them come in, but not under an evaluation."""
        wanted = self.waiting[0].version if self.waiting else 0
        may_load = not self.evals_left and may_load_weights(self.cfg, len(self.in_flight), self.engine.version, wanted)
        self.engine.look_for_weights()
        if may_load and self.engine.staged > self.engine.version:
            self.done["update_stall_s"] += self.engine.load_weights()
            self.report()
        self.engine.stage_weights()  # while they must not be loaded too: a trainer that sends them has to go on

    def admit(self) -> None:
        """Fill up to H sequences in flight, sample by sample; evaluation prompts go first."""
        drain = drains(self.cfg) and not self.evals_left  # an evaluation ends with the weights it has
        if drain and self.engine.offered > self.engine.version:
            return  # let what is in flight run dry, then wait for the newest weights
        while len(self.in_flight) < self.cfg.actor.sequences and self._take_prompt():
            prompt = self.waiting[0]
            if prompt.version > self.engine.version:
                self.update()
            if prompt.version > self.engine.version:  # its weights are published, but not beside the model yet
                return
            if prompt.is_eval and not self.evals_left:
                self.evals_left = prompt.eval_samples
            request = self.engine.submit(prompt.prompt_ids.tolist(), prompt.temperature)
            self.in_flight[request] = self.waiting.popleft()

    def _take_prompt(self) -> bool:
        """Make `waiting` hold the next sample; False if there is none or finished groups pile up behind us."""
        prompt = self.channels.eval_prompts.get(timeout_s=0) if self.index == 0 else None
        if prompt is not None:
            self.waiting.extendleft([prompt] * prompt.samples)
        elif not self.waiting and len(self.outbox) < 4:
            prompt = self.channels.prompts[self.index].get(timeout_s=0)
            if prompt is not None:
                self.waiting.extend([prompt] * prompt.samples)
        return bool(self.waiting)

    def step(self) -> None:
        """Decode one token of every sequence in flight; send the groups that this finishes."""
        self.done.update(decode_steps=bool(self.in_flight), sequence_steps=len(self.in_flight))
        for request_id, rollout in self.engine.step().items():
            prompt = self.in_flight.pop(request_id)
            self.done["generated_tokens"] += len(rollout.completion_ids)
            self.evals_left -= prompt.is_eval
            if prompt.is_eval and not self.evals_left and self.cfg.eval.keep_best:
                self.keep_evaluated()
            rollouts = self.groups.setdefault(prompt.group_id, [])
            rollouts.append(rollout)
            if len(rollouts) == prompt.samples:
                self.outbox.append(RolloutGroup(prompt, self.groups.pop(prompt.group_id)))
        while self.outbox and self.channels.completions.put(self.outbox[0], timeout_s=0):
            self.outbox.popleft()
        if self.saving is not None:
            self.tell_saved()

    def keep_evaluated(self) -> None:
        """Write the weights that were just evaluated; whether they are the best the launcher will know."""
        while self.saving is not None:  # those before
            self.tell_saved()
        self.saving = self.engine.version
        self.engine.save_weights(self.cfg.evaluated_dir(self.saving))

    def tell_saved(self) -> None:
        """Report that the evaluated weights are written, or why not, once it is known."""
        if (error := self.engine.saved_weights()) is None:
            return
        kind, values = "evaluated", {"version": self.saving}
        if error:
            kind, values = "trouble", {"what": f"the weights of version {self.saving} were not kept: {error}"}
        if self.channels.reports.put(Report(kind, values), timeout_s=0):
            self.saving = None

    def report(self) -> None:
        """What was done since the last report; if there is no room for it, it joins the next."""
        now = time.monotonic()
        in_flight = self.done["sequence_steps"] / max(1, self.done["decode_steps"])
        values = {"actor": self.index, "in_flight": in_flight, "running_s": now - self.reported}
        if self.channels.reports.put(Report("actor", {**self.done, **values}), timeout_s=0):
            self.done, self.reported = Counter(), now


def main(cfg: Config, channels: Channels, start: Start, index: int, device: str) -> None:
    seed = hash((cfg.seed, index, start.step, start.actor_restarts)) % 2**32  # after a resume others than before
    engine = Engine(cfg, seed=seed, device=device)
    engine.join_weight_channel(channels.weights, first_rank=1 + index * cfg.actor.tp)
    actor = Actor(cfg, channels, engine, index)
    actor.report()
    channels.actors[index] = ActorState.UP
    while not channels.stop.value:
        if time.monotonic() > actor.reported + REPORT_S:
            actor.report()
        begin = time.monotonic()
        actor.update()
        actor.admit()
        if idle := not actor.in_flight:
            time.sleep(0.002)
        actor.step()  # with nothing to decode, too: groups may wait to be sent
        if idle:
            actor.done["idle_s"] += time.monotonic() - begin
    while actor.saving is not None:
        actor.tell_saved()
        time.sleep(0.01)
