"""What `make bench-quick` says of figures that have become worse."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEETINGS = "a step of two ranks: all-reduces"


@pytest.fixture(scope="module")
def guards() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("guards")


@pytest.fixture(scope="module")
def history(guards: Any) -> Any:
    return guards.history


def test_a_figure_within_its_bound_is_not_mentioned(guards: Any) -> None:
    assert guards.worse([guards.guarded_case(MEETINGS, [1])], []) is None


def test_a_worse_figure_is_told_with_its_bound_and_its_history(guards: Any, history: Any) -> None:
    machine = history.Machine("CPU", 2, bf16_units=True)
    cases = {MEETINGS: history.Figure(1.0, 0.0, "all-reduces", "≤ 1")}
    entries = [
        history.Entry("2026-01-01T00:00:00+00:00", "aaaaaaa", machine, 0.5, cases),
        history.Entry("2026-01-02T00:00:00+00:00", "bbbbbbb", machine, 0.5, {}),
    ]
    better, worse = guards.guarded_case(MEETINGS, [1]), guards.guarded_case(MEETINGS, [3])
    assert guards.worse([better, worse], entries).splitlines() == [
        f"worse: {MEETINGS}: 3, the bound is ≤ 1",
        "  2026-01-01  aaaaaaa  1",
    ]


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_second_all_reduce_of_a_step_is_counted(guards: Any, tmp_path: Path) -> None:
    """Gradients of one step travel apart if a bucket holds less than they take."""
    overrides = [*guards.TINY, f"data.path={tmp_path / 'tokens'}", "data.max_bytes=200000"]
    single, split = (
        {case.case: case for case in guards.two_ranks([*overrides, *more], tmp_path / name)}
        for name, more in {"whole": [], "split": ["parallel.ddp.bucket_cap_mb=0.01"]}.items()
    )
    assert single[MEETINGS].ok
    assert split[MEETINGS].figure > single[MEETINGS].figure
