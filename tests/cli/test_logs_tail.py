"""`instar logs tail`: the end of what a run says, and what it says next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_runs import write_run, writing

from instar.cli.main import main
from instar.logs.query.tail import last_events, last_lines
from instar.record.rundir import RunDir, hold

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return write_run(Path("runs/tail-abcde"), {step: 4.0 - step / 100 for step in range(1, 101)})


@contextmanager
def typed(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command whose lines are read as they come."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "instar.cli.main", "logs", "tail", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_last_events_are_shown_as_the_console_shows_them(run: RunDir, capsys: Capture) -> None:
    assert main(["logs", "tail", "-n", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "    100  6.40k tok  loss 3.000  lr 1.0e-3  640 tok/s",
        f"    100  saved {run.checkpoints / 'step-100'}",
        f"done  100 steps  6.40k tok  50s active  → {run.path}",
    ]


@pytest.mark.usefixtures("run")
def test_more_than_there_is_is_all_there_is(capsys: Capture) -> None:
    assert main(["logs", "tail", "-n", "999"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run abcde  2L/32d")
    assert len(lines) == 103


@pytest.mark.usefixtures("run")
def test_json_is_one_document(capsys: Capture) -> None:
    assert main(["logs", "tail", "-n", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [event["kind"] for event in said] == ["stop", "run_finished"]


def test_a_ranks_log(run: RunDir, capsys: Capture) -> None:
    run.log(1).write_text("".join(f"line {n}\n" for n in range(50)) + "half a l")
    assert main(["logs", "tail", "--rank", "1", "-n", "2"]) == 0
    assert capsys.readouterr().out == "line 48\nline 49\n"
    assert main(["logs", "tail", "--rank", "3"]) == 2
    assert "rank 3 has no log in runs/tail-abcde/logs; ranks with a log: 1" in (
        capsys.readouterr().err
    )


def test_following_ends_with_the_run(run: RunDir) -> None:
    with hold(run), typed("tail", "-f", "-n", "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("done  100 steps")
        with writing(run.path) as writer:
            writer.start(step=100)
            writer.train(101, 2.5)
            assert process.stdout.readline().startswith("run abcde")
            assert "loss 2.500" in process.stdout.readline()
            writer.stop(102, "SIGTERM", resumable=True)
        assert process.stdout.readline().startswith("stopped: SIGTERM  102 steps")
        assert process.poll() is None
        run.lock.unlink()  # whoever holds it is not asked any more
        run.lock.touch()
        rest, said = process.communicate(timeout=30)
        assert (process.returncode, rest, said) == (0, "", "")


def test_a_ranks_log_is_followed_too(run: RunDir) -> None:
    run.log(0).write_text("first\n")
    with hold(run), typed("tail", "-f", "--rank", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        with run.log(0).open("a") as file:
            file.write("second\n")
        assert process.stdout.readline() == "second\n"


def test_ctrl_c_ends_following(run: RunDir) -> None:
    with hold(run), typed("tail", "-f") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tial"], "did you mean 'tail'?"),
        (["--json", "-f"], "--json cannot be combined with -f"),
        (["--json", "--rank", "0"], "--json cannot be combined with --rank"),
        (["--rank", "x"], "'x' is not a valid integer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("run")
def test_mistakes_are_told(capsys: Capture, words: list[str], told: str) -> None:
    assert main(["logs", "tail", *words]) == 2
    assert told in capsys.readouterr().err


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 40), st.booleans())
def test_the_last_lines_are_those_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], count: int, torn: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    lines = [line.replace(b"\n", b"") for line in lines]
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(whole + b"torn" * torn)
    assert last_lines(path, count) == (lines[max(0, len(lines) - count) :], len(whole))


def test_lines_longer_than_a_block_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = [bytes([65 + n]) * 100_000 for n in range(5)]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert last_lines(path, 2)[0] == lines[3:]


def test_what_is_no_event_does_not_count(run: RunDir) -> None:
    with run.events.open("ab") as file:
        file.write(b"no event\n" * 100)
    events, end = last_events(run.events, 3)
    assert [type(event).__name__ for event in events] == ["Saved", "Stop", "RunFinished"]
    assert end == run.events.stat().st_size
