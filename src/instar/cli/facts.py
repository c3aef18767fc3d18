"""Facts on stdout, each behind its name: wrapped on a terminal, a line each elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

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
