"""The parts of sections: tables, lists and texts as data for the browser, and numbers as text.

A section is `{"kind": …}` with a title and the fields that `page/sections.js` draws for its kind:
`failure`, `facts`, `text`, `table`, `runs`, `notices`, `matrix`, `scatter`, `samples`, `images`, `config` or `pairs`.
Numbers are formatted here, so that pages and command line round alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from instar.logs.web.curves import printable, shortened
from instar.record.format import duration, si

if TYPE_CHECKING:
    from instar.logs.read.record import RecordedEvent
    from instar.record.events import Event

Section = dict[str, Any]
Cell = str | dict[str, str]
"""a text, or its parts: `strong`, `text`, `note`, `class`, and `full` if `text` is shortened"""
MAX_ROWS = 400
"""rows of a table"""


def table(
    title: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[Cell]],
    rows: int,
    source: Sequence[RecordedEvent[Event]] = (),
    **more: Any,
) -> Section:
    """Returns a table of the last `rows` lines; a head that ends in `>` marks a column of numbers.

    `source`: the events from which `lines` were made, to mark superseded ones.
    """
    all_lines = list(lines)
    if not all_lines:
        return {}
    shown = all_lines[-rows:]
    superseded = [n for n, logged in enumerate(source[-rows:]) if not logged.kept]
    return {
        "kind": "table",
        "title": title,
        "heads": [head.removesuffix(">") for head in heads],
        "numbers": [n for n, head in enumerate(heads) if head.endswith(">")],
        "rows": shown,
        "superseded": superseded,
        "left_out": max(0, max(len(source), len(all_lines)) - rows),
        **more,
    }


def notices(title: str, items: Sequence[tuple[str, int | None, str]], rows: int) -> Section:
    if not items:
        return {}
    shown = [
        (kind, "" if step is None else f"step {step:,}", shortened(text, 4000))
        for kind, step, text in items[-rows:]
    ]
    left_out = max(0, len(items) - rows)
    return {"kind": "notices", "title": title, "items": shown, "left_out": left_out}


def text_section(*lines: str) -> Section:
    found = [line for line in lines if line]
    return {"kind": "text", "title": "", "lines": found} if found else {}


def finite_text(text: Callable[[float], str], value: float) -> str:
    return text(value) if math.isfinite(value) else "?"


def count_text(count: float | None) -> str:
    return finite_text(si, count) if count else "–"


def number_text(value: float | None) -> str:
    """Formats with four decimals, or with an exponent if the value is very small or large."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if plain else f"{value:.3e}"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.2g}ms" if 0 <= seconds < 0.0995 else duration(seconds)


def date_text(time: float) -> str:
    """Formats Unix seconds as `2026-11-21 22:35 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "?"


def printable_section(value: Any) -> Any:
    """Returns `value` with all strings encodable as UTF-8."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_section(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_section(each) for each in value]
    return value
