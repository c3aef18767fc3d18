"""`instar logs summary`, also of a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from written_runs import write_run, writing

from instar.cli.main import main

Instar = Callable[..., subprocess.CompletedProcess[str]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a-abcde"), {1: 4.0, 20: 3.0}, {20: 3.5})
    with writing(Path("runs/b-fghjk")) as writer:
        writer.start()
        writer.train(10, 3.5)
    return Path("runs")


@pytest.mark.usefixtures("runs")
def test_the_latest_run_is_summarized_by_default(capsys: Capture) -> None:
    assert main(["logs", "summary"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("b-fghjk\nstate        crashed: ended without a message")
    assert "loss    3.5000  10  3.5000  10" in out


@pytest.mark.usefixtures("runs")
def test_one_line_for_each_run(capsys: Capture) -> None:
    assert main(["logs", "summary", "--all", "--format", "one-line"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["finished", "a-abcde"], ["crashed", "b-fghjk"]]


@pytest.mark.usefixtures("runs")
def test_json_is_one_document_of_all_runs(capsys: Capture) -> None:
    assert main(["logs", "summary", "a", "b", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in said] == ["abcde", "fghjk"]
    assert said[0]["best"]["val/loss"] == {"value": 3.5, "step": 20, "error": 0.01}


def test_a_run_that_cannot_be_read_is_told_beside_the_others(runs: Path, capsys: Capture) -> None:
    (runs / "b-fghjk" / "events.jsonl").write_text("nothing of the kind\n")
    assert main(["logs", "summary", "--all", "--format", "one-line"]) == 4
    said = capsys.readouterr()
    assert said.out.startswith("finished  a-abcde")
    assert said.err.startswith("runs/b-fghjk/events.jsonl")


@pytest.mark.skipif(sys.platform != "linux", reason="what opens files is called otherwise")
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("works", [True, False])
def test_a_file_is_opened_with_the_systems_own_program(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\ncp "$1" opened\nexit {0 if works else 3}\n')
    opener.chmod(0o755)
    monkeypatch.setenv("PATH", f"{opener.parent}:{os.environ['PATH']}")
    code = main(["logs", "summary", "a", "--format", "md", "-o", "a.md", "-e"])
    assert Path("opened").read_text() == Path("a.md").read_text()
    said = capsys.readouterr().err
    assert (code, "no application to open a.md" in said) == ((0, False) if works else (2, True))


def test_a_locale_without_signs_gets_none(
    instar: Instar, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(place / "a-abcde", {1: 4.0, 20: 3.0}, {20: 3.5})
    monkeypatch.setenv("LC_ALL", "C")
    out = instar("logs", "summary", "a-abcde").stdout
    assert out.isascii()
    assert "3.5000 +-0.0100" in out


def test_a_real_run_and_what_it_says_of_itself(place: Path, instar: Instar) -> None:
    (place / "grow.yaml").write_text(
        (place / "tiny.yaml").read_text()
        + "eval: {eval_interval: 4}\nschedule: [{name: widen_mlp, value: 160, max_wait_iters: 4}]\n"
    )
    instar("train", "grow.yaml")
    (said,) = json.loads(instar("logs", "summary", "--json").stdout)
    assert (said["state"], said["reason"], said["step"]) == ("finished", "reached 8it", 8)
    assert [o["name"] for o in said["operations"]] == ["widen_mlp"]
    assert said["checkpoints"][-1]["pointers"]
    assert said["memory_peak_bytes"] > 1 << 20
    parameters = said["parameters"]
    events = [
        json.loads(line)
        for line in instar("logs", "events", "--format", "jsonl").stdout.splitlines()
    ]
    assert events[0]["parameters"] < parameters
    assert {"run_started", "train", "eval", "operation", "checkpoint", "stop"} <= {
        event["kind"] for event in events
    }
    (line,) = instar("logs", "summary", "--format", "one-line").stdout.splitlines()
    assert line.startswith("finished  tiny-")
    assert "step 8" in line
    assert "1 operation" in line
    assert instar("logs", "list").stdout.splitlines()[1].split()[1:3] == ["tiny", "finished"]
    tail = instar("logs", "tail", "-n", "1", "-f").stdout
    assert tail.startswith("done  8 steps")
