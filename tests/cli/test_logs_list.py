"""`instar logs list`, typed where runs are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from written_runs import BEGAN, write_run, writing

from instar.cli.main import main
from instar.record.rundir import RunDir, hold

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished, a crashed and a stopped run, written to in this order."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    write_run(folder / "grow-abcde", {1: 4.0, 1000: 3.21}, {1000: 3.0, 500: 2.5})
    with writing(folder / "grow-fghjk") as writer:
        writer.start()
        writer.train(10, 3.5)
    with writing(folder / "other-mnpqr") as writer:
        writer.start()
        writer.save(5)
        writer.stop(5, "SIGTERM", resumable=True)
    for number, name in enumerate(("grow-abcde", "grow-fghjk", "other-mnpqr")):
        os.utime(folder / name / "events.jsonl", (BEGAN + number, BEGAN + number))
    return folder


@pytest.mark.usefixtures("runs")
def test_runs_are_listed_the_latest_last(capsys: Capture) -> None:
    assert main(["logs", "list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["abcde", "grow", "finished"],
        ["fghjk", "grow", "crashed"],
        ["mnpqr", "other", "stopped"],
    ]
    step, loss = header.index("step") + 4, header.index("loss") + 4
    assert lines[0][:step].endswith("1,000")
    assert lines[0][:loss].endswith("3.210")
    assert "2.5000  500" in lines[0]
    assert (lines[1].split()[3], lines[1].split()[6:8]) == ("10", ["-", "-"])


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--state", "crashed"], ["fghjk"]),
        (["--state", "running"], []),
        (["--name", "grow"], ["abcde", "fghjk"]),
        (["--name", "o*"], ["mnpqr"]),
        (["--name", "fghjk"], ["fghjk"]),
        (["-n", "2"], ["fghjk", "mnpqr"]),
        (["-n", "1", "--name", "grow"], ["fghjk"]),
        (["runs/grow-abcde"], ["abcde"]),
        (["runs/*", "-n", "9"], ["abcde", "fghjk", "mnpqr"]),
    ],
    ids=" ".join,
)
def test_the_list_is_narrowed(capsys: Capture, options: list[str], ids: list[str]) -> None:
    assert main(["logs", "list", *options, "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ids


@pytest.mark.usefixtures("runs")
def test_json_has_what_the_table_has_and_more(capsys: Capture) -> None:
    assert main(["logs", "list", "--json", "-n", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["reason"], row["resumable"]) == ("stopped", "SIGTERM", True)
    assert row["go_on"] == "instar resume runs/other-mnpqr"
    assert (row["started"], row["seen"]) == (BEGAN, BEGAN + 5)


def test_a_running_run_is_listed_as_running(runs: Path, capsys: Capture) -> None:
    with hold(RunDir(runs / "grow-fghjk")):
        main(["logs", "list", "--state", "running"])
    assert "fghjk" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_markdown_and_files(capsys: Capture) -> None:
    assert main(["logs", "list", "--format", "md", "-o", "list.md"]) == 0
    assert capsys.readouterr() == ("", "wrote list.md\n")
    lines = Path("list.md").read_text().splitlines()
    assert {line.count("|") for line in lines} == {11}
    assert len(lines) == 5


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path, capsys: Capture) -> None:
    (runs / "grow-fghjk" / "events.jsonl").write_text("this is no record\n")
    assert main(["logs", "list"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 4
    assert said.err.startswith("runs/grow-fghjk/events.jsonl is not the record of a run")


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--state", "fin"], "unknown state 'fin'; did you mean 'finished'?"),
        (["--state", "crahsed"], "did you mean 'crashed'?"),
        (["nowhere"], "no run 'nowhere'"),
        (["runs/grow-abcd"], "did you mean 'runs/grow-abcde'?"),
        (["--format", "csv"], "'csv' is not one of 'text', 'json', 'md'"),
        (["-o", "missing/list.md"], "cannot write missing/list.md: No such file or directory"),
        (["-e"], "name one with -o FILE"),
        (["-n", "0"], "0 is not in the range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told(capsys: Capture, options: list[str], told: str) -> None:
    assert main(["logs", "list", *options]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""


def test_where_no_run_is_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "list"]) == 0
    assert capsys.readouterr() == ("", "no runs\n")
    assert main(["logs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
