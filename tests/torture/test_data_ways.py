"""However samples come to real ranks, it is the same run: sent by rank 0 or read by each, cut and
gone on with in another way, with sizes that change on the way."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import figures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import parametrize_first
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import Place, acknowledged_step, codes, events, output_of, weights
from ways import KINDS as EVERY_KIND
from ways import Way, config, invariants, make_rows, rows_of, samples_of, take_steps

from instar.data.text.streams.samples import DocumentStream, PackedStream

SHARDS = 4
DOCUMENTS = "data.source=documents-*.parquet", "data.tokenizer=byte"
KINDS = {
    "tokens": (),
    "rows": ("data.kind=rows", *DOCUMENTS, "data.path=rows"),
    "a stream": (
        "data.kind=stream",
        *DOCUMENTS,
        "data.path=stream",
        "data.val_source=squares.txt",
        f"data.lanes={SHARDS}",
        "data.shuffle_window=16",
    ),
    "a mixture": (
        "data.mixture=[{source: squares.txt, weight: 1}, {source: others.txt, weight: 2}]",
        "data.source=stdlib",  # as if the file did not say any
        "data.tokenizer=byte",
        "data.path=mixture",
    ),
}
STREAM = KINDS["a stream"]
STRATEGIES = "dispatched", "sharded"
"""in this order: rank 0 then meets the ends of a stream that nobody has counted yet"""
SIZES = (2, 3, 4)
SAVES = ("checkpoint.every_steps=3",)
STEPS = figures.times(12, 24)
ENDS = f"train.until=[{STEPS}it]"


@pytest.fixture
def data_place(place: Place) -> Place:
    """With documents of 0 to 60 characters in four Parquet files, and other text."""
    chance = random.Random(0)
    for shard in range(SHARDS):
        texts = [
            "".join(chance.choices("abcdefgh é", k=chance.randrange(60)))
            for _ in range(figures.times(40, 70))
        ]
        pq.write_table(pa.table({"text": texts}), place.path / f"documents-{shard}.parquet")
    text = "".join(f"{n} doubled is {2 * n}.\n" for n in range(300))
    (place.path / "others.txt").write_text(text)
    return place


def run(place: Place, name: str, size: int, *settings: str) -> Path:
    """A whole run of so many ranks."""
    run_dir = place.path / name
    ranks = place.train(run_dir, *settings, ranks=size)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    return run_dir


def final_weights(run_dir: Path) -> dict[str, bytes]:
    """At the step at which it ended."""
    tensors = weights(run_dir, acknowledged_step(run_dir))
    assert tensors
    return tensors


def losses(run_dir: Path) -> list[float]:
    return [float(event["loss"]) for event in events(run_dir, "train")]


def samples(run_dir: Path) -> int:
    state = run_dir / "checkpoints" / f"step-{acknowledged_step(run_dir)}" / "state.json"
    content: dict[str, Any] = json.loads(state.read_text())
    return int(_within(content, "progress")["samples"])


def _within(content: dict[str, Any], key: str) -> dict[str, Any]:
    if key in content:
        inner: dict[str, Any] = content[key]
        return inner
    return next(_within(v, key) for v in content.values() if isinstance(v, dict) and key in str(v))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_sent_samples_train_as_read_ones_bit_for_bit(data_place: Place) -> None:
    """With dropout."""
    unlike = []
    trials = [(kind, size) for kind in KINDS for size in SIZES]
    trials = trials if figures.FULL else [("a stream", 3)]
    for number, (kind, size) in enumerate(trials):
        place = f"{kind}-{size}"
        path = () if kind == "tokens" else (f"data.path=data-{number}",)
        run_dirs = {
            strategy: run(
                data_place,
                f"{place}-{strategy}",
                size,
                *KINDS[kind],
                *path,
                ENDS,
                f"data.strategy={strategy}",
            )
            for strategy in STRATEGIES
        }
        first, second = map(final_weights, run_dirs.values())
        if first != second:
            unlike.append(f"{kind}, W={size}")
        for run_dir in run_dirs.values():
            shutil.rmtree(run_dir)
    what = "runs dispatched and sharded: other weights at the end"
    figures.write("dispatched-sharded", [figures.none_of(len(trials), what, unlike)])


@pytest.mark.timeout(3600)
def test_one_or_two_ranks_are_one_run(data_place: Place) -> None:
    for kind in KINDS if figures.FULL else ("tokens",):
        keys = *KINDS[kind], ENDS, "model.dropout=0.0"
        expected = losses(run(data_place, f"{kind}-1", 1, *keys))
        assert len(expected) == STEPS
        for strategy in STRATEGIES[: figures.times(1, 2)]:
            actual = losses(
                run(data_place, f"{kind}-2-{strategy}", 2, *keys, f"data.strategy={strategy}")
            )
            assert actual == pytest.approx(expected, rel=1e-4)


SCHEDULE = [
    {"name": "set_batch_size", "value": 7, "when": {"at_step": 3}},
    {"name": "set_grad_accum", "value": 2, "when": {"at_step": 5}},
    {"name": "set_context", "value": 8, "when": {"at_step": 7}},
    {"name": "set_batch_size", "value": 12, "when": {"at_step": 9}},
]


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_sizes_change_alike_where_samples_are_sent(data_place: Place) -> None:
    """What was sent ahead is dropped, and the new sizes are planned anew."""
    unlike = []
    trials = [(kind, size) for kind in KINDS for size in SIZES]
    trials = trials if figures.FULL else [("tokens", 2)]
    for kind, size in trials:
        changes = (*KINDS[kind], ENDS, f"schedule={json.dumps(SCHEDULE)}")
        run_dirs = [
            run(
                data_place, f"{kind}-{size}-{strategy}", size, *changes, f"data.strategy={strategy}"
            )
            for strategy in STRATEGIES
        ]
        operations = [event["name"] for event in events(run_dirs[0], "operation")]
        assert len(operations) == len(SCHEDULE), operations
        if len(set(map(str, map(losses, run_dirs)))) > 1 or not have_same_weights(run_dirs):
            unlike.append(f"{kind}, W={size}")
    what = "runs whose sizes change, dispatched and sharded: other weights at the end"
    figures.write("dispatched-changes", [figures.none_of(len(trials), what, unlike)])


def have_same_weights(run_dirs: Sequence[Path]) -> bool:
    first, *rest_of_weights = map(final_weights, run_dirs)
    return all(first == other for other in rest_of_weights)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_stream_of_unknown_length_ends_where_two_epochs_end(data_place: Place) -> None:
    """And a run that goes on in the second epoch ends there too."""
    budget = "train.until=[2ep]"
    dispatched_run = run(data_place, "sent", 2, *STREAM, budget, "data.strategy=dispatched")
    resumed_run = data_place.path / "again"
    cut = acknowledged_step(dispatched_run) - 4
    settings = *STREAM, "data.path=again-data", "data.strategy=dispatched", f"train.until=[{cut}it]"
    assert set(codes(data_place.train(resumed_run, *settings, ranks=2))) == {0}
    (data_place.path / "again-data" / "lanes.json").unlink()
    ranks = data_place.resume(resumed_run, "--until", "2ep", ranks=2)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    sharded_run = run(data_place, "read", 2, *STREAM, budget)
    counts = json.loads((data_place.path / "stream" / "lanes.json").read_text())["counts"]
    epoch = sum(-(-(count - 1) // 16) for count in counts)
    assert samples(dispatched_run) == samples(resumed_run) == samples(sharded_run) == 2 * epoch
    assert have_same_weights([dispatched_run, resumed_run, sharded_run])


CUTS = figures.times(1, 40)


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_a_killed_run_goes_on_in_the_other_way(data_place: Place) -> None:
    """With as many ranks: bit for bit. With others: the same samples, and losses that differ by
    rounding."""
    chance = random.Random(0)
    different, kills = [], 0
    full_runs: dict[tuple[str, int], Path] = {}
    kinds = ["a stream", "tokens", "rows", "a mixture"]
    for number in range(CUTS):
        kind = kinds[number % len(kinds)]
        size, after = (2, 3) if number % 2 else (2, 2)
        settings = *KINDS[kind], *SAVES, ENDS, "model.dropout=0.0"
        if (kind, size) not in full_runs:
            full_runs[kind, size] = run(data_place, f"whole-{kind}-{size}", size, *settings)
        full_run = full_runs[kind, size]
        first, second = chance.sample(STRATEGIES, 2)
        run_dir = data_place.path / f"parts-{number}"
        ranks = data_place.train(run_dir, *settings, f"data.strategy={first}", ranks=size)
        ranks[0].wait_until(partial(acknowledged_step, run_dir))
        ranks[0].ended_within(chance.uniform(0.0, 0.5))
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        kills += -signal.SIGKILL in codes(ranks)
        ranks = data_place.resume(run_dir, "--set", f"data.strategy={second}", ranks=after)
        what = f"{kind}, W={size} {first}, then W={after} {second}"
        if set(codes(ranks)) != {0} or samples(run_dir) != samples(full_run):
            different.append(f"{what}\n{output_of(ranks)}")
        elif after == size and not have_same_weights([run_dir, full_run]):
            different.append(what)
        elif last_losses(run_dir) != pytest.approx(last_losses(full_run), rel=1e-3):
            different.append(f"{what}: {last_losses(run_dir)}")
    figures.write(
        "other-strategy",
        [
            figures.count("runs killed, to be gone on with in the other way", kills),
            figures.none_of(
                CUTS, "killed and gone on with in the other way: other ends", different
            ),
        ],
    )


def last_losses(run_dir: Path) -> list[float]:
    """The loss of each step, of whoever did it last."""
    return list(
        {event["step"]: float(event["loss"]) for event in events(run_dir, "train")}.values()
    )


@dataclass(frozen=True)
class Part:
    """A run goes on in some way, with so many samples in a micro-batch and a step, for some steps."""

    way: Way
    batch_size: int
    accumulation: int
    steps: int


def parts(*strategies: str) -> st.SearchStrategy[list[Part]]:
    ways = st.builds(Way, st.integers(1, 4), st.sampled_from(strategies))
    part = st.builds(Part, ways, st.integers(1, 9), st.integers(1, 4), st.integers(0, 12))
    return st.lists(part, min_size=2, max_size=5)


def is_within(part: list[bytes], sequence: list[bytes]) -> bool:
    """Whether all of `part` is in `whole`, in the same order."""
    rows = iter(sequence)
    return all(row in rows for row in part)


CUT_PLANS = figures.times(3, 60)


@pytest.mark.timeout(3600)
@parametrize_first("kind", EVERY_KIND, first=3)
def test_whatever_the_cuts_it_is_the_sequence_of_the_undisturbed_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is opened anew, as a run that goes on is; steps end where epochs do. A stream has
    seek points every few documents."""
    monkeypatch.setattr(PackedStream, "spacing", 100)
    monkeypatch.setattr(DocumentStream, "spacing", 3)
    path = {} if "mixture" in EVERY_KIND[kind] else {"path": str(tmp_path / "data")}
    data = config(make_rows(tmp_path), kind, **path)
    full_run = take_steps(data, Way(1), 120)  # more than any of the plans takes
    sequence = [row for batches in full_run for row in rows_of(batches[0])]
    epoch = next(batches[0].plan.cursor for batches in full_run if batches[0].plan.epoch)
    strategies = (
        ["dispatched"] if EVERY_KIND[kind].get("kind") == "python" else ["dispatched", "sharded"]
    )

    trials = 0

    @settings(
        max_examples=CUT_PLANS,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(start=st.integers(0, epoch + 20), plan=parts(*strategies))
    def cut_and_go_on(start: int, plan: list[Part]) -> None:
        nonlocal trials
        trials += len(plan)
        cursor = start
        for part in plan:
            sizes = part.batch_size * part.accumulation, part.batch_size
            for batches in take_steps(data, part.way, part.steps, cursor, sizes):
                count = min(sizes[0], epoch - cursor % epoch)
                expected = sequence[cursor : cursor + count]
                assert len(expected) == count, "the undisturbed run is too short"
                plan_of_all, *_ = invariants(batches)
                assert (plan_of_all.cursor, plan_of_all.count) == (cursor, count)
                assert samples_of(batches) == Counter(expected)
                assert all(is_within(rows_of(batch), expected) for batch in batches)
                cursor += count

    cut_and_go_on()
    what = "cuts gone on with in another way: samples lost, repeated or in another order"
    name = kind.replace(",", "").replace(" ", "-")
    figures.write(f"data-cuts-{name}", [figures.none_of(trials, f"{kind}, {what}", [])])
