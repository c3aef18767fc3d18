"""Commands that are printed to be pasted hold paths as a shell reads them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src/instar"
COMMAND = re.compile(
    r"\binstar (resume|control|test|train|sample|grow|checkpoint \w+|logs \w+)( --\S+)* $"
)
QUOTES = re.compile(r"\bquote\(|\.shell_word\b|\bshlex\.join\(")


def unquoted_commands(path: Path) -> list[str]:
    """Commands in a file's texts whose path or name is put in as it is."""
    commands = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
                continue
            value = ast.unparse(part)
            if COMMAND.search(before) and not QUOTES.search(value) and value != "{run}":
                commands.append(f"{path.relative_to(ROOT)}: {before[-60:]}{value}")
            before += "…"
    return commands


def test_every_path_in_a_command_is_quoted() -> None:
    assert [command for path in ROOT.rglob("*.py") for command in unquoted_commands(path)] == []
