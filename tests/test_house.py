"""The house stays simple: few files in one call, short functions, small classes."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ispasp
from support.mutants import MUTANTS

SRC = Path(ispasp.__file__).parent
MOST_CODE = 15_985  # lines of code in the library: where it can be lower, lower it; only a feature may raise it
MOST_FILES = 35
MOST_LINES = 40
MOST_ATTRIBUTES = 12
MIRRORS = {"SlimMultiheadAttention"}  # have the attributes of the torch module that they stand in for
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def definitions() -> list[tuple[str, Any]]:
    """Every function and class of the library."""
    return [
        (f"{path.relative_to(SRC)}:{node.name}", node)
        for path in sorted(SRC.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    return ((name, node) for name, node in definitions() if isinstance(node, kinds))


def visited(call: Any) -> set[str]:
    """The files of the library that a call executes functions of."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {str(Path(name).relative_to(SRC)) for name in found if Path(name).is_relative_to(SRC)}


def test_one_prune_goes_through_few_files() -> None:
    net, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(16, 4)

    def prune() -> None:
        ispasp.prune(net, [batch], keep=0.5, progress=False)

    prune()  # what is imported and cached once does not count
    files = visited(prune)
    assert "_prune.py" in files
    assert len(files) <= MOST_FILES, sorted(files)


def body_lines(function: Function) -> int:
    """Lines from the first statement behind the docstring to the last."""
    first = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (first[-1].end_lineno or 0) - first[0].lineno + 1 if first else 0


def test_functions_fit_a_screen() -> None:
    functions = nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    assert {name: n for name, function in functions if (n := body_lines(function)) > MOST_LINES} == {}


def code_lines(text: str) -> int:
    """Lines that hold code: all but blank ones, comments and docstrings. A statement of three lines counts three."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def test_the_library_stays_small() -> None:
    sizes = {path: code_lines(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")}
    assert sum(sizes.values()) <= MOST_CODE, "the library grows: is there something to take away, or to share?"


@pytest.mark.parametrize("file", sorted({file for file, _ in MUTANTS}))
def test_every_mutation_changes_one_place(file: str) -> None:
    """`make mutations` takes long and runs seldom: what it would break has to stand where it says."""
    text = (SRC / file).read_text(encoding="utf-8")
    changes = [pair for (name, _), pairs in MUTANTS.items() if name == file for pair in pairs]
    assert {old: text.count(old) for old, _ in changes if text.count(old) != 1} == {}
    for old, new in changes:
        assert old != new
        ast.parse(text.replace(old, new))


def is_record(cls: ast.ClassDef) -> bool:
    return any("dataclass" in (text := ast.unparse(each)) and "frozen=True" in text for each in cls.decorator_list)


def attributes(cls: ast.ClassDef) -> set[str]:
    """What the class declares, and what its methods assign to `self`."""
    declared = {
        row.target.id for row in cls.body if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
    }
    stored = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return declared | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_classes_have_few_attributes() -> None:
    classes = [(name, cls) for name, cls in nodes(ast.ClassDef) if not is_record(cls) and cls.name not in MIRRORS]
    assert classes
    assert {name: found for name, cls in classes if len(found := attributes(cls)) > MOST_ATTRIBUTES} == {}


@pytest.mark.parametrize(
    ("code", "lines"), [("def f():\n    'text'\n    x = 1\n    return x", 2), ("def f(): pass", 1)]
)
def test_what_counts_as_a_body(code: str, lines: int) -> None:
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function) == lines


def test_what_counts_as_code() -> None:
    text = '"""Doc."""\n\n# why\nx = f(\n    1,  # one\n)\n'
    assert code_lines(text) == 3
    assert code_lines(text + 'def g():\n    """Doc\n\n    more."""\n    return """a\n\nb"""\n') == 3 + 4


def test_what_counts_as_an_attribute() -> None:
    (cls,) = ast.parse("class C:\n    a: int\n    def __init__(self):\n        self.b, self.c = 1, 2").body
    assert isinstance(cls, ast.ClassDef)
    assert attributes(cls) == {"a", "b", "c"}
