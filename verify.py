r"""The built-in verifiers: `reward.function` names one of `exact`, `number`, `choice`, `math`, `gym`.

Each is a plain function (completion, dataset row) -> 1.0 or 0.0; `row["answer"]` is text. Copy one to write your own.
They read *one* answer from the completion, the last it states, and never look whether the right one is somewhere in it:
what accepts "7, or 12" for 12 trains a policy that lists numbers. An answer that is missing, empty or garbled is wrong,
never an error. Nothing here limits time: 9^{9^{9^9}} hangs, is killed from outside, and counts as failed, not as wrong.
"""

import copy
import json
import logging
import re
from fractions import Fraction
from functools import lru_cache

# A minus after a word or a bracket subtracts or joins ("2-3", "step-3"); digits in a word or an exponent are no number
# ("x2", "cm^2"). Used with re.ASCII, so that a number may follow a Chinese character directly.
UNSIGNED = r"(?:(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
SIGNED = r"((?<![\w)\]}^])[-−][$€£]?)?(?<![\w^])(?<!\^[{-])(?<!\^\{-)"
NUMBER = re.compile(rf"{SIGNED}(?:(\d+)\ (?=\d+/\d))?({UNSIGNED})(?:\ ?/\ ?({UNSIGNED}))?", re.ASCII)


def _last(pattern: str | re.Pattern, text: str, flags: int = 0) -> re.Match | None:
    return max(re.finditer(pattern, text, flags), key=re.Match.end, default=None)


def _value(match: re.Match | None) -> Fraction | None:
    """The match of NUMBER as an exact value; None for no match, x/0, or more digits than anyone means (1e9999)."""
    if match is None or re.search(r"[eE][-+]?\d{4}", match[0]):  # 10**999999999 would take all memory
        return None
    sign, whole, top, bottom = (part and part.replace(",", "") for part in match.groups()[:4])
    try:
        return (Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)) * (-1 if sign else 1)
    except (ValueError, ZeroDivisionError):  # ValueError: Python reads no integer of more than 4300 digits
        return None


def _boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, braces balanced; '' if it is never closed, None if there is none."""
    start, depth = text.rfind(r"\boxed{"), 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i].strip()
    return None if start < 0 else ""


def _stated(text: str) -> str | None:
    """What follows the last "####", "answer is" or "answer:", to the end of the text; None if there is none."""
    match = _last(r"####|(?i:\banswer\b[\s*_]*(?:is\b|:|=))[\s*:]*", text)
    return match and text[match.end() :].strip()


def _clause(text: str) -> str:
    """'5, since 2 + 3 = 5. So ...' -> '5, '"""
    return re.split(r"\n|[.;] |\b(?:because|since|as|so|which|not)\b", text)[0]


def exact(completion: str, row: dict) -> float:
    """1.0 if the completion is the row's answer, white space around either aside: (' 9', {'answer': '9'}) -> 1.0."""
    return float(completion.strip() == row["answer"].strip())


def number(completion: str, row: dict) -> float:
    """1.0 if the last number is the last number of the answer: ('so $1,234.0.', {'answer': '... #### 1234'}) -> 1.0.

    Compared as exact values: '3.0' is 3, '6/8' is 0.75, '1 1/2' is 1.5, '1e3' is 1000. A percent or currency sign is
    not part of the number: '50%' is 50, not 0.5. '1,234' is one number, '1,23' and '1,2,345' are lists.
    """
    said, want = (_value(_last(NUMBER, text)) for text in (completion, row["answer"]))
    return float(said is not None and said == want)


MARK = r"[*_\"'$({\[]{0,8}"
LETTER = rf"{MARK}(?:\\(?:text|textbf|mathrm|mathbf)\{{)?{MARK}([A-Z])(?![\w'’-])"
ONLY_LETTER = re.compile(rf"{LETTER}(?:[*_\"'$)}}\]:.\s]*|[*_]*[.:)\]].*)")  # "C", "**(C)**", "C) Paris", "C. Paris"
ANSWER_LETTER = re.compile(
    r"(?i:\banswer\b(?:(?:\s+(?:choice|option))?[\s*_]*(?:is\b|:|=)[\s*_:]*(?:(?:choice|option)\s+)?|[\s*_:]+))"
    rf"{LETTER}(?!(?<=[AI])\ (?!because|since|as\b)[a-z])"
)
MARKED_LETTER = re.compile(r"(?:\(|\*\*\(?)([A-Z])(?:\)|[).:]*\*\*)")


