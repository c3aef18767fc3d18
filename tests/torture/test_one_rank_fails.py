"""Something goes wrong on one rank alone: all ranks act alike, and none waits for ever."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from cases import parametrize_first
from failures import FAILING_STEP
from tiny_run import Place, codes, events, output_of

WORLDS = (2, 4)[: figures.times(1, 2)]
REPEATS = figures.times(1, 5)
STEPS = FAILING_STEP + 4
ENDED_S = 10.0
"""from the failing step to the end of the last rank"""


@dataclass(frozen=True)
class Trouble:
    """What happens on rank 1 from step 8 on, what all ranks say of it, and their exit code."""

    body: str
    says: str
    code: int
    settings: tuple[str, ...] = ()


GROWS = (f"schedule=[{{name: widen_mlp, value: 192, when: {{at_step: {FAILING_STEP - 1}}}}}]",)


TROUBLES = {
    "data cannot be read": Trouble("rank_1_cannot_read", "rank 1.*Input/output error", 4),
    "a file cannot be written": Trouble("rank_1_cannot_write", "rank 1.*Input/output error", 4),
    "it grows another model": Trouble("rank_1_grows_otherwise", "differs from rank 0's", 4, GROWS),
    "no memory to grow": Trouble("rank_1_has_no_memory_to_grow", "rank 1.*no room for", 4, GROWS),
    "NaN at every step": Trouble("rank_1_has_nan_for_good", "not finite for 8 steps in a row", 4),
}


@pytest.mark.timeout(1800)
@parametrize_first("what", TROUBLES, first=2)
def test_one_ranks_trouble_ends_all_alike(place: Place, what: str) -> None:
    trouble, unlike, seconds = TROUBLES[what], [], []
    sizes = WORLDS * REPEATS
    for size in sizes:
        run_dir = place.path / "run"
        body = f"failures:{trouble.body}"
        ranks = place.train(
            run_dir, "checkpoint.every_steps=3", *trouble.settings, ranks=size, body=body
        )
        ranks[0].wait_for(rf"^ *{FAILING_STEP - 1} .*loss")
        start_s = time.monotonic()
        exit_codes = codes(ranks)
        seconds.append(time.monotonic() - start_s)
        if set(exit_codes) != {trouble.code} or not is_same_end(run_dir, size, trouble.says):
            unlike.append(f"W={size}: {exit_codes}\n{output_of(ranks)}")
        shutil.rmtree(run_dir)
    figures.write(
        f"one-rank-{trouble.body.removeprefix('rank_1_').replace('_', '-')}",
        [
            figures.none_of(len(sizes), f"{what} on one rank: not all act alike", unlike),
            figures.at_most(f"{what} on one rank: until all have ended", seconds, "s", ENDED_S),
        ],
    )


def is_same_end(run_dir: Path, size: int, says: str) -> bool:
    """Every rank says the same cause, and did the same steps."""
    logs = [(run_dir / "logs" / f"rank_{rank}.log").read_text("utf-8") for rank in range(size)]
    last = {re.findall(r"step (\d+): loss", log)[-1] for log in logs}
    return len(last) == 1 and all(re.search(says, log) for log in logs)


@pytest.mark.timeout(600)
def test_one_ranks_nan_is_skipped_by_all(place: Place) -> None:
    """The run goes on, on the curve of a single process that skips the same step."""
    expected = curve_with_a_skip(place, 1)
    for size in WORLDS:
        actual = curve_with_a_skip(place, size)
        assert len(actual) == STEPS
        assert actual == pytest.approx(expected, rel=2e-3, nan_ok=True)


def curve_with_a_skip(place: Place, size: int) -> list[float]:
    """The losses of a run whose last rank has NaN at step 8."""
    run_dir = place.path / f"run-{size}"
    body = "failures:last_rank_has_nan_once"
    keys = ("model.dropout=0.0", f"train.until=[{STEPS}it]")
    ranks = place.train(run_dir, *keys, ranks=size, body=body)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    assert [event["step"] for event in events(run_dir, "skip")] == [FAILING_STEP]
    return [float(event["loss"]) for event in events(run_dir, "train")]
