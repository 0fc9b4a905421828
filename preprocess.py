"""Preprocess: lets groups start, turns finished ones into advantages, and packs them into one batch per step.

consumes  rollouts: scored `RolloutGroup`s; the version of the newest weights
emits     prompts: leave to sample a group; batches: a `StepBatch` for every trainer rank

    while steps are to be made:
        while schedule.may_start(newest version): issue the next prompt
        group = next scored group; drop it if its rewards are all equal (option)
        batch = schedule.next_batch(finished groups); send its packed parts to the trainer ranks

Unlike the paper's ring buffer nothing is thrown away to keep lag small: a group is only started if it is certain to be
trained in time. Whoever throws away what comes late prefers short answers. And groups are trained in the order they
started, not as they finish, unless `order` says so.
"""

import dataclasses
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable

import torch

from config import Config, Start
from data import encoded_prompts, prompt_text
from evaluation import Evaluation, metric_means
from life import ActorState
from model_files import load_tokenizer
from packing import Sequence, make_micro_batch, pack
from queues import Channels, MicroBatch, Prompt, Report, Rollout, RolloutGroup, StepBatch
from schedule import make_schedule


def group_advantages(rewards: list[float], baseline: str, divide_by_std: bool) -> list[float]:
    """Reward minus baseline, a sample: leave_one_out takes the mean of the *other* samples, mean that of the group.

    >>> group_advantages([1.0, 0.0, 0.0], "leave_one_out", False)
    [1.0, -0.5, -0.5]
    """
    n, total = len(rewards), sum(rewards)
    if has_no_variance(rewards):  # exactly 0, whatever the rounding of the mean
        return [0.0] * n
    baselines = [(total - r) / (n - 1) if baseline == "leave_one_out" else total / n for r in rewards]
    scale = statistics.pstdev(rewards) + 1e-6 if divide_by_std else 1.0
    return [(r - b) / scale for r, b in zip(rewards, baselines, strict=True)]


def has_no_variance(rewards: list[float]) -> bool:
    """Compared with rounding in mind: rewards that are sums of the same parts in another order are equal."""
    return max(rewards) - min(rewards) <= 1e-9 * max(1.0, *map(abs, rewards))


def verified(group: RolloutGroup) -> list[Rollout]:
    """Those of its samples that have a reward; of the others, whose verifier failed, nobody knows whether they are
    right."""
    return [rollout for rollout in group.rollouts if not rollout.failure]


def shown(group: RolloutGroup) -> Rollout:
    """The sample that stands for its group on the screen and in files: any. The first has finished first, so it is
    short."""
    return group.rollouts[group.prompt.group_id % len(group.rollouts)]


def length_penalty(cfg: Config, rollout: Rollout) -> float:
    """0 until `soft_limit_tokens` before the limit, then linear up to 1 at it (the paper's, arXiv 2509.19128)."""
    soft = cfg.reward.soft_limit_tokens
    over = len(rollout.completion_ids) - (cfg.actor.max_completion_tokens - soft)
    return max(0.0, over / soft) if soft else 0.0


def make_step_batches(
    cfg: Config, step: int, groups: list[RolloutGroup], ranks: int, metrics: dict, stream: dict | None = None
) -> list[StepBatch]:
    """One optimizer step's groups -> a StepBatch for every trainer rank, with the normaliser of the whole step."""
    sequences, by_token = [], cfg.train.normaliser == "token"
    for group in groups:
        rollouts = verified(group)
        returns = [rollout.reward - length_penalty(cfg, rollout) for rollout in rollouts]
        advantages = group_advantages(returns, cfg.preprocess.baseline, cfg.preprocess.divide_by_std)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if cfg.preprocess.truncated == "mask" and rollout.finish_reason == "length":
                continue  # its reward has been part of the others' baseline
            weight = 1.0 if by_token else 1.0 / len(rollout.completion_ids)
            sequences.append(Sequence(group.prompt.prompt_ids, rollout, advantage, weight))
    normaliser = sum(len(s.rollout.completion_ids) if by_token else 1 for s in sequences)
    dealt = pack([len(s) for s in sequences], cfg.preprocess.max_tokens_per_microbatch, ranks)
    packed = [[make_micro_batch([sequences[i] for i in micro_batch]) for micro_batch in rank] for rank in dealt]
    return [StepBatch(step, micro_batches, normaliser, metrics, stream or {}) for micro_batches in packed]