def choice(completion: str, row: dict) -> float:
    r"""1.0 if the stated choice is the answer's letter: ('A dog, so the answer is (C).', {'answer': 'C'}) -> 1.0.

    Looked for in this order: the whole completion ("c", "**C**", "C) Paris" on one line); the last \boxed{}; the last
    letter directly after "answer is", "answer:" or "answer"; the last (C) or **C**. Lower case counts only as the whole
    completion. "A" and "I" with a lower-case word behind them ("The answer is A dog") are no choice.
    """
    text, boxed = completion.strip(), _boxed(completion)
    match = ONLY_LETTER.fullmatch(text.upper() if len(text) == 1 else text)
    if match is None and boxed is not None:
        match = ONLY_LETTER.fullmatch(boxed)
    elif match is None:
        match = _last(ANSWER_LETTER, text) or _last(MARKED_LETTER, text)
    want = ONLY_LETTER.fullmatch(row["answer"].strip().upper())
    return float(match is not None and want is not None and match[1] == want[1])


# What is written in Unicode, or in LaTeX for the eye only -> what math-verify reads right.
TIDY = {"−": "-", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "×": r"\times ", "∪": r"\cup ", "÷": "/"}
TIDY |= {"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\xa0": " ", "~": " "}
TIDY |= {r"\%": "%", "{,}": ",", r"\,": "", r"\! ": "", r"\!": "", r"\;": " ", r"\ ": " ", r"\left": "", r"\right": ""}
TIDY |= dict.fromkeys(["$", r"\$", r"\(", r"\)", r"\[", r"\]", "°", r"^\circ", r"^{\circ}"], "")
TIDY_KEYS = re.compile(rf"(?<!\\)(?:{'|'.join(map(re.escape, TIDY))})(?!arrow)")
UNIT = r"(\ (?!(?:pi|dozen|hundred|thousand|[mbtr]+illion)\b)(?:[A-Za-z]{2,}|m)(?:[ /][A-Za-z]+)*(?:\ ?\^\{?\d\}?)?)?"
PLAIN = re.compile(rf"\+?{NUMBER.pattern}(\ ?%|\ percent)?{UNIT}", re.ASCII)
PROSE = re.compile(r"(?<![\\{a-zA-Z])(?!(?:and|sin|cos|tan|log|exp)\b)[^\W\d_]{3,}|\b(?:is|it|so|we|of|to|by|at)\b")
LATEX = r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]|(-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\})"


