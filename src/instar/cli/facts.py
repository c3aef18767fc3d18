"""Facts on stdout: each behind its name, wrapped on a terminal, or all as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

import click

from instar.cli.table import terminal_width

LEAST = 20
"""columns of a text below which wrapping helps nobody"""


def print_named(texts: Iterable[tuple[str, str]], indent: int) -> None:
    """Print names and texts, the texts in a column of their own that begins after `indent`."""
    width = terminal_width()
    for name, text in texts:
        lines = [text]
        if width is not None and width - indent >= LEAST:
            lines = textwrap.wrap(
                text, width - indent, break_long_words=False, break_on_hyphens=False
            ) or [""]
        for number, line in enumerate(lines):
            click.echo(f"{'' if number else name:<{indent}}{line}".rstrip())


def print_json(value: Any) -> None:
    """Print one JSON document; numbers that are not finite are words."""
    from instar.record.events import to_words

    click.echo(json.dumps(to_words(value), indent=2, ensure_ascii=False))
