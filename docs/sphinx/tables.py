"""Tables of Markdown, and text in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table and an empty one; none without rows."""
    if rows:
        for row in (head, ["---"] * len(head), *rows):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        yield ""


def escape(text: str) -> str:
    """Return text with escapes where Markdown would read formatting."""
    for sign in "\\*_<[`":
        text = text.replace(sign, "\\" + sign)
    return text
