"""`instar report`, typed in a folder with runs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from shown_runs import start_event, steps, told_run, write

from instar.cli.main import main


class Output(NamedTuple):
    stdout: str
    stderr: str


RunReport = Callable[..., Output]


@pytest.fixture
def run_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunReport:
    """Types `instar report` beside two runs."""
    told_run(tmp_path / "runs" / "told-aaaaa")
    write(tmp_path / "runs" / "told-bbbbb", [(start_event(), 1), *steps(1, 10)])
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Output:
        exit_code = main(["report", *words])
        output = Output(*capsys.readouterr())
        assert exit_code == code, output
        return output

    return run


def test_one_run_has_its_page_in_its_folder(run_report: RunReport, tmp_path: Path) -> None:
    assert run_report("aaaaa").stdout == "runs/told-aaaaa/report.html\n"
    assert "widen_mlp" in (tmp_path / "runs/told-aaaaa/report.html").read_text()
    assert not (tmp_path / "runs/told-bbbbb/report.html").exists()


def test_several_have_one_here(run_report: RunReport, tmp_path: Path) -> None:
    assert run_report("told").stdout == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert "told-aaaaa" in text
    assert "told-bbbbb" in text


def test_json_says_what_was_written_and_of_what(run_report: RunReport, tmp_path: Path) -> None:
    summary = json.loads(run_report("aaaaa", "-o", "out.html", "--json").stdout)
    assert summary["path"] == "out.html"
    assert summary["size_bytes"] == (tmp_path / "out.html").stat().st_size
    assert [run["step"] for run in summary["runs"]] == [40]


def test_it_is_opened_if_asked(
    run_report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text('#!/bin/sh\necho "$@" > "$OPENED"\n')
    opener.chmod(opener.stat().st_mode | stat.S_IXUSR)
    opener_log = tmp_path / "opened"
    monkeypatch.setenv("PATH", str(opener.parent), prepend=os.pathsep)
    monkeypatch.setenv("OPENED", str(opener_log))
    run_report("aaaaa", "-e")
    assert opener_log.read_text().strip().endswith("report.html")


def test_what_cannot_be_written_or_found_is_said(run_report: RunReport) -> None:
    missing = run_report("aaaaa", "-o", "nowhere/out.html", code=2).stderr
    assert "-o: cannot write nowhere/out.html: No such file or directory" in missing
    assert "did you mean 'told-aaaaa'" in run_report("told-aaaa", code=2).stderr


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    run_report: RunReport, tmp_path: Path
) -> None:
    broken = tmp_path / "runs" / "told-ccccc"
    broken.mkdir()
    (broken / "events.jsonl").write_bytes(b"\x00\xff not a record\n" * 3)
    output = run_report("told", "-o", "all.html", code=4)
    assert "told-ccccc" in output.stderr
    assert "told-aaaaa" in (tmp_path / "all.html").read_text()
