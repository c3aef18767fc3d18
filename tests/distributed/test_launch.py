from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from instar.config.errors import ConfigError
from instar.distributed.launch import launch_ranks, torchrun_line
from instar.distributed.placement import LaunchOptions
from instar.processes.child import GONE, process_state

Launcher = Callable[[str, int], Any]

# A rank without torch: starts in a moment, and waits for ever unless told otherwise.
PLAIN = """
import os, signal, sys, threading, time
from pathlib import Path
from typing import Any
from instar.config.errors import ConfigError
from instar.distributed.rank_log import running_rank
from instar.distributed.signals import StopSignal, exit_with_parent, exit_now, training_started

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
# whole or not at all: a rank may be killed while it writes
(folder / f"new-pid-{rank}").write_text(str(os.getpid()))
(folder / f"new-pid-{rank}").rename(folder / f"pid-{rank}")

def note(name):
    (folder / name).write_text(str(time.time()))

def meet():
    # Ranks meet in a folder of pipes here: whoever opens one waits for the other end.
    pipe = folder / "pipe"
    try:
        os.mkfifo(pipe)
    except FileExistsError:
        pass
    os.close(os.open(pipe, os.O_WRONLY if rank else os.O_RDONLY))

def for_ever():
    threading.Event().wait()
"""

# Ranks that step in time and stop together, as the trainer does.
STEPPING = (
    PLAIN
    + """
def work(log):
    exit_with_parent(os.environ)
    with StopSignal() as stop:
        from instar.config.schema import ParallelConfig
        from instar.distributed.agree import FlagReducer, Flag
        from instar.distributed.failure import Interrupted
        from instar.distributed.world import join_group
        with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
            log.open(folder)
            pulse = FlagReducer(world)
            for log.step in range(10**9):
                if log.step == 100 and world.is_main:
                    print("stepping", flush=True)
                if fails(log.step, rank):
                    note("raised")
                    raise ValueError("boom")
                if pulse.send(Flag.STOP if stop.requested else Flag.NONE).wait().stop:
                    note(f"saved-{rank}-{log.step}")
                    raise Interrupted("resume with: instar resume")

with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_no_orphans(launch: Any, count: int) -> None:
    pids = launch.pids()
    assert len(pids) == count
    assert not any(map(is_running, pids))


def assert_gone(launch: Any, limit_s: float) -> None:
    """All ranks end within the limit; whoever adopts them may take its time to reap them."""
    deadline = time.monotonic() + limit_s
    while any(process_state(pid) != GONE for pid in launch.pids()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_raises_ends_all_and_is_named(launcher: Launcher) -> None:
    toy = STEPPING.replace(
        "def work", "def fails(step, rank): return step == 120 and rank == 1\ndef work"
    )
    launch = launcher(toy, 2)
    code, errors, end_time = launch.end()
    assert code == 4
    assert "rank 1 failed at step 120: ValueError: boom" in errors
    assert f"last lines of {launch.folder / 'logs' / 'rank_1.log'}" in errors
    assert 'raise ValueError("boom")' in errors
    assert "torch" not in errors
    assert end_time - float((launch.folder / "raised").read_text()) < 5
    assert_no_orphans(launch, 2)


def test_a_peer_that_waits_elsewhere_is_ended_too(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
def work(log):
    log.step = 7
    meet()
    if rank == 1:
        note("raised")
        raise OSError("disk gone")
    for_ever()
with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
    )
    launch = launcher(toy, 2)
    code, errors, end_time = launch.end()
    assert code == 4
    assert "rank 1 failed at step 7: OSError: disk gone" in errors
    assert end_time - float((launch.folder / "raised").read_text()) < 5
    assert_no_orphans(launch, 2)


def test_a_killed_rank_is_named(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
def work(log):
    log.open(folder)
    import logging
    logging.getLogger("instar.toy").info("alive and well")
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for_ever()
with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
    )
    launch = launcher(toy, 2)
    code, errors, _ = launch.end()
    assert code == 4
    assert "rank 1 was killed by SIGKILL" in errors
    assert "INFO: alive and well" in errors
    assert_no_orphans(launch, 2)


def test_a_rank_that_dies_before_it_has_a_log_still_has_last_lines(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
meet()
if rank == 1:
    import no_such_module
for_ever()
"""
    )
    code, errors, _ = launcher(toy, 2).end()
    assert code == 4
    assert "rank 1 ended with exit code 1" in errors
    assert "No module named 'no_such_module'" in errors


def test_a_config_mistake_is_told_once(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
def work(log):
    raise ConfigError.of("n_embd is odd", where="a.yaml:3:1")
with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
    )
    code, errors, _ = launcher(toy, 2).end()
    assert code == 2
    assert errors == "a.yaml:3:1: n_embd is odd\n1 error. Nothing was started.\n"


def test_all_ranks_stop_at_the_same_step(launcher: Launcher) -> None:
    toy = STEPPING.replace("def work", "def fails(step, rank): return False\ndef work")
    launch = launcher(toy, 2)
    launch.read_until("stepping")
    launch.press(signal.SIGINT)
    code, errors, _ = launch.end()
    assert code == 75
    assert "SIGINT: stopping" in errors
    assert errors.endswith("resume with: instar resume\n")
    checkpoints = sorted(file.name.split("-")[1:] for file in launch.folder.glob("saved-*"))
    assert [rank for rank, _ in checkpoints] == ["0", "1"]
    assert checkpoints[0][1] == checkpoints[1][1]
    assert_no_orphans(launch, 2)


