"""Formats tables and lines as plain text; imports little, because fast commands use it too."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

_GAP = "  "


def align_columns(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Return lines of aligned cells; the columns `right`, from 0, are right-aligned.

    Columns beyond `width` follow in further tables, each of which repeats the first column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for columns in _that_fit(widths, width):
        lines += [""] if lines else []
        lines += [
            _GAP.join(
                row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in columns
            ).rstrip()
            for row in rows
        ]
    return lines


def columns_that_fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> list[int]:
    """Return the indices of the columns of a table that is at most `width` wide, as far as leaving
    out optional ones, named in this order, makes it so."""
    widths = {n: max(map(len, column)) for n, column in enumerate(zip(headers, *rows, strict=True))}
    for header in optional:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        widths.pop(headers.index(header))
    return list(widths)


def indent_text(text: str, depth: int) -> str:
    """Return the name of a branch of a tree: `└ name`."""
    return f"{'  ' * (depth - 1)}└ {text}" if depth else text


def wrap_line(line: str, width: int | None, indent: str = "    ") -> list[str]:
    """Wrap a line at `width`; words are not split."""
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        max(width, 2 * len(indent)),
        subsequent_indent=indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _that_fit(widths: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """Yield the indices of the columns of each table."""
    columns, used = [0], widths[0]
    for number, width in enumerate(widths[1:], 1):
        if limit is not None and used + len(_GAP) + width > limit and len(columns) > 1:
            yield columns
            columns, used = [0], widths[0]
        columns.append(number)
        used += len(_GAP) + width
    yield columns
