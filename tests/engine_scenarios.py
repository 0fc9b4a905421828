"""Runs real vLLM through the in-flight update and compares it with transformers; prints its findings as JSON.

    python tests/engine_scenarios.py qwen2-tied|llama-untied-tp2 FOLDER

One engine in one process for all scenarios of an architecture: `test_engine.py` starts this and asserts on the result.
"""

import copy
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
import torch.distributed as dist
from conftest import changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from actor import Engine
from config import presets
from model_files import model_layout
from queues import Rollout
from store import Link
from weights import BroadcastWeights, SharedMemoryWeights

PROMPTS = [[7, 10, 5, 12], [1, 2, 3], [4] * 20, [9, 8, 7, 6, 5, 4, 3, 2], [11, 0], [5, 5, 13, 5]]
NEW_TOKENS = 24


def make_model(kind: str, folder: Path) -> None:
    """A small random model: context 512, no end-of-sequence token, and a generation_config that must not apply."""
    common = dict(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(1)
    config = (LlamaConfig if kind.startswith("llama") else Qwen2Config)(
        **common, tie_word_embeddings="tied" in kind.split("-")
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(presets()["tiny"]().model)
    tokenizer.eos_token = None  # every sequence runs to its limit
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 2, "top_p": 0.3, "repetition_penalty": 1.5}))


class World:
    """The policy at every version, in transformers, and the engine under test."""

    def __init__(self, folder: Path, tp: int):
        layout = model_layout(folder)
        cfg = changed(
            presets()["tiny"](),
            model=folder,
            actor=dict(max_prompt_tokens=400, max_completion_tokens=NEW_TOKENS, prefix_caching=True, tp=tp),
        )
        self.policies = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()]
        self.weights, self.layout = SharedMemoryWeights(layout, "float32"), layout
        if tp > 1:  # two workers, and weights that come from a trainer elsewhere, in several buckets
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            link = Link("127.0.0.1", self.store.port, "test", b"", 30)
            self.weights = BroadcastWeights(layout, "float32", link, 1 + tp, bucket_bytes=50_000)
        self.engine = Engine(cfg, seed=0, device="cpu")
        self.engine.join_weight_channel(self.weights)
        self.weights.join(0, torch.device("cpu"))

    def publish(self, change: float = 0.05) -> None:
        """A next version in which every single weight differs a lot from the last one."""
        policy = copy.deepcopy(self.policies[-1])
        generator = torch.Generator().manual_seed(len(self.policies))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += change * torch.randn(parameter.shape, generator=generator)
        self.policies.append(policy)
        named = dict(policy.named_parameters(remove_duplicate=False))
        self.weights.publish(len(self.policies) - 1, [(name, named[name].detach()) for name in self.layout])

    def update(self, change: float = 0.05) -> None:
        self.publish(change)
        self.stage()
        self.engine.load_weights()

    def stage(self) -> None:
        """Until the newest version lies beside the model."""
        while self.engine.staged < len(self.policies) - 1:
            self.engine.look_for_weights()
            self.engine.stage_weights()

    def run(self, requests: dict[str, list[int]], steps: int | None = None) -> dict[str, Rollout]:
        done = {}
        while len(done) < len(requests) if steps is None else steps > 0:
            done |= self.engine.step()
            steps = None if steps is None else steps - 1
        return done

    def expected(self, prompt: list[int], completion: Rollout, kv: str, temperature: float = 1.0) -> list[float]:
        """Log-probs of the completion by transformers, each token under its own version's weights.

        keep: the cache holds what each earlier version computed. recompute: each version computes the whole prefix.
        """
        ids, versions = completion.completion_ids.tolist(), completion.versions.tolist()
        logprobs, cache, cached = [], None, 0
        for i, version in enumerate(versions):
            if kv == "recompute" and i and version != versions[i - 1]:
                cache, cached = None, 0
            prefix = torch.tensor([(prompt + ids[:i])[cached:]])
            with torch.no_grad():
                output = self.policies[version](input_ids=prefix, past_key_values=cache, use_cache=True)
            cache, cached = output.past_key_values, len(prompt) + i
            logprobs.append((output.logits[0, -1] / temperature).log_softmax(-1)[ids[i]].item())
        return logprobs


def difference(a: torch.Tensor, b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a.tolist(), b, strict=True))


def under(version: int, completion: Rollout) -> Rollout:
    """The same tokens as if one version had sampled them all."""
    return dataclasses.replace(completion, versions=torch.full_like(completion.versions, version))


def across_updates(world: World, kv: str) -> dict:
    """Six sequences, updates after 5 and 12 more decode steps, a seventh sequence that joins between the two."""
    engine = world.engine
    engine.kv = kv
    first = engine.version
    requests = {engine.submit(prompt, 1.0): prompt for prompt in PROMPTS}
    done = world.run(requests, steps=5)
    world.update()
    late = engine.submit(PROMPTS[0], 1.0)
    requests[late] = PROMPTS[0]
    done |= world.run(requests, steps=7)
    world.update()
    done |= world.run({r: p for r, p in requests.items() if r not in done})
    errors, old_errors = [], []
    for request, completion in done.items():
        errors.append(difference(completion.logprobs, world.expected(requests[request], completion, kv)))
        stale = world.expected(requests[request], under(first, completion), kv)
        old_errors.append(difference(completion.logprobs, stale))
    return {
        "versions": {request: (completion.versions - first).tolist() for request, completion in done.items()},
        "late": late,
        "lengths": [len(completion.completion_ids) for completion in done.values()],
        "finish": sorted({completion.finish_reason for completion in done.values()}),
        "error": max(errors),
        "error_if_old_weights": min(old_errors),
        "other_kv_error": max(
            difference(c.logprobs, world.expected(requests[r], c, "recompute" if kv == "keep" else "keep"))
            for r, c in done.items()
        ),
    }


