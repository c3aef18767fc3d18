"""Object-store addresses are refused by name wherever a path is meant, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from instar.cli.main import instar, main
from instar.config.errors import ConfigError
from instar.config.fields import known_tasks, root_of, schema_keys
from instar.config.files import OPTIONS, WEB, check_words
from instar.config.load import load_config
from instar.record.rundir import find_run

NO_PATHS = {
    *(
        "name",
        "preset",
        "device",
        "task",
        "train.until",
        "optimizer.no_decay",
        "checkpoint.best_of",
    ),
    *("learning_rate.plateau.metric", "parallel.master_address", "parallel.devices"),
}
"""keys of text with forms of their own, which refuse addresses too"""


def text_keys(task: str) -> list[str]:
    table = schema_keys(root_of(task))
    names = [name for name, field in table.items() if "str" in str(field.annotation)]
    return [n for n in names if "Literal" not in str(table[n].annotation) and not n.startswith(WEB)]


@pytest.fixture(autouse=True)
def nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


@pytest.mark.parametrize(
    ("task", "key"), [(task, key) for task in known_tasks() for key in text_keys(task)]
)
def test_every_key_of_a_path_refuses_addresses(task: str, key: str) -> None:
    for address in ("s3://bucket/x", "file:///tmp/x", "GS://b"):
        with pytest.raises(ConfigError) as error:
            load_config(None, [f"task={task}", f"{key}={address}"])
        problems = [str(problem) for problem in error.value.problems]
        says = f"{key}: {address} is an address, not a path"
        assert key in NO_PATHS or any(says in problem for problem in problems), problems


def test_paths_within_lists_are_refused_at_their_place() -> None:
    Path("run.yaml").write_text(
        "data:\n  mixture:\n    - {source: a.txt}\n    - {source: 's3://b/c'}\n"
        "schedule:\n  - {name: change_vocab, value: {tokenizer: 's3://t'}, when: {at_step: 1}}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config("run.yaml")
    messages = [str(problem).split("\n")[0] for problem in error.value.problems]
    assert any(
        text.startswith("run.yaml:4:16: data.mixture: s3://b/c is an add") for text in messages
    )
    assert any("schedule: s3://t is an address" in text for text in messages)


@pytest.mark.parametrize("path", ["s3://bucket/run.yaml", "file:///run.yaml"])
def test_configs_schedules_and_runs_are_no_addresses(path: str) -> None:
    for read in (load_config, find_run):
        with pytest.raises(ConfigError, match="is an address, not a path"):
            read(path)
    with pytest.raises(ConfigError, match=r"schedule: .* is an address, not a path"):
        load_config(None, [f"schedule={path}"])


def test_web_addresses_of_trackers_and_alerts_stay() -> None:
    webhook = "record.alerts.webhook=https://example.org/x"
    assert load_config(None, [webhook]).config.record.alerts.webhook
    prompt = load_config(None, ["record.sample_prompt='https://a'"]).config.record
    assert prompt.sample_prompt == "https://a"


def commands() -> list[tuple[list[str], click.Command]]:
    results: list[tuple[list[str], click.Command]] = []
    context = click.Context(instar)
    for name in instar.list_commands(context):
        command = instar.get_command(context, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        results += [([name, sub], subcommand) for sub, subcommand in inner.items()] or [
            ([name], command)
        ]
    return results


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*pair, id=" ".join(pair[0])) for pair in commands()]
)
def test_every_argument_and_option_of_a_command_refuses_addresses(
    words: list[str], command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            assert main([*words, "s3://bucket/x"]) == 2
        elif not (parameter.is_flag or parameter.count) and not set(parameter.opts) & OPTIONS:  # type: ignore[attr-defined]
            assert main([*words, max(parameter.opts, key=len), "s3://bucket/x"]) == 2
        else:
            continue
        assert "s3://bucket/x is an address, not a path" in capsys.readouterr().err


def test_texts_may_be_addresses() -> None:
    check_words(["sample", "r", "--prompt", "https://a", "--stop=https://b", "--", "s3://c"])
