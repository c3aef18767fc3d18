"""`instar logs plot`: to the terminal, into files, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest
from browser import chromium, watch_page
from cases import parametrize_first
from drawn import falling, train, write_run
from needed import needs
from written_runs import written_fleet

from instar.cli.main import main

RunCli = Callable[..., tuple[str, str]]
COMMAND = [sys.executable, "-m", "instar.cli.main", "logs", "plot"]


@pytest.fixture
def runs(place: Path) -> Path:
    for seed, letters in enumerate(("abcde", "bcdef"), 1):
        config = f"name: demo\nseed: {seed}  # --set\n"
        write_run(place / "runs" / f"demo-{letters}", falling(60, 6.0 + seed), config)
    return place / "runs"


@pytest.fixture
def run_plot(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    """Types `instar logs plot` beside `runs`, and returns what it says on stdout and stderr."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.chdir(runs.parent)
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["logs", "plot", *words]) == code
        output = capsys.readouterr()
        return output.out, output.err

    return run


def on_terminal(place: Path, *words: str, columns: int, **env: str) -> str:
    """What the command shows on a terminal of its own."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=place,
        env=environment | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | env,
        stdin=subprocess.DEVNULL,
        stdout=follower,
    )
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # how Linux says that the last writer has gone
            break
        if not part:
            break
        output += part
    os.close(leader)
    assert process.wait() == 0
    return output.decode().replace("\r\n", "\n")


@pytest.mark.usefixtures("runs")
def test_the_latest_run_is_drawn_in_characters_without_codes(place: Path) -> None:
    env = os.environ | {"COLUMNS": "80", "LC_ALL": "C.UTF-8"}
    process = subprocess.run(
        COMMAND, cwd=place, env=env, capture_output=True, text=True, encoding="utf-8", check=True
    )

    lines = process.stdout.splitlines()
    assert lines[0] == "demo-bcdef"
    assert "\033" not in process.stdout
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "30 │ widen_mlp 192→352"
    assert process.stderr == ""


@pytest.mark.usefixtures("runs")
@parametrize_first("columns", [40, 80, 200], first=1)
def test_on_a_terminal_the_plot_is_coloured_and_as_wide(place: Path, columns: int) -> None:
    output = on_terminal(place, "demo", columns=columns)

    assert "\033[38" in output
    assert "\033[48" not in output
    plain = on_terminal(place, "demo", columns=columns, NO_COLOR="1")
    assert "\033" not in plain
    widest = max(map(len, plain.splitlines()))
    assert columns - 2 <= widest <= columns


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"LC_ALL": "C"}])
def test_a_dumb_terminal_gets_ascii(place: Path, env: dict[str, str]) -> None:
    output = on_terminal(place, columns=80, **env)

    assert output.isascii()
    assert "\033" not in output
    assert "widen_mlp 192->352" in output


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.png", b"\x89PNG"),
        ("a.svg", b"<?xml"),
        ("a.PDF", b"%PDF"),
        pytest.param("a.html", b"<!doctype html>", marks=needs("board")),
        ("a.txt", b"demo-bcdef\n"),
        ("a.json", b"{"),
    ],
)
def test_the_suffix_says_what_is_written(
    runs: Path, run_plot: RunCli, name: str, begins: bytes
) -> None:
    assert run_plot("-o", name) == ("", f"wrote {name}\n")
    assert (runs.parent / name).read_bytes().startswith(begins)
    assert len(list(runs.parent.glob("*a.*"))) == 1


def test_json_is_what_is_drawn(run_plot: RunCli) -> None:
    words = ("--compare", "--metrics", "loss,val_loss", "--smooth", "0.5", "-x", "tokens", "--json")
    chart = json.loads(run_plot(*words)[0])

    assert chart["x"] == "tokens"
    assert chart["runs"] == ["demo seed=1", "demo seed=2"]
    loss, held_out = chart["panels"]
    assert [curve["metric"] for curve in loss["curves"]] == ["loss", "loss"]
    assert loss["curves"][0]["x"] == [2048 * n for n in range(1, 61)]
    assert loss["curves"][0]["raw"]["value"][0] == pytest.approx(6.9167, abs=1e-4)
    assert held_out["curves"][0]["best"] == {"x": 2048 * 60, "value": pytest.approx(2.1)}
    assert {mark["text"] for mark in chart["marks"]} >= {"widen_mlp 192→352"}


def test_seeds_become_one_curve(run_plot: RunCli) -> None:
    chart = json.loads(run_plot("demo", "--by", "seed", "--json")[0])

    assert chart["runs"] == ["demo (2 runs)"]
    assert chart["panels"][0]["curves"][0]["low"]


@needs("fleet")
def test_a_fleet_is_drawn_in_the_groups_of_its_matrix(place: Path, run_plot: RunCli) -> None:
    written_fleet(place)
    chart = json.loads(run_plot("fleets/rates", "--json")[0])
    assert chart["runs"] == ["rates lr=0.1 (2 runs)", "rates lr=0.2"]
    curve = chart["panels"][0]["curves"][0]
    assert (curve["value"], curve["low"][-1]) == ([4.0, 3.5], pytest.approx(3.5 - 0.5**0.5))
    by_run = json.loads(run_plot("fleets/rates", "--by", "run", "--json")[0])
    assert len(by_run["runs"]) == 3
    assert {run_curve["low"] is None for run_curve in by_run["panels"][0]["curves"]} == {True}


@pytest.mark.usefixtures("runs")
def test_a_picture_may_go_into_a_pipe(place: Path) -> None:
    process = subprocess.run(
        [*COMMAND, "--format", "svg"], cwd=place, capture_output=True, check=True
    )

    assert process.stdout.startswith(b"<?xml")


@needs("board")
def test_a_page_asks_for_nothing_and_shows_what_was_asked_for(
    place: Path, run_plot: RunCli
) -> None:
    words = ("-x", "flops", "--smooth", "0.5", "--log", "--lr", "--no-marks", "-o", "page.html")
    run_plot("demo", *words)

    with chromium() as browser, watch_page(browser) as window:
        window.page.goto((place / "page.html").as_uri())
        window.page.wait_for_selector(".chart canvas")
        assert window.page.locator(".chart canvas").count() == 2
        assert window.page.input_value("[name=x]") == "flops"
        assert window.page.input_value("[name=smooth]") == "0.5"
        assert window.page.is_checked("[name=log]")
        assert not window.page.is_checked("[name=marks]")
        key = window.page.get_by_title("demo seed=1 loss")
        assert key.inner_text() == "seed=1 loss"
        assert window.errors == []
        assert window.urls_outside() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--metrics", "val/los"],
            "no metric 'val/los' in runs/demo-bcdef; did you mean 'val/loss'?",
        ),
        (["-x", "flopz"], "--x: unknown axis 'flopz'; did you mean 'flops'?"),
        (
            ["-o", "a.jpg"],
            "-o: a.jpg has no suffix of a known format; use .png, .svg",
        ),
        (["-o", "none/a.png"], "-o: cannot write none/a.png: No such file or directory"),
        (["-o", "runs", "--format", "png"], "-o: cannot write runs: Is a directory"),
        (
            ["--from", "soon"],
            "--from: 'soon' is not a place on the axis step; write it like 2000, 20M",
        ),
        (["--from", "5k"], "nothing to draw: loss, val/loss of runs/demo-bcdef has no point"),
        (["--smooth", "1"], "Invalid value for '--smooth': 1.0 is not in the range 0<=x<1"),
        (["--clip", "101"], "Invalid value for '--clip': 101.0 is not in the range 50<x<=100"),
        (["nowhere"], "no run 'nowhere' in runs"),
        pytest.param(
            ["--clip", "99", "-o", "a.html"],
            "--clip: --clip is not supported in html; zoom in",
            marks=needs("board"),
        ),
        (["--by", "sede"], "'sede' is not one of 'run', 'name', 'seed'"),
    ],
)
def test_what_cannot_be_drawn_says_what_instead(
    runs: Path, run_plot: RunCli, words: list[str], message: str
) -> None:
    before = sorted(runs.parent.rglob("*"))

    out, err = run_plot(*words, code=2)

    assert message in err
    assert out == ""
    assert sorted(runs.parent.rglob("*")) == before


def test_of_a_metric_that_is_never_finite_nothing_is_drawn(place: Path, run_plot: RunCli) -> None:
    write_run(place / "runs" / "none-abcde", [train(n, float("nan")) for n in range(1, 5)])

    _, err = run_plot("none", code=2)

    assert "none of the 4 values of loss, val/loss in runs/none-abcde is finite" in err


def test_without_matplotlib_the_extra_is_named(
    run_plot: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert "pip install 'instar[plot]'" in run_plot("-o", "a.png", code=2)[1]


def test_opening_uses_the_systems_own_program(
    run_plot: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n')
    opener.chmod(0o755)
    monkeypatch.setenv("PATH", str(opener.parent), prepend=os.pathsep)

    run_plot("-o", "a.svg", "-e")
    run_plot("-e")

    named_file, unnamed_file = (tmp_path / "opened").read_text().splitlines()
    assert named_file == "a.svg"
    assert unnamed_file.endswith("plot.png")
    assert Path(unnamed_file).read_bytes().startswith(b"\x89PNG")
