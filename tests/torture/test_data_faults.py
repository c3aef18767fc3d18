"""What feeds a run fails, changes, blocks or is killed: all ranks end with that cause, by name."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import faulty
import figures
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import parametrize_first
from forks import INSTAR
from tiny_run import Place, codes, events, output_of, weights

REPEATS = figures.times(1, 10)
STEPS = figures.times(12, 24)
TIMEOUT_S, SILENCE_S = 3.0, 2.0
SOON_S = 2.0
PATIENCE_S = 15.0
GRACE_S = 1.0
DISPATCHED = (
    "data.kind=python",
    "data.strategy=dispatched",
    "data.val_source=squares.txt",
    "data.tokenizer=byte",
    "data.order=sequential",
    "eval.eval_interval=1000",
    "checkpoint.every_steps=3",
)
LIMITS = (f"parallel.timeout_s={TIMEOUT_S}", f"parallel.silence_s={SILENCE_S}")


@dataclass(frozen=True)
class Trouble:
    """What every rank says of a source, what rank 0's log says besides, and the step it ends at."""

    source: str
    says: str
    step: int
    where: str = ""
    settings: tuple[str, ...] = ()
    body: str = INSTAR


ITEM = f"item {faulty.WRONG}"
TROUBLES = (
    Trouble("raises", "ConnectionError: the database is gone", 8, f"faulty:raises, {ITEM}"),
    Trouble(
        "ends_early",
        "lane 0 ended after [0-9,]+ samples, when it was read before it had",
        23,
        body="failures:keeps_little",
    ),
    Trouble(
        "ids",
        f"faulty:ids, {ITEM}: token 1[0-9]+ is not in the vocabulary of 256",
        8,
        settings=("data.tokens_field=tokens", "data.val_source=ids.jsonl"),
    ),
    Trouble("lacks_a_field", rf"faulty:lacks_a_field, {ITEM}: there is no field 'text'", 8),
    Trouble("holds_nothing", f"faulty:holds_nothing, {ITEM}: 'text' is nothing, not text", 8),
    Trouble("holds_a_number", f"faulty:holds_a_number, {ITEM}: 'text' is int, not text", 8),
    Trouble(
        "begins_otherwise",
        "faulty:begins_otherwise, item 0 is not what it was when it was read before",
        16,
        body="failures:keeps_little",
    ),
)[: figures.times(3, 7)]
SIZES = (2, 3)


def source(name: str) -> tuple[str, ...]:
    places = f"data.source=faulty:{name}", f"data.path={name}"
    return (*DISPATCHED, *places, "train.until=[40it]")


def logs(run_dir: Path, ranks: Sequence[int]) -> list[str]:
    return [(run_dir / "logs" / f"rank_{rank}.log").read_text("utf-8") for rank in ranks]


def last_steps(logs: Sequence[str]) -> set[int]:
    return {max(map(int, re.findall(r"step (\d+): loss", log)), default=0) for log in logs}


@pytest.mark.timeout(3600)
@parametrize_first("trouble", TROUBLES, first=1, ids=lambda trouble: trouble.source)
def test_a_source_that_fails_ends_all_ranks_with_its_own_words(
    place: Place, trouble: Trouble
) -> None:
    (place.path / "ids.jsonl").write_text('{"tokens": [1, 2, 3, 4, 5]}\n' * 30)
    unlike, untold, seconds = [], [], []
    sizes = SIZES * REPEATS if figures.FULL else SIZES[TROUBLES.index(trouble) % 2 :][:1]
    for size in sizes:
        run_dir = place.path / "run"
        settings = (*source(trouble.source), *trouble.settings)
        ranks = place.train(run_dir, *settings, ranks=size, body=trouble.body)
        ranks[0].wait_for(rf"^ *{trouble.step - 1} .*loss")
        start_s = time.monotonic()
        exit_codes = codes(ranks)
        seconds.append(time.monotonic() - start_s)
        rank_logs = logs(run_dir, range(size))
        is_same_end = last_steps(rank_logs) == {trouble.step - 1} and set(exit_codes) == {4}
        if not is_same_end or not all(re.search(trouble.says, log) for log in rank_logs):
            unlike.append(f"W={size}: {exit_codes}\n{output_of(ranks)}\n{rank_logs[-1]}")
        if complaints := unclear(ranks[0].output(), rank_logs, trouble):
            untold.append(f"W={size}: {complaints}\n{output_of(ranks)}")
        shutil.rmtree(run_dir)
    name = trouble.source.replace("_", "-")
    figures.write(
        f"source-{name}",
        [
            figures.none_of(len(sizes), f"a source that {name}: not all ranks end alike", unlike),
            figures.none_of(len(sizes), f"a source that {name}: not told clearly", untold),
            figures.at_most(f"a source that {name}: all ended", seconds, "s", SOON_S),
        ],
    )


