"""Every check that says exact, intact, whole, equal, tested or verified has a test that damages what it
looks at. The list of checks is made from the source and the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import damages

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"\b(exact|intact|whole|equal|tested|verified)\b", re.IGNORECASE)
HISTORY = ("docs/journal.md",)


class Message(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def texts_of(path: Path) -> Iterator[Message]:
    """The texts of a source file that people may read: its literals, and the help of commands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT).as_posix()
    plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "command(" in "".join(
            ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield Message(name, node.lineno, " ".join((ast.get_docstring(node) or "").split()))
        elif isinstance(node, ast.JoinedStr) and id(node) not in plain:
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            ]
            plain |= {id(part) for part in ast.walk(node)}
            yield Message(name, node.lineno, "".join(parts))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain
        ):
            yield Message(name, node.lineno, node.value)


def sentences_of(path: Path) -> Iterator[Message]:
    """The sentences of a page, without its code."""
    name, sentence, start, code = path.relative_to(ROOT).as_posix(), "", 0, False
    lines = [*path.read_text(encoding="utf-8").splitlines(), ""]
    for number, line in enumerate(lines, 1):
        opens = bool(re.match(r"\s*([-*|#]|\d+\. )", line))
        if line.lstrip().startswith("```"):
            code = not code
        if code or opens or not line.strip():
            for text in re.split(r"(?<=[.!?:;]) +(?=[A-Z`*\[(])", sentence):
                yield Message(name, start, text.strip())
            sentence, start = "", number
        if not code and not line.lstrip().startswith("```"):
            sentence = f"{sentence} {line.strip()}"


@cache
def messages() -> list[Message]:
    """Every message with one of the words. Parsing all of the source takes seconds, which each worker
    that collects this file would spend if they were made when it is imported."""
    source = [text for path in (ROOT / "src").rglob("*.py") for text in texts_of(path)]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sentences = [
        message
        for path in pages
        if path.relative_to(ROOT).as_posix() not in HISTORY
        for message in sentences_of(path)
    ]
    return sorted(message for message in [*source, *sentences] if WORDS.search(message.text))


def claims(row: damages.Check | damages.NoCheck, message: Message) -> bool:
    """Whether a row is about a message. What says intact, tested or verified is never another thing in
    general: its row names the file, and so do rows of messages where checks speak."""
    in_general = row.where == "*"
    if in_general and re.search(r"\b(intact|tested|verified)\b", message.text):
        return False
    if in_general and any(fnmatch(message.path, where) for where in damages.CHECKING):
        return False
    match = re.search(row.says, message.text, re.IGNORECASE)
    return fnmatch(message.path, row.where) and match is not None


def test_every_check_has_a_row() -> None:
    rows = (*damages.CHECKS, *damages.NO_CHECKS)
    missing = [
        str(message) for message in messages() if not any(claims(row, message) for row in rows)
    ]
    assert missing == []


def test_every_row_has_a_check() -> None:
    rows = (*damages.CHECKS, *damages.NO_CHECKS)
    assert [row for row in rows if not any(claims(row, message) for message in messages())] == []


def test_every_test_that_a_row_names_exists() -> None:
    tests = {test for row in damages.CHECKS for test in row.tests}
    missing = []
    for test in sorted(tests):
        file, _, function = test.partition("::")
        path = ROOT / "tests" / file
        if not path.exists() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            missing.append(test)
    assert missing == []


def test_a_row_that_is_a_check_names_a_test() -> None:
    assert [row for row in damages.CHECKS if not row.tests] == []
