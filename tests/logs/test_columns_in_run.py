"""The columns that a run writes beside its record: read instead of it, and never trusted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from read_alike import same
from records import make_run

from instar.logs.read import cache, record, scan
from instar.logs.read.reader_cache import cache_folder, read_checked, write_checked
from instar.logs.read.record import RunRecord, read_record, read_records
from instar.record.events import Train, encode_event
from instar.record.rundir import RunDir

STEPS = 6000


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run", STEPS)
    assert run.events.stat().st_size > cache.SMALL_BYTES
    return run


def scan_record(run: RunDir) -> RunRecord:
    """The record without any columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTAR_CACHE_DIR", "/proc/no-cache")
        patch.setattr(cache, "COLUMNS", "none")
        run_record = read_record(run)
        series = {metric: run_record.series(metric) for metric in run_record.metrics}
    return RunRecord(run, run_record.events, series, run_record.faults, run_record.end)


def parsed_bytes(run: RunDir, monkeypatch: pytest.MonkeyPatch, *, own_cache: bool = False) -> int:
    """How many bytes of the record a reading parses, without or with a cache of its own."""
    sizes: list[int] = []
    original = scan.scan

    def counting(
        path: Path, after: scan.Content | None = None, *limits: int, **more: int
    ) -> scan.Content:
        content = original(path, after, *limits, **more)
        sizes.append(content.end - (after.end if after else 0))
        return content

    with monkeypatch.context() as patch:
        if not own_cache:
            patch.setenv("INSTAR_CACHE_DIR", "/proc/no-cache")
        patch.setattr(scan, "scan", counting)
        patch.setattr(cache, "scan", counting)
        patch.setattr(record, "scan", counting)
        read_record(run).series("loss")
    return sum(sizes)


def test_the_first_look_parses_no_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scan_record(run)
    cache.extend_columns(run, finished=True)
    assert parsed_bytes(run, monkeypatch) == 0
    same(read_record(run), plain)
    same(read_records([run, run])[1], plain)
    folder = cache_folder(run)
    assert folder is not None
    assert not (folder / "columns.json").exists()


def test_columns_go_with_a_run_that_is_copied(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.extend_columns(run, finished=True)
    shutil.copytree(run.path, tmp_path / "copy")
    assert parsed_bytes(RunDir(tmp_path / "copy"), monkeypatch) == 0
    same(read_record(RunDir(tmp_path / "copy")), scan_record(run))


def test_a_record_that_grows_is_added_to_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [encode_event(Train(step=n, loss=1 / (n + 1), lr=0.1), 1.0, 1) for n in range(30_000)]
    run = RunDir(tmp_path)
    run.events.write_bytes(b"".join(lines[:20]))
    with cache.columns_written(run, every_s=1e-3):
        for begin in range(20, len(lines), 3000):
            with run.events.open("ab") as file:
                file.writelines(lines[begin : begin + 3000])
    assert parsed_bytes(run, monkeypatch) == 0
    same(read_record(run), scan_record(run))
    with run.events.open("ab") as file:
        file.write(encode_event(Train(step=30_000, loss=2.0), 1.0, 1) + b'{"v":1,"kind":"tr')
    assert 0 < parsed_bytes(run, monkeypatch) < 1000
    assert read_record(run).series("loss").value[-1] == 2.0


def test_a_small_record_has_no_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 50)
    with cache.columns_written(run):
        pass
    assert not (run.path / cache.COLUMNS).exists()


def columns(run: RunDir) -> Path:
    return run.path / cache.COLUMNS


def index_with(change: Callable[[dict[str, object]], None]) -> Callable[[RunDir], None]:
    def wrong(run: RunDir) -> None:
        path = columns(run) / "columns.json"
        index = msgspec.json.decode(read_checked(path))
        change(index)
        write_checked(path, msgspec.json.encode(index))

    return wrong


def train(index: dict[str, object]) -> dict[str, dict[str, dict[str, object]]]:
    return index["tables"]["train"]  # type: ignore[index, no-any-return]


