"""Preset `gsm8k`: grade-school word problems (GSM8K, MIT licence) with Qwen2.5-0.5B-Instruct, one node of 8 GPUs.

    python launch.py gsm8k
    python launch.py gsm8k --model Qwen/Qwen2.5-1.5B-Instruct

The answer of a row is its worked solution, `… #### 72`; the verifier takes the last number of both. Model and data come
from the Hugging Face hub.
"""

from pathlib import Path

from config import ActorConfig, Config, EvalConfig, PreprocessConfig, PromptConfig, RewardConfig, TrainConfig

WRAP = "{prompt}\nReason step by step, and end with a line `#### ` and the answer alone."


def preset() -> Config:
    """GSM8K with Qwen2.5-0.5B-Instruct, on a node of 8 GPUs (not yet run there)"""
    return Config(
        name="gsm8k",
        model=Path("Qwen/Qwen2.5-0.5B-Instruct"),
        data=("hf:openai/gsm8k/main:train",),
        actors=4,
        trainers=4,
        device="cuda",
        steps=200,
        batch_size=512,
        group_size=8,
        max_lag=8,
        checkpoint_every=50,
        prompt=PromptConfig(prompt_key="question", wrap=WRAP),
        reward=RewardConfig(function="number", workers=4, soft_limit_tokens=100),
        actor=ActorConfig(sequences=256, max_prompt_tokens=512, max_completion_tokens=512),
        preprocess=PreprocessConfig(max_tokens_per_microbatch=16384),
        train=TrainConfig(lr=1e-6, warmup_steps=10),
        eval=EvalConfig(data=("hf:openai/gsm8k/main:test",), every=25, prompts=512),
    )