def batch_metrics(cfg: Config, groups: list[RolloutGroup], dropped: list[RolloutGroup]) -> dict:
    """Of a step before it is trained. What verifiers said counts dropped groups as well: those that are all right are
    progress."""
    rollouts = [rollout for group in groups for rollout in verified(group)]
    seen = [(group.prompt.row, rollout) for group in groups + dropped for rollout in verified(group)]
    rewards, tasks = [rollout.reward for _, rollout in seen], {}
    for row, rollout in seen:
        if "task" in row:
            tasks.setdefault(f"task/{row['task']}", []).append(rollout.reward)
    named = {f"verifier/{name}": value for name, value in metric_means([rollout for _, rollout in seen]).items()}
    return named | {task: statistics.fmean(values) for task, values in sorted(tasks.items())} | {
        "samples": len(rollouts),
        "failed_samples": sum(len(group.rollouts) for group in groups + dropped) - len(seen),
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "length_penalty": statistics.fmean(length_penalty(cfg, rollout) for rollout in rollouts),
        "completion_tokens_mean": statistics.fmean(len(rollout.completion_ids) for rollout in rollouts),
        "truncated_fraction": statistics.fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "no_variance_groups": sum(has_no_variance([r.reward for r in verified(group)]) for group in groups),
        "group_ids": [group.prompt.group_id for group in groups],
        "completion_tokens": [[len(rollout.completion_ids) for rollout in group.rollouts] for group in groups],
    }  # fmt: skip


