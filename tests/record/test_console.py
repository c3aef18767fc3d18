import io
import os
import pty
import re
import statistics
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import instar
from instar.record.console import (
    REPAINT_EVERY_S,
    REPAINT_SHARE,
    Console,
    LiveScreen,
    open_console,
    silent_console,
)
from instar.record.events import Eval, OperationEvent, RunFinished, RunStarted, Train
from instar.record.format import train_line

WHERE = Path("runs/grow-r7f3a")
TERMINAL = {"TERM": "xterm-256color"}
TRAIN = Train(
    step=1000,
    tokens=524_000_000,
    loss=3.9121,
    lr=3e-4,
    grad_norm=0.81,
    tokens_per_s=1.02e6,
    mfu=0.41,
)


def tell_a_whole_run(console: Console) -> None:
    console.header(
        RunStarted(run_id="r7f3a", model="12L/768d", parameters=124_000_000, devices="4×H200"),
        WHERE,
    )
    console.progress(TRAIN, eta_s=4920)
    console.train(TRAIN, eta_s=4920)
    console.show_eval(Eval(step=1000, split="val", loss=3.41, best=True))
    console.show_operation(
        OperationEvent(step=2000, verb="GROW", name="widen_mlp", change="2048→3072")
    )
    console.say("a remark")
    console.warn("a doubt")
    console.show_end(RunFinished(step=2000), WHERE, "SIGINT")
    console.close()


WHOLE_RUN = """\
run r7f3a  12L/768d 124M  4×H200  → runs/grow-r7f3a
  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  mfu 41%  eta 1h22
  1,000  val 3.4100  best
  2,000 GROW widen_mlp 2048→3072
a remark
warning: a doubt
stopped: SIGINT  2,000 steps  → runs/grow-r7f3a
"""


