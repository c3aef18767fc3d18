"""docs/environment.md has every environment variable that the source reads or sets, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environment.md").read_text("utf-8")
LISTED = {
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
}

NAME = re.compile(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|INSTAR_[A-Z_]+")
SHORT = re.compile(
    r'environ(?:ment)?(?:\.(?:get|pop|setdefault))?[\[(]"([A-Z]+)"'
    r'|"([A-Z]+)" (?:not )?in (?:os\.)?environ|"(PATH|TMPDIR|HOSTNAME|RANK|NNODES)"'
)
"""names without an underscore, where they are used"""
PICKLE = "data/text/foreign/meta_pickle.py"
"""whose constants of this form are operations of pickle"""
OTHERS = {
    *("CAUSAL_LM", "CUBLAS_STATUS", "CUDNN_STATUS", "F8_E4M3", "F8_E5M2"),
    *("O_DIRECT", "PER_RANK", "STRICT_PACK", "STRICT_SPREAD", "INSTAR_ALERT_", "T_0"),
}
"""constants of this form that name something else"""
OUTSIDE = {"INSTAR_TORTURE", "INSTAR_ALERT_RUN", "INSTAR_ALERT_NAME", "INSTAR_ALERT_STEP"}
"""of the tests, and put together from parts"""


def names_in(source: str) -> set[str]:
    """Return the names of variables in a file: whole constants, parts of formatted texts, and short ones."""
    constants = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    short = {next(filter(None, groups)) for groups in SHORT.findall(source)}
    return {name for name in constants if NAME.fullmatch(name)} | short


def in_source() -> set[str]:
    source = ROOT / "src/instar"
    files = (path for path in source.rglob("*.py") if path != source / PICKLE)
    return set().union(*(names_in(path.read_text("utf-8")) for path in files)) - OTHERS


def test_every_variable_of_the_source_is_on_the_page_and_no_other() -> None:
    assert in_source() | OUTSIDE == LISTED


@pytest.mark.parametrize(
    "line",
    [
        'os.environ.get("INSTAR_NEW")',
        'HIDDEN = "OTHER_TOOL_HOME"',
        'if "WHERE" not in os.environ: pass',
        'environment.get("WHERE", "")',
        'os.environ.setdefault("WHERE", "1")',
    ],
)
def test_a_new_variable_would_be_noticed(line: str) -> None:
    assert names_in(line) - LISTED


def test_what_is_put_together_from_parts_is_as_the_page_says() -> None:
    source = (ROOT / "src/instar/record/alerts.py").read_text("utf-8")
    assert 'f"INSTAR_ALERT_{key.upper()}"' in source
    assert '("run", "name", "step")' in source
    assert "INSTAR_TORTURE" in (ROOT / "Makefile").read_text("utf-8")
