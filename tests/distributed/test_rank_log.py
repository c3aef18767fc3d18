from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from instar.config.errors import ConfigError
from instar.distributed.failure import (
    LAUNCHER_VARIABLE,
    RECORD_VARIABLE,
    Interrupted,
    PeerError,
    log_of_failure,
    point_to_log,
    read_failure,
)
from instar.distributed.rank_log import MAX_HELD_BYTES, RankLog, rank_log_path, running_rank

Python = Callable[..., "subprocess.Popen[str]"]
logger = logging.getLogger("instar.test")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.delenv("INSTAR_LAUNCHER_PID", raising=False)
    return path


def fail(log: RankLog, step: int | None = None, run_dir: Path | None = None) -> None:
    with log:
        log.step = step
        if run_dir is not None:
            log.open(run_dir)
        raise ValueError("boom")


def test_lines_before_and_after_the_folder_is_known_are_in_the_log(tmp_path: Path) -> None:
    with RankLog(0) as log:
        logger.info("before")
        assert log.open(tmp_path) == rank_log_path(tmp_path, 0)
        logger.warning("after %d", 2)
    lines = rank_log_path(tmp_path, 0).read_text().splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"
    assert re.fullmatch(rf"\[RANK 0\] {time} INFO: before", lines[0])
    assert re.fullmatch(rf"\[RANK 0\] {time} WARNING: after 2", lines[1])
    assert len(lines) == 2


def test_a_line_longer_than_what_is_held_for_a_full_disk_is_written(tmp_path: Path) -> None:
    with RankLog(0) as log:
        log.open(tmp_path)
        logger.info("x" * 2 * MAX_HELD_BYTES)
        logger.info("after")
    text = rank_log_path(tmp_path, 0).read_text()
    assert "x" * 2 * MAX_HELD_BYTES in text
    assert text.endswith("after\n")


def test_a_second_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        with RankLog(0) as log:
            log.open(tmp_path)
            logger.info("started")
    assert rank_log_path(tmp_path, 0).read_text().count("started") == 2


def test_a_failure_that_the_launcher_cannot_be_told_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its temporary folder was tidied away."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.delenv("INSTAR_LAUNCHER_PID", raising=False)
    with pytest.raises(ValueError, match="boom"):
        fail(RankLog(0), step=7, run_dir=tmp_path)
    log = rank_log_path(tmp_path, 0).read_text()
    assert "rank 0 failed at step 7: ValueError: boom" in log
    assert "the launcher cannot be told" in log