class Stream(io.StringIO):
    """Text in memory that claims to be a terminal, or not, and to have an encoding."""

    def __init__(self, *, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal = terminal
        self._encoding = encoding

    def isatty(self) -> bool:
        return self._terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


@pytest.mark.parametrize(
    ("terminal", "environment"),
    [
        (False, TERMINAL),
        (False, TERMINAL | {"FORCE_COLOR": "1"}),
        (True, {"TERM": "dumb"}),
        (True, {}),
    ],
    ids=["a pipe", "a pipe that asks for colour", "a dumb terminal", "no TERM"],
)
def test_where_there_is_no_cursor_there_are_plain_lines(
    terminal: bool, environment: dict[str, str]
) -> None:
    stream = Stream(terminal=terminal)
    tell_a_whole_run(open_console(stream, environment))
    assert stream.getvalue() == WHOLE_RUN


@pytest.mark.parametrize(
    ("encoding", "environment"), [("ascii", {}), ("utf-8", {"LC_ALL": "C"}), ("latin-1", {})]
)
def test_a_stream_that_cannot_say_arrows_gets_ascii(
    encoding: str, environment: dict[str, str]
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    tell_a_whole_run(open_console(stream, environment))
    output = raw.getvalue()
    assert b"2048->3072" in output
    assert b"-> runs/grow-r7f3a" in output


def test_the_other_ranks_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    tell_a_whole_run(silent_console())
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    tell_a_whole_run(open_console())
    out, err = capfd.readouterr()
    assert out == ""
    assert err == WHOLE_RUN


@contextmanager
def terminal() -> Iterator[tuple[io.TextIOWrapper, Callable[[], str]]]:
    """A real terminal: a stream to write to, and a function that closes it and says what it got."""
    outer, inner = pty.openpty()
    tty.setraw(inner)
    content = bytearray()

    def listen() -> None:
        try:
            while chunk := os.read(outer, 4096):
                content.extend(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    stream = os.fdopen(inner, "w", encoding="utf-8")

    def hang_up() -> str:
        stream.close()
        listener.join()
        return content.decode()

    try:
        yield stream, hang_up
    finally:
        hang_up()
        os.close(outer)


def screen(output: str) -> list[str]:
    """What is left to read on a terminal that was sent this: rewritten lines overwritten."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if piece == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif piece == "\x1b[2K":
            lines[at] = ""
        elif piece == "\x1b[1A":
            at -= 1
        elif piece[0] not in "\r\x1b":
            lines[at] += piece
    return lines


def test_on_a_terminal_the_same_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with terminal() as (stream, hang_up):
        tell_a_whole_run(open_console(stream, TERMINAL))
        output = hang_up()
    assert "\n".join(screen(output)).rstrip("\n") + "\n" == WHOLE_RUN
    assert "\x1b[35m" in output


def test_the_current_step_is_shown_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (stream, hang_up):
        console = open_console(stream, TERMINAL)
        console.progress(TRAIN)
        output = hang_up()
    assert screen(output)[-1] == (
        "  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  mfu 41%"
    )
    console.close()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_train_line_is_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal() as (stream, hang_up):
        console = open_console(stream, TERMINAL)
        console.progress(TRAIN, eta_s=4920)
        console.train(TRAIN, eta_s=4920)
        console.close()
        lines = screen(hang_up())
    assert lines[0].startswith("  1,000")
    assert max(map(len, lines)) <= columns


def test_no_color_leaves_the_cursor_and_takes_the_colours() -> None:
    with terminal() as (stream, hang_up):
        tell_a_whole_run(open_console(stream, TERMINAL | {"NO_COLOR": "1"}))
        output = hang_up()
    assert "\x1b[2K" in output
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", output)


def test_a_killed_run_leaves_a_cursor() -> None:
    with terminal() as (stream, hang_up):
        console = open_console(stream, TERMINAL)
        console.progress(TRAIN)
        output = hang_up()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    console.close()


class SlowTerminal(Stream):
    """Every painting of a line takes this long, on its own clock."""

    def __init__(self, painting_s: float) -> None:
        super().__init__(terminal=True)
        self.painting_s = painting_s
        self.now = 100.0

    def flush(self) -> None:
        self.now += self.painting_s


@pytest.mark.parametrize("painting_s", [0.0, 0.0005, 0.05])
def test_a_slow_terminal_is_painted_less_often(painting_s: float) -> None:
    stream = SlowTerminal(painting_s)
    screen = LiveScreen(stream, "utf-8", color=False, clock=lambda: stream.now)
    start = stream.now
    screen.update("first")
    took = stream.now - start
    next_paint = max(start + REPAINT_EVERY_S, stream.now + took / REPAINT_SHARE)
    due = []
    for stream.now in (next_paint - 0.001, next_paint + 0.001):
        due.append(screen.due)
    assert due == [False, True]
    screen.close()


def test_ten_paintings_take_less_than_a_hundredth_of_a_second() -> None:
    took = []
    with terminal() as (stream, _):
        console = open_console(stream, TERMINAL)
        for _ in range(50):
            start = time.thread_time()
            console.screen.update(train_line(TRAIN, eta_s=4920, width=80))
            took.append(time.thread_time() - start)
        console.close()
    assert statistics.median(took) * 10 < REPAINT_SHARE


def test_asking_whether_a_line_is_due_costs_nothing() -> None:
    with terminal() as (stream, _):
        console = open_console(stream, TERMINAL)
        console.progress(TRAIN)
        assert not console.due
        start = time.perf_counter()
        for _ in range(1000):
            _ = console.due
        assert (time.perf_counter() - start) / 1000 < 20e-6
        console.close()


def test_a_terminal_that_hangs_up_stops_nothing() -> None:
    with terminal() as (stream, hang_up):
        console = open_console(stream, TERMINAL)
        hang_up()
        tell_a_whole_run(console)
    assert sys.stderr.write("") == 0  # given back, and writable


def test_a_closed_stream_stops_nothing() -> None:
    stream = Stream(terminal=False)
    stream.close()
    tell_a_whole_run(open_console(stream, TERMINAL))


@pytest.mark.parametrize("how", ["broken pipe", "no stderr"])
def test_a_run_whose_reader_is_gone_ends_well(how: str) -> None:
    code = (
        "from instar.record.console import open_console\n"
        "console = open_console()\n"
        "for _ in range(100): console.say('x' * 1000)\n"
        "console.close(); print('alive')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(instar.__file__).parents[1])}
    reader, writer = os.pipe()
    os.close(reader)
    close = "2>&-" if how == "no stderr" else ""
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {close}', sys.executable, code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (result.returncode, result.stdout) == (0, "alive\n")


def test_a_warning_from_elsewhere_scrolls_above_the_current_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (stream, hang_up):
        monkeypatch.setattr(sys, "stderr", stream)
        console = open_console(environment=TERMINAL)
        console.progress(TRAIN)
        print("a library's remark", file=sys.stderr)
        console.close()
        lines = screen(hang_up())
    assert lines[0] == "a library's remark"


def test_a_live_screen_is_what_a_terminal_gets() -> None:
    with terminal() as (stream, _):
        console = open_console(stream, TERMINAL)
        assert isinstance(console.screen, LiveScreen)
        console.close()
