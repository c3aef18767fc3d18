"""How far long work is: what is shown of it, and what is said when it is interrupted."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from instar.record import progress as module
from instar.record.console import PlainScreen
from instar.record.format import encodable_as, progress_line
from instar.record.progress import Display, folder_bytes, progress, showing, track_items

GIB = 1 << 30


class Screen(PlainScreen):
    """Keeps what is shown, and says when that is."""

    def __init__(self, width: int | None, marker: str = "") -> None:
        super().__init__(io.StringIO(), "utf-8")
        self.width = width
        self.due = width is not None
        self.lines: list[str] = []
        self.is_open = True
        self.marker = marker
        self.on_screen = threading.Event()

    def show(self, text: str, style: str = "") -> None:
        del style
        self.update(text)

    def update(self, text: str) -> None:
        self.lines.append(text)
        if text and self.marker in text:
            self.on_screen.set()

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("width", [80, None])
def test_long_work_is_shown_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    for name in ("BAR_AFTER_S", "LINE_EVERY_S", "_TICK_S"):
        monkeypatch.setattr(module, name, 0.001)
    screen = Screen(width, marker="2 of 4 bytes")
    with showing(Display(lambda: screen, owns=True)):
        with progress("reading all", 4, "runs"):
            for number in track_items(range(4), "reading one", "bytes", 4):
                if number == 2:
                    assert screen.on_screen.wait(60)
        assert not screen.is_open
        assert screen.lines[-1] == ""
    assert any(line.startswith("reading one") and "2 of 4 bytes" in line for line in screen.lines)
    assert (width is not None) == any("━" in line for line in screen.lines)


def test_short_work_opens_no_screen() -> None:
    def never() -> PlainScreen:
        raise AssertionError("opened")

    with showing(Display(never, owns=True)):
        assert list(track_items([1, 2], "reading", "runs")) == [1, 2]


def test_what_a_library_writes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR_AFTER_S", "_TICK_S"):
        monkeypatch.setattr(module, name, 0.001)
    (tmp_path / "a").write_bytes(bytes(100))
    screen = Screen(80)
    with (
        showing(Display(lambda: screen, owns=False)),
        progress("writing", 400, measure=lambda: folder_bytes(tmp_path)),
    ):
        assert screen.on_screen.wait(60)
    assert screen.is_open
    assert "25%" in screen.lines[0]


def test_what_was_interrupted_is_noted_once_by_the_innermost() -> None:
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        progress("verifying all"),
        progress("verifying one", remaining_text="nothing is lost"),
    ):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == ["interrupted while verifying one: nothing is lost"]


def test_a_line_has_share_amount_rate_and_time_left() -> None:
    line = progress_line("verifying", GIB, 4 * GIB, "B", 2.0)
    assert line == "verifying  25%  1.00 GiB of 4.00 GiB  512 MiB/s  6.0s left"
    assert progress_line("counting", 1200, None, "tokens", 60.0) == (
        "counting  1,200 tokens  20 tokens/s  1m00"
    )
    assert progress_line("waiting", 0, None, "B", 3.0) == "waiting  3.0s"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_line_fits_its_terminal(width: int) -> None:
    for doing in ("verifying", "verifying /a/very/long/path/" + "x" * 100):
        for count in (0, GIB, 2 * GIB, 3 * GIB):
            line = progress_line(doing, count, 2 * GIB, "B", 9.0, width)
            assert len(line) < width
            assert "%" in line
    assert encodable_as(progress_line("a", 1, 2, "B", 9.0, 80), "ascii").isascii()


def test_a_loop_that_an_exception_leaves_is_shown_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR_AFTER_S", "_TICK_S"):
        monkeypatch.setattr(module, name, 0.001)
    screen = Screen(80)

    def interrupt() -> None:
        with showing(Display(lambda: screen, owns=True)):
            for _ in track_items(range(4), "reading", "runs"):
                assert screen.on_screen.wait(60)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt()
    assert not screen.is_open
    assert caught.value.__notes__ == [f"interrupted while reading: {module.AGAIN}"]
