"""Every command that a page names in its text exists, with the options that stand after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from instar.cli.main import instar

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "src/instar/extensions").glob("*/README.md"),
    ]
)
NAMED = re.compile(r"`(instar [^`]+)`")
OF_PACKAGES = {"census"}
"""commands of extensions that a page makes up"""


def mistakes(line: str) -> Iterator[str]:
    """Yield what a command line names that does not exist: a command, or options."""
    words, command = line.replace("\\", "").split()[1:], instar
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        subcommand = command.get_command(click.Context(command), name)
        if subcommand is None:
            yield name
            return
        command = subcommand
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    matches = (re.match(r"--[a-z][a-z-]*", word) for word in words)
    yield from (option[0] for option in matches if option and option[0] not in options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_named_exists(page: Path) -> None:
    lines = NAMED.findall(page.read_text("utf-8"))
    wrong = {line: [*mistakes(line)] for line in lines if line.split()[1] not in OF_PACKAGES}
    assert {line: words for line, words in wrong.items() if words} == {}


@pytest.mark.parametrize(
    "line", ["instar logs show", "instar logs plot --metric loss", "instar trian x.yaml"]
)
def test_what_does_not_exist_is_noticed(line: str) -> None:
    assert [*mistakes(line)]
