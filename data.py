"""Data: dataset rows, from whatever the user names, to the token ids that the engine sees.

    "one.jsonl@3 gym:leg_counting@1"  ─Source─▶ raw rows ─checked_row─▶ rows ─prompt_encoder─▶ (number, prompt_ids, row)

A row is a dict with `prompt` (or `messages`) and `answer`, and whatever else the verifier wants of it. The stream is a
function of the sources and the seed alone, so a group's id, its number in the stream, names it for good: after a resume
and with any number of actors. Whatever is left out of it is counted.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from config import ROW_BYTES, Config, ConfigError, load_function
from model_files import uses_chat_template

EVAL_SEED = 1_234_567  # of held-out rows, whatever the run's seed: runs are compared on the same prompts
CHECKED_ROWS = 100_000  # so many rows of a source are looked at before a run starts, the rest as they are used


@dataclass(frozen=True)
class Source:
    """Rows known beforehand, reshuffled every epoch, or a generator, called with another seed every epoch."""

    name: str
    rows: Sequence | None = None  # of dicts, or of lines of JSON
    unit: str = "row"
    generate: Callable[[int], Iterable] | None = None  # seed -> rows

    def epoch(self, seed: int, epoch: int | None) -> Iterator[tuple[str, Any]]:
        """(where it is, row as it is there) of every row; in the order they are stored, for epoch None."""
        if self.rows is None:
            for number, row in enumerate(self.generate(seed + 1_000_003 * (epoch or 0)), start=1):
                yield f"{self.name}, row {number}", row
            return
        order = list(range(len(self.rows)))
        if epoch is not None:
            random.Random(f"{seed} {epoch}").shuffle(order)
        for i in order:
            yield f"{self.name}, {self.unit} {i + 1}", self.rows[i]


def split_weight(spec: str) -> tuple[str, float]:
    """`rows.jsonl@0.5` -> ("rows.jsonl", 0.5); the weight is 1 unless it is given."""
    found = re.fullmatch(r"(.+)@(\d+\.?\d*|\.\d+)", spec, re.DOTALL)
    spec, weight = (found[1], float(found[2])) if found else (spec, 1.0)
    if not weight:
        raise ConfigError(f"{spec}: its weight in the mixture is 0: leave it out")
    return spec, weight


def open_source(spec: str) -> Source:
    """Raises ConfigError, with the remedy, if there is no such thing."""
    kind, _, rest = spec.partition(":")
    if kind == "hf":
        return _hub_source(rest)
    if kind == "gym":
        return _gym_source(rest)
    if spec.endswith((".jsonl", ".parquet")):
        path = Path(spec)
        if not path.is_file():
            raise ConfigError(f"dataset {path}: no such file")
        if path.suffix == ".parquet":
            _need("pyarrow", spec)
            import pyarrow.parquet

            return Source(f"dataset {path}", pyarrow.parquet.read_table(path).to_pylist())
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip(b"\n").split(b"\n")
        # Not splitlines(): that ends a line at U+2028 and its like, which are plain text in JSON.
        return Source(f"dataset {path}", lines, "line")
    if not spec.removeprefix("python:").rpartition(":")[0].endswith(".py"):
        raise ConfigError(f"data {spec!r}: want a .jsonl or .parquet file, hf:…, gym:… or `file.py:function`")
    function = load_function(spec)

    def generate(seed: int) -> Iterator:
        try:
            yield from function(seed)
        except Exception as error:
            raise ConfigError(f"{spec} failed: {error!r}") from error

    return Source(spec, generate=generate)


def _need(package: str, spec: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"data {spec}: package {package} is not installed (requirements-extras.txt)")


def _hub_source(rest: str) -> Source:
    """`name[/subset][:split]` through the `datasets` library: name is `org/name`, or a folder on this disk."""
    _need("datasets", f"hf:{rest}")
    import datasets

    name, _, split = rest.partition(":")
    subset = None
    if not Path(name).is_dir():
        *parts, last = name.split("/")
        name, subset = ("/".join(parts), last) if len(parts) == 2 else (name, None)
    try:
        rows = datasets.load_dataset(name, subset, split=split or "train")
    except Exception as error:  # of the network, the hub, the disk or the dataset: all mean the same here
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data hf:{rest}: cannot be loaded (name {name}, subset {subset}): {reason}") from None
    return Source(f"dataset hf:{rest}", rows)


def _gym_source(rest: str) -> Source:
    """`task[:{"option": value}]` of reasoning-gym. The verifier `gym` makes the problem again from what a row carries:
    its metadata would not all survive the way (tuples, keys that are no text)."""
    _need("reasoning_gym", f"gym:{rest}")
    from verify import gym_dataset

    task, _, options = rest.partition(":")
    try:
        config = json.loads(options or "{}")
        options = json.dumps(config, sort_keys=True)
        gym_dataset(task, 0, options)
    except Exception as error:  # JSON's, or whatever the task makes of its options
        raise ConfigError(f"data gym:{rest}: reasoning-gym cannot make this task: {error}") from None

    def generate(seed: int) -> Iterator[dict]:
        problems = gym_dataset(task, seed, options)
        for index in range(len(problems)):
            problem, gym = problems[index], {"task": task, "seed": seed, "index": index, "config": config}
            answer = "" if problem["answer"] is None else str(problem["answer"])
            yield {"prompt": problem["question"], "answer": answer, "task": task, "gym": gym}

    return Source(f"gym:{rest}", generate=generate)


def checked_row(raw: Any, where: str, cfg: Config) -> dict:
    """`prompt` (unless there are `messages` instead) and `answer` as texts, all else as it was, of plain values
    throughout. Raises ConfigError that says where and what is missing.

    >>> checked_row('{"question": "1 + 1", "answer": 2}', "line 7", cfg)  # with prompt_key "question"
    {"question": "1 + 1", "prompt": "1 + 1", "answer": "2"}
    """
    row = raw
    if isinstance(raw, bytes | str):
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or brackets without end
            raise ConfigError(f"{where}: not JSON ({error}): {raw[:100]!r}") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: want an object with "prompt" and "answer", got {shortened(row)}')
    prompt, answer = row.get(cfg.prompt.prompt_key), row.get(cfg.prompt.answer_key)
    row = {key: value for key, value in row.items() if key != "prompt"}
    if prompt is not None or row.get("messages") is None:  # beside a prompt, `messages` are for the verifier alone
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{where}: "{cfg.prompt.prompt_key}" is missing or not a text: {shortened(raw)}')
        row["prompt"] = prompt
    elif not _are_messages(row["messages"]):
        want = 'a list of {"role": …, "content": text}, the last of them the user\'s'
        raise ConfigError(f'{where}: "messages" is not {want}: {shortened(raw)}')
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not (number or isinstance(answer, str)):
        raise ConfigError(f'{where}: "{cfg.prompt.answer_key}" is missing or not a text: {shortened(raw)}')
    row["answer"] = str(answer)
    with contextlib.suppress(TypeError, OverflowError, UnicodeError, RecursionError):
        if msgspec.msgpack.decode(encoded := msgspec.msgpack.encode(row)) == row:
            if len(encoded) > ROW_BYTES:
                raise ConfigError(f"{where}: {len(encoded):,} bytes, more than the {ROW_BYTES:,} of a row")
            return row
    what = f"{shortened(row)} would not reach the verifier as it is"
    raise ConfigError(f"{where}: {what}: want text, numbers, lists and dicts")


def _are_messages(messages: Any) -> bool:
    """What a chat template takes, with something for the model to answer at its end."""
    right = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    texts = right and all(isinstance(m.get(key), str) for m in messages for key in ("role", "content"))
    return bool(texts and messages[-1]["content"] and messages[-1]["role"] != "assistant")


def prompt_text(row: dict) -> str:
    """What a row asks, to be shown."""
    return row["prompt"] if "prompt" in row else row["messages"][-1]["content"]


def shortened(row: Any) -> str:
    text = repr(row)
    return text if len(text) <= 300 else text[:300] + "…"


def check_source(spec: str, cfg: Config) -> None:
    """Raises ConfigError that names the first of the malformed rows and their number, or if there is no good one."""
    source = open_source(split_weight(spec)[0])
    wrong, good = [], 0
    rows = itertools.islice(source.epoch(cfg.seed, None), CHECKED_ROWS if source.rows is not None else 1)
    for where, raw in rows:
        if is_blank(raw):
            continue
        try:
            checked_row(raw, where, cfg)
            good += 1
        except ConfigError as error:
            wrong.append(str(error))
    if wrong and (cfg.prompt.malformed == "stop" or not good):
        more = f"\n… and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        remedy = "; --prompt.malformed skip leaves such rows out and counts them" if good else ""
        raise ConfigError("\n".join(wrong[:5]) + more + remedy)
    if not good:
        raise ConfigError(f'{source.name} is empty: want rows like {{"prompt": "1+1=", "answer": "2"}}')


def is_blank(raw: Any) -> bool:
    return isinstance(raw, bytes) and not raw.strip()


def raw_rows(specs: Sequence[str], seed: int, epochs: int | None) -> Iterator[tuple[str, Any]]:
    """(where, row) of all sources, mixed by weight; each runs through its epochs, without end for None."""

    def stream(source: Source) -> Iterator[tuple[str, Any]]:
        for epoch in itertools.count() if epochs is None else range(epochs):
            some = False
            for where, raw in source.epoch(seed, epoch):
                if not is_blank(raw):
                    some = True
                    yield where, raw
            if not some:
                raise ConfigError(f"{source.name} is empty")

    named = [split_weight(spec) for spec in specs]
    streams = {i: stream(open_source(spec)) for i, (spec, _) in enumerate(named)}
    draw = random.Random(f"{seed} mixture")
    while streams:
        i = draw.choices(list(streams), [named[i][1] for i in streams])[0]
        try:
            yield next(streams[i])
        except StopIteration:
            del streams[i]


def prompt_encoder(cfg: Config, tokenizer) -> Callable[[dict, str], list[int]]:
    """(row, where it is) -> prompt token ids: by the chat template, which writes every special token itself, or as
    plain text, to which the tokenizer adds what it always adds. One beginning-of-sequence token at most. Raises
    ConfigError."""
    chat = uses_chat_template(cfg)

    def encode(row: dict, where: str) -> list[int]:
        messages = row.get("messages")
        if "prompt" in row:
            messages = [{"role": "user", "content": cfg.prompt.wrap.replace("{prompt}", row["prompt"])}]
        if chat:
            if cfg.prompt.system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": cfg.prompt.system}, *messages]
            try:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # templates raise what they like, of roles that they do not know above all
                raise ConfigError(f"{where}: the chat template refuses {shortened(messages)}: {error}") from None
        elif len(messages) == 1:
            ids = tokenizer.encode(cfg.prompt.few_shot + messages[0]["content"])
        else:
            what = "several messages, and no chat template (prompt.template)"
            raise ConfigError(f"{where}: {what}: {shortened(messages)}")
        if not ids:
            raise ConfigError(f"{where}: the tokenizer makes no token of {shortened(messages)}")
        while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # the text had one already
            ids = ids[1:]
        return ids

    return encode


def encoded_prompts(
    cfg: Config, specs: Sequence[str], tokenizer, dropped: Counter, seed: int, epochs: int | None = None,
    held_out: Collection[tuple[int, ...]] = (),
) -> Iterator[tuple[int, list[int], dict]]:  # fmt: skip
    """(row number, prompt token ids, row), without end for epochs None. Malformed rows (unless they are an error),
    prompts that are too long and those that are held out are skipped and counted. Raises ConfigError if 1,000 in a row
    are."""
    encode, last = prompt_encoder(cfg, tokenizer), -1
    for number, (where, raw) in enumerate(raw_rows(specs, seed, epochs)):
        reason, what = None, ""
        try:
            row = checked_row(raw, where, cfg)
            prompt_ids = encode(row, where)
        except ConfigError as error:
            if cfg.prompt.malformed == "stop":
                raise
            reason, what = "malformed", str(error)
        else:
            if len(prompt_ids) > cfg.actor.max_prompt_tokens:
                reason, what = "prompt_too_long", f"over {cfg.actor.max_prompt_tokens} tokens: raise max_prompt_tokens"
            elif held_out and tuple(prompt_ids) in held_out:
                reason, what = "held_out", "among the held-out prompts: is the training data more than those?"
        if reason is None:
            last = number
            yield number, prompt_ids, row
            continue
        dropped[reason] += 1
        if number - last >= 1000:
            raise ConfigError(f"1,000 rows of {' '.join(specs)} in a row skipped; the last ({where}): {what}")
