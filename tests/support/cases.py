"""Which cases of a test run in `make test`, and which in `make torture` alone.

    python tests/support/cases.py

writes the list of them in tests/README.md anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest


def parametrize_first(
    names: str | tuple[str, ...], cases: Iterable[Any], *, first: int, **options: Any
) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize(names, cases, **options)`, marked as `marked_after` marks cases."""
    single = isinstance(names, str) and "," not in names
    return pytest.mark.parametrize(names, marked_after(first, cases, single=single), **options)


def marked_after(first: int, cases: Iterable[Any], *, single: bool = True) -> list[Any]:
    """Return `cases`, of which those after the first `first` are marked `torture`.

    `single`: each of them is one value, not a tuple of several.
    """
    return [
        case if index < first else _in_torture(case, single=single)
        for index, case in enumerate(cases)
    ]


def _in_torture(case: Any, *, single: bool) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.torture])
    return pytest.param(*([case] if single else case), marks=pytest.mark.torture)


TESTS = Path(__file__).parents[1]
README = TESTS / "README.md"
TITLE = "## What `make torture` alone runs\n"
MARKERS = ("pytest.mark.torture", "parametrize_first", "marked_after")


def in_torture_alone() -> Iterator[str]:
    """Yield a line of Markdown for each file with tests that `make test` leaves out, whole or some of their cases."""
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text("utf-8")
        if not any(marker in source for marker in MARKERS):
            continue
        names = [
            f"{node.name.removeprefix('test_')}{_extent(node)}"
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and _extent(node) is not None
        ]
        if names:
            yield f"- `{path.relative_to(TESTS)}`: {', '.join(names)}\n"


def _extent(function: ast.FunctionDef) -> str | None:
    """Return what follows its name: nothing if all of it is left out; None if nothing is."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    if "pytest.mark.torture" in decorators:
        return ""
    is_partial = any(marker in decorator for decorator in decorators for marker in MARKERS)
    return " (some cases)" if is_partial else None


def with_list(readme: str) -> str:
    """Return the text of tests/README.md with the list as it is now, at its end."""
    head, _, _ = readme.partition(TITLE)
    return f"{head}{TITLE}\n{''.join(in_torture_alone())}"


if __name__ == "__main__":
    README.write_text(with_list(README.read_text("utf-8")), "utf-8")