def _tidy(text: str) -> str:
    r"""One answer, the same however it is dressed: '$\left(1{,}234\text{ cm}\right)$.' -> '(1,234 cm)'."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = TIDY_KEYS.sub(lambda key: TIDY[key[0]], text)
    text = re.sub(r"√\s*(\d+|\w|(?=\())", r"\\sqrt{\1}", text).replace(r"\sqrt{}", r"\sqrt")
    text = re.sub(r"(?<=\d)\ (?=\d{3}(?!\d))", "", text)  # 1 234 -> 1234: to math-verify it is the mixed number 1 + 234
    return re.sub(r"\s+", " ", text).lstrip(" *").rstrip(" *.,;:")


def _parts(text: str) -> tuple[str, list[str]] | None:
    r"""'p = (1, f(2, 3)]' -> ('(]', ['1', 'f(2, 3)']); None unless brackets around it all hold two items or more."""
    match = re.fullmatch(r"(?:[^=<>]*=)?\s*\\?([(\[{])(.*?)\\?([)\]}])", text)
    items, depth = [""], 0
    for char in match[2] if match else "":
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:  # (1,2) \cup (3,4)
            return None
        items = [*items, ""] if char == "," and depth == 0 else [*items[:-1], items[-1] + char]
    return (match[1] + match[3], [item.strip() for item in items]) if len(items) > 1 else None


def _formula(text: str) -> str:
    """A plain number as math-verify reads it right (1e3 is 1*e*3 to it, 2 1/2 is 3/2); other text less its unit."""
    plain = PLAIN.fullmatch(text)
    value = _value(plain)
    if value is None:
        return re.sub(r" (?:[ckm]m|in|ft|units|square \w+)(?: ?\^\{?\d\}?)?$", "", text)
    if "." in plain[3] and not plain[4] and "e" not in plain[3].lower():
        literal = plain[3].replace(",", "")  # rounding is for decimals: 0.3333333 is 1/3
    else:
        top, bottom = abs(value.numerator), value.denominator
        literal = str(top) if bottom == 1 else rf"\frac{{{top}}}{{{bottom}}}"
    return "-" * (value < 0) + literal + "%" * bool(plain[5])


def _one_unit(said: str, want: str) -> bool:
    """Short units must be the same, cm is not m; words may be others for it, and one may be left out."""
    said, want = said.strip(), want.strip()
    return not said or not want or said == want or max(len(said), len(want)) > 3


def _same(said: str, want: str) -> bool:
    """Whether two tidy answers are equal, by the first that can tell: text, plain numbers, brackets, math-verify."""
    texts = [
        re.sub(r" (?!\d)|(?<!\d) ", "", text).casefold() for text in (said, want)
    ]  # "x + 1" is "x+1", "1 2" not 12
    if "" in texts or texts[0] == texts[1]:
        return "" not in texts
    a, b = PLAIN.fullmatch(said), PLAIN.fullmatch(want)
    if a and b:
        equal = _value(a) is not None and _value(a) == _value(b) and _one_unit(a[6] or "", b[6] or "")
        if equal or not (a[5] or b[5] or bool(a[4]) != bool(b[4])):  # 50% and 0.5, 1/3 and 0.3333333: let it judge
            return equal
    if re.fullmatch(r"[A-Za-z][a-z]{3,}[A-Za-z' .-]*|[A-Z]", want):
        return False  # as formulas "listen" and "silent" are equal
    a, b = _parts(said), _parts(want)
    if a and b and (a[0], b[0]) != ("{}", "{}"):  # math-verify takes (1,2), the point, for {1,2}
        return a[0] == b[0] and len(a[1]) == len(b[1]) and all(map(_same, a[1], b[1]))
    if max(len(said), len(want)) > 250:  # no answer; to parse a loop of "1 1 1 1 ..." takes minutes
        return False

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no timeout: see the header
    said, want = (  # one expression each, or none: of several, verify() accepts any that matches
        parse(f"${_formula(text)}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (said, want)
    )
    return verify(want, said, timeout_seconds=None, allow_set_relation_comp=True)


def math(completion: str, row: dict) -> float:
    r"""1.0 if the stated answer equals the row's: ('Thus \boxed{\frac{1}{2}}', {'answer': '0.5'}) -> 1.0.

    The answer of the completion is the last \boxed{}; else what follows the last "####", "answer is" or "answer:", up
    to the end of the sentence; else all of it. If the latter two are prose, the last formula or number in it.
    """
    want = _tidy(_boxed(row["answer"]) or _stated(row["answer"]) or row["answer"])
    said = _boxed(completion)
    if said is None:
        stated = _stated(completion)
        said = completion if stated is None else _clause(stated)
        said = said[-2000:]  # a degenerate completion repeats what it has without end
        if PROSE.search(said) and (PLAIN.fullmatch(want) or not PROSE.search(want)):
            match = _last(rf"{LATEX}|{NUMBER.pattern}", said, re.DOTALL | re.ASCII)
            said = next(filter(None, match.groups()[:4]), match[0]) if match else said
    return float(_same(_tidy(said), want))


# For tasks whose own scorer is no judge. All tasks of 0.1.25 were tried with wrong answers.
GYM_SCORERS = {
    **dict.fromkeys(["binary_matrix", "spiral_matrix", "string_insertion"], exact),  # theirs runs eval(answer)
    **dict.fromkeys(["letter_jumble", "word_sorting"], exact),  # the right answer and more words after it is right
    "game_of_life_halting": exact,  # any text at all is right
    "coin_flip": number,  # "0" is right
    "gsm_symbolic": number,  # the first number counts, without its sign
}
HASHED = "its entries depend on PYTHONHASHSEED, so the verifier would make another one than the prompt's"
GYM_REFUSED = dict.fromkeys(["knight_swap", "polynomial_multiplication", "word_ladder"], HASHED) | {
    "puzzle24": "its scorer accepts 6*4*1*1 whatever the numbers are",
    "composite": "name the tasks it is made of",
}
# Scorers that run the answer as code; besides, Integral(f, x) solves any integral. So it may hold but these names and
# single letters.
GYM_CODE = {"countdown", "intermediate_integration", "n_queens", "simple_integration"}
GYM_NAMES = re.compile(r"(?:[\d\s+*/^().,=-]|\b(?:a?(?:sin|cos|tan)h?|exp|log|sqrt|pi|[A-Za-z_])\b)*")


@lru_cache(maxsize=64)
def gym_dataset(task: str, seed: int, config: str):
    """reasoning-gym's dataset, config as JSON: gym_dataset('chain_sum', 1, '{"max_terms": 3}')[7]['question'].

    Any index works, above `size` too, except in acre, gsm_symbolic, list_functions and word_ladder, which list as many
    tasks at once (acre's entries depend on it besides). Raises ValueError for a task that cannot be verified.
    """
    import reasoning_gym

    if task in GYM_REFUSED:
        raise ValueError(f"reasoning-gym's task {task!r} cannot be verified: {GYM_REFUSED[task]}")
    return reasoning_gym.create_dataset(task, **{"size": 10_000, "seed": seed, **json.loads(config)})


@lru_cache(maxsize=64)
def _gym_entry(dataset, index: int) -> dict:
    return dataset[index]  # up to 0.4 s, and a group asks for one many times


def gym(completion: str, row: dict) -> float:
    r"""1.0 if reasoning-gym's scorer gives the full mark: ('<answer>9</answer>', {'answer': '9', 'gym': {...}}) -> 1.0.

    `row["gym"]` is {"task": "chain_sum", "seed": 1, "index": 7, "config": {}}; the entry is made again from it. What is
    scored: the last <answer>, else the last \boxed{}, else what follows the last "answer is" or "answer:", else all; of
    that, where the row's answer is a number, the last number. There is no partial credit: many tasks give 0.01 for
    garbage, which group-normalised advantages blow up to that of a right answer, and some 0.9 for a near miss.
    """
    task, gold = row["gym"]["task"], row["answer"].strip()
    tagged, stated = _last(r"<answer>(.*?)</answer>", completion, re.DOTALL), _stated(completion)
    if stated and "\n" not in gold:
        stated = _clause(stated) if NUMBER.fullmatch(gold) else stated.split("\n")[0].rstrip(" *")
        stated = stated if gold.endswith(".") else stated.rstrip(" *.")
    found = (tagged and tagged[1], _boxed(completion), stated, completion)
    answer = next(text for text in found if text is not None).strip()
    if NUMBER.fullmatch(gold) and (match := _last(NUMBER, answer)):
        answer = re.sub("[,$€£]", "", match[0]).replace("−", "-")
    if task in GYM_SCORERS:
        return GYM_SCORERS[task](answer, row)

    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    if DATASETS[task][0].score_answer is ProceduralDataset.score_answer:  # it compares, with credit for a substring
        return exact(answer, row)
    dataset = gym_dataset(task, row["gym"]["seed"], json.dumps(row["gym"]["config"], sort_keys=True))
    entry = copy.deepcopy(_gym_entry(dataset, row["gym"]["index"]))  # scorers change their entry
    if entry["answer"] is not None and entry["answer"].strip() != gold:
        raise ValueError(f"{row['gym']} now has the answer {entry['answer']!r}, not {gold!r}: another reasoning-gym?")
    if answer == entry["answer"]:
        return 1.0
    if re.search(r"(?i)\bnan", answer) or (task in GYM_CODE and not GYM_NAMES.fullmatch(answer)):
        return 0.0  # nan is at no distance that the scorers call too far
    try:
        return float(dataset.score_answer(answer=answer, entry=entry) == 1.0)
    except (MemoryError, OSError):  # a limit of the worker: failed, not wrong
        raise
    except Exception:  # on garbage the scorers raise whatever their parsing happens to
        return 0.0


VERIFIERS = {"exact": exact, "number": number, "choice": choice, "math": math, "gym": gym}
PACKAGES = {"math": "math_verify", "gym": "reasoning_gym"}  # verifier -> the module it needs
