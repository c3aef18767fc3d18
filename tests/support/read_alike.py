"""Two readings of one record, held against each other."""

from __future__ import annotations

import numpy as np

from instar.logs.read.record import AXES, RunRecord


def same(record: RunRecord, other: RunRecord) -> None:
    """Fails unless they are alike in everything, values to the last bit."""
    assert record.metrics == other.metrics
    assert record.events == other.events
    assert record.faults == other.faults
    assert record.end == other.end
    for metric in record.metrics:
        first, second = record.series(metric), other.series(metric)
        assert np.array_equal(first.value.view("<i8"), second.value.view("<i8"))
        for name in ("is_current", "segment", *AXES):
            assert np.array_equal(getattr(first, name), getattr(second, name))
