"""Tokens/s and model FLOPs utilisation of the trainer alone, on random packed data, for any model given by its config.

    python bench/train.py [--model qwen2-0.1b | qwen2-0.5b | qwen2-1.5b | DIR] [--tokens N] [--lengths LOW HIGH] …

Whole optimizer steps of `train.Trainer` (forward, loss, backward, clipping, Adam) with random weights and tokens. The
peak is the rate of a large square matrix product on the same device, before and after every step: float32 on a CPU,
bfloat16 on a GPU. FLOPs are `bench.flops.training_flops`. DIR: a folder with a config.json.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import placement  # noqa: E402
from bench.flops import matmul_flops_per_s  # noqa: E402
from config import Config, TrainConfig  # noqa: E402
from model_files import model_layout  # noqa: E402
from packing import Sequence, make_micro_batch  # noqa: E402
from queues import Rollout, StepBatch  # noqa: E402
from train import Trainer, init_process_group  # noqa: E402

# layers, width, heads, key-value heads, inner width, vocabulary, tied
SHAPES = {
    "qwen2-0.1b": (12, 768, 12, 4, 2560, 32_000, True),  # 116 M parameters
    "qwen2-0.5b": (24, 896, 14, 2, 4864, 151_936, True),
    "qwen2-1.5b": (28, 1536, 12, 2, 8960, 151_936, True),
}


def make_model(name: str, folder: Path) -> Path:
    """Random weights, saved as a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

    if name in SHAPES:
        layers, width, heads, kv_heads, inner, vocabulary, tied = SHAPES[name]
        config = Qwen2Config(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            max_position_embeddings=32_768,
        )
    else:
        config = AutoConfig.from_pretrained(name)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def random_batch(vocabulary: int, tokens: int, lengths: tuple[int, int], micro_batches: int) -> StepBatch:
    """Sequences of lengths drawn evenly between two bounds, a tenth of each prompt, packed to `tokens`."""
    generator, packed = torch.Generator().manual_seed(0), []
    for _ in range(micro_batches):
        sequences, room = [], tokens
        while room >= lengths[0]:
            n = min(room, int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=generator)))
            ids, prompt = torch.randint(0, vocabulary, (n,), generator=generator), max(1, n // 10)
            completion = ids[prompt:]
            zeros = torch.zeros(len(completion), dtype=torch.int64)
            rollout = Rollout(completion, torch.full((len(completion),), -10.0), zeros, "stop", 1.0)
            sequences.append(Sequence(ids[:prompt], rollout, advantage=(-1.0) ** len(sequences), weight=1.0))
            room -= n
        packed.append(make_micro_batch(sequences))
    return StepBatch(0, packed, sum(int(m.mask.sum()) for m in packed), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="qwen2-0.5b" if on_gpu else "qwen2-0.1b")
    parser.add_argument("--tokens", type=int, default=16_384 if on_gpu else 2048, help="of a micro-batch")
    parser.add_argument("--lengths", type=int, nargs=2, default=(2048, 8192) if on_gpu else (128, 512))
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 3)
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if not on_gpu and not placement.KEEP_MEMORY.items() <= os.environ.items():  # as the launcher sets it for a trainer
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | placement.KEEP_MEMORY)
    device = torch.device("cuda:0" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    with tempfile.TemporaryDirectory() as folder:
        options = TrainConfig(lr=1e-9, activation_checkpointing=args.activation_checkpointing, compile=args.compile)
        cfg = Config(model=make_model(args.model, Path(folder) / "model"), runs_dir=Path(folder), train=options)
        cfg.run_dir.mkdir()
        init_process_group(cfg, 0, device)
        trainer = Trainer(cfg, model_layout(cfg.model), 0, device)
    lm = trainer.policy.lm
    batch = random_batch(lm.config.vocab_size, args.tokens, args.lengths, args.micro_batches)
    peaks, measured = [], []
    for step in range(-1 - 2 * args.compile, args.steps):  # the first warms up
        metrics = trainer.step(dataclasses.replace(batch, step=max(0, step)))
        if step >= 0:
            measured.append(metrics | {"flops_per_s": metrics["mfu"] * trainer.peak_flops_per_s})
        peaks.append(matmul_flops_per_s(device))
    peaks = peaks[-args.steps - 1 :]
    around = [(before + after) / 2 for before, after in zip(peaks, peaks[1:], strict=False)]
    rates = [m["flops_per_s"] / peak for m, peak in zip(measured, around, strict=True)]
    parameters, packed = sum(p.numel() for p in lm.parameters()) / 1e6, args.tokens
    print(f"{args.model}, {parameters:.0f} M parameters, {args.micro_batches} x {packed} tokens a step, {name}")
    low, middle, high = (f(peaks) / 1e12 for f in (min, statistics.median, max))
    print(f"matrix product      {middle:.3f}   ({low:.3f} - {high:.3f}) TFLOP/s")
    tokens_per_s = [m["rank_tokens_per_s"] for m in measured]
    print(f"tokens/s            {statistics.median(tokens_per_s):.0f}")
    print(f"MFU                 {statistics.median(rates):.3f}   ({min(rates):.3f} - {max(rates):.3f})")
    if on_gpu:
        print(f"peak memory         {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
