"""The number of ranks changes at any cut: no sample is lost, none is trained on twice."""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import pytest
from feeds import Numbers, local_feed
from forks import Child
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import Place, codes, output_of

from instar.data.loader import StepBatch
from instar.data.order import Order, make_order, plan_step

CUTS = figures.times(60, 3000)
CASES = figures.times(1, 12)


@dataclass(frozen=True)
class Part:
    """A run goes on with so many ranks, micro-batches and samples per step, for so many steps."""

    world_size: int
    batch_size: int
    accumulation: int
    steps: int

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation


def parts() -> st.SearchStrategy[list[Part]]:
    part = st.builds(
        Part, st.sampled_from([1, 2, 4]), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9)
    )
    return st.lists(part, min_size=2, max_size=6)


def numbers_of(batch: StepBatch) -> list[int]:
    return [
        int(number)
        for micro in batch.micro_batches
        if micro.samples
        for number in micro.arrays["number"]
    ]


def train(order: Order, cursor: int, part: Part) -> tuple[int, list[int]]:
    """The samples that the ranks' feeds hand out, and the cursor then. What they read ahead and
    did not hand out is dropped, as it is when a run ends."""
    feeds = [
        local_feed(Numbers(order.samples_per_epoch), order, rank, part.world_size)
        for rank in range(part.world_size)
    ]
    samples = []
    for _ in range(part.steps):
        plan = plan_step(cursor, order.samples_per_epoch, part.global_batch)
        for feed in feeds:
            samples += numbers_of(feed.take(cursor, part.global_batch, part.batch_size))
        cursor += plan.count
    for feed in feeds:
        feed.close()
    return cursor, samples


def wrong_counts(samples: Sequence[int], order: Order, cursor: int) -> Counter[int]:
    """How often each sample was taken beyond (or, negative, below) what the order asks for."""
    expected: Counter[int] = Counter()
    epochs, last_stop = divmod(cursor, order.samples_per_epoch)
    for epoch in range(epochs + 1):
        stop = order.samples_per_epoch if epoch < epochs else last_stop
        expected.update(order.indices(epoch, 0, stop).tolist())
    counts = Counter(samples)
    counts.subtract(expected)
    return Counter({sample: count for sample, count in counts.items() if count})


@pytest.mark.timeout(3600)
def test_whatever_the_cuts_every_sample_is_taken_as_often_as_it_should() -> None:
    trials = 0

    @settings(max_examples=CUTS, deadline=None, database=None)
    @given(samples=st.integers(1, 120), plan=parts(), kind=st.sampled_from(["shuffled", "random"]))
    def cut_and_go_on(samples: int, plan: list[Part], kind: str) -> None:
        nonlocal trials
        order = make_order("random" if kind == "random" else "shuffled", samples, seed=7)
        cursor, sample_numbers = 0, []
        for part in plan:
            cursor, more = train(order, cursor, part)
            sample_numbers += more
        trials += len(plan) - 1
        assert wrong_counts(sample_numbers, order, cursor) == {}

    cut_and_go_on()
    figures.write(
        "cuts", [figures.none_of(trials, "cuts with other ranks: samples lost or repeated", [])]
    )


OVERRIDES = (
    "train.batch_size=39",
    "eval.eval_interval=1000",
    "eval.at_start=true",
    "eval.batch_size=1",
)
"""117 samples a step; one can be stopped in the evaluation before the first"""
LAST = 20
SIZES = (1, 2, 4, 1)
AT_ONCE = 0
"""cut by SIGTERM before the first step; other cuts are steps"""


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_real_ranks_take_every_sample_as_often_as_they_should(place: Place) -> None:
    full_run = place.path / "whole"
    ranks = place.train(
        full_run, *OVERRIDES, f"train.until=[{LAST}it]", body="taken:report_samples"
    )
    assert codes(ranks) == [0], output_of(ranks)
    steps = taken_by(ranks)
    ends = [
        at
        for at, (step, after) in enumerate(itertools.pairwise(steps), 1)
        if step["epoch"] != after["epoch"]
    ]
    assert len(ends) >= 2
    chance = random.Random(0)
    cases = [
        (AT_ONCE, ends[0] - 2, ends[0]),
        (1, 2, ends[0] - 1),
        (ends[0], ends[0] + 1, ends[1]),
        *(sorted(chance.sample(range(1, LAST), 3)) for _ in range(CASES)),
    ][:CASES]
    wrong = []
    for number, cuts in enumerate(cases):
        run_dir = place.path / f"parts-{number}"
        ranks = []
        for size, until in zip(SIZES, (*cuts, LAST), strict=True):
            ranks += stage(place, run_dir, size, until)
        counts = Counter(ids_of(taken_by(ranks)))
        counts.subtract(ids_of(steps))
        if any(counts.values()):
            wrong.append(f"cuts at {cuts}: {counts}")
    figures.write(
        "other-ranks",
        [
            figures.none_of(
                len(cases) * 3,
                "cuts of real runs, W 1→2→4→1: samples lost or repeated",
                wrong,
            )
        ],
    )


def stage(place: Place, run_dir: Path, size: int, until: int) -> list[Child]:
    """Begin or go on with so many ranks until a step."""
    budget = f"{until or LAST}it"
    if run_dir.exists():
        ranks = place.resume(run_dir, "--until", budget, ranks=size, body="taken:report_samples")
    else:
        overrides = (*OVERRIDES, f"train.until=[{budget}]", f"learning_rate.lr_decay_iters={LAST}")
        ranks = place.train(run_dir, *overrides, ranks=size, body="taken:report_samples")
    if until == AT_ONCE:
        ranks[0].wait_for(r"^run ")
        for rank in ranks:
            rank.signal(signal.SIGTERM)
    exit_codes = set(codes(ranks))
    assert exit_codes == {75 if until == AT_ONCE else 0}, output_of(ranks)
    return ranks


def taken_by(ranks: Sequence[Child]) -> list[dict[str, Any]]:
    """What the ranks' feeds handed out, step by step and rank by rank."""
    lines = (line for rank in ranks for line in rank.output().splitlines())
    return [json.loads(line) for line in lines if line.startswith('{"epoch"')]


def ids_of(steps: Sequence[dict[str, Any]]) -> list[int]:
    return [sample for step in steps for sample in step["samples"]]
