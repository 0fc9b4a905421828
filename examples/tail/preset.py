"""Preset `tail`: a long tail of lengths, for bench/figures.py. task.py has its task, tiny's make_model.py its model."""

from pathlib import Path

from config import ActorConfig, Config, EvalConfig, PreprocessConfig, RewardConfig, TrainConfig

HERE = Path(__file__).parent


def preset() -> Config:
    """repeated addition, longest completion 12 times the mean: where waiting for the longest costs most"""
    return Config(
        name="tail",
        model=HERE / "model",
        data=(f"{HERE}/task.py:train_rows",),
        steps=80,
        batch_size=128,
        group_size=8,
        max_lag=24,
        reward=RewardConfig(function=f"{HERE}/task.py:reward"),
        actor=ActorConfig(
            sequences=128,
            max_prompt_tokens=16,
            max_completion_tokens=480,
            dtype="float32",
            kv_cache_gib=1,
            prefix_caching=False,
            enforce_eager=True,
        ),
        preprocess=PreprocessConfig(max_tokens_per_microbatch=2048, order="finished", ready_batches=2),
        train=TrainConfig(lr=3e-4, warmup_steps=20, lr_schedule="linear"),
        eval=EvalConfig(data=(f"{HERE}/task.py:held_out_rows",), every=50, prompts=256, greedy=False),
    )
