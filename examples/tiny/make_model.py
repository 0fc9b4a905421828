"""Makes the base model of preset `tiny`, or that of `tail`: about ten minutes on one core.

A stock Qwen2 of 0.45 M parameters, supervised on *noisy* demonstrations of the problems in `task.py`: each running
total is wrong with probability ERROR_RATE. Like any base model it has seen the right way often enough to be able to do
it, and the wrong way often enough that its samples seldom do. One thread and one seed, so the same torch build on the
same kind of CPU gives the same bytes.

    python examples/tiny/make_model.py [--task examples/tiny] [--steps 1500] [--seed 0] [--out FOLDER]
    python examples/tiny/make_model.py --task examples/tail --steps 1000 --pool 8
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

BATCH = 64


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token a character, then '<eos>' and '<pad>'."""
    vocabulary = {character: i for i, character in enumerate(characters)}
    vocabulary |= {"<eos>": len(vocabulary), "<pad>": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, context_tokens: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def batches(
    task, tokenizer: PreTrainedTokenizerFast, rng: random.Random, pool: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """BATCH noisy demonstrations of training prompts: input ids, labels (-100 on prompt and padding), both (B, T).

    So many batches are drawn at once; several are then of neighbours in length, which saves padding.
    """
    while True:
        drawn = [demonstration(task, tokenizer, rng) for _ in range(BATCH * pool)]
        if pool > 1:
            drawn.sort(key=lambda pair: len(pair[0]))
        for i in rng.sample(range(pool), pool) if pool > 1 else [0]:
            ids, labels = zip(*drawn[BATCH * i : BATCH * (i + 1)], strict=True)
            pad = torch.nn.utils.rnn.pad_sequence
            yield pad(ids, True, tokenizer.pad_token_id), pad(labels, True, -100)


def demonstration(task, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    while True:
        problem = task.sample_problem(rng)
        prompt = task.prompt_text(problem)
        if task.is_held_out(prompt):
            continue
        prompt_ids = tokenizer.encode(prompt)
        completion = task.demonstration(problem, rng, task.ERROR_RATE)
        completion_ids = tokenizer.encode(completion) + [tokenizer.eos_token_id]
        labels = [-100] * len(prompt_ids) + completion_ids
        return torch.tensor(prompt_ids + completion_ids), torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, default=Path(__file__).parent, help="folder with a task.py")
    parser.add_argument("--out", type=Path, help="default: model/ in that folder")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=1, help="batches drawn at once and sorted by length")
    args = parser.parse_args()
    sys.path.insert(0, str(args.task.resolve()))
    import task

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer(task.CHARACTERS)
    model = make_model(tokenizer, task.CONTEXT_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - step / args.steps) if step else 1 / warmup
    )
    for step, (input_ids, labels) in zip(range(args.steps), batches(task, tokenizer, rng, args.pool), strict=False):
        # Right padding under a causal mask: no real token ever attends to a pad token.
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    out = args.out or args.task / "model"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{model.num_parameters():,} parameters written to {out}")


if __name__ == "__main__":
    main()
