"""Repeated addition: the task of preset `tail`. Its lengths have a long tail, as those of reasoning have.

    prompt      37+6*4=
    completion  +6=3:3+6=9:2+6=5:1+6=1:0#1      the term, the total's last digit, how many are left, ..; the answer

How many terms there are follows a power law: more than half of the prompts have one or two, one in 85 has 60. So a
completion has 33 tokens in the mean and 413 at the most, and who waits for the longest of a batch waits long.
"""

import random
import zlib
from collections.abc import Iterator

CHARACTERS = "0123456789+*=:#"
CONTEXT_TOKENS = 512
ERROR_RATE = 0.3
MOST_TERMS = 60


def sample_problem(rng: random.Random, least: float = 1, power: float = 1.2) -> tuple[int, int, int]:
    """(start, term, times), e.g. (37, 6, 4); times is n or more with probability (least / n)^power, and 60 at the most.
    The defaults are those of the demonstrations that the base model has learned from."""
    times = int(least * (1 - rng.random()) ** (-1 / power))
    return rng.randint(0, 99), rng.randint(1, 9), min(MOST_TERMS, times)


def prompt_text(problem: tuple[int, int, int]) -> str:
    """(37, 6, 4) -> '37+6*4='."""
    start, term, times = problem
    return f"{start}+{term}*{times}="


def demonstration(problem: tuple[int, int, int], rng: random.Random, error_rate: float = 0.0) -> str:
    """(37, 6, 2) -> '+6=3:1+6=9:0#9'; with probability `error_rate` a digit is off by 1 to 3 and carried on."""
    digit, term, times = problem
    text = ""
    for left in reversed(range(times)):
        off = rng.choice([-3, -2, -1, 1, 2, 3]) if rng.random() < error_rate else 0
        digit = (digit + term + off) % 10
        text += f"+{term}={digit}:{left}"
    return f"{text}#{digit}"


def is_held_out(prompt: str) -> bool:
    """One prompt in ten, by a hash of its text: the two sets are disjoint whatever the seeds."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def _rows(seed: int, held_out: bool) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        start, term, times = problem = sample_problem(rng, least=1.5, power=1.2)
        if is_held_out(prompt_text(problem)) == held_out:
            yield {"prompt": prompt_text(problem), "answer": str((start + term * times) % 10)}


def train_rows(seed: int) -> Iterator[dict]:
    """Endless training rows {'prompt': '36+6*4=', 'answer': '0'}."""
    return _rows(seed, held_out=False)


def held_out_rows(seed: int) -> Iterator[dict]:
    """Endless held-out rows; none of them is ever a training row."""
    return _rows(seed, held_out=True)


def reward(completion: str, row: dict) -> float:
    """1.0 if what follows the first '#' is the answer, else 0.0."""
    return float(completion.partition("#")[2] == row["answer"])
