"""Process trees: started, stopped and ended with their launcher; locks live as long as a tree."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from instar.extensions.fleet.engines.spawner import Command, Spawner, Tree


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    new_spawner = Spawner()
    yield new_spawner
    new_spawner.close()


def _command(folder: Path, *argv: str, grace_s: float = 1.0) -> Command:
    return Command(
        argv, dict(os.environ), folder, folder / "log", folder / "result", grace_s=grace_s
    )


def _messages(tree: Tree, until: str = "gone") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while not (messages and until in messages[-1]):
        assert select.select([tree], [], [], 60)[0], messages
        messages += tree.receive()
    if "gone" in messages[-1]:
        tree.close()
    return messages


def test_a_command_runs_with_its_log_and_its_result(spawner: Spawner, tmp_path: Path) -> None:
    argv = ("sh", "-c", "echo out; echo err >&2; exit 3")
    *_, exit_message, gone_message = _messages(spawner.start(_command(tmp_path, *argv)))
    assert exit_message["status"] == 3
    assert not exit_message["stopped"]
    assert gone_message == {"gone": True}
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    assert '"status": 3' in (tmp_path / "result").read_text()


def test_a_command_that_cannot_be_started(spawner: Spawner, tmp_path: Path) -> None:
    error, gone_message = _messages(spawner.start(_command(tmp_path, "no-such-command")))
    assert error["error"] == "cannot start no-such-command: No such file or directory"
    assert gone_message == {"gone": True}


def test_signals_reach_a_command_as_they_would_in_a_shell(spawner: Spawner, tmp_path: Path) -> None:
    """The shim's own handlers are not inherited."""
    code = "import signal; print([signal.getsignal(n) is signal.SIG_DFL for n in (1, 3, 15, 17)])"
    _messages(spawner.start(_command(tmp_path, sys.executable, "-c", code)))
    assert (tmp_path / "log").read_text() == "[True, True, True, True]\n"


HANDLES = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trap '' TERM; echo ready; sleep 0.5; exit 0", False),
        ("trap '' TERM; echo ready; sleep 0.5; exit 3", True),
        ("trap 'exit 0' TERM; echo ready; sleep 0.5 & wait", True),
        (f"trap '' TERM; {sys.executable} -c '{HANDLES}'; exit 0", True),
    ],
)
def test_a_command_that_ignores_the_signal_and_succeeds_was_not_stopped(
    spawner: Spawner, tmp_path: Path, words: str, expected: bool
) -> None:
    """It would be run again by a launcher that resumes, although it did all that it had to."""
    tree = spawner.start(_command(tmp_path, "sh", "-c", words, grace_s=30))
    _messages(tree, until="pid")
    while (tmp_path / "log").read_text() != "ready\n":
        time.sleep(0.01)
    tree.stop(signal.SIGTERM, 30)
    exit_message, _ = _messages(tree)
    assert exit_message["stopped"] is expected
    assert f'"stopped": {str(expected).lower()}' in (tmp_path / "result").read_text()


def test_a_command_that_ended_before_its_shim_heard_of_a_stop_was_not_stopped(
    spawner: Spawner, tmp_path: Path
) -> None:
    tree = spawner.start(_command(tmp_path, "sh", "-c", "sleep 0.5"))
    (start_message,) = _messages(tree, until="pid")
    command = psutil.Process(start_message["pid"])
    shim = command.parent()
    assert shim is not None
    shim.suspend()
    try:
        while command.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        tree.stop(signal.SIGTERM, 1.0)
    finally:
        shim.resume()
    exit_message, _ = _messages(tree)
    assert exit_message["status"] == 0
    assert not exit_message["stopped"]


