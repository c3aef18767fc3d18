"""The column cache: the same columns as without it, whatever became of the record or of the cache."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from read_alike import same
from records import lines, make_run, make_runs

from instar.logs.read import cache
from instar.logs.read.reader_cache import cache_folder, cached_summary, read_checked, write_checked
from instar.logs.read.record import RunRecord, read_record, read_records
from instar.logs.read.scan import scan
from instar.record.events import Eval, RecordError, RunStarted, Stop, Train, encode_event
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

LINES = tuple(lines(6000, 1, rewinds=2))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Nearly 3 MB."""
    return write_parts(tmp_path / "run", LINES)


def write_parts(path: Path, parts: tuple[bytes, ...]) -> RunDir:
    path.mkdir(exist_ok=True)
    (path / "events.jsonl").write_bytes(b"".join(parts))
    return RunDir(path)


def cache_of(run: RunDir) -> Path:
    folder = cache_folder(run)
    assert folder is not None
    return folder


def without_cache(run: RunDir) -> RunRecord:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTAR_CACHE_DIR", "/proc/no-cache")
        record = read_record(run)
        series = {metric: record.series(metric) for metric in record.metrics}
    return RunRecord(run, record.events, series, record.faults, record.end)


def count_parsed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each later reading of a record has parsed."""
    read_bytes: list[int] = []

    def counting(path: Path, after: cache.Content | None = None, *limits: int) -> cache.Content:
        content = scan(path, after, *limits)
        read_bytes.append(content.end - (after.end if after else 0))
        return content

    monkeypatch.setattr("instar.logs.read.scan.scan", counting)
    return read_bytes


def test_a_large_record_is_parsed_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_cache(run)
    parsed_bytes = count_parsed_bytes(monkeypatch)
    same(read_record(run), plain)
    assert sum(parsed_bytes) == run.events.stat().st_size
    parsed_bytes.clear()
    same(read_record(run), plain)
    assert sum(parsed_bytes) == 0


def test_a_small_record_has_no_cache(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50)
    read_record(run)
    cached_summary(run)
    assert not cache_of(run).exists()


def test_of_a_record_that_grew_only_the_rest_is_parsed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1500, 3000, 3010, 5999, 6000, len(LINES)]
    parsed_bytes = count_parsed_bytes(monkeypatch)
    for number, size in enumerate(sizes):
        with run.events.open("r+b") as file:
            file.write(b"".join(LINES[:size]))
        if number == 0:
            os.truncate(run.events, len(b"".join(LINES[:size])))
        read_record(run)
        same(read_record(run), without_cache(run))
    parsed_bytes.clear()
    new_line = encode_event(Train(step=6001, loss=2.0, extra={"new": 3.0}), 1.0, 3)
    with run.events.open("ab") as file:
        file.write(new_line)
    record = read_record(run)
    assert len(new_line) <= sum(parsed_bytes) < cache.SMALL_BYTES
    assert record.series("new").step.tolist() == [6001]
    assert record.series("loss").step[-1] == 6001


def test_a_metric_that_comes_late_and_one_that_stops_are_added_to_the_cache(tmp_path: Path) -> None:
    early = tuple(encode_event(Train(step=s, loss=1.0, lr=0.1), 1.0, 1) for s in range(8000))
    late = tuple(
        encode_event(Train(step=s, loss=1.0, extra={"late": s / 2}), 1.0, 1)
        for s in range(8000, 16000)
    )
    run = write_parts(tmp_path / "run", early)
    read_record(run)
    with run.events.open("ab") as file:
        file.writelines((*late, encode_event(Eval(step=16000, split="val", loss=1.0), 1.0, 1)))
    same(read_record(run), without_cache(run))
    record = read_record(run)
    assert cache.cached_bytes(run.events, cache_of(run)) == record.end
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
    change: Callable[[RunDir], None], run: RunDir
) -> None:
    read_record(run)
    cached_summary(run)
    change(run)
    plain = without_cache(run)
    same(read_record(run), plain)
    same(read_record(run), plain)
    assert cached_summary(run).step == plain.series("loss").current().step[-1]


def test_faults_and_what_was_superseded_come_from_the_cache_too(tmp_path: Path) -> None:
    bad_lines = list(LINES)
    for place in range(100, 4000, 300):
        bad_lines[place] = b"\0" * 20 + b"\n"
    run = write_parts(tmp_path / "run", tuple(bad_lines))
    first = read_record(run)
    assert len(first.faults) == 6
    same(read_record(run), first)
    loss = first.series("loss")
    assert 0 < loss.is_current.sum() < len(loss)


def test_a_damaged_cache_is_made_anew(run: RunDir) -> None:
    plain = without_cache(run)
    draw = random.Random(7)
    read_record(run)
    cached_summary(run)
    for name in ("columns.json", "summary.json", "events.jsonl", "0-step", "0-0", "1-segment"):
        for damage in ("flip", "cut", "remove", "empty", "extend"):
            cached_summary(run)
            path = next(cache_of(run).rglob(name))
            data = bytearray(path.read_bytes())
            if damage == "remove":
                path.unlink()
            elif data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                damages = {"cut": data[: len(data) // 2], "empty": b"", "extend": data + data}
                path.write_bytes(damages.get(damage, data))
            same(read_record(run), plain)
            same(read_record(run), plain)
            assert cached_summary(run).step == 6000


def test_a_cache_that_breaks_between_two_looks_is_no_harm(run: RunDir) -> None:
    read_record(run)
    record = read_record(run)
    loss = record.series("loss")
    for path in cache_of(run).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with run.events.open("ab") as file:
        file.write(encode_event(Train(step=6001, loss=2.0, grad_norm=1.0), 1.0, 3))
    norm = record.series("grad_norm")
    assert np.array_equal(norm.step[: len(loss)], loss.step)
    assert len(norm.current()) == norm.is_current.sum()
    assert len(record.series("val/loss")) > 10


@pytest.mark.parametrize("wrong", ["file", "link", "missing home", "another user's"])
def test_without_a_cache_folder_of_ones_own_nothing_is_kept(
    run: RunDir, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, target = tmp_path / "place", tmp_path / "mine"
    target.mkdir()
    monkeypatch.setenv("INSTAR_CACHE_DIR", str(place))
    match wrong:
        case "file":
            place.write_text("in the way")
        case "link":
            place.symlink_to(target)
        case "missing home":
            monkeypatch.delenv("INSTAR_CACHE_DIR")
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            monkeypatch.setenv("HOME", "/proc/home")
        case _:
            place.mkdir()
            monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert cache_folder(run) is None
    assert len(read_record(run).series("loss")) > 6000
    assert len(read_records([run, run])) == 2
    assert cached_summary(run).step == 6000
    assert not any(target.iterdir())


def test_nothing_is_written_into_a_run_that_is_read(run: RunDir) -> None:
    target = run.path.parent / "mine"
    target.write_text("export PATH")
    (run.path / "cache").mkdir()
    for name in ("lock", "columns.json", "summary.json", "columns-01234567"):
        (run.path / "cache" / name).symlink_to(target)
    before = {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")}
    read_record(run)
    cached_summary(run)
    read_records([run])
    assert {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert target.read_text() == "export PATH"


def test_the_cache_is_for_its_user_alone(run: RunDir) -> None:
    read_record(run)
    cached_summary(run)
    top = cache_of(run).parent.parent
    paths = [top, *top.rglob("*")]
    assert len(paths) > 10
    assert not any(path.stat().st_mode & 0o077 for path in (top, cache_of(run)))


def test_links_among_the_files_of_a_cache_are_not_followed(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    read_record(run)
    for path in [path for path in cache_of(run).rglob("*") if path.is_file()]:
        content = path.read_bytes()
        target.write_bytes(content)
        path.unlink()
        path.symlink_to(target)
        with run.events.open("ab") as file:
            file.write(encode_event(Train(step=6001, loss=2.0, extra={"new": 3.0}), 1.0, 3))
            file.write(b" " * cache.SMALL_BYTES + b"\n")
        same(read_record(run), without_cache(run))
        assert target.read_bytes() == content


@pytest.mark.parametrize("name", ["../../mine", "/etc/mine", "0-step/../../../mine", ""])
def test_names_in_a_cache_lead_nowhere_else(run: RunDir, name: str) -> None:
    read_record(run)
    path = cache_of(run) / "columns.json"
    index = msgspec.json.decode(read_checked(path))
    index["tables"]["train"]["axes"]["step"]["name"] = name
    write_checked(path, msgspec.json.encode(index))
    assert cache.load_columns(run.events, cache_of(run)) is None
    index["folder"] = name
    write_checked(path, msgspec.json.encode(index))
    assert cache.load_columns(run.events, cache_of(run)) is None
    same(read_record(run), without_cache(run))


def test_sizes_in_a_cache_are_no_more_than_its_files_have(run: RunDir) -> None:
    read_record(run)
    path = cache_of(run) / "columns.json"
    index = msgspec.json.decode(read_checked(path))
    index["tables"]["train"]["axes"]["step"]["parts"][0][0] = 1 << 50
    write_checked(path, msgspec.json.encode(index))
    same(read_record(run), without_cache(run))


def test_what_was_used_least_recently_leaves_a_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_CACHE_DIR", str(tmp_path / "place"))
    runs = [write_parts(tmp_path / name, LINES) for name in "abc"]
    for age, run in zip((30, 10, 20), runs, strict=True):
        read_record(run)
        os.utime(cache_of(run), (time.time() - age, time.time() - age))
    cache_bytes = sum(path.stat().st_size for path in cache_of(runs[0]).rglob("*"))
    monkeypatch.setattr("instar.logs.read.reader_cache.MOST_BYTES", int(3.5 * cache_bytes))
    read_record(runs[0])
    last = write_parts(tmp_path / "last", LINES)
    read_record(last)
    assert [cache_of(run).exists() for run in (*runs, last)] == [True, True, False, True]


def test_readers_and_a_writer_at_once_each_see_a_beginning_of_the_record(tmp_path: Path) -> None:
    run = write_parts(tmp_path / "run", LINES[:1000])
    reader = (
        "import sys; from pathlib import Path\n"
        "from instar.logs.read.record import read_record; from instar.record.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); seen = 0\n"
        "while seen < 30000:\n"
        "    loss = read_record(run).series('loss'); steps = loss.current().step\n"
        "    assert (steps == range(1, len(steps) + 1)).all(), steps\n"
        "    assert (loss.value == loss.step / 2).all()\n"
        "    assert len(steps) >= seen; seen = len(steps)\n"
    )
    first = encode_event(RunStarted(run_id="r"), 1.0, 1)
    run.events.write_bytes(first)
    readers = [subprocess.Popen([sys.executable, "-c", reader, run.path]) for _ in range(2)]
    with run.events.open("ab", buffering=0) as file:
        for step in range(1, 30001):
            file.write(encode_event(Train(step=step, loss=step / 2), 1.0, 1))
    assert [process.wait(60) for process in readers] == [0, 0]


def test_many_records_are_read_by_all_cores_as_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make_runs(tmp_path, 5, 4000)
    plain = [without_cache(run) for n, run in enumerate(runs)]
    monkeypatch.setattr("instar.logs.read.cache.PARALLEL_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    for record, expected in zip(read_records(runs), plain, strict=True):
        same(record, expected)
    assert all(cache.cached_bytes(run.events, cache_of(run)) for run in runs)


def test_of_many_records_one_that_is_none_is_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one", 10), RunDir(tmp_path / "none")]
    with pytest.raises(RecordError, match="none"):
        read_records(runs)


def test_a_glance_tells_what_a_list_needs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo-e5s6m")
    run.path.mkdir()
    with Recorder(run.events, clock=lambda: 50.0) as recorder:
        recorder.write(RunStarted(run_id="e5s6m", model="2L/128d", unit="node"))
        for step, loss in enumerate([5.0, 3.0, 4.0], 1):
            recorder.write(Train(step=step, tokens=10 * step, loss=loss + 1))
            recorder.write(Eval(step=step, split="val", loss=loss))
        recorder.write(Stop(step=3, reason="SIGTERM", resumable=True))
        summary = cached_summary(run)
        assert (summary.id, summary.name, summary.model, summary.unit) == (
            "e5s6m",
            "demo",
            "2L/128d",
            "node",
        )
        assert (summary.started, summary.seen, summary.kind, summary.segments) == (
            50.0,
            50.0,
            "stop",
            1,
        )
        assert (summary.step, summary.loss) == (3, 5.0)
        assert (summary.val, summary.best, summary.best_step) == (4.0, 3.0, 2)
        assert [type(event) for event in summary.events] == [RunStarted, Stop]
        recorder.write(RunStarted(run_id="e5s6m", step=1))
        summary = cached_summary(run)
        assert (summary.step, summary.val, summary.best_step, summary.segments) == (1, 5.0, 1, 2)
        assert [type(event) for event in summary.events] == [RunStarted]


def test_a_glance_at_a_part_and_at_the_rest_is_a_glance_at_the_whole(tmp_path: Path) -> None:
    expected = cached_summary(make_run(tmp_path / "whole", 3000, 5, rewinds=3))
    parts = tuple(lines(3000, 5, rewinds=3))
    run = write_parts(tmp_path / "run", ())
    for begin in range(0, len(parts), 37):
        with run.events.open("ab") as file:
            file.writelines(parts[begin : begin + 37])
        cached_summary(run)
    assert (cache_of(run) / "summary.json").exists()
    for field in ("step", "tokens", "loss", "val", "best", "best_step", "kind", "seen"):
        assert getattr(cached_summary(run), field) == getattr(expected, field)
    record = read_record(run)
    val = record.series("val/loss").current()
    assert expected.best == val.value.min()
    assert expected.best_step == val.step[val.value.argmin()]


@pytest.mark.parametrize("content", [None, b"", b"step,loss\n1,2\n", b"\0" * 50000])
def test_a_glance_at_what_is_no_record_says_so(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    summary = cached_summary(RunDir(tmp_path))
    assert (summary.step, summary.kind, summary.events) == (None, "", ())
    assert bool(summary.fault) == (content != b"")


def test_one_metric_takes_its_own_columns_and_no_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_record(run)
    columns = cache.load_columns(run.events, cache_of(run))
    assert columns is not None
    table = columns.tables["train"]
    assert len(table.axes) + len(table.metrics) > 10
    read_paths: list[Path] = []
    of_the_cache = cache._read

    def counting_read(place: Path, file: Any, dtype: str) -> Any:
        read_paths.append(place / file.name)
        return of_the_cache(place, file, dtype)

    monkeypatch.setattr(cache, "_read", counting_read)
    assert "lr" in table.metrics
    assert not read_paths
    assert len(read_record(run).series("loss").value) > 5000
    assert 1 <= len(read_paths) <= 4, read_paths
