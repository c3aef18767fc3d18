import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import instar
from instar.record.events import RecordError, RunStarted, Train, Warn, read_events
from instar.record.recorder import Recorder, Silent

WRITER = """
import itertools, sys
from pathlib import Path
from instar.record.events import RunStarted, Train
from instar.record.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
recorder.write(RunStarted(run_id="x"))
for step in itertools.count(1):
    recorder.write(Train(step=step, loss=1.0 / step))
    print(step, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def steps(path: Path) -> list[int]:
    return [event.step for event in read_events(path) if isinstance(event, Train)]


def test_events_get_the_time_and_the_segment_of_their_writing(path: Path) -> None:
    with Recorder(path, clock=lambda: 12.5) as recorder:
        recorder.write(RunStarted(run_id="r7f3a"))
        recorder.write(Train(step=1, loss=2.0))
    assert [(event.time, event.segment) for event in read_events(path)] == [(12.5, 1)] * 2


def test_every_start_opens_a_segment(path: Path) -> None:
    for start in range(3):
        with Recorder(path) as recorder:
            recorder.write(RunStarted(run_id="r7f3a", step=start))
            recorder.write(Train(step=start, loss=2.0))
    assert [event.segment for event in read_events(path)] == [1, 1, 2, 2, 3, 3]


def test_what_a_write_returned_for_is_in_the_file(path: Path) -> None:
    with Recorder(path) as recorder:
        for step in range(3):
            recorder.write(Train(step=step, loss=2.0))
            assert steps(path)[-1] == step
            assert recorder.size == path.stat().st_size


def test_a_torn_last_line_is_cut_off_and_said_so(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder.write(RunStarted(run_id="r7f3a"))
    with path.open("ab") as file:
        file.write(b'{"v":1,"kind":"tra')
    with Recorder(path) as recorder:
        recorder.write(RunStarted(run_id="r7f3a"))
    first, warning, second = read_events(path)
    assert (first.segment, second.segment) == (1, 2)
    assert isinstance(warning, Warn)
    assert warning.message == "cut off a torn last line of 18 bytes"


def test_two_writers_of_one_record_are_refused(path: Path) -> None:
    with Recorder(path), pytest.raises(RecordError, match="written by another process"):
        Recorder(path)
    Recorder(path).close()


def test_sync_covers_all_that_was_written(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder.write(Train(step=1, loss=2.0))
        assert recorder.synced < recorder.size
        recorder.sync()
        assert recorder.synced == recorder.size == path.stat().st_size


def test_a_write_long_after_the_last_sync_syncs(path: Path) -> None:
    with Recorder(path, sync_every_s=0.0) as recorder:
        recorder.write(Train(step=1, loss=2.0))
        assert recorder.synced == recorder.size > 0


def test_closing_twice_does_nothing(path: Path) -> None:
    recorder = Recorder(path)
    recorder.close()
    recorder.close()


def test_writing_after_closing_is_an_error(path: Path) -> None:
    recorder = Recorder(path)
    recorder.close()
    with pytest.raises(RecordError, match="cannot write"):
        recorder.write(Train(step=1, loss=2.0))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot open .*No such file"):
        Recorder(tmp_path / "missing" / "events.jsonl")


def test_the_other_ranks_record_nothing() -> None:
    silent = Silent()
    silent.write(Train(step=1, loss=2.0))
    silent.sync()
    silent.close()


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a full disk; pytest's own output neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_an_error_and_leaves_only_whole_lines(path: Path) -> None:
    recorder = Recorder(path)
    with small_disk(1000):
        while recorder.size < 800:
            recorder.write(Train(step=1, loss=2.0))
        with pytest.raises(RecordError, match="cannot write"):
            recorder.write(Warn(message="x" * 300))
    whole = path.read_bytes()
    assert whole.endswith(b"}\n")
    os.truncate(path, 0)  # room again
    recorder.write(Train(step=77, loss=2.0))
    recorder.close()
    assert steps(path) == [77]


def test_sigkill_takes_no_acknowledged_record(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(instar.__file__).parents[1])}
    for kill_after in (1, 2, 30, 500):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            acknowledged = [writer.stdout.readline() for _ in range(kill_after)]
            writer.kill()
            acknowledged += writer.stdout.readlines()
        whole = [int(line) for line in acknowledged if line.endswith(b"\n")]
        last = max(event.segment for event in read_events(path))
        kept = [e.step for e in read_events(path) if isinstance(e, Train) and e.segment == last]
        assert kept[: len(whole)] == whole
        assert len(kept) <= len(whole) + 1
    assert last == 4


def test_one_call_takes_less_than_50_microseconds(path: Path) -> None:
    event = Train(
        step=1000, samples=64000, tokens=524_000_000, epoch=1.5, flops=1e18, wall_s=12.3,
        active_s=11.1, loss=3.912, grad_norm=0.81, lr=3e-4, tokens_per_s=1.02e6, mfu=0.41,
        memory_bytes=1 << 30,
    )  # fmt: skip
    took = []
    with Recorder(path) as recorder:
        for _ in range(2000):
            start = time.perf_counter()
            recorder.write(event)
            took.append(time.perf_counter() - start)
    assert statistics.median(took) < 50e-6
