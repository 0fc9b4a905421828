"""Preset `tiny`: what `make demo` runs. README.md has its results; task.py its task, make_model.py its model."""

from pathlib import Path

from config import ActorConfig, Config, EvalConfig, PreprocessConfig, RewardConfig, TrainConfig

HERE = Path(__file__).parent


def preset() -> Config:
    """chain sums with a 0.45 M-parameter model: learns on two CPU cores in under three minutes"""
    return Config(
        name="tiny",
        model=HERE / "model",
        data=(f"{HERE}/task.py:train_rows",),
        steps=220,
        batch_size=128,
        group_size=8,
        max_lag=4,
        reward=RewardConfig(function=f"{HERE}/task.py:reward"),
        actor=ActorConfig(
            sequences=128,
            max_prompt_tokens=32,
            max_completion_tokens=64,
            dtype="float32",
            kv_cache_gib=1,
            prefix_caching=False,
            enforce_eager=True,
        ),
        preprocess=PreprocessConfig(max_tokens_per_microbatch=2048, ready_batches=2),
        train=TrainConfig(lr=2e-4, warmup_steps=20, lr_schedule="linear"),
        eval=EvalConfig(data=(f"{HERE}/task.py:held_out_rows",), every=50, prompts=256, greedy=False),
    )
