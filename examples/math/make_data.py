"""Makes `examples/math/train.jsonl` of the problems that Open-Reasoner-Zero published.

Their file is a list of conversations: a turn of the human with the problem, a turn of the assistant with the answer.

    python examples/math/make_data.py orz_math.json [--out FILE]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path


def rows(conversations: list[list[dict]]) -> Iterator[dict]:
    """[{"from": "human", "value": problem}, {"from": "assistant", "ground_truth": {"value": answer}}] -> a row."""
    for human, assistant in conversations:
        assert (human["from"], assistant["from"]) == ("human", "assistant"), human
        yield {"problem": human["value"], "answer": assistant["ground_truth"]["value"], "task": "orz"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "train.jsonl")
    args = parser.parse_args()
    found = list(rows(json.loads(args.file.read_text())))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{len(found)} problems in {args.out}")


if __name__ == "__main__":
    main()
