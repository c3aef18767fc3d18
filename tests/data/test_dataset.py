"""Whatever the kind of data, the strategy, the ranks and the workers: the same samples, in the same
order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import parametrize_first
from ways import KINDS, Way, config, invariants, make_rows, take_steps

from instar.data.loader import StepBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rows(tmp_path_factory.mktemp("rows"))


def identical(batch: StepBatch, other: StepBatch) -> bool:
    return len(batch.micro_batches) == len(other.micro_batches) and all(
        (left.weight, left.samples, left.first) == (right.weight, right.samples, right.first)
        and all(np.array_equal(left.arrays[name], right.arrays[name]) for name in left.arrays)
        for left, right in zip(batch.micro_batches, other.micro_batches, strict=True)
    )


@parametrize_first("kind", KINDS, first=5)
def test_every_way_brings_the_same_global_batches(folder: Path, kind: str, tmp_path: Path) -> None:
    data = config(
        folder, kind, **({} if "mixture" in KINDS[kind] else {"path": str(tmp_path / "data")})
    )
    steps = [invariants(batches) for batches in take_steps(data, Way(1), 40)]
    assert steps[0][0].epoch == 0
    assert steps[-1][0].epoch >= 1, "the trial is too short to see an epoch end"
    only_dispatched = KINDS[kind].get("kind") == "python"
    for ranks in (2, 3, 4):
        dispatched_steps = take_steps(data, Way(ranks, "dispatched"), 40)
        assert [invariants(batches) for batches in dispatched_steps] == steps
        if only_dispatched:
            continue
        sharded_steps = take_steps(data, Way(ranks), 40)
        assert [invariants(batches) for batches in sharded_steps] == steps
        assert all(
            identical(batch, other)
            for batches, other_batches in zip(dispatched_steps, sharded_steps, strict=True)
            for batch, other in zip(batches, other_batches, strict=True)
        )


@parametrize_first(
    ("kind", "way"),
    [
        ("rows of text", Way(2, workers=1)),
        ("a shuffled stream", Way(2, workers=1)),
        ("a shuffled stream", Way(2, "dispatched", workers=3)),
        ("transformed", Way(2, workers=1)),
    ],
    first=1,
    ids=str,
)
def test_workers_change_nothing(folder: Path, kind: str, way: Way, tmp_path: Path) -> None:
    data = config(folder, kind, path=str(tmp_path / "data"))
    serial_steps = take_steps(data, Way(way.ranks, way.strategy), 12)
    worker_steps = take_steps(data, way, 12)
    assert all(
        identical(batch, other)
        for batches, other_batches in zip(serial_steps, worker_steps, strict=True)
        for batch, other in zip(batches, other_batches, strict=True)
    )
