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


class Said(NamedTuple):
    stdout: str
    stderr: str


Typed = Callable[..., Said]


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Typed:
    """Types `instar report` beside two runs."""
    told_run(tmp_path / "runs" / "told-aaaaa")
    write(tmp_path / "runs" / "told-bbbbb", [(start_event(), 1), *steps(1, 10)])
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Said:
        done = main(["report", *words])
        said = Said(*capsys.readouterr())
        assert done == code, said
        return said

    return run


def test_one_run_has_its_page_in_its_folder(typed: Typed, tmp_path: Path) -> None:
    assert typed("aaaaa").stdout == "runs/told-aaaaa/report.html\n"
    assert "widen_mlp" in (tmp_path / "runs/told-aaaaa/report.html").read_text()
    assert not (tmp_path / "runs/told-bbbbb/report.html").exists()


def test_several_have_one_here(typed: Typed, tmp_path: Path) -> None:
    assert typed("told").stdout == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert "told-aaaaa" in text
    assert "told-bbbbb" in text


def test_json_says_what_was_written_and_of_what(typed: Typed, tmp_path: Path) -> None:
    said = json.loads(typed("aaaaa", "-o", "out.html", "--json").stdout)
    assert said["path"] == "out.html"
    assert said["size_bytes"] == (tmp_path / "out.html").stat().st_size
    assert [run["step"] for run in said["runs"]] == [40]


def test_it_is_opened_if_asked(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text('#!/bin/sh\necho "$@" > "$OPENED"\n')
    opener.chmod(opener.stat().st_mode | stat.S_IXUSR)
    opened = tmp_path / "opened"
    monkeypatch.setenv("PATH", str(opener.parent), prepend=os.pathsep)
    monkeypatch.setenv("OPENED", str(opened))
    typed("aaaaa", "-e")
    assert opened.read_text().strip().endswith("report.html")


def test_what_cannot_be_written_or_found_is_said(typed: Typed) -> None:
    missing = typed("aaaaa", "-o", "nowhere/out.html", code=2).stderr
    assert "-o: cannot write nowhere/out.html: No such file or directory" in missing
    assert "did you mean 'told-aaaaa'" in typed("told-aaaa", code=2).stderr


def test_a_run_that_cannot_be_read_does_not_hide_the_others(typed: Typed, tmp_path: Path) -> None:
    broken = tmp_path / "runs" / "told-ccccc"
    broken.mkdir()
    (broken / "events.jsonl").write_bytes(b"\x00\xff not a record\n" * 3)
    done = typed("told", "-o", "all.html", code=4)
    assert "told-ccccc" in done.stderr
    assert "told-aaaaa" in (tmp_path / "all.html").read_text()