def unclear(terminal: str, rank_logs: Sequence[str], trouble: Trouble) -> list[str]:
    """What is wrong with what a person reads."""
    complaints = []
    if not re.search(rf"rank 0 failed at step {trouble.step}: .*{trouble.says}", terminal):
        complaints.append("the terminal does not name rank, step and cause")
    if "Traceback" in terminal or "Nothing was started" in terminal:
        complaints.append("the terminal shows a traceback, or says that nothing was started")
    if any("rank 0 failed while in step" not in log for log in rank_logs[1:]):
        complaints.append("another rank's log does not name rank 0")
    if (
        trouble.where not in rank_logs[0]
        or "while reading samples at positions" not in rank_logs[0]
    ):
        complaints.append("rank 0's log does not say where in the data")
    return complaints


DAMAGES = ("cut", "numbers", "zeros")[: figures.times(2, 3)]
STREAM = (
    "data.kind=stream",
    "data.source=documents-*.parquet",
    "data.lanes=3",
    "data.path=stream",
    "eval.eval_interval=1000",
    *DISPATCHED[2:5],
)


def damage(folder: Path, how: str) -> None:
    """Three Parquet files, of which the last is damaged."""
    for shard in range(3):
        texts = pa.array([faulty.document(number) for number in range(faulty.WRONG)])
        if how == "numbers" and shard == 2:
            texts = pa.array(range(faulty.WRONG))
        path = folder / f"documents-{shard}.parquet"
        pq.write_table(pa.table({"text": texts}), path)
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[-300:]
    elif how == "zeros":
        content[40:140] = bytes(100)
    path.write_bytes(content)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_named_by_all_ranks_or_before_they_start(place: Place, how: str) -> None:
    damage(place.path, how)
    unlike = []
    sizes = SIZES if figures.FULL else SIZES[:1]
    for size in sizes:
        run_dir = place.path / f"run-{size}"
        ranks = place.train(run_dir, *STREAM, "data.strategy=dispatched", ranks=size)
        exit_codes, rank_logs = codes(ranks), logs(run_dir, range(size))
        where = r"lane 2 \(documents-2.parquet\)"
        is_named = all("rank 0 failed" in log and re.search(where, log) for log in rank_logs)
        if set(exit_codes) != {4} or not is_named or "Traceback" in ranks[0].output():
            unlike.append(f"W={size}: {exit_codes}\n{output_of(ranks)}\n{rank_logs[-1]}")
        shutil.rmtree(place.path / "stream")
        ranks = place.train(place.path / "never-made", *STREAM, ranks=size)
        exit_codes, terminal = codes(ranks), ranks[0].output()
        if set(exit_codes) != {2} or not re.search(where, terminal) or "Traceback" in terminal:
            unlike.append(f"counted, W={size}: {exit_codes}\n{output_of(ranks)}")
    what = f"a file with {how} in it: not named by all ranks"
    figures.write(f"stream-{how}", [figures.none_of(2 * len(sizes), what, unlike)])


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ("blocks_at_once", "blocks")[: figures.times(1, 2)])
def test_a_source_that_blocks_ends_all_ranks_at_the_limit(place: Place, name: str) -> None:
    not_named, seconds = [], []
    sizes = SIZES * REPEATS if figures.FULL else SIZES[:1]
    for size in sizes:
        run_dir = place.path / "run"
        ranks = place.train(run_dir, *source(name), *LIMITS, ranks=size)
        assert ranks[0].wait_for(f"^{faulty.WAITING}"), output_of(ranks)
        start_s = time.monotonic()
        exit_codes = codes(ranks)
        seconds.append(time.monotonic() - start_s)
        pattern = r"rank 0 has not entered a collective \(the samples that rank 0[^)]*\) for \d+ s"
        rank_logs = logs(run_dir, range(size))
        if set(exit_codes) != {4} or not all(re.search(pattern, text) for text in rank_logs):
            not_named.append(f"W={size}: {exit_codes}\n{output_of(ranks)}\n{rank_logs[-1]}")
        shutil.rmtree(run_dir)
    what = f"a source that {name.replace('_', ' ')}"
    figures.write(
        f"source-{name.replace('_', '-')}",
        [
            figures.none_of(len(sizes), f"{what}: rank 0 not named on every rank", not_named),
            figures.at_most(f"{what}: all ended", seconds, "s", TIMEOUT_S + SILENCE_S),
        ],
    )


