"""Every statement of the page on security names the tests that verify it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"<!-- (tests/\S+\.py)::(\w+) -->")


def statements(page: str) -> list[str]:
    """A page's paragraphs and list items behind the introduction, with the comments in each."""
    blocks = re.split(r"\n\s*\n|\n(?=- )", page[page.index("\n## ") :].strip())
    return [block for block in blocks if not block.startswith("#")]


@pytest.mark.parametrize(
    "statement", statements(PAGE.read_text("utf-8")), ids=lambda text: text[:50].strip("- ")
)
def test_a_statement_on_security_names_tests_that_exist(statement: str) -> None:
    tests = NAMED.findall(statement)
    assert tests, f"no test is named behind: {statement}"
    for path, name in tests:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_statement_without_a_test_is_found() -> None:
    page = (
        "# Title\n\nIntroduction.\n\n## One\n\n- A claim.\n  Of two lines.\n"
        "  <!-- tests/a.py::test_a -->\n- Another one.\n\n### Two\n\nA paragraph\nof two.\n"
    )
    assert [bool(NAMED.search(statement)) for statement in statements(page)] == [True, False, False]
    assert statements(page)[2] == "A paragraph\nof two."
