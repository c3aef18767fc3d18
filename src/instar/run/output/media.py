"""Events of the images and tables that a task's code has logged; saves the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from instar.record.events import Event, ImageEvent, TableEvent, Warn
from instar.record.media import save_image
from instar.tasks.logged import Pixels, TableData


def media_events(
    folder: Path,
    split: str,
    step: int,
    images: Mapping[str, Pixels],
    tables: Mapping[str, TableData],
) -> Iterator[Event]:
    """Yield an event for each; a warning for an image that cannot be saved in the run's folder."""
    for name, pixels in images.items():
        try:
            path = save_image(folder, split, step, pixels)
        except OSError as error:
            yield Warn(message=f"the image {name} is not saved: {error}", step=step)
            continue
        height, width = pixels.shape[:2]
        yield ImageEvent(step=step, name=name, split=split, path=path, width=width, height=height)
    for name, table in tables.items():
        yield TableEvent(step=step, name=name, split=split, columns=table.columns, rows=table.rows)