class Preprocessor:
    """Issues prompts, takes scored groups, sends batches, and asks for evaluations."""

    def __init__(self, cfg: Config, channels: Channels, start: Start, tokenizer, add_ref_logprobs: Callable):
        self.cfg, self.channels, self.start = cfg, channels, start
        self.tokenizer, self.add_ref_logprobs = tokenizer, add_ref_logprobs
        self.schedule = make_schedule(cfg, start.step)
        self.dropped = Counter(
            zero_variance=0, verifier_failed=0, prompt_too_long=0, malformed=0, held_out=0, repeated=0
        )
        self.evaluation = Evaluation(cfg, tokenizer, start)
        held_out, unfinished = self.evaluation.token_ids, set(start.unfinished)
        stream = encoded_prompts(cfg, cfg.data, tokenizer, self.dropped, seed=cfg.seed, held_out=held_out)
        self.prompts = (p for p in stream if p[0] >= start.next_group or p[0] in unfinished)
        self.next_prompt = next(self.prompts) if cfg.steps else (0, [], {})
        for reason in ("zero_variance", "verifier_failed"):
            self.dropped[reason] = start.dropped.get(reason, 0)
        self.issued: dict[int, tuple[int, Prompt]] = {}  # group id -> the actor it was issued to, of those not back
        self.again: deque[Prompt] = deque()  # issued to an actor that died
        self.finished: dict[int, RolloutGroup] = {}  # scored groups that wait for a batch, in the order they came
        self.dropped_in_a_row = 0
        self.dropped_groups: list[RolloutGroup] = []  # since the last batch
        shown = self.evaluation.prompts[0] if not cfg.steps else self.next_prompt
        self.channels.reports.put(Report("note", {"what": self.as_the_engine_sees_it(shown[1])}))

    @property
    def done(self) -> bool:
        """All batches are sent and the evaluation of the final weights is in."""
        return self.schedule.next_step == self.cfg.steps < self.evaluation.next_version

    def as_the_engine_sees_it(self, prompt_ids: list[int]) -> str:
        """What templates and tokenizers do to a prompt is best looked at."""
        return f"the first prompt as the engine sees it: {self.tokenizer.decode(prompt_ids)!r}\n  = {prompt_ids}"

    def issue_prompts(self) -> None:
        """Start groups while the schedule allows and the actors' queue has room."""
        cfg, version = self.cfg, self.channels.weights.version
        while self.again and self.issue(self.again[0]):
            self.again.popleft()
        needed = (cfg.steps - self.schedule.next_step) * cfg.groups_per_batch
        while len(self.schedule.outstanding) < needed and self.schedule.may_start(version):
            group_id, prompt_ids, row = self.next_prompt
            ids, temperature = torch.tensor(prompt_ids), cfg.actor.temperature
            oldest = self.schedule.oldest(version)
            if not self.issue(Prompt(group_id, oldest, cfg.group_size, ids, row, temperature)):
                return
            self.schedule.start(group_id, version)
            self.next_prompt = next(self.prompts)

    def issue(self, prompt: Prompt) -> bool:
        """To the actor that has the fewest groups, of those that can take one: not to one whose weights stand still for
        an evaluation, unless it is the only one, or a phase has the same weights."""
        evaluates = self.cfg.schedule == "pipeline" and self.cfg.actors > 1 and self.evaluation.groups is not None
        load = Counter(actor for actor, _ in self.issued.values())
        for actor in sorted(range(evaluates, self.cfg.actors), key=lambda actor: load[actor]):
            up = self.channels.actors[actor] == ActorState.UP
            if up and self.channels.prompts[actor].put(prompt, timeout_s=0):
                self.issued[prompt.group_id] = actor, prompt
                return True
        return False

    def take_back(self, actor: int) -> None:
        """What was issued to an actor that died and is not back is to be issued again, with the same bound on its lag.
        What it had finished may still be on its way: whichever comes first is taken."""
        while self.channels.prompts[actor].get(timeout_s=0) is not None:
            pass
        self.again.extend(prompt for holder, prompt in self.issued.values() if holder == actor)
        self.issued = {group_id: held for group_id, held in self.issued.items() if held[0] != actor}
        if actor == 0:
            while self.channels.eval_prompts.get(timeout_s=0) is not None:
                pass
            self.evaluation.begin_again()
        self.channels.actors[actor] = ActorState.TAKEN_BACK

    def issue_eval(self) -> None:
        """Ask for an evaluation of the newest weights when one is due; actor 0 holds them still until it is done."""
        for prompt in self.evaluation.begin(self.channels.weights.version) if self.schedule.may_evaluate else ():
            self.channels.eval_prompts.put(prompt)

    def take(self, group: RolloutGroup) -> None:
        """A scored group: to the finished ones, or dropped and counted."""
        self.issued.pop(group.prompt.group_id, None)
        if group.prompt.group_id not in self.schedule.outstanding or group.prompt.group_id in self.finished:
            self.dropped["repeated"] += 1
            return
        returns = [rollout.reward - length_penalty(self.cfg, rollout) for rollout in verified(group)]
        failed = len(returns) < 2  # nothing is left for a baseline
        if failed or (self.cfg.preprocess.zero_variance == "drop" and has_no_variance(returns)):
            self.dropped_groups.append(group)
            self.dropped["verifier_failed" if failed else "zero_variance"] += 1
            self.schedule.drop(group.prompt.group_id)
            self.dropped_in_a_row += 1
            if self.dropped_in_a_row >= 100 * self.cfg.groups_per_batch:
                what = f"the last {self.dropped_in_a_row} groups were all dropped: in each, all rewards were the same"
                what += f" or the verifier failed (it did in {self.dropped['verifier_failed']} groups so far)"
                raise RuntimeError(f"{what}. Is the task too hard or too easy for this model, or the verifier wrong?")
        else:
            self.dropped_in_a_row = 0
            self.finished[group.prompt.group_id] = group

    def take_eval(self, group: RolloutGroup) -> None:
        """A scored group of the running evaluation; the last one ends it."""
        groups = self.evaluation.take(group)
        if groups is None:
            return
        result = self.evaluation.result(groups)
        for group in groups:
            if group.prompt.temperature == 0 or not self.cfg.eval.greedy:
                values = {"eval_version": result["eval_version"]} | self.about(group)
                values["completion"] = self.tokenizer.decode(shown(group).completion_ids.tolist())
                self.channels.reports.put(Report("eval_rollout", values))
        self.channels.reports.put(Report("eval", result))

    def send_batches(self) -> None:
        """Send every batch that is complete. Rank 0's part goes last: when it is there, all are."""
        while self.schedule.next_step < self.cfg.steps:
            step = self.schedule.next_step
            group_ids = self.schedule.next_batch(self.finished)
            if group_ids is None:
                return
            groups = [self.finished.pop(group_id) for group_id in group_ids]
            metrics = batch_metrics(self.cfg, groups, self.dropped_groups)
            metrics["queue_rollouts"] = len(self.channels.rollouts)
            metrics["foreign_messages"] = self.channels.link.foreign() if self.channels.link else 0
            metrics |= {f"dropped_{reason}": n for reason, n in self.dropped.items()}
            self.dropped_groups = []
            batches = make_step_batches(self.cfg, step, groups, self.cfg.trainers, metrics, self.stream_position())
            self.report_rollout(step, groups[step % len(groups)])  # not the first: that is often a long one
            for queue, batch in reversed(list(zip(self.channels.batches, batches, strict=True))):
                micro_batches = [self.add_ref_logprobs(micro_batch) for micro_batch in batch.micro_batches]
                queue.put(dataclasses.replace(batch, micro_batches=micro_batches))

    def stream_position(self) -> dict:
        """What a `Start` after the batch that leaves now has to know."""
        next_row = self.next_prompt[0]
        not_yet_again = {group_id for group_id in self.start.unfinished if group_id >= next_row}
        return {
            "next_group": max(self.start.next_group, next_row),
            "unfinished": sorted(not_yet_again | set(self.schedule.outstanding)),
            "dropped": dict(self.dropped),
        }

    @staticmethod
    def about(group: RolloutGroup) -> dict:
        """One sample of a group, without its tokens."""
        rollout, row = shown(group), group.prompt.row
        values = {"prompt": prompt_text(row), "answer": row["answer"], "reward": rollout.reward}
        return values | {"failure": rollout.failure, "finish_reason": rollout.finish_reason}

    def report_rollout(self, step: int, group: RolloutGroup) -> None:
        """One sample of the step, for rollouts.jsonl and for the reader of the screen."""
        rollout = shown(group)
        values = {"step": step + 1, "group_id": group.prompt.group_id} | self.about(group)
        values["tokens"] = [self.tokenizer.decode([token]) for token in rollout.completion_ids.tolist()]
        values["token_ids"] = rollout.completion_ids.tolist()
        values["versions"] = rollout.versions.tolist()
        values["logprobs"] = [round(logprob, 4) for logprob in rollout.logprobs.tolist()]
        self.channels.reports.put(Report("rollout", values))