def fresh(world: World, temperature: float) -> dict:
    """New requests after an update: every weight of the model is the new one."""
    world.update()
    requests = {world.engine.submit(prompt, temperature): prompt for prompt in PROMPTS}
    done = world.run(requests)
    new, old = [], []
    for request, completion in done.items():
        prompt = requests[request]
        new.append(difference(completion.logprobs, world.expected(prompt, completion, "keep", temperature)))
        stale = under(world.engine.version - 1, completion)
        old.append(difference(completion.logprobs, world.expected(prompt, stale, "keep", temperature)))
    return {"error": max(new), "error_of_the_version_before": min(old)}


def prefix_cache(world: World) -> dict:
    """A long prompt, cached in blocks, under one version and again under the next, with a sequence still running."""
    prompt = [(7 * i) % 14 for i in range(300)]
    world.engine.kv = "keep"
    found = {}
    for name in ("first", "again", "after update"):
        if name == "after update":
            running = world.engine.submit(prompt, 1.0)  # holds blocks of the old version
            world.run({}, steps=3)
            world.update()
        request = world.engine.submit(prompt, 1.0)
        completion = world.run({request: prompt} | ({running: prompt} if name == "after update" else {}))[request]
        found[name] = difference(completion.logprobs, world.expected(prompt, completion, "keep"))
    stats = world.engine.engine.engine_core.engine_core.scheduler.kv_cache_manager
    return {"errors": found, "caching": stats.enable_caching}


def skipping(world: World) -> dict:
    """Three versions are published while the actor decodes, or (broadcast) staged one over the other while it must not
    load any: it loads the newest alone."""
    before = world.engine.version
    for _ in range(3):
        world.publish()
        if isinstance(world.weights, BroadcastWeights):
            world.stage()
    world.stage()
    world.engine.load_weights()
    return {"loaded": world.engine.version - before}


def endings(world: World) -> dict:
    """One greedy sequence, again and again, with other end-of-sequence ids, limits and texts to stop at."""
    engine, plain = world.engine, world.engine.sampling

    def sample(**options) -> list:
        engine.sampling = functools.partial(plain, **options)
        request = engine.submit(PROMPTS[1], 0.0)
        completion = world.run({request: PROMPTS[1]})[request]
        engine.sampling = plain
        assert set(completion.versions.tolist()) == {engine.version}, "stopped by a text, too"
        return [completion.completion_ids.tolist(), completion.finish_reason]

    whole, _ = sample()
    first = {token: whole.index(token) for token in set(whole)}  # where each token comes first
    end = max(first, key=first.get)  # as late as can be
    n, other = first[end] + 1, next(token for token in range(64) if token not in first)
    digits = {token: at for token, at in first.items() if token < 10}
    digit = max(digits, key=digits.get, default=None)
    return {
        "whole": whole,
        "n": n,
        "second of two": sample(stop_token_ids=[other, end]),
        "exactly at the limit": sample(stop_token_ids=[other, end], max_tokens=n),
        "one short of it": sample(stop_token_ids=[other, end], max_tokens=n - 1),
        "text": sample(stop=[str(digit)], detokenize=True),
        "text at": digits[digit] + 1,
    }


def same_weights(world: World) -> dict:
    """Greedy sequences, alone and across an update that changes nothing, with either fate of the KV cache."""
    engine, found = world.engine, {}
    for kv in ("alone", "keep", "recompute"):
        requests = {engine.submit(prompt, 0.0): prompt for prompt in PROMPTS}
        done = world.run(requests, steps=9)
        if kv != "alone":
            engine.kv = kv
            world.update(change=0.0)
        done |= world.run({request: prompt for request, prompt in requests.items() if request not in done})
        found[kv] = [done[request].completion_ids.tolist() for request in requests]
    engine.kv = "keep"
    return found


def saved(world: World, folder: Path) -> dict:
    """The weights of the engine, written while newer ones lie staged."""
    expected = dict(world.policies[-1].named_parameters(remove_duplicate=False))
    expected = {name: expected[name].detach().clone() for name in world.layout}
    world.publish()
    world.stage()
    world.engine.save_weights(folder)
    while world.engine.saved_weights() is None:
        pass
    found = load_file(folder / "model.safetensors")
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    world.engine.load_weights()
    request = world.engine.submit(PROMPTS[0], 1.0)
    completion = world.run({request: PROMPTS[0]})[request]
    return {
        "same": same,
        "error_after": difference(completion.logprobs, world.expected(PROMPTS[0], completion, "keep")),
    }


def incomplete(world: World) -> str:
    """A channel that lacks a weight of the model is an error, not an old weight."""
    layout = {name: shape for name, shape in world.layout.items() if "0.mlp.down_proj" not in name}
    try:
        world.engine.join_weight_channel(SharedMemoryWeights(layout, "float32"))
    except RuntimeError as error:
        return str(error)
    return "no error"


def main(kind: str, folder: Path) -> dict:
    make_model(kind, folder)
    world = World(folder, tp=2 if kind.endswith("tp2") else 1)
    result = {
        "keep": across_updates(world, "keep"),
        "recompute": across_updates(world, "recompute"),
        "fresh": fresh(world, 1.0),
        "half": fresh(world, 0.5),
        "prefix": prefix_cache(world),
        "skipping": skipping(world),
        "endings": endings(world),
        "same weights": same_weights(world),
        "saved": saved(world, folder / "saved"),
        "incomplete": incomplete(world),
    }
    return result


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]))
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)