def test_a_second_signal_ends_all_at_once(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
with StopSignal(moment_s=0) as stop:
    meet()
    if rank == 0:
        print("ready", flush=True)
        stop.wait()
        print("asked", flush=True)
    for_ever()
"""
    )
    launch = launcher(toy, 2)
    launch.read_until("ready")
    launch.press(signal.SIGINT)
    launch.read_until("asked")
    # The launcher counts what comes within 0.2 s of the first as the same Ctrl-C.
    with pytest.raises(subprocess.TimeoutExpired):
        launch.process.wait(0.4)
    press_time = launch.press(signal.SIGINT)
    code, _, end_time = launch.end()
    assert code == 130  # nothing was saved
    assert end_time - press_time < 3
    assert_no_orphans(launch, 2)


def test_a_signal_while_the_ranks_start_leaves_nothing_behind(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
print("starting", flush=True)
for_ever()
"""
    )
    launch = launcher(toy, 2)
    launch.read_until("starting")
    press_time = launch.press(signal.SIGTERM)
    code, _, end_time = launch.end()
    assert code == 130
    assert end_time - press_time < 5
    assert not any(map(is_running, launch.pids()))


def test_ranks_stop_when_their_launcher_is_killed(launcher: Launcher) -> None:
    toy = (
        PLAIN
        + """
from instar.distributed.failure import Interrupted
def work(log):
    exit_with_parent(os.environ)
    # as in a run: the signal comes once for each thread of the launcher that ends
    with StopSignal(last=True) as stop:
        training_started()
        meet()
        if rank == 0:
            print("ready", flush=True)
        stop.wait()
with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
    )
    launch = launcher(toy, 2)
    launch.read_until("ready")
    launch.process.kill()
    # Only rank 0 holds the pipe of the launcher's stdout; whoever is last removes the folder, and that may be rank 1.
    assert_gone(launch, 90)
    assert not [*launch.folder.rglob("instar-*")]


STARTING = (
    PLAIN
    + """
exit_with_parent(os.environ)

def wait_at(moment):
    if moment == at and rank == 1:
        print("waiting", flush=True)
        for_ever()

def work(log):
    with StopSignal(last=True):
        wait_at("the store")
        from instar.config.schema import ParallelConfig
        from instar.distributed import world as meeting
        from instar.distributed.agree import raise_on_all_ranks
        connect = meeting._connect
        def connect_late(*arguments):
            wait_at("the process group")
            connect(*arguments)
        meeting._connect = connect_late
        with meeting.join_group(ParallelConfig(timeout_s=60), "cpu") as world:
            with raise_on_all_ranks(world, "preparing data"):
                wait_at("an agreement")
            wait_at("nothing")
            for_ever()
wait_at("imports")
with running_rank() as rank_run:
    work(rank_run.log)
exit_now(rank_run.code)
"""
)


@pytest.mark.parametrize(
    "moment", ["imports", "the store", "the process group", "an agreement", "nothing"]
)
def test_ranks_that_start_leave_at_once_when_their_launcher_is_killed(
    launcher: Launcher, moment: str
) -> None:
    """Rank 1 waits there for ever, so that rank 0 waits for it."""
    launch = launcher(STARTING.replace("== at", f"== {moment!r}"), 2)
    # what rank 1 says before it has a log is kept in a file
    while not any("waiting" in f.read_text() for f in launch.folder.rglob("stdout.log")):
        with pytest.raises(subprocess.TimeoutExpired):
            launch.process.wait(0.01)
    launch.process.kill()
    assert_gone(launch, 3)
    # a rank that has no handlers yet is ended by the kernel's signal and cleans nothing up
    assert moment == "imports" or not [*launch.folder.rglob("instar-*")]


def test_the_torchrun_line_runs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    line = torchrun_line(["my runs/a.yaml", "--set", "seed=3"], 4)
    assert line == "torchrun --nproc_per_node=4 -m instar.train 'my runs/a.yaml' --set seed=3"
    assert "--max-restarts=3 -m" in torchrun_line(["a.yaml"], 4, max_restarts=3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads, devices, *_ = shlex.split(torchrun_line(["a.yaml"], 2, [1, 3]))
    assert threads.startswith("OMP_NUM_THREADS=")
    assert devices == "INSTAR_DEVICES=1,3"
    assert "--master-port=29511 -m" in torchrun_line(["a.yaml"], 2, port=29511)


def test_fewer_devices_than_ranks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="2 ranks, but 1 devices"):
        launch_ranks(LaunchOptions([], 2, [0]))


def test_devices_are_looked_for_before_a_rank_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError, match="cuda:0 does not exist: CUDA_VISIBLE_DEVICES= leaves 0 GPUs"
    ):
        launch_ranks(LaunchOptions([], 2, device="cuda"))


def test_no_ranks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        launch_ranks(LaunchOptions([], 0))
