"""Every command and every key that the page for users of other trainers names exists here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from instar.cli.main import instar
from instar.config.fields import LANGUAGE, PlainConfig, root_of, schema_keys, section_types
from instar.config.load import load_config

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text("utf-8")
ROWS = [
    re.split(r" *\| *", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| `")
]
NAMED = sorted({code for row in ROWS if len(row) > 1 for code in re.findall(r"`([^`]+)`", row[1])})


def commands(text: str) -> Iterator[str]:
    return (code for code in re.findall(r"`([^`]+)`", text) if code.startswith("instar "))


@pytest.mark.parametrize("line", sorted(set(commands(PAGE))))
def test_a_command_that_is_named_is_accepted(line: str) -> None:
    _, *words = shlex.split(line)
    command: click.Command = instar
    context = click.Context(instar)
    while isinstance(command, click.Group):
        name, subcommand, words = command.resolve_command(context, words)
        assert subcommand is not None
        command, context = subcommand, click.Context(subcommand, context, info_name=name)
    command.parse_args(context, words)


@pytest.mark.parametrize("entry", [text for text in NAMED if not text.startswith("instar ")])
def test_a_key_that_is_named_exists_and_takes_the_value(entry: str) -> None:
    key, separator, value = entry.partition(": ")
    key_types = {**schema_keys(root_of(LANGUAGE)), **section_types(root_of(LANGUAGE))}
    if key in key_types and separator:
        load_config(None, [f"{key}={value}"])
    assert key in {*key_types, *schema_keys(PlainConfig)}


def test_the_page_names_many() -> None:
    assert len(ROWS) > 80
    assert len(NAMED) > 80
