"""Chain sums: the task of preset `tiny`. A dataset and its verifier are two functions; copy this file for your own.

    prompt      7+5-3=
    completion  7+5=12-3=9#9        each operand copied, each running total written, the answer after '#'

2 to 9 one-digit terms, so a completion is 8 to 45 tokens long: the spread that makes a decode batch run dry
unless finished sequences are replaced at once. Running totals never go below zero.
"""

import random
import zlib
from collections.abc import Iterator

CHARACTERS = "0123456789+-=#"
CONTEXT_TOKENS = 128
ERROR_RATE = 0.22
MIN_TERMS, MAX_TERMS = 2, 9


def sample_problem(rng: random.Random) -> list[int]:
    """Signed one-digit terms whose running total stays at or above zero, e.g. [7, 5, -3]."""
    terms = [rng.randint(0, 9)]
    for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
        term = rng.randint(0, 9)
        terms.append(-term if term and term <= sum(terms) and rng.random() < 0.5 else term)
    return terms


def prompt_text(terms: list[int]) -> str:
    """[7, 5, -3] -> '7+5-3='."""
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:]) + "="


def demonstration(terms: list[int], rng: random.Random, error_rate: float = 0.0) -> str:
    """[7, 5, -3] -> '7+5=12-3=9#9'; with probability `error_rate` a running total is off by 1 to 3 and carried on."""
    total, text = terms[0], str(terms[0])
    for term in terms[1:]:
        total += term
        if rng.random() < error_rate:
            offset = rng.randint(1, 3)
            total += offset if total < offset or rng.random() < 0.5 else -offset
        text += f"{term:+d}={total}"
    return f"{text}#{total}"


def is_held_out(prompt: str) -> bool:
    """One prompt in ten, by a hash of its text: the two sets are disjoint whatever the seeds."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def _rows(seed: int, held_out: bool) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        terms = sample_problem(rng)
        if is_held_out(prompt_text(terms)) == held_out:
            yield {"prompt": prompt_text(terms), "answer": str(sum(terms))}


def train_rows(seed: int) -> Iterator[dict]:
    """Endless training rows {'prompt': '7+5-3=', 'answer': '9'}."""
    return _rows(seed, held_out=False)


def held_out_rows(seed: int) -> Iterator[dict]:
    """Endless held-out rows; none of them is ever a training row."""
    return _rows(seed, held_out=True)


def reward(completion: str, row: dict) -> float:
    """1.0 if what follows the first '#' is the answer, else 0.0."""
    return float(completion.partition("#")[2] == row["answer"])
