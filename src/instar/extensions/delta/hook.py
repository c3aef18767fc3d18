"""What deltas do during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instar.extensions.delta.config import delta_config

if TYPE_CHECKING:
    from instar.extensions.delta.saver import DeltaSaver
    from instar.run.output.extension import RunPlace


def open_deltas(place: RunPlace) -> DeltaSaver | None:
    """Return what saves a run's deltas; None if it saves none."""
    if delta_config(place.config).every is None:
        return None
    from instar.extensions.delta.saver import DeltaSaver

    return DeltaSaver(place)
