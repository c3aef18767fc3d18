"""Tables on stdout: drawn on a terminal, plain aligned columns in a pipe or file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of as many cells as there are headers; the first is never wrapped.

    No escape codes leave unless stdout is a terminal and NO_COLOR is unset; without a
    terminal nothing is wrapped or cut either.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        _draw(headers, rows)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    console.print(table)
