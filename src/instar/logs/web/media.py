"""Images and tables that a run's own code has logged, for its page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from instar.logs.web.curves import shortened
from instar.record.events import ImageEvent, Placed, TableEvent
from instar.record.media import read_image

if TYPE_CHECKING:
    from instar.logs.read.record import RunRecord

MAX_OF_A_NAME = 4
"""latest images of one name and split"""
IMAGE_BYTES = 1 << 20
"""size of all images of a run's page"""
MAX_TABLES, MAX_COLUMNS = 40, 30
E = TypeVar("E", bound=Placed)


def image_section(record: RunRecord, share: float) -> dict[str, Any]:
    """Return the latest images of each name as data URIs; empty without images.

    Args:
        share: of `IMAGE_BYTES`.
    """
    items: list[dict[str, Any]] = []
    room, left_out = share * IMAGE_BYTES, 0
    counts: dict[tuple[str, str], int] = {}
    found = _kept(record, ImageEvent)
    for event in reversed(found):
        key = event.split, event.name
        counts[key] = counts.get(key, 0) + 1
        content = read_image(record.run.path, event.path) if room > 0 else None
        if content is None or counts[key] > MAX_OF_A_NAME or len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        items.append(
            {
                "label": f"{shortened(event.name)} ({shortened(event.split)}), step {event.step:,}",
                "src": f"data:image/png;base64,{base64.b64encode(content).decode()}",
            }
        )
    if not found:
        return {}
    return {"kind": "images", "title": "Images", "items": items, "left_out": left_out}


def table_sections(record: RunRecord, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the first `rows` rows of the latest table of each name and split."""
    latest = {(event.split, event.name): event for event in _kept(record, TableEvent)}
    for event in [*latest.values()][:MAX_TABLES]:
        cells = [row[:MAX_COLUMNS] for row in event.rows[:rows]]
        columns = event.columns[:MAX_COLUMNS]
        yield {
            "kind": "table",
            "title": shortened(f"{event.name} ({event.split}), step {event.step:,}"),
            "heads": [shortened(column) for column in columns],
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
    return f"{value:.5g}" if isinstance(value, float) else shortened(str(value))


def _kept(record: RunRecord, kind: type[E]) -> list[E]:
    return [logged.event for logged in record.of(kind) if logged.kept]
