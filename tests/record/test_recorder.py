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


def test_a_record_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("torn")
    for name, link in ("soft", os.symlink), ("hard", os.link):
        link(target, tmp_path / name)
        with pytest.raises(RecordError, match=r"symbolic link|another name"):
            Recorder(tmp_path / name)
    assert target.read_text() == "torn"


def test_sync_covers_all_that_was_written(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder.write(Train(step=1, loss=2.0))
        assert recorder.synced_bytes < recorder.size
        recorder.sync()
        assert recorder.synced_bytes == recorder.size == path.stat().st_size


def test_a_write_long_after_the_last_sync_syncs(path: Path) -> None:
    with Recorder(path, sync_every_s=0.0) as recorder:
        recorder.write(Train(step=1, loss=2.0))
        assert recorder.synced_bytes == recorder.size > 0


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


def test_lines_that_a_full_disk_refuses_are_held_and_written_in_order(path: Path) -> None:
    warnings: list[str] = []
    recorder = Recorder(path, warn=warnings.append)
    with small_disk(1000):
        step = 0
        while path.stat().st_size + 300 < 1000 or step < 10:
            step += 1
            recorder.write(Train(step=step, loss=2.0))
        recorder.sync()
        assert path.read_bytes().endswith(b"}\n")
        assert len(steps(path)) < step
        assert recorder.synced_bytes <= recorder.size == path.stat().st_size
        assert len(warnings) == 1
        assert "File too large" in warnings[0]
        assert recorder.failure() is None
    recorder.write(Train(step=step + 1, loss=2.0))
    recorder.close()
    assert steps(path) == list(range(1, step + 2))
    assert [type(event) for event in read_events(path)].count(Warn) == 1
    assert len(warnings) == 2


def test_held_lines_are_written_when_no_other_line_follows(path: Path) -> None:
    with Recorder(path) as recorder:
        with small_disk(100):
            for step in range(3):
                recorder.write(Train(step=step, loss=2.0))
            assert path.stat().st_size < 100
        deadline = time.monotonic() + 30
        while path.stat().st_size == 0 or steps(path) != [0, 1, 2]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_line_that_was_written_in_part_is_completed(path: Path) -> None:
    """As on a disk that does not let a file be cut either."""
    recorder = Recorder(path)
    recorder._file._alone = False
    with small_disk(500):
        for step in range(5):
            recorder.write(Train(step=step, loss=2.0))
        assert path.stat().st_size == 500
    recorder.close()
    assert steps(path) == list(range(5))


@pytest.mark.parametrize("limit", ["MAX_HELD_BYTES", "MAX_REFUSED_S"])
def test_too_much_or_too_long_says_that_the_run_should_stop(
    path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instar.record.recorder.CLOSE_WAIT_S", 0.0)
    warnings: list[str] = []
    recorder = Recorder(path, warn=warnings.append)
    with small_disk(10):
        recorder.write(Train(step=1, loss=2.0))
        assert recorder.failure() is None
        monkeypatch.setattr(f"instar.record.recorder.{limit}", 0)
        assert "1 lines are held" in str(recorder.failure())
        recorder.close()
    assert "the last 1 lines of the record are lost" in warnings[-1]
    assert path.read_bytes() == b""


def test_sigkill_takes_no_acknowledged_record(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(instar.__file__).parents[1])}
    for kill_after in (1, 2, 30, 500):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(kill_after)]
            writer.kill()
            lines += writer.stdout.readlines()
        complete = [int(line) for line in lines if line.endswith(b"\n")]
        last = max(event.segment for event in read_events(path))
        steps = [e.step for e in read_events(path) if isinstance(e, Train) and e.segment == last]
        assert steps[: len(complete)] == complete
        assert len(steps) <= len(complete) + 1
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