STOPPED = ("blocks", "blocks_at_once", "blocks_when_called")


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_sigterm_while_a_source_blocks_saves_leaves_and_loses_nothing(place: Place) -> None:
    """Also while the very first sample does not come."""
    wrong, different, seconds = [], [], []
    expected: dict[int, dict[str, bytes]] = {}
    trials = [(name, size) for name in STOPPED for size in SIZES] * REPEATS
    trials = trials if figures.FULL else [(STOPPED[1], 2)]
    for number, (name, size) in enumerate(trials):
        if size not in expected:
            expected[size] = expected_weights(place, size)
        run_dir = place.path / f"run-{number}"
        ranks = place.train(run_dir, *source(name), f"train.until=[{STEPS}it]", ranks=size)
        assert ranks[0].wait_for(f"^{faulty.WAITING}"), output_of(ranks)
        start_s = time.monotonic()
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        exit_codes = [rank.finish(PATIENCE_S) for rank in ranks]
        saves = [event["seconds"] for event in events(run_dir, "checkpoint")]
        seconds.append(time.monotonic() - start_s - max(saves, default=0.0))
        rank_logs = logs(run_dir, range(size))
        if (
            set(exit_codes) != {75}
            or len(last_steps(rank_logs)) != 1
            or "Traceback" in output_of(ranks)
        ):
            wrong.append(f"{name}, W={size}: {exit_codes}\n{output_of(ranks)}")
        (place.path / faulty.ANSWERS).touch()
        resumed_ranks = place.resume(run_dir, ranks=size)
        if set(codes(resumed_ranks)) != {0} or weights(run_dir, STEPS) != expected[size]:
            different.append(f"{name}, W={size}\n{output_of(resumed_ranks)}")
        (place.path / faulty.ANSWERS).unlink()
        shutil.rmtree(run_dir)
    figures.write(
        "sigterm-source",
        [
            figures.none_of(len(trials), "SIGTERM while a source blocks: no clean stop", wrong),
            figures.none_of(len(trials), "SIGTERM while a source blocks: other weights", different),
            figures.at_most(
                "SIGTERM while a source blocks: to the end, beyond a save", seconds, "s", GRACE_S
            ),
        ],
    )


def expected_weights(place: Place, size: int) -> dict[str, bytes]:
    (place.path / faulty.ANSWERS).touch()
    run_dir = place.path / f"whole-{size}"
    settings = (*source("blocks"), f"train.until=[{STEPS}it]")
    ranks = place.train(run_dir, *settings, ranks=size)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    (place.path / faulty.ANSWERS).unlink()
    return weights(run_dir, STEPS)


@pytest.mark.timeout(3600)
def test_a_killed_rank_is_named_by_all_that_were_sent_samples(place: Place) -> None:
    """Whether it is the one that reads and sends, or one that receives."""
    chance = random.Random(0)
    not_named, seconds = [], []
    trials = [(size, victim) for size in SIZES for victim in (0, 1)] * REPEATS
    trials = trials if figures.FULL else [(2, 1), (3, 0)]
    for size, victim in trials:
        run_dir = place.path / "run"
        ranks = place.train(run_dir, *source("texts"), "train.until=[100000it]", ranks=size)
        ranks[0].wait_for(rf"^ *{chance.randint(2, 20)} .*loss")
        time.sleep(chance.uniform(0.0, 0.05))
        ranks[victim].signal(signal.SIGKILL)
        start_s = time.monotonic()
        exit_codes = codes(ranks)
        seconds.append(time.monotonic() - start_s)
        survivors = [rank for rank in range(size) if rank != victim]
        rank_logs = logs(run_dir, survivors)
        pattern = rf"rank {victim} is gone"
        # rank 0 serves the store here: when it leaves, that may be all that the others see
        matches = [re.search(pattern, rank_logs[0])] + [
            re.search(f"{pattern}|rank 0 ", log) for log in rank_logs
        ]
        good = all(exit_codes[rank] == 4 for rank in survivors)
        if not good or not all(matches) or any("uncaught" in log for log in rank_logs):
            not_named.append(
                f"rank {victim} of {size}: {exit_codes}\n{output_of(ranks)}\n{rank_logs[-1]}"
            )
        shutil.rmtree(run_dir)
    what = "SIGKILL of a rank that sends or receives samples"
    figures.write(
        "killed-dispatched",
        [
            figures.none_of(len(trials), f"{what}: not named by all others", not_named),
            figures.at_most(f"{what}: the others ended", seconds, "s", SOON_S),
        ],
    )


def works(process: psutil.Process) -> bool:
    """Whether it is there; one that has ended may wait long for its new parent to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(3600)
def test_no_worker_outlives_a_killed_rank(place: Place) -> None:
    leftovers, seconds = [], []
    settings = ("data.workers=2", "train.until=[100000it]")
    for number in range(figures.times(1, 10)):
        run_dir = place.path / "run"
        ranks = place.train(run_dir, *settings, "data.path=tokens", ranks=2)
        ranks[0].wait_for(r"^ *2 .*loss")
        workers = [worker for rank in ranks for worker in psutil.Process(rank.pid).children()]
        assert len(workers) == 4, workers
        ranks[number % 2].signal(signal.SIGKILL)
        start_s = time.monotonic()
        codes(ranks)
        while alive := [worker for worker in workers if works(worker)]:
            if time.monotonic() - start_s > PATIENCE_S:
                leftovers.append(f"rank {number % 2} killed: {alive}")
                break
            time.sleep(0.01)
        seconds.append(time.monotonic() - start_s)
        shutil.rmtree(run_dir)
    what = "SIGKILL of a rank with workers"
    figures.write(
        "killed-with-workers",
        [
            figures.none_of(len(seconds), f"{what}: a process is left", leftovers),
            figures.at_most(f"{what}: all processes gone", seconds, "s", SOON_S),
        ],
    )
