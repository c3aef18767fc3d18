"""Tables on stdout, in pipes and on terminals of some width."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from terminal import environment, run_on_terminal

from instar.cli.output import print_table

CODE = """
from instar.cli.output import print_table
print_table(
    ["run", "state", "step", "words"],
    [["a-run", "running", "1,000", "one two three four"], ["b", "crashed", "5", "six"]],
    right=["step"],
    optional=["words", "state"],
)
"""


def render_table(tmp_path: Path, columns: int, **env: str) -> str:
    command = [sys.executable, "-c", CODE]
    return run_on_terminal(command, tmp_path, environment(**env), columns)[1].replace("\r", "")


def test_in_a_pipe_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["run", "step"], [["a" * 300, "5"]], right=["step"], optional=["step"])
    assert capsys.readouterr().out.splitlines()[1] == "a" * 300 + "     5"


@pytest.mark.parametrize(
    ("columns", "header"),
    [(80, "run    state     step  words"), (30, "run    state     step"), (14, "run     step")],
)
def test_what_a_terminal_has_no_room_for_is_left_out(
    tmp_path: Path, columns: int, header: str
) -> None:
    lines = render_table(tmp_path, columns, NO_COLOR="1").splitlines()
    assert lines[0].rstrip() == header
    assert max(len(line.rstrip()) for line in lines) <= columns
    assert [line.split()[0] for line in lines[1:]] == ["a-run", "b"]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["no color", "dumb"])
def test_no_escape_code_where_none_is_wanted(tmp_path: Path, env: dict[str, str]) -> None:
    assert "\x1b" not in render_table(tmp_path, 80, **env)
    assert "\x1b[1m" in render_table(tmp_path, 80)