def test_an_exception_is_in_the_record(record: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail(RankLog(3), step=120)
    failure = read_failure(record)
    assert failure is not None
    assert failure.sentence() == "rank 3 failed at step 120: ValueError: boom"
    assert (failure.exit_code, failure.secondary) == (4, False)


def test_torchrun_reads_the_record_too(record: Path) -> None:
    with pytest.raises(ValueError, match="boom"), RankLog(0):
        raise ValueError("boom")
    message = json.loads(record.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert 'raise ValueError("boom")' in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_the_traceback_is_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail(RankLog(0), run_dir=tmp_path)
    text = rank_log_path(tmp_path, 0).read_text()
    assert "ERROR: rank 0 failed: ValueError: boom\nTraceback" in text


def test_a_peers_failure_is_secondary(record: Path) -> None:
    error = PeerError("rank 1 …", what="saving", rank=1, exit_code=3, secondary=True)
    with pytest.raises(PeerError), RankLog(0):
        raise error
    failure = read_failure(record)
    assert failure is not None
    assert (failure.secondary, failure.exit_code) == (True, 3)


def test_an_interruption_is_no_failure(record: Path) -> None:
    with pytest.raises(Interrupted), RankLog(0):
        raise Interrupted("stopped")
    assert not record.exists()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError.of("n_embd is odd"), 2, "n_embd is odd"),
        (Interrupted("resume with: instar resume r1"), 75, "resume with"),
        (ValueError("boom"), 4, "rank 0 failed at step 7: ValueError: boom"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 4, "rank 0 failed at step 7: SystemExit: 0"),
    ],
)
def test_a_rank_ends_with_its_errors_code_and_says_why(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_rank() as rank:
        rank.log.step = 7
        raise error
    assert rank.code == code
    errors = capsys.readouterr().err
    assert message in errors
    assert bool(message) == bool(errors)


def test_under_instars_launcher_only_the_record_speaks(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_LAUNCHER_PID", "1")

    with running_rank() as rank:
        raise ValueError("boom")
    assert rank.code == 4
    assert capsys.readouterr().err == ""
    assert read_failure(record) is not None


def test_other_ranks_leave_the_terminal_to_rank_0(tmp_path: Path, python: Python) -> None:
    program = """
import os, sys, threading
from pathlib import Path
from instar.distributed.rank_log import RankLog
with RankLog(1) as log:
    print("before")
    log.open(Path(sys.argv[1]))
    print("printed")
    os.write(2, b"from C++\\n")
    thread = threading.Thread(target=lambda: 1 / 0, name="loader")
    thread.start()
    thread.join()
print("after")
"""
    assert python(program, str(tmp_path)).communicate(timeout=30) == ("before\nafter\n", "")
    text = rank_log_path(tmp_path, 1).read_text()
    assert "printed\nfrom C++\n" in text
    assert "ERROR: uncaught in thread loader\nTraceback" in text


def test_a_crash_in_c_leaves_its_stack_in_the_log(tmp_path: Path, python: Python) -> None:
    program = """
import faulthandler, sys
from pathlib import Path
from instar.distributed.rank_log import RankLog
with RankLog(0) as log:
    log.open(Path(sys.argv[1]))
    faulthandler._sigsegv()
"""
    python(program, str(tmp_path)).communicate(timeout=30)
    assert "Segmentation fault" in rank_log_path(tmp_path, 0).read_text()


FULL = """
import logging, os, sys
from pathlib import Path
from instar.distributed.rank_log import RankLog, running_rank

def work(log):
    log.open(Path(sys.argv[1]))
    print("printed before")
    file = os.dup(log._appender.fileno())
    full = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
    os.dup2(full, log._appender.fileno())
    print("printed", flush=True)
    print("on stderr", file=sys.stderr)
    logging.getLogger("instar.test").info("logged")
    if sys.argv[2] == "freed":
        os.dup2(file, log._appender.fileno())

with running_rank() as rank:
    work(rank.log)
sys.exit(rank.code)
"""


@pytest.mark.parametrize("ends", ["freed", "full"])
def test_a_full_disk_under_a_log_ends_nothing(tmp_path: Path, python: Python, ends: str) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    process = python(FULL, str(tmp_path), ends, **env)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    # what is lost is said where somebody looks
    warning = f"warning: the disk refused 3 writes to {rank_log_path(tmp_path, 1)}\n"
    assert (output, errors) == ("", warning if ends == "full" else "")
    lines = rank_log_path(tmp_path, 1).read_text().splitlines()
    assert lines[:3] == ["printed before", "printed", "on stderr"][: len(lines)]
    assert len(lines) == (4 if ends == "freed" else 1)


def test_a_log_that_cannot_be_opened_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank_log_path(tmp_path, 0).mkdir(parents=True)
    with RankLog(0) as log:
        log.open(tmp_path)
        logger.info("nobody hears this")
    assert "cannot open" in capfd.readouterr().err


def test_a_launcher_that_looks_meanwhile_sees_the_path_of_a_log_or_none(tmp_path: Path) -> None:
    """A run points to its log again after each of its branches."""
    record, log = tmp_path / "error.json", tmp_path / "run" / "logs" / "rank_0.log"
    environment = {RECORD_VARIABLE: str(record), LAUNCHER_VARIABLE: "1"}

    def point_often() -> None:
        for _ in range(2000):
            point_to_log(log, environment)

    assert log_of_failure(record) is None
    writer = Thread(target=point_often)
    writer.start()
    paths = set[Path | None]()
    while writer.is_alive():
        paths.add(log_of_failure(record))
    assert paths - {None} == {log}
