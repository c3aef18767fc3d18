"""Lines and tables on stdout: drawn on a terminal, plain aligned columns in a pipe or file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

import click

from instar.cli.plain import ENCODING
from instar.logs.telling.aligned import aligned

_GAP = 2
_LEAST = 12
"""columns that a cell wants in which text is wrapped"""


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print rows of as many cells as there are headers; the first is never wrapped.

    No escape codes leave unless stdout is a terminal and NO_COLOR is unset; without a
    terminal nothing is wrapped or cut either. The columns `right` are flush right; those of
    `spare` are left out of a terminal that is too narrow, the first named first.
    """
    if terminal_width() is not None:
        _draw(headers, rows, right, spare)
        return
    numbers = [number for number, header in enumerate(headers) if header in right]
    for line in aligned([[*map(as_shown, row)] for row in (headers, *rows)], numbers):
        click.echo(line)


def as_shown(text: str) -> str:
    """`text` as stdout will spell it: as wide as it will be."""
    if text.isascii() or getattr(sys.stdout, "encoding", None) != ENCODING:
        return text
    from instar.record.lines import spelt

    return spelt(text)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None: it is none, and lines may have any length."""
    try:
        there = sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # closed
        return None
    return shutil.get_terminal_size().columns if there else None


def _widths(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headers, *rows, strict=True)]


def _draw(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    spare: Sequence[str],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    shown = _that_fit(headers, rows, spare, console.width)
    stiff = [number for number in shown if number == 0 or headers[number] in right]
    if not _has_room(headers, rows, stiff, shown, console.width):
        _stack(headers, rows, shown, console.width)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in shown:
        table.add_column(
            as_shown(headers[number]),
            overflow="fold",
            no_wrap=number == 0 or headers[number] in right,
            justify="right" if headers[number] in right else "left",
        )
    for row in rows:
        table.add_row(*(Text(as_shown(row[number])) for number in shown))
    console.print(table)


def _has_room(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    stiff: Collection[int],
    shown: Sequence[int],
    width: int,
) -> bool:
    """Whether the columns that can be wrapped have room beside those that cannot."""
    widths = _widths(headers, rows)
    least = sum(widths[n] if n in stiff else min(widths[n], _LEAST) for n in shown)
    return least + _GAP * (len(shown) - 1) <= width


def _stack(
    headers: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int], width: int
) -> None:
    """Print each row's cells below each other, wrapped, behind their headers."""
    if headers[shown[0]]:
        click.echo(headers[shown[0]])
    for row in rows:
        click.echo(row[shown[0]])
        for number in shown[1:]:
            if row[number]:
                named = f"{headers[number]} {row[number]}".lstrip()
                for line in textwrap.wrap(
                    named, width, initial_indent="  ", subsequent_indent="    "
                ):
                    click.echo(line)


def _that_fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int
) -> list[int]:
    """The columns for which there is room, by number."""
    widths = dict(enumerate(_widths(headers, rows)))
    for header in spare:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        widths.pop(headers.index(header))
    return list(widths)
