"""Lists and summaries show a family of runs as a tree, whatever a record says about its parent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from needed import needs
from shown_runs import start_event, steps, write

from instar.cli.main import main
from instar.logs.query.runs import list_rows, row_to_json, run_tree
from instar.logs.query.summary import summarize
from instar.logs.read.record import read_record
from instar.logs.text.summary import page, summary_markdown
from instar.record.events import Branched
from instar.record.rundir import RunDir, runs_in


def branch(folder: Path, parent: str, name: str, step: int, *, path: str = "") -> RunDir:
    """A branch that has trained ten steps, or has not begun."""
    first = Branched(
        name=name, parent=parent, step=step, checkpoint=f"step-{step}", iters=10, decay=10
    )
    events = [(start_event(step=step), 1), *steps(step + 1, step + 10)] if step < 30 else []
    return write(folder / (path or f"{parent}.{name}"), [(first, 0), *events])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    branch(tmp_path, "trunk", "large", 30)
    write(tmp_path / "other", [(start_event(), 1), *steps(1, 10)])
    write(tmp_path / "trunk", [(start_event(), 1), *steps(1, 40)])
    branch(tmp_path, "trunk", "small", 10)
    branch(tmp_path, "trunk.small", "tiny", 15)
    return tmp_path


def test_a_family_is_a_tree(folder: Path) -> None:
    for name in ("trunk", "trunk.large", "trunk.small.tiny"):
        assert [
            (row.name, row.depth, row.branched_at) for row in run_tree(RunDir(folder / name))
        ] == [
            ("trunk", 0, None),
            ("trunk.small", 1, 10),
            ("trunk.small.tiny", 2, 15),
            ("trunk.large", 1, 30),
        ]
    assert run_tree(RunDir(folder / "other")) == ()


def test_a_branch_that_has_not_begun_is_stopped_and_can_be_resumed(folder: Path) -> None:
    rows = {row.summary.run.path.name: row for row in list_rows(runs_in(folder))}
    status = rows["trunk.large"].status
    assert (status.state, status.reason) == ("stopped", "a branch that has not begun")
    assert status.go_on == f"instar resume {folder / 'trunk.large'}"
    assert row_to_json(rows["trunk.large"])["branch_of"] == {
        "run": "trunk",
        "step": 30,
        "name": "large",
    }
    assert "branch_of" not in row_to_json(rows["trunk"])


def test_lists_show_the_tree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "list", str(folder)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    names = [re.sub(r"^ *(└ )?([\w.]+) .*", r"\1\2", line) for line in lines]
    assert names == ["other", "trunk", "└ trunk.small", "└ trunk.small.tiny", "└ trunk.large"]
    assert lines[3].startswith("  └ trunk.small.tiny ")
    assert "step 15" in lines[3]


def test_pages_show_the_tree(folder: Path) -> None:
    record = read_record(RunDir(folder / "trunk.small"))
    summary = summarize(record)
    lines = page(summary, 100)
    at = lines.index("family")
    assert [line.split("  ")[1] for line in lines[at + 2 : at + 4]] == ["trunk", "└ trunk.small"]
    assert any(
        line.startswith("| └ trunk.small | step 10 | ") for line in summary_markdown([summary])
    )


@needs("board")
def test_a_report_shows_the_tree(folder: Path) -> None:
    from instar.extensions.board.report import report_html

    html = report_html([read_record(RunDir(folder / "trunk.small"))])
    assert json.dumps("└ trunk.small")[1:-1] in html or "└ trunk.small" in html
    assert '"title":"Family"' in html.replace('": "', '":"')


@pytest.mark.parametrize(
    ("parent", "name", "path"),
    [
        ("../other", "small", "x"),
        ("other", "small", "stranger"),
        ("", "small", ".small"),
        (".", "small", "..small"),
        ("gone", "small", "gone.small"),
    ],
)
def test_a_record_alone_makes_no_family(tmp_path: Path, parent: str, name: str, path: str) -> None:
    write(tmp_path / "other", [(start_event(), 1), *steps(1, 10)])
    run = branch(tmp_path, parent, name, 10, path=path)
    assert [row.name for row in run_tree(run)] == (["gone.small"] if parent == "gone" else [])
    assert run_tree(RunDir(tmp_path / "other")) == ()