def flip(run: RunDir, name: str) -> None:
    path = next(columns(run).rglob(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def huge(index: dict[str, object]) -> None:
    rows = 1 << 40
    table = train(index)
    table["rows"] = rows  # type: ignore[assignment]
    for file in (*table["axes"].values(), *table["metrics"].values()):
        file["parts"] = [[8 * rows, "0" * 16]]


def link_columns(run: RunDir) -> None:
    columns(run).rename(run.path.parent / "elsewhere")
    columns(run).symlink_to(run.path.parent / "elsewhere")


def linked_column(run: RunDir) -> None:
    path = next(columns(run).rglob("0-step"))
    path.rename(run.path.parent / "elsewhere")
    path.symlink_to(run.path.parent / "elsewhere")


def of_another_record(run: RunDir) -> None:
    other = make_run(run.path.parent / "other", STEPS + 1, 5)
    cache.extend_columns(other, finished=True)
    shutil.rmtree(columns(run))
    shutil.copytree(columns(other), columns(run))


def edit_record(run: RunDir) -> None:
    data = run.events.read_bytes()
    place = data.index(b'"loss":', len(data) // 2)
    run.events.write_bytes(data[: place + 7] + b"7" + data[place + 8 :])
    os.utime(run.events, (2e9, 2e9))


def cut(run: RunDir) -> None:
    os.truncate(run.events, run.events.stat().st_size * 2 // 3)


def blocking(run: RunDir) -> None:
    (columns(run) / "columns.json").unlink()
    os.mkfifo(columns(run) / "columns.json")


WRONG: dict[str, Callable[[RunDir], None]] = {
    "index flipped": lambda run: flip(run, "columns.json"),
    "column flipped": lambda run: flip(run, "0-0"),
    "axis flipped": lambda run: flip(run, "0-segment"),
    "events flipped": lambda run: flip(run, "events.jsonl"),
    "column cut": lambda run: os.truncate(next(columns(run).rglob("0-0")), 100),
    "column missing": lambda run: next(columns(run).rglob("0-0")).unlink(),
    "name outside": index_with(
        lambda index: train(index)["axes"]["step"].update(name="../../mine")
    ),
    "folder outside": index_with(lambda index: index.update(folder="../..")),
    "another form": index_with(lambda index: index.update(form=0)),
    "axis missing": index_with(lambda index: train(index)["axes"].pop("segment")),  # type: ignore[arg-type, return-value]
    "huge sizes": index_with(huge),
    "end beyond": index_with(lambda index: index["stamp"].update(end=1 << 50)),  # type: ignore[attr-defined]
    "end negative": index_with(lambda index: index["stamp"].update(end=-5)),  # type: ignore[attr-defined]
    "told faults": index_with(lambda index: index.update(faults=[[1, "\x1b[2J"]])),
    "folder is a link": link_columns,
    "column is a link": linked_column,
    "another record's": of_another_record,
    "record edited": edit_record,
    "record cut": cut,
    "a pipe": blocking,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_columns_that_do_not_belong_to_the_record_are_ignored(run: RunDir, wrong: str) -> None:
    cache.extend_columns(run, finished=True)
    WRONG[wrong](run)
    plain = scan_record(run)
    same(read_record(run), plain)
    assert not plain.faults


@pytest.mark.parametrize("name", ["0-0", "0-segment", "events.jsonl"])
def test_a_damaged_column_has_the_record_scanned_once_by_each_reader(
    run: RunDir, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.extend_columns(run, finished=True)
    flip(run, name)
    plain = scan_record(run)
    same(read_record(run), plain)
    assert parsed_bytes(run, monkeypatch, own_cache=True) == 0
    same(read_record(run), plain)
    folder = cache_folder(run)
    assert folder is not None
    for path in folder.rglob(name):  # and the reader's own: the record still holds
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    same(read_record(run), plain)
    same(read_record(run), plain)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_run_that_goes_on_makes_wrong_columns_anew(run: RunDir, wrong: str) -> None:
    cache.extend_columns(run, finished=True)
    WRONG[wrong](run)
    new_line = encode_event(Train(step=STEPS + 1, loss=2.0), 1.0, 9)
    with cache.columns_written(run), run.events.open("ab") as file:
        if wrong == "record cut":  # as a recorder does that opens it
            data = run.events.read_bytes()
            file.truncate(data.rindex(b"\n") + 1)
        file.write(new_line)
    same(read_record(run), scan_record(run))


def test_a_tables_name_that_the_record_has_not_is_an_error_with_a_name(run: RunDir) -> None:
    cache.extend_columns(run, finished=True)
    index_with(lambda index: index["tables"].update(other=index["tables"]["train"]))(run)  # type: ignore[attr-defined, index]
    assert np.array_equal(
        read_record(run).series("loss").value, scan_record(run).series("loss").value
    )


def test_columns_are_readable_by_whom_the_record_is(run: RunDir) -> None:
    cache.extend_columns(run, finished=True)
    umask = os.umask(0)
    os.umask(umask)
    for path in columns(run).rglob("*"):
        if path.is_file() and path.name != "columns.json":
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert (columns(run) / "columns.json").stat().st_mode & 0o444 == 0o444 & ~umask


def test_reading_writes_nothing_into_the_run(run: RunDir) -> None:
    cache.extend_columns(run, finished=True)
    before = {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")}
    read_record(run).series("loss")
    assert {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")} == before
