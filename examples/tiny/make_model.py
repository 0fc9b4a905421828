"""Makes `examples/tiny/model/`, the base model of preset `tiny`: about ten minutes on one core.

A stock Qwen2 of 0.45 M parameters, supervised on *noisy* demonstrations of the chain sums in `task.py`: each running
total is wrong with probability 0.22. Like any base model it has seen the right way often enough to be able to do it,
and the wrong way often enough that its samples seldom do. One thread and one seed, so the same torch build on the
same kind of CPU gives the same bytes.

    python examples/tiny/make_model.py [--out FOLDER] [--steps 1500] [--seed 0]
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import task

CHARACTERS = "0123456789+-=#"
CONTEXT_TOKENS = 128
ERROR_RATE = 0.22
BATCH = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, then '<eos>' and '<pad>'."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    vocabulary |= {"<eos>": len(vocabulary), "<pad>": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """BATCH noisy demonstrations of training prompts: input ids, labels (-100 on prompt and padding), both (B, T)."""
    ids, labels = [], []
    while len(ids) < BATCH:
        terms = task.sample_terms(rng)
        prompt = task.prompt_text(terms)
        if task.is_held_out(prompt):
            continue
        prompt_ids = tokenizer.encode(prompt)
        completion_ids = tokenizer.encode(task.demonstration(terms, rng, ERROR_RATE)) + [tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt_ids + completion_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + completion_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, -100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - step / args.steps) if step else 1 / warmup
    )
    for step in range(args.steps):
        input_ids, labels = make_batch(tokenizer, rng)
        # Right padding under a causal mask: no real token ever attends to a pad token.
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters():,} parameters written to {args.out}")


if __name__ == "__main__":
    main()
