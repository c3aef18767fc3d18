"""Pieces of a long record, read by other processes: the record as one process reads it."""

import itertools
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from read_alike import same
from records import lines, make_run

from instar.logs.read import cache
from instar.logs.read import scan as scanning
from instar.logs.read.reader_cache import cache_folder
from instar.logs.read.record import RunRecord, read_record
from instar.logs.read.scan import MAX_FAULTS, pieces, scan
from instar.processes.pool import Workers
from instar.record.events import RecordError, Train, encode_event
from instar.record.rundir import RunDir


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A record of 4 MB with rewinds, damaged lines and a torn end, read in about 20 pieces."""
    monkeypatch.setattr(scanning, "WORTH_BYTES", 1 << 20)
    monkeypatch.setattr(scanning, "PIECE_BYTES", 200_000)
    monkeypatch.setattr(scanning, "usable_cores", lambda: 3)
    run = make_run(tmp_path / "run", 9000, 4, rewinds=2)
    parts = run.events.read_bytes().splitlines(keepends=True)
    for place in range(1000, 10000, 900):
        parts[place] = b"\0" * 50 + b"\n"
    parts[5000] = b"x" * 500_000 + b"\n"
    run.events.write_bytes(b"".join(parts) + b'{"v":1,"ki')
    return run


def cache_of(run: RunDir) -> Path:
    folder = cache_folder(run)
    assert folder is not None
    return folder


def read_alone(run: RunDir) -> RunRecord:
    """As one process reads it that looks at one line after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "read_content", lambda run: scan(run.events))
        patch.setattr("instar.logs.read.scan.decode_measurements", not_at_once)
        return read_record(run)


def not_at_once(_: bytes) -> list[Any]:
    raise msgspec.DecodeError


def test_processes_read_a_long_record_as_one_does(long: RunDir) -> None:
    expected = read_alone(long)
    assert len(expected.faults) == MAX_FAULTS + 1
    assert not expected.series("loss").is_current.all()
    same(read_record(long), expected)
    assert cache.cached_bytes(long.events, cache_of(long)) == expected.end
    same(read_record(long), expected)


def test_processes_go_on_behind_what_the_cache_holds(long: RunDir) -> None:
    content = long.events.read_bytes()
    long.events.write_bytes(content[: len(content) // 3])
    read_record(long)
    with long.events.open("ab") as file:
        file.write(content[len(content) // 3 :])
    same(read_record(long), read_alone(long))
    assert cache.cached_bytes(long.events, cache_of(long)) > len(content) - 1000


def test_processes_read_a_long_record_that_cannot_be_cached(
    long: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_CACHE_DIR", "/proc/no-cache")
    same(read_record(long), read_alone(long))


def test_without_its_helpers_a_process_reads_all_by_itself(
    long: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Workers):
        """Loses its first process when that has read something."""

        def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
            answer = super().call(worker, method, *args)
            if args[0] > 0 and worker == 0:
                os.kill(self.processes[0], signal.SIGKILL)
            return answer

    monkeypatch.setattr(scanning, "Workers", Lost)
    same(read_record(long), read_alone(long))

    def refuse(*_: object) -> None:
        raise BlockingIOError("no more processes")

    cache.discard_columns(cache_of(long))
    monkeypatch.setattr(scanning, "Workers", refuse)
    same(read_record(long), read_alone(long))


@pytest.mark.parametrize("with_cache", [True, False])
def test_a_record_that_is_replaced_meanwhile_is_read_anew(
    long: RunDir, with_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_cache:
        monkeypatch.setenv("INSTAR_CACHE_DIR", "/proc/no-cache")
    fresh = b"".join(lines(9000, 8))

    class Replacing(Workers):
        def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
            if args[0] > 1_500_000 and long.events.stat().st_size != len(fresh):
                other = long.path / "other"
                other.write_bytes(fresh)
                other.replace(long.events)
            return super().call(worker, method, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "Workers", Replacing)
        record = read_record(long)
    same(record, read_alone(long))
    same(read_record(long), read_alone(long))


def test_a_record_that_grows_meanwhile_is_read_to_a_line(long: RunDir) -> None:
    class Growing(Workers):
        def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
            with long.events.open("ab") as file:
                file.write(b'"more"}\n' + encode_event(Train(step=args[0], loss=1.0), 1.0, 3))
            return super().call(worker, method, *args)

    before = long.events.stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "Workers", Growing)
        record = read_record(long)
    assert record.end == long.events.stat().st_size > before
    same(record, read_alone(long))


def test_pieces_begin_at_lines_and_end_where_the_record_did(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"ab\n" * 30 + b"x" * 50 + b"\n" + b"\n" * 9)
    text = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "PIECE_BYTES", 7)
        for size in range(20, len(text)):
            *inner, last = scanning._borders(path, 3, size)
            assert last == size
            assert all(3 < border < other for border, other in itertools.pairwise([*inner, last]))
            assert all(text[place - 1 : place] == b"\n" for place in inner)


def test_a_record_that_vanishes_is_said_to_be_unreadable(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        list(pieces(tmp_path / "events.jsonl"))