@pytest.mark.parametrize("words", ["exit 3", "kill -9 $$"])
def test_temporary_files_are_deleted_with_their_tree(
    spawner: Spawner, tmp_path: Path, words: str
) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path / "base")}
    (tmp_path / "base").mkdir()
    text = f'mkdir "$TMPDIR/folder"; echo "$TMPDIR"; touch "$TMPDIR/folder/file"; {words}'
    command = replace(_command(tmp_path, "sh", "-c", text), env=env, scratch=True)
    _messages(spawner.start(command))
    scratch_folder = Path((tmp_path / "log").read_text().strip())
    assert scratch_folder.parent == tmp_path / "base"
    assert len(scratch_folder.name) < 24
    assert not list(scratch_folder.parent.iterdir())
    env["TMPDIR"] = str(tmp_path / "missing")  # then it is as the command finds it
    _messages(spawner.start(replace(command, env=env)))
    assert str(tmp_path / "missing") in (tmp_path / "log").read_text()


DAEMON = "(setsid sh -c 'trap \"\" TERM; sleep 60' &) ; trap '' TERM; sleep 60"


def test_a_tree_ends_with_its_daemons(spawner: Spawner, tmp_path: Path) -> None:
    tree = spawner.start(_command(tmp_path, "sh", "-c", DAEMON))
    (start_message,) = _messages(tree, until="pid")
    children = _descendants_when(start_message["pid"], 1)
    began = time.monotonic()
    tree.stop(signal.SIGTERM, 0.5)
    *_, exit_message, _ = _messages(tree)
    assert exit_message["status"] == -signal.SIGKILL
    assert exit_message["stopped"]
    assert time.monotonic() - began < 10
    assert not any(child.is_running() for child in children)


def test_processes_that_a_finished_command_leaves_are_ended(
    spawner: Spawner, tmp_path: Path
) -> None:
    tree = spawner.start(_command(tmp_path, "sh", "-c", "setsid sleep 60 & echo $! > left"))
    *_, exit_message, _ = _messages(tree)
    assert exit_message["status"] == 0
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


def test_a_lock_is_held_until_the_tree_has_ended(spawner: Spawner, tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    tree = spawner.start(_command(tmp_path, "sleep", "60"), [lock])
    os.close(lock)
    _messages(tree, until="pid")
    with (tmp_path / "lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tree.stop(signal.SIGTERM, 5.0)
        _messages(tree)
        deadline = time.monotonic() + 10
        while True:  # the helper closes its copy a moment later
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_killed_shim_takes_its_tree_with_it(spawner: Spawner, tmp_path: Path) -> None:
    tree = spawner.start(_command(tmp_path, "sh", "-c", DAEMON))
    (start_message,) = _messages(tree, until="pid")
    command = psutil.Process(start_message["pid"])
    children = _descendants_when(start_message["pid"], 1)
    shim = command.parent()
    assert shim is not None
    shim.kill()
    assert _messages(tree) == [{"gone": True}]
    psutil.wait_procs([command, *children], timeout=10)
    assert not any(process.is_running() for process in (command, *children))


LAUNCHER = """\
import sys, time
from pathlib import Path
from instar.extensions.fleet.engines.spawner import Command, Spawner
folder = Path(sys.argv[1])
spawner, trees = Spawner(), []
for n in range(3):
    command = Command(("sh", "-c", sys.argv[2]), {"PATH": "/usr/bin:/bin"}, folder, folder / f"log{n}", folder / f"result{n}", grace_s=1.0)
    trees.append(spawner.start(command))
time.sleep(1)
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", LAUNCHER, str(tmp_path), f"echo $$ >> pids; {DAEMON}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        pids = [int(text) for text in (tmp_path / "pids").read_text().split()]
        trees = [psutil.Process(pid) for pid in pids]
        every = [*trees, *(child for tree in trees for child in tree.children(recursive=True))]
        launcher.kill()
    _, alive = psutil.wait_procs(every, timeout=10)
    assert len(every) > 3
    assert not alive
    deadline = time.monotonic() + 10
    while not (tmp_path / "result0").exists():  # a shim writes it when its command has ended
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _descendants_when(pid: int, min_count: int) -> list[psutil.Process]:
    """The other processes of a tree, once there are some."""
    while True:
        shim = psutil.Process(pid).parent()
        assert shim is not None
        descendants = [child for child in shim.children(recursive=True) if child.pid != pid]
        if len(descendants) >= min_count and any(child.name() == "sleep" for child in descendants):
            return descendants
        time.sleep(0.02)
