"""Fleets and their logs while they run: what is drawn on a terminal, and what is printed elsewhere."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import FleetPlace, RunningFleet
from terminal import environment, run_on_terminal

from instar.extensions.fleet.state import (
    InstanceChanged,
    InstanceStatus,
    ProcessChanged,
    Started,
    fold_events,
)
from instar.extensions.fleet.view import live, reader
from instar.extensions.fleet.view.reader import FleetReader
from instar.extensions.fleet.view.rows import fleet_view
from instar.record.console import PlainScreen


@pytest.fixture
def running(tmp_path: Path) -> RunningFleet:
    return RunningFleet(tmp_path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REDRAW_S", 0.01)
    monkeypatch.setattr(live, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(reader, "POLL_S", 0.01)
    monkeypatch.setattr(reader, "LIST_S", 0.0)


def test_without_a_terminal_a_change_is_a_line(running: RunningFleet) -> None:
    class Listener(io.StringIO):
        def write(self, text: str) -> int:
            if "s1: running" in text:
                running.state.write(
                    ProcessChanged(1.5, 0, "server", "healthy", 1, 5, (3,), {"http": 8000})
                )
            if "healthy" in text:
                running.end()
            return super().write(text)

    stream = Listener()
    live.watch_fleet(FleetReader(running.folder), PlainScreen(stream, "utf-8"))
    assert stream.getvalue().splitlines() == [
        "two: running (1 running, 1 waiting)",
        "s1: running",
        "s1 server: healthy (GPU 3, http 8000)",
        "two: failed (1 failed, 1 waiting)",
        "s1 server: ended (GPU 3, http 8000)",
        "s1: failed (no reason)",
    ]


def test_on_a_terminal_the_table_is_drawn_in_place(running: RunningFleet, tmp_path: Path) -> None:
    steps = iter(
        [
            ("waiting", lambda: running.state.write(InstanceChanged(1.5, 1, "starting"))),
            ("starting", running.end),
        ]
    )
    due = [next(steps)]

    def react(screen: str) -> bytes:
        while due and due[0][0] in screen:
            due.pop(0)[1]()
            due.extend([step] if (step := next(steps, None)) else [])
        return b""

    argv = [sys.executable, "-m", "instar.cli.main", "fleet", "status", "two", "--watch"]
    code, screen = run_on_terminal(argv, tmp_path, environment(), 60, react)
    assert code == 0, screen
    assert "\x1b[2J" not in screen  # a screen that is cleared flickers
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "").splitlines()[-4:]
    assert last[0].startswith("two: failed")
    assert last[2].split() == ["0", "s1", "failed", "no", "reason"]


def test_a_fleet_that_is_started_is_shown_below_its_messages(place: FleetPlace) -> None:
    place.write("""
name: shown
matrix: {seed: [1, 2]}
max_parallel: 1
jobs:
  job: {command: [sh, -c, "until test -e go; do sleep 0.05; done; exit ${index}"]}
""")

    def react(screen: str) -> bytes:
        if re.search(r"shown-0 +running", screen):
            (place.path / "go").touch()
        return b""

    argv = [sys.executable, "-m", "instar.cli.main", "fleet", "up", "fleet.yaml"]
    env = environment(**{k: v for k, v in place.env().items() if k in ("INSTAR_LOCK_DIR", "PATH")})
    code, screen = run_on_terminal(argv, place.path, env, 80, react)
    assert code == 4, screen
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "").splitlines()
    assert any(line.endswith("fleet shown: 2 instances, 1 at a time") for line in lines), lines
    assert any("1 running, 1 waiting" in line for line in lines)
    assert any("shown-1 failed: job ended with exit code 1" in line for line in lines), lines
    assert lines[-2:] == [
        "shown: failed (1 succeeded, 1 failed)",
        "next: instar fleet resume shown",
    ]


def test_a_table_that_is_too_long_shows_what_runs() -> None:
    base_status = fold_events([Started(1.0, 1, "h", "", ())])
    phases = ["succeeded"] * 50 + ["running"] * 2 + ["waiting"] * 48
    status = {i: InstanceStatus(phase=phase) for i, phase in enumerate(phases)}  # type: ignore[arg-type]
    view = fleet_view("many", type(base_status)(status, base_status.start), 1)
    lines = [text for text, _ in live.block(view, 0.0, 60, 12)]
    assert len(lines) <= 12
    assert [line.split()[0] for line in lines[2:-1]] == ["0", "1", "2", "3", "4", "5", "50", "51"]
    assert lines[-1] == "… 92 more"


def _lines(tail: Iterator[tuple[reader.ProcessLog, str]], count: int) -> list[str]:
    return [next(tail)[1] for _ in range(count)]


def test_logs_are_followed_until_the_fleet_has_ended(running: RunningFleet) -> None:
    path = running.log("job.log", "one\ntwo\nthree\nfo")
    tail = reader.tail_logs(running.folder, lambda _: True, 2, follow=True)
    assert _lines(tail, 2) == ["two", "three"]
    running.log("job.log", "ur\n10%\r20%\r30%\r\n")
    assert _lines(tail, 2) == ["four", "30%"]
    running.log("server.log", "also\n")  # a log that begins later
    log, line = next(tail)
    assert (log.process, line) == ("server", "also")
    running.log("job.log", "new\n", "w")  # truncated
    assert _lines(tail, 1) == ["new"]
    running.log("job.log.new", "another one, longer\n\x1b[31mend").replace(path)
    assert _lines(tail, 1) == ["another one, longer"]
    running.end()
    assert [line for _, line in tail] == ["\\u001b[31mend"]


def test_of_a_large_log_only_the_end_is_read(running: RunningFleet) -> None:
    path = running.log("job.log", "")
    with path.open("r+b") as file:
        file.truncate(1 << 36)  # no machine could read it as a whole
        file.seek(0, 2)
        file.write(b"\nlast but one\nlast\n")
    running.end()
    lines = [line for _, line in reader.tail_logs(running.folder, lambda _: True, 2, follow=False)]
    assert lines == ["last but one", "last"]
    with path.open("r+b") as file:
        file.truncate(1 << 36)  # one line
    lines = [line for _, line in reader.tail_logs(running.folder, lambda _: True, 2, follow=False)]
    assert max(map(len, lines)) <= 6 * reader.MAX_LINE_BYTES
