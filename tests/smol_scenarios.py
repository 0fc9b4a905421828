"""SmolLM2 in real vLLM against transformers and against the trainer's own forward pass; prints its findings as JSON.

python tests/smol_scenarios.py
"""

import json
import os

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}

import torch
from conftest import changed
from transformers import AutoModelForCausalLM, AutoTokenizer

from actor import Engine
from config import PromptConfig, presets
from data import prompt_encoder
from packing import Sequence, make_micro_batch
from policy import load_policy
from queues import Rollout

NEW_TOKENS = 64
QUESTIONS = ["What is the capital of Peru?", "12 + 30 =", "Write a line about rain.", "Zähle bis 5: 1, 2,"]


def main() -> dict:
    cfg = presets()["smol"]()
    cfg = changed(cfg, actor=dict(max_prompt_tokens=64, max_completion_tokens=NEW_TOKENS, stop=(), dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    prompts = []
    for template in ("chat", "plain"):
        encode = prompt_encoder(changed(cfg, prompt=PromptConfig(template=template)), tokenizer)
        prompts += [encode({"prompt": question}, "") for question in QUESTIONS]
    engine = Engine(cfg, seed=0, device="cpu")

    def sample(temperature: float) -> list[tuple[list[int], Rollout]]:
        requests = {engine.submit(prompt, temperature): prompt for prompt in prompts * 2}
        done = {}
        while len(done) < len(requests):
            done |= engine.step()
        return [(requests[request], rollout) for request, rollout in done.items()]

    sampled = {temperature: sample(temperature) for temperature in (1.0, 0.7, 0.0)}
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32).eval()
    policy = load_policy(cfg.model, torch.float32, torch.device("cpu"))
    found = {"prompts": [tokenizer.decode(prompt) for prompt in prompts]}
    for temperature in (1.0, 0.7):
        theirs, ours, raw = [], [], []
        for prompt, rollout in sampled[temperature]:
            ids = torch.tensor([prompt + rollout.completion_ids.tolist()])
            at, targets = slice(len(prompt) - 1, -1), rollout.completion_ids[:, None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, at]
            for scale, differences in ((temperature, theirs), (1.3, raw)):
                logprobs = (logits / scale).log_softmax(-1).gather(1, targets).squeeze(1)
                differences.append((logprobs - rollout.logprobs).abs())
        pack = [Sequence(torch.tensor(prompt), rollout, 1.0, 1.0) for prompt, rollout in sampled[temperature]]
        for i in range(0, len(pack), 4):
            micro_batch = make_micro_batch(pack[i : i + 4])
            with torch.no_grad():
                logprobs, _ = policy(micro_batch, temperature)
            ours.append((logprobs - micro_batch.logprobs[micro_batch.mask]).abs())
        theirs, ours, raw = map(torch.cat, (theirs, ours, raw))
        found[str(temperature)] = {
            "tokens": len(theirs),
            "transformers_max": theirs.max().item(),
            "transformers_mean": theirs.mean().item(),
            "trainer_max": ours.max().item(),
            "trainer_mean": ours.mean().item(),
            "other_temperature_mean": raw.mean().item(),
        }
    greedy, again = sampled[0.0][: len(prompts)], sampled[0.0][len(prompts) :]
    found["greedy_twice_the_same"] = [a[1].completion_ids.tolist() == b[1].completion_ids.tolist() for a, b in zip(
        sorted(greedy, key=lambda x: x[0]), sorted(again, key=lambda x: x[0]), strict=True
    )]  # fmt: skip
    prompt, rollout = next(x for x in sampled[0.0] if x[0] == prompts[0])
    found["greedy"] = tokenizer.decode(rollout.completion_ids)
    return found


if __name__ == "__main__":
    found = main()
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)
