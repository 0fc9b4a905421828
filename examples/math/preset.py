"""Preset `math`: competition mathematics with Qwen2.5-7B, the experiment of the paper (arXiv 2509.19128, section 4).

    python examples/math/make_data.py orz_math.json     # the problems of Open-Reasoner-Zero (MIT licence), 17 thousand
    python launch.py math

The paper's settings: 1,000 optimizer steps of 1,024 samples, Adam at 1e-6, clamp 5, 64 sequences in flight a generation
GPU; 48 GPUs generate and 80 train. Ours, where it names none: groups of 8, trained as they finish, and answers of at
most 8,192 tokens.
"""

from pathlib import Path

from config import ActorConfig, Config, EvalConfig, PreprocessConfig, PromptConfig, RewardConfig, TrainConfig

HERE = Path(__file__).parent
WRAP = "Question: {prompt}\nReason step by step, and put the final answer within \\boxed{}.\nAnswer:"


def preset() -> Config:
    """the paper's mathematics with Qwen2.5-7B, on 16 nodes of 8 GPUs (not yet run there)"""
    return Config(
        name="math",
        model=Path("Qwen/Qwen2.5-7B"),
        data=(f"{HERE}/train.jsonl",),
        actors=48,
        trainers=80,
        device="cuda",
        steps=1000,
        batch_size=1024,
        group_size=8,
        max_lag=None,
        checkpoint_every=50,
        # A base model: the chat template of its tokenizer is none that it was trained on.
        prompt=PromptConfig(template="plain", wrap=WRAP, prompt_key="problem", malformed="skip"),
        reward=RewardConfig(function="math", workers=16, soft_limit_tokens=1024),
        actor=ActorConfig(sequences=64, max_prompt_tokens=1024, max_completion_tokens=8192),
        preprocess=PreprocessConfig(max_tokens_per_microbatch=16384, order="finished"),
        train=TrainConfig(lr=1e-6, clamp=5.0, activation_checkpointing=True),
        eval=EvalConfig(data=("hf:HuggingFaceH4/MATH-500:test",), every=50, prompts=500),
    )
