"""Two readings of one record, held against each other."""

from __future__ import annotations

import numpy as np

from instar.logs.read.record import AXES, RunRecord


def same(one: RunRecord, other: RunRecord) -> None:
    """Fails unless they are alike in everything, values to the last bit."""
    assert one.metrics == other.metrics
    assert one.events == other.events
    assert one.faults == other.faults
    assert one.end == other.end
    for metric in one.metrics:
        first, second = one.series(metric), other.series(metric)
        assert np.array_equal(first.value.view("<i8"), second.value.view("<i8"))
        for name in ("is_current", "segment", *AXES):
            assert np.array_equal(getattr(first, name), getattr(second, name))
