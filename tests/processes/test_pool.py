"""Worker processes: calls, errors, signals, ends."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hosted
import numpy as np
import pytest
from hosted import open_nothing, open_thing

from instar.config.errors import ConfigError
from instar.processes.pool import WorkerLost, Workers

LIMIT_S = 30


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(open_thing, 2) as started:
        yield started


def ended(process: int) -> bool:
    """Whether a process is gone within the limit."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIMIT_S)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError.of("wrong", where="data.path", key="data.path"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        FileNotFoundError(2, "No such file", "there"),
        json.JSONDecodeError("wrong", "{]", 1),  # pickles itself without its notes
    ],
)
def test_errors_of_many_forms_keep_theirs(workers: Workers, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        workers.call(0, "fail", error).result()
    assert str(caught.value) == str(error)
    assert caught.value.__notes__ == ["a note of the thing"]


def test_an_error_that_cannot_be_sent_is_told(workers: Workers) -> None:
    with pytest.raises(RuntimeError, match=r"UnspeakableError: .*lock"):
        workers.call(0, "fail_unspeakably").result()
    with pytest.raises(TypeError, match="lock"):
        workers.call(0, "lock").result()
    with pytest.raises(AttributeError, match="no_such_method"):
        workers.call(0, "no_such_method").result()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        workers.call(0, "echo", lambda: None)
    assert workers.call(0, "echo", 1).result() == 1


def test_calls_go_to_the_worker_they_name_in_their_order(workers: Workers) -> None:
    for worker in (0, 1):
        assert workers.call(worker, "process").result() == workers.processes[worker]
    futures = [workers.call(number % 2, "echo", number) for number in range(50)]
    assert [future.result() for future in futures] == list(range(50))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5_000_000, dtype=np.int64),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(20)[::2],
        np.empty((3, 0)),
    ],
)
def test_arrays_arrive_whole_and_can_be_written_to(workers: Workers, array: np.ndarray) -> None:
    doubled = workers.call(1, "double", array).result()
    assert np.array_equal(doubled, 2 * array)
    doubled[...] = 0


def test_a_worker_imports_no_torch(workers: Workers) -> None:
    assert not workers.call(0, "has_imported", "torch").result()
    assert workers.call(0, "has_imported", "hosted").result()


def test_a_worker_uses_one_thread_unless_told_otherwise() -> None:
    assert "RAYON_NUM_THREADS" not in os.environ
    with Workers(open_thing, 1) as workers:
        assert workers.call(0, "environment", "RAYON_NUM_THREADS").result() == "1"


def test_signals_to_the_group_leave_workers_alone(workers: Workers) -> None:
    assert workers.call(0, "ignored_signals").result() == [True, True]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(workers.processes[0], number)
    assert workers.call(0, "echo", "alive").result() == "alive"


def test_a_killed_worker_is_an_error_that_names_it() -> None:
    with Workers(open_thing, 2) as workers:
        waiting = workers.call(1, "sleep_for_ever")
        behind = workers.call(1, "echo", 1)
        os.kill(workers.processes[1], signal.SIGKILL)
        for future in (waiting, behind, workers.call(1, "echo", 2)):
            with pytest.raises(
                WorkerLost, match=r"worker 1 of 2 \(process \d+\) was killed by SIGKILL"
            ):
                future.result(LIMIT_S)
        assert workers.call(0, "echo", 3).result() == 3


def test_a_worker_that_leaves_is_an_error_that_names_it() -> None:
    with Workers(open_thing, 1) as workers:
        left = workers.call(0, "leave", 3)
        with pytest.raises(
            WorkerLost, match=r"worker 0 of 1 \(process \d+\) ended with exit code 3"
        ):
            left.result(LIMIT_S)


def test_what_cannot_be_opened_is_an_error_and_leaves_nobody() -> None:
    with pytest.raises(FileNotFoundError, match="there is nothing to open") as caught:
        Workers(open_nothing, 2)
    process = int(str(caught.value.__cause__).split("(process ")[1].split(")")[0])
    assert ended(process)


def test_closing_ends_a_busy_worker() -> None:
    workers = Workers(open_thing, 2)
    waiting = workers.call(0, "sleep_for_ever")
    processes = workers.processes
    workers.close()
    workers.close()
    assert all(ended(process) for process in processes)
    with pytest.raises(WorkerLost, match="worker 0 of 2 is closed"):
        waiting.result(LIMIT_S)
    with pytest.raises(WorkerLost, match="worker 1 of 2 is closed"):
        workers.call(1, "process")


def test_workers_are_gone_when_their_process_is_killed() -> None:
    words = [sys.executable, "-c", "import hosted; hosted.hold(2)"]
    path = os.pathsep.join([str(Path(hosted.__file__).parent), *sys.path])
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.kill()
    assert all(ended(process) for process in processes)


def test_no_worker_is_no_answer() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        Workers(open_thing, 0)
