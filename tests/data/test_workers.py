"""A source that worker processes read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hosted import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import same

from instar.data.source import WorkerSource
from instar.processes.pool import WorkerLost, WorkerTraceback


@pytest.fixture(scope="module")
def sources() -> Iterator[list[WorkerSource]]:
    worker_sources = [WorkerSource(partial(Numbers, 50), number) for number in (1, 3)]
    yield worker_sources
    for source in worker_sources:
        source.close()


@settings(deadline=None, max_examples=40)
@given(ids=st.lists(st.integers(0, 49), min_size=1, max_size=9), epoch=st.integers(0, 5))
def test_the_number_of_workers_changes_nothing(
    sources: list[WorkerSource], ids: list[int], epoch: int
) -> None:
    indices = np.array(ids)
    expected = Numbers(50).read(indices, epoch)
    for source in sources:
        assert same(source.read(indices, epoch), expected)


def test_what_needs_no_reading_is_said_here(sources: list[WorkerSource]) -> None:
    worker_source, local_source = sources[1], Numbers(50)
    assert len(worker_source) == 50
    assert worker_source.fingerprint == local_source.fingerprint
    assert worker_source.weights(np.arange(7)) == local_source.weights(np.arange(7))


def test_an_error_arrives_as_it_was_raised(sources: list[WorkerSource]) -> None:
    for source in sources:
        with pytest.raises(IndexError, match="sample 99 of 50") as error:
            source.read(np.array([1, 2, 99]))
        assert error.value.__notes__ == ["a note of the source"]
        assert isinstance(error.value.__cause__, WorkerTraceback)
        assert "in read" in str(error.value.__cause__)
        assert len(source.read(np.array([1]))["number"]) == 1


def test_reading_from_a_killed_worker_is_an_error() -> None:
    source = WorkerSource(partial(Numbers, 50), 2)
    try:
        os.kill(source.workers.processes[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="worker 1 of 2"):
            source.read(np.arange(4))
    finally:
        source.close()
