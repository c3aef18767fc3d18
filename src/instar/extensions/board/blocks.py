"""The parts of sections: tables, lists and texts as data for the browser, and numbers as text.

A section is `{"kind": …}` with a title and the fields that `page/sections.js` draws for its kind:
`failure`, `facts`, `text`, `table`, `runs`, `notices`, `matrix`, `scatter`, `samples`, `images`, `config` or `pairs`.
Numbers are formatted here, so that pages and command line round alike.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from instar.config.errors import shorten_text
from instar.logs.read.record import RecordedEvent, RunRecord
from instar.record.events import Event, ImageEvent, TableEvent
from instar.record.format import duration, encodable, si
from instar.record.media import read_image

Section = dict[str, Any]
Cell = str | dict[str, str]
"""a text, or its parts: `strong`, `text`, `note`, `class`, and `full` if `text` is shortened"""
MAX_ROWS = 400
"""rows of a table"""
MAX_OF_A_NAME = 4
"""latest images of one name and split"""
IMAGE_BYTES = 1 << 20
"""size of all images of a run's page"""
MAX_TABLES, MAX_COLUMNS = 40, 30


def table_section(
    title: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[Cell]],
    rows: int,
    source: Sequence[RecordedEvent[Event]] = (),
    **more: Any,
) -> Section:
    """Return a table of the last `rows` lines; a head that ends in `>` marks a column of numbers.

    `source`: the events from which `lines` were made, to mark superseded ones.
    """
    all_lines = list(lines)
    if not all_lines:
        return {}
    last_lines = all_lines[-rows:]
    superseded_rows = [n for n, entry in enumerate(source[-rows:]) if not entry.is_current]
    return {
        "kind": "table",
        "title": title,
        "heads": [head.removesuffix(">") for head in heads],
        "numbers": [n for n, head in enumerate(heads) if head.endswith(">")],
        "rows": last_lines,
        "superseded": superseded_rows,
        "left_out": max(0, max(len(source), len(all_lines)) - rows),
        **more,
    }


def notices(title: str, items: Sequence[tuple[str, int | None, str]], rows: int) -> Section:
    if not items:
        return {}
    texts = [
        (kind, "" if step is None else f"step {step:,}", shorten_text(text, 4000))
        for kind, step, text in items[-rows:]
    ]
    left_out = max(0, len(items) - rows)
    return {"kind": "notices", "title": title, "items": texts, "left_out": left_out}


def text_section(*lines: str) -> Section:
    non_empty = [line for line in lines if line]
    return {"kind": "text", "title": "", "lines": non_empty} if non_empty else {}


def finite_text(text: Callable[[float], str], value: float) -> str:
    return text(value) if math.isfinite(value) else "?"


def count_text(count: float | None) -> str:
    return finite_text(si, count) if count else "–"


def number_text(value: float | None) -> str:
    """Format with four decimals, or with an exponent if the value is very small or large."""
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
    """Format Unix seconds as `2026-11-21 22:35 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "?"


def printable_section(value: Any) -> Any:
    """Return `value` with all strings encodable as UTF-8."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable(str(key)): printable_section(section) for key, section in value.items()}
    if isinstance(value, list | tuple):
        return [printable_section(section) for section in value]
    return value


def image_section(record: RunRecord, share: float) -> dict[str, Any]:
    """Return the latest images of each name as data URIs; empty without images.

    Args:
        share: of `IMAGE_BYTES`.
    """
    items: list[dict[str, Any]] = []
    room, left_out = share * IMAGE_BYTES, 0
    counts: dict[tuple[str, str], int] = {}
    images = [entry.event for entry in record.of(ImageEvent) if entry.is_current]
    for event in reversed(images):
        key = event.split, event.name
        counts[key] = counts.get(key, 0) + 1
        content = read_image(record.run.path, event.path) if room > 0 else None
        if content is None or counts[key] > MAX_OF_A_NAME or len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        items.append(
            {
                "label": f"{shorten_text(event.name)} ({shorten_text(event.split)}), step {event.step:,}",
                "src": f"data:image/png;base64,{base64.b64encode(content).decode()}",
            }
        )
    if not images:
        return {}
    return {"kind": "images", "title": "Images", "items": items, "left_out": left_out}


def table_sections(record: RunRecord, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the first `rows` rows of the latest table of each name and split."""
    tables = (entry.event for entry in record.of(TableEvent) if entry.is_current)
    latest = {(event.split, event.name): event for event in tables}
    for event in [*latest.values()][:MAX_TABLES]:
        cells = [row[:MAX_COLUMNS] for row in event.rows[:rows]]
        columns = event.columns[:MAX_COLUMNS]
        yield {
            "kind": "table",
            "title": shorten_text(f"{event.name} ({event.split}), step {event.step:,}"),
            "heads": [shorten_text(column) for column in columns],
            "numbers": [n for n in range(len(columns)) if all(map(_is_number, _column(cells, n)))],
            "rows": [[_text(value) for value in row] for row in cells],
            "superseded": [],
            "left_out": 0,
        }


def _column(rows: Sequence[Sequence[object]], number: int) -> list[object]:
    return [row[number] for row in rows if number < len(row)]


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else shorten_text(str(value))
