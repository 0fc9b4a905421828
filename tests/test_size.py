"""The core stays small enough to be read."""

import ast
import io
import tokenize

from conftest import ROOT

NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Lines that hold anything but white space, comments and docstrings."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def test_lines_of_code_are_counted_as_said():
    assert (
        lines_of_code('"""Header.\n\nMore."""\n\nx = 1  # one\n# two\ny = (\n    2,\n)\n\ndef f():\n    """Doc."""\n')
        == 5
    )


def test_core_has_under_2000_lines_of_code():
    sizes = {path.name: lines_of_code(path.read_text()) for path in ROOT.glob("*.py")}
    assert sorted(sizes) == [
        "actor.py",
        "config.py",
        "launch.py",
        "preprocess.py",
        "queues.py",
        "reward.py",
        "train.py",
    ]
    assert sum(sizes.values()) < 2000, sizes
