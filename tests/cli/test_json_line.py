"""`--json` of every command: one line of JSON on stdout, also with errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from instar.cli.main import instar, main


def commands(
    group: click.Command = instar, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    context = click.Context(group, info_name=" ".join(path))
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from commands(command, (*path, name))


COMMANDS = dict(commands())


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """The exit code, and what the one line on stdout holds."""
    code = main([*words, "--json"])
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1, out
    return code, json.loads(out)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_says_in_one_line_what_is_wrong(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, answer = one_line(capsys, *words, "--no-such-option")
    assert (code, answer["exit_code"]) == (2, 2)
    assert "--no-such-option" in answer["error"]
    arguments = [
        parameter for parameter in COMMANDS[words].params if isinstance(parameter, click.Argument)
    ]
    if any(parameter.required for parameter in arguments):
        code, answer = one_line(
            capsys, *words, *("nothing" for parameter in arguments if parameter.required)
        )
        assert code == answer["exit_code"] != 0
        assert answer["error"]


def test_what_a_command_prints_is_one_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one_line(capsys, "init", "gpt", "gpt.yaml")[0] == 0
    code, answer = one_line(capsys, "config", "validate", "gpt.yaml")
    assert (code, answer["config"], answer["valid"]) == (0, "gpt.yaml", True)
    code, answer = one_line(capsys, "config", "validate", "gpt.yaml", "--set", "modle.x=1")
    assert code == 2
    assert "unknown key 'modle'" in answer["error"]
    code, answer = one_line(capsys, "completion", "bash")
    assert code == 0
    assert "_instar_completion" in answer["output"]
    code, answer = one_line(capsys, "config", "schema", "optimizer")
    assert answer["properties"]["lr"]["default"] == 0.001
