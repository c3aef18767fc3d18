"""The column cache: the same columns as without it, whatever became of the record or of the cache."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from read_alike import same
from records import lines, make_run, make_runs

from instar.logs.reading import cache
from instar.logs.reading.glance import glance
from instar.logs.reading.many import read_many
from instar.logs.reading.record import RunRecord, read
from instar.logs.reading.scan import scan
from instar.record.events import Eval, RecordError, RunStarted, Stop, Train, encode
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

LINES = tuple(lines(6000, 1, rewinds=2))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Nearly 3 MB."""
    return written(tmp_path / "run", LINES)


def written(path: Path, parts: tuple[bytes, ...]) -> RunDir:
    path.mkdir(exist_ok=True)
    (path / "events.jsonl").write_bytes(b"".join(parts))
    return RunDir(path)


def cache_of(run: RunDir) -> Path:
    return run.path / "cache"


def without_cache(run: RunDir, place: Path) -> RunRecord:
    """The record read from a copy whose folder cannot be written, so to speak."""
    copy = RunDir(place)
    place.mkdir()
    copy.events.write_bytes(run.events.read_bytes())
    (place / "cache").write_text("a file, not a folder")
    found = read(copy)
    faults = [fault.replace(str(place), str(run.path)) for fault in found.faults]
    return RunRecord(
        run, found.events, {m: found.series(m) for m in found.metrics}, faults, found.end
    )


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each later reading of a record has parsed."""
    read_bytes: list[int] = []

    def counting(path: Path, after: cache.Content | None = None, *rest: int) -> cache.Content:
        found = scan(path, after, *rest)
        read_bytes.append(found.end - (after.end if after else 0))
        return found

    monkeypatch.setattr("instar.logs.reading.spread.scan", counting)
    return read_bytes


def test_a_large_record_is_parsed_once(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = without_cache(run, tmp_path / "copy")
    counted = parsed(monkeypatch)
    same(read(run), plain)
    assert sum(counted) == run.events.stat().st_size
    counted.clear()
    same(read(run), plain)
    assert sum(counted) == 0


def test_a_small_record_has_no_cache(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50)
    read(run)
    glance(run)
    assert not cache_of(run).exists()


def test_of_a_record_that_grew_only_the_rest_is_parsed(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1500, 3000, 3010, 5999, 6000, len(LINES)]
    counted = parsed(monkeypatch)
    for number, size in enumerate(sizes):
        with run.events.open("r+b") as file:
            file.write(b"".join(LINES[:size]))
        if number == 0:
            os.truncate(run.events, len(b"".join(LINES[:size])))
        read(run)
        same(read(run), without_cache(run, tmp_path / f"copy-{number}"))
    counted.clear()
    grown = encode(Train(step=6001, loss=2.0, extra={"new": 3.0}), 1.0, 3)
    with run.events.open("ab") as file:
        file.write(grown)
    record = read(run)
    assert len(grown) <= sum(counted) < cache.SMALL_BYTES
    assert record.series("new").step.tolist() == [6001]
    assert record.series("loss").step[-1] == 6001


def test_a_metric_that_comes_late_and_one_that_stops_are_added_to_the_cache(tmp_path: Path) -> None:
    early = tuple(encode(Train(step=s, loss=1.0, lr=0.1), 1.0, 1) for s in range(8000))
    late = tuple(
        encode(Train(step=s, loss=1.0, extra={"late": s / 2}), 1.0, 1) for s in range(8000, 16000)
    )
    run = written(tmp_path / "run", early)
    read(run)
    with run.events.open("ab") as file:
        file.writelines((*late, encode(Eval(step=16000, split="val", loss=1.0), 1.0, 1)))
    same(read(run), without_cache(run, tmp_path / "copy"))
    record = read(run)
    assert cache.held_bytes(run.events, cache_of(run)) == record.end
    assert record.series("late").step.tolist() == list(range(8000, 16000))
    assert record.series("lr").step.tolist() == list(range(8000))


def cut(run: RunDir) -> None:
    os.truncate(run.events, run.events.stat().st_size // 2)


def replace(run: RunDir) -> None:
    other = run.path / "other"
    other.write_bytes(b"".join(lines(9000, 2)))
    other.replace(run.events)


def overwrite(run: RunDir) -> None:
    run.events.write_bytes(b"".join(lines(9000, 2)))


def edit(run: RunDir) -> None:
    before = run.events.stat()
    text = run.events.read_bytes()
    run.events.write_bytes(text.replace(b'"loss":3', b'"loss":7', 1))
    os.utime(run.events, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [cut, replace, overwrite, edit], ids=lambda c: c.__name__)
def test_a_record_that_was_changed_is_read_anew(
    change: Callable[[RunDir], None], run: RunDir, tmp_path: Path
) -> None:
    read(run)
    glance(run)
    change(run)
    plain = without_cache(run, tmp_path / "copy")
    same(read(run), plain)
    same(read(run), plain)
    assert glance(run).step == plain.series("loss").current().step[-1]


def test_faults_and_what_was_superseded_come_from_the_cache_too(tmp_path: Path) -> None:
    damaged = list(LINES)
    for place in range(100, 4000, 300):
        damaged[place] = b"\0" * 20 + b"\n"
    run = written(tmp_path / "run", tuple(damaged))
    first = read(run)
    assert len(first.faults) == 6
    same(read(run), first)
    loss = first.series("loss")
    assert 0 < loss.kept.sum() < len(loss)


def test_a_damaged_cache_is_made_anew(run: RunDir, tmp_path: Path) -> None:
    plain = without_cache(run, tmp_path / "copy")
    draw = random.Random(7)
    read(run)
    glance(run)
    for name in ("columns.json", "glance.json", "events.jsonl", "0-step", "0-0", "1-segment"):
        for damage in ("flip", "cut", "remove", "empty", "extend"):
            glance(run)
            path = next(cache_of(run).rglob(name))
            data = bytearray(path.read_bytes())
            if damage == "remove":
                path.unlink()
            elif data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                kept = {"cut": data[: len(data) // 2], "empty": b"", "extend": data + data}
                path.write_bytes(kept.get(damage, data))
            same(read(run), plain)
            same(read(run), plain)
            assert glance(run).step == 6000


def test_a_cache_that_breaks_between_two_looks_is_no_harm(run: RunDir) -> None:
    read(run)
    record = read(run)
    loss = record.series("loss")
    for path in cache_of(run).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with run.events.open("ab") as file:
        file.write(encode(Train(step=6001, loss=2.0, grad_norm=1.0), 1.0, 3))
    norm = record.series("grad_norm")
    assert np.array_equal(norm.step[: len(loss)], loss.step)
    assert len(norm.current()) == norm.kept.sum()
    assert len(record.series("val/loss")) > 10


def test_a_folder_that_cannot_be_written_does_without(run: RunDir) -> None:
    (run.path / "cache").write_text("in the way")
    assert len(read(run).series("loss")) > 6000
    assert glance(run).step == 6000
    assert sorted(path.name for path in run.path.iterdir()) == ["cache", "events.jsonl"]


def test_readers_and_a_writer_at_once_each_see_a_beginning_of_the_record(tmp_path: Path) -> None:
    run = written(tmp_path / "run", LINES[:1000])
    reader = (
        "import sys; from pathlib import Path\n"
        "from instar.logs.reading.record import read; from instar.record.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); seen = 0\n"
        "while seen < 30000:\n"
        "    loss = read(run).series('loss'); steps = loss.current().step\n"
        "    assert (steps == range(1, len(steps) + 1)).all(), steps\n"
        "    assert (loss.value == loss.step / 2).all()\n"
        "    assert len(steps) >= seen; seen = len(steps)\n"
    )
    first = encode(RunStarted(run_id="r"), 1.0, 1)
    run.events.write_bytes(first)
    readers = [subprocess.Popen([sys.executable, "-c", reader, run.path]) for _ in range(2)]
    with run.events.open("ab", buffering=0) as file:
        for step in range(1, 30001):
            file.write(encode(Train(step=step, loss=step / 2), 1.0, 1))
    assert [process.wait(60) for process in readers] == [0, 0]


def test_many_records_are_read_by_all_cores_as_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make_runs(tmp_path, 5, 4000)
    plain = [without_cache(run, tmp_path / f"copy-{n}") for n, run in enumerate(runs)]
    monkeypatch.setattr("instar.logs.reading.many._WORTH_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    for record, expected in zip(read_many(runs), plain, strict=True):
        same(record, expected)
    assert all(cache.held_bytes(run.events, cache_of(run)) for run in runs)


def test_of_many_records_one_that_is_none_is_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one", 10), RunDir(tmp_path / "none")]
    with pytest.raises(RecordError, match="none"):
        read_many(runs)


def test_a_glance_tells_what_a_list_needs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo-e5s6m")
    run.path.mkdir()
    with Recorder(run.events, clock=lambda: 50.0) as recorder:
        recorder.write(RunStarted(run_id="e5s6m", model="2L/128d", unit="node"))
        for step, loss in enumerate([5.0, 3.0, 4.0], 1):
            recorder.write(Train(step=step, tokens=10 * step, loss=loss + 1))
            recorder.write(Eval(step=step, split="val", loss=loss))
        recorder.write(Stop(step=3, reason="SIGTERM", resumable=True))
        seen = glance(run)
        assert (seen.id, seen.name, seen.model, seen.unit) == ("e5s6m", "demo", "2L/128d", "node")
        assert (seen.started, seen.seen, seen.kind, seen.segments) == (50.0, 50.0, "stop", 1)
        assert (seen.step, seen.loss) == (3, 5.0)
        assert (seen.val, seen.val_step, seen.best, seen.best_step) == (4.0, 3, 3.0, 2)
        assert [type(event) for event in seen.events] == [RunStarted, Stop]
        recorder.write(RunStarted(run_id="e5s6m", step=1))
        seen = glance(run)
        assert (seen.step, seen.val, seen.best_step, seen.segments) == (1, 5.0, 1, 2)
        assert [type(event) for event in seen.events] == [RunStarted]


def test_a_glance_at_a_part_and_at_the_rest_is_a_glance_at_the_whole(tmp_path: Path) -> None:
    whole = glance(make_run(tmp_path / "whole", 3000, 5, rewinds=3))
    parts = tuple(lines(3000, 5, rewinds=3))
    run = written(tmp_path / "run", ())
    for begin in range(0, len(parts), 37):
        with run.events.open("ab") as file:
            file.writelines(parts[begin : begin + 37])
        glance(run)
    assert (cache_of(run) / "glance.json").exists()
    for field in ("step", "tokens", "loss", "val", "val_step", "best", "best_step", "kind", "seen"):
        assert getattr(glance(run), field) == getattr(whole, field)
    record = read(run)
    val = record.series("val/loss").current()
    assert whole.best == val.value.min()
    assert whole.best_step == val.step[val.value.argmin()]


@pytest.mark.parametrize("content", [None, b"", b"step,loss\n1,2\n", b"\0" * 50000])
def test_a_glance_at_what_is_no_record_says_so(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    seen = glance(RunDir(tmp_path))
    assert (seen.step, seen.kind, seen.events) == (None, "", ())
    assert bool(seen.fault) == (content != b"")


def test_one_metric_takes_its_own_columns_and_no_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(run)
    held = cache.load(run.events, cache_of(run))
    assert held is not None
    table = held.tables["train"]
    assert len(table.axes) + len(table.metrics) > 10
    opened: list[Path] = []
    of_the_cache = cache._read

    def counted(place: Path, file: Any, dtype: str) -> Any:
        opened.append(place / file.name)
        return of_the_cache(place, file, dtype)

    monkeypatch.setattr(cache, "_read", counted)
    assert "lr" in table.metrics
    assert not opened
    assert len(read(run).series("loss").value) > 5000
    assert 1 <= len(opened) <= 4, opened
