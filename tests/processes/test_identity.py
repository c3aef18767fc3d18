"""Processes that files name: a signal goes only to the one that holds the lock."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from instar.processes.identity import NotHolder, ProcessName, running_process, this_process
from instar.record.lock import lock_owner, named_holder, open_lock, signal_owner, write_holder


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any lock."""
    code = "import signal; signal.signal(2, signal.SIG_DFL); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def _name(pid: int) -> ProcessName:
    return ProcessName(pid, psutil.Process(pid).create_time(), ProcessName.of_this().host)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """A lock that this process holds."""
    path = tmp_path / "lock"
    descriptor = open_lock(path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write_holder(descriptor)
    yield path
    os.close(descriptor)


def test_a_signal_goes_to_the_process_that_holds_the_lock(lock: Path) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    try:
        assert lock_owner(lock) == os.getpid()
        signal_owner(lock, signal.SIGUSR1)
        assert signals == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_other_process_that_a_lock_names_is_signalled(
    lock: Path, victim: subprocess.Popen[bytes]
) -> None:
    name = _name(victim.pid)
    for text in (
        f"{victim.pid}\n",
        f"{name}\n",
        f"{ProcessName(victim.pid, 1.0, name.host)}\n",
        f"{ProcessName(victim.pid, name.started, 'elsewhere')}\n",
        "-1\n",
        "0 1.0 \n",
        f"-1 {name.started:.6f} {name.host}\n",
        f"1 {name.started:.6f} {name.host}\n",
        f"{9 * '9'} {name.started:.6f} {name.host}\n",
        "",
        "\0\n",
    ):
        lock.write_text(text)
        with pytest.raises(NotHolder):
            signal_owner(lock, signal.SIGINT)
    assert victim.poll() is None


def test_a_process_that_reads_a_lock_or_holds_it_under_another_name_is_not_signalled(
    lock: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text(str(ProcessName.of_this()))
    with other.open(), pytest.raises(NotHolder, match="does not hold it"):
        signal_owner(other, signal.SIGKILL)
    os.link(lock, tmp_path / "link")
    with pytest.raises(NotHolder, match="does not hold it"):
        signal_owner(tmp_path / "link", signal.SIGKILL)
    with pytest.raises(NotHolder, match="cannot be read"):
        signal_owner(tmp_path / "missing", signal.SIGKILL)


def test_what_a_file_says_of_a_process_is_compared_with_the_process() -> None:
    record = {"host": ProcessName.of_this().host} | this_process()
    assert running_process(record) == os.getpid()
    for damage in (
        {"pid": -1},
        {"pid": 0},
        {"pid": True},
        {"pid": 1 << 40},
        {"pid": str(os.getpid())},
        {"pid_started": None},
        {"pid_started": float("nan")},
        {"pid_started": float(str(record["pid_started"])) - 60},
        {"host": "elsewhere"},
        {"host": None},
    ):
        assert running_process(record | damage) is None, damage


def test_a_full_disk_leaves_a_lock_without_a_name(tmp_path: Path) -> None:
    descriptor = open_lock(tmp_path / "lock")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert named_holder(descriptor) is None
        assert lock_owner(tmp_path / "lock") == 0
    finally:
        os.close(descriptor)


def test_only_a_stopped_sibling_is_killed() -> None:
    code = "import sys; from instar.processes.identity import kill_stopped_sibling\n"
    code += "for line in sys.stdin: kill_stopped_sibling(int(line)); print(flush=True)"

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def kill(pid: int) -> None:
        assert killer.stdin is not None
        assert killer.stdout is not None
        killer.stdin.write(f"{pid}\n")
        killer.stdin.flush()
        killer.stdout.readline()

    killer, rank, other = start(), start(), start("another command")
    try:
        kill(rank.pid)  # it is not stopped
        for process in (rank, other):
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                pass
        for number in (-1, 0, 1 << 70, other.pid, os.getpid()):
            kill(number)
        assert (rank.poll(), other.poll()) == (None, None)
        kill(rank.pid)
        assert rank.wait(10) == -signal.SIGKILL
    finally:
        for process in (killer, rank, other):
            process.kill()
            process.communicate()