def reference(cfg: Config, device: torch.device) -> Callable[[MicroBatch], MicroBatch]:
    """A function that adds the initial model's log-probs to a micro-batch; without a KL penalty it adds nothing."""
    if not cfg.train.kl_coef:
        return lambda micro_batch: micro_batch
    from policy import load_policy, to_device

    policy = load_policy(cfg.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)

    @torch.no_grad()
    def add_ref_logprobs(micro_batch: MicroBatch) -> MicroBatch:
        logprobs, _ = policy(to_device(micro_batch, device), cfg.actor.temperature)
        ref_logprobs = torch.zeros_like(micro_batch.logprobs)
        ref_logprobs[micro_batch.mask] = logprobs.cpu()
        return dataclasses.replace(micro_batch, ref_logprobs=ref_logprobs)

    return add_ref_logprobs


def main(cfg: Config, channels: Channels, start: Start, _: int, device_name: str) -> None:
    tokenizer = load_tokenizer(cfg.model)
    preprocessor = Preprocessor(cfg, channels, start, tokenizer, reference(cfg, torch.device(device_name)))
    while channels.weights.version < start.step and not channels.stop.value:
        time.sleep(0.01)  # the trainer publishes the checkpoint's weights first
    while cfg.schedule != "pipeline" and ActorState.STARTING in list(channels.actors) and not channels.stop.value:
        time.sleep(0.01)  # a phase is for all engines
    rest_s = 0.02 if cfg.schedule == "pipeline" else 0.005  # new weights may have come, which a whole phase waits for
    while not preprocessor.done and not channels.stop.value:
        for actor in (i for i, state in enumerate(channels.actors) if state == ActorState.DEAD):
            preprocessor.take_back(actor)
        preprocessor.issue_eval()
        preprocessor.issue_prompts()
        group = channels.rollouts.get(timeout_s=rest_s)
        if group is not None and group.prompt.is_eval:
            preprocessor.take_eval(group)
        elif group is not None:
            preprocessor.take(group)
            preprocessor.send_batches()
