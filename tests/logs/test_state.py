"""Whether a run goes on, has ended, and how."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from written_runs import BEGAN, Writer, writing

from instar.distributed.rank_log import RankLog
from instar.logs.query.state import NO_REASON, QUIET_S, RunStatus, last_error, run_status
from instar.logs.read.record import read_record
from instar.processes.identity import this_process
from instar.record.events import Eval, Failed, RunFinished, RunStarted, Saved, Stop
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, hold


def status(run: RunDir, now: float = BEGAN + 1e6) -> RunStatus:
    record = read_record(run)
    return run_status(run, [entry.event for entry in record.events], BEGAN + 10, now)


def begin_run(folder: Path, **more: object) -> RunDir:
    with writing(folder) as writer:
        writer.start(**more)
        writer.train(10, 3.0)
    return RunDir(folder)


def log(run: RunDir, rank: int, seconds: float, text: str) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + seconds))
    with run.log(rank).open("a") as file:
        file.write(f"[RANK {rank}] {when} {text}\n")


def test_a_run_whose_lock_is_held_runs(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    with hold(run):
        assert status(run) == RunStatus("running", "", False, "", os.getpid())
    assert status(run).state == "crashed"


def test_a_run_in_which_nothing_was_trained_yet_is_stopped_whenever_it_was_made(
    tmp_path: Path,
) -> None:
    """As the run of an imported or a grown model."""
    run = RunDir(tmp_path)
    run.config.touch()
    run.await_start()
    for now in (BEGAN + 11, BEGAN + 1e6):
        result = status(run, now)
        assert (result.state, result.go_on) == ("stopped", f"instar resume {tmp_path}")
        assert result.reason == "nothing trained in it yet"
    with hold(run):
        assert status(run).state == "running"
    assert status(run).state == "crashed"  # a process has had it since


def test_a_run_whose_holder_was_killed_has_crashed(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from instar.record.rundir import RunDir, hold\n"
        "with hold(RunDir(Path(sys.argv[1]))): print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert status(run).process == process.pid
        process.kill()
        process.wait()
        begins_again = f"instar resume {run.path}"
        assert status(run) == RunStatus("crashed", NO_REASON, False, begins_again, None)


@pytest.mark.parametrize(("resumable", "state"), [(False, "finished"), (True, "stopped")])
def test_a_run_that_said_why_it_stopped(tmp_path: Path, resumable: bool, state: str) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
        writer.save(10)
        writer.stop(10, "SIGTERM", resumable=resumable)
    result = status(writer.run)
    assert (result.state, result.reason, result.resumable) == (state, "SIGTERM", True)
    assert result.go_on == (f"instar resume {writer.run.path}" if resumable else "")


@pytest.mark.parametrize("end", ["stop", "finished", "failed"])
def test_an_end_holds_while_its_process_puts_things_away(tmp_path: Path, end: str) -> None:
    run = begin_run(tmp_path / "run")
    with hold(run), Recorder(run.events) as record:
        record.write(RunStarted(run_id="aaaaa", step=10))
        record.write(Saved(step=10, path=str(run.checkpoints / "step-10")))
        record.write(Eval(step=10, split="test", loss=1.0))
        assert status(run).state == "running"  # at its last save, and its final test
        if end == "failed":
            record.write(Failed(message="OSError: no space", rank=0, step=10))
        else:
            record.write(Stop(step=10, reason="SIGTERM", resumable=True))
        if end == "finished":
            record.write(RunFinished(step=10))
        result = status(run)
    assert (result.state, result.process) == ("crashed" if end == "failed" else "stopped", None)
    assert status(run) == result


def test_an_ended_run_that_another_process_has_taken_runs_again(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
        writer.stop(10, "SIGTERM", resumable=True)
    with hold(writer.run):
        assert status(writer.run).state == "running"
    assert status(writer.run).state == "stopped"


def test_a_test_made_afterwards_does_not_change_how_a_run_ended(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
        writer.stop(10)
    with writing(tmp_path / "run") as writer:
        writer.write(Eval(step=5, split="test", loss=1.0))
    assert status(writer.run).state == "finished"


def test_a_run_gone_on_with_counts_with_its_last_segment(tmp_path: Path) -> None:
    def going_on(writer: Writer) -> None:
        writer.start(step=10)
        writer.train(12, 2.0)

    with writing(tmp_path / "run") as writer:
        writer.start()
        writer.stop(10, "SIGTERM", resumable=True)
        going_on(writer)
    assert status(writer.run).state == "crashed"
    with writing(tmp_path / "run") as writer:
        writer.stop(12)
    assert status(writer.run).state == "finished"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("rank 1 failed at step 7: ValueError: no", "rank 1 failed at step 7: ValueError: no"),
        ("ValueError: no", "rank 1 failed at step 7: ValueError: no"),
    ],
    ids=["whole sentence", "cause alone"],
)
def test_a_run_that_said_why_it_failed(tmp_path: Path, message: str, reason: str) -> None:
    run = begin_run(tmp_path / "run")
    with writing(run.path) as writer:
        writer.recorder.write(Failed(message=message, rank=1, step=7))
    assert (status(run).state, status(run).reason) == ("crashed", reason)


def test_a_run_that_could_not_say_why_is_explained_by_its_logs(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    log(run, 0, -50, "ERROR: rank 0 failed: of an earlier segment")
    assert status(run).reason == NO_REASON
    log(run, 0, 20, "ERROR: rank 0 failed at step 10: PeerLost: rank 1 is gone")
    assert status(run).reason == "rank 0 failed at step 10: PeerLost: rank 1 is gone"
    log(run, 1, 21, "ERROR: rank 1 failed at step 10: ValueError: the cause")
    log(run, 1, 22, "INFO: last words")
    assert status(run).reason == "rank 1 failed at step 10: ValueError: the cause"


def test_what_the_interpreter_itself_dies_of_is_an_error(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    run.log(0).write_bytes(b"\xff\xfe\nFatal Python error: Segmentation fault\n\nThread 0x1:\n")
    assert last_error(run) == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize("obstacle", ["another host", "no lock"])
def test_where_the_lock_cannot_be_asked_a_fresh_record_runs(tmp_path: Path, obstacle: str) -> None:
    more = {"machine": {"host": "elsewhere"}} if obstacle == "another host" else {}
    run = begin_run(tmp_path / "run", **more)
    if obstacle == "no lock":
        run.lock.unlink()
    last_event = BEGAN + 10
    assert status(run, now=last_event + QUIET_S - 1).state == "running"
    assert status(run, now=last_event + QUIET_S + 1).state == "crashed"


def test_where_the_lock_cannot_be_asked_a_run_whose_process_is_there_runs(tmp_path: Path) -> None:
    this_machine = {"host": platform.node()} | this_process()
    dead_process = this_machine | {"pid_started": this_machine["pid_started"] - 60}
    for name, machine, state in ("a", this_machine, "running"), ("b", dead_process, "crashed"):
        run = begin_run(tmp_path / name, machine=machine)
        run.lock.unlink()
        assert status(run).state == state


def test_a_checkpoint_that_is_not_whole_cannot_be_gone_on_with(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    with writing(run.path) as writer:
        writer.save(10)
    assert status(run).go_on == f"instar resume {run.path}"
    (run.checkpoints / "step-10" / "manifest.json").unlink()
    assert (status(run).resumable, status(run).go_on) == (False, "")


def test_a_path_with_a_space_is_quoted_in_the_command(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "my run")
    with writing(run.path) as writer:
        writer.save(10)
    assert status(run).go_on == f"instar resume '{run.path}'"


def test_the_logs_of_another_time_zone_explain_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin_run(tmp_path / "run")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        with RankLog(0) as rank_log:
            rank_log.open(run.path)
            logging.getLogger("instar").error("rank 0 failed at step 10: RuntimeError: no memory")
        monkeypatch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        assert last_error(run, time.time() - 60).endswith("RuntimeError: no memory")
        assert last_error(run, time.time() + 60) == ""
    finally:
        monkeypatch.undo()
        time.tzset()
