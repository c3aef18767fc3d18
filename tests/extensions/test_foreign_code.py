"""Whose code commands run: readers nobody's, whoever trains only what is trusted."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from chains import after, first, save
from safetensors.torch import save_file
from typed import run_commands
from written_runs import place, writing

from instar.checkpoint.manifest import Facts
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.cli.main import instar as commands
from instar.config.load import load_config
from instar.config.user_code.trust import TRUST_VARIABLE, Untrusted, module_files
from instar.extensions.board import app
from instar.extensions.board.catalog import Catalog
from instar.extensions.board.sections import PARTS
from instar.extensions.delta.format.folder import deltas_of
from instar.record.events import Eval
from instar.record.rundir import RunDir

SCRIPT = Path(sys.executable).with_name("instar")
CANARY = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(f'{{__name__}} was run')\n"
SHADOWS = ("notes", "torch", "numpy", "rich", "matplotlib", "yaml", "site", "sitecustomize")
"""modules that a hostile folder may bring, which shadow real ones where it is on the path"""

READING = {
    "logs list": ["."],
    "logs tag": ["a", "--add", "seen"],
    "logs note": ["a", "-m", "seen"],
    "logs archive": ["a", "--undo"],
    "logs summary": ["a"],
    "logs plot": ["a", "b", "--output", "plot.svg"],
    "logs compare": ["a", "b"],
    "logs tail": ["a"],
    "logs events": ["a"],
    "logs export": ["a", "--to", "csv", "--output", "out"],
    "logs report": ["a", "b", "--output", "one.html"],
    "report": ["a", "b", "--output", "two.html"],
    "dashboard": [],  # what it serves is asked for below
    "checkpoint list": ["a", "--verify"],
    "checkpoint inspect": ["a"],
    "checkpoint verify": ["a"],
    "checkpoint diff": ["a", "b"],
    "checkpoint analyze": ["a"],
    "checkpoint export": ["a", "hf", "--to", "hf"],
    "checkpoint average": ["a", "--last", "1", "--out", "mean"],
    "checkpoint import": ["a", "--to", "imported"],
    "config show": ["a/run.yaml", "--origin"],
    "config validate": ["a/run.yaml"],
    "config diff": ["a/run.yaml", "b/run.yaml"],
    "control": ["a", "status"],
    "sample": ["a"],
    "data inspect": ["a"],
    "delta create": ["old.safetensors", "new.safetensors", "link"],
    "delta apply": ["old.safetensors", "link", "applied.safetensors"],
    "delta verify": ["a"],
    "delta info": ["link", "--tensors"],
    "delta log": ["a", "--stats"],
    "delta checkout": ["a", "checked_out.safetensors", "--link", "3"],
    "delta squash": ["a", "1", "2"],
    "delta export": ["a", "like_a", "--like", "a"],
    "delta gc": ["a", "--keep-from", "2"],
}
FLEETS = {f"fleet {name}" for name in ("plan", "doctor", "status", "logs", "stop", "down", "reap")}
"""read a fleet's file or folder, and records of its runs: tests/extensions/fleet/test_foreign.py"""
TAKE_NO_RUN = {"init", "doctor", "demo", "config schema", "completion", "logs import", *FLEETS}
RUN_ITS_CODE = {
    "train",
    "resume",
    "test",
    "grow",
    "schedule check",
    "schedule pilot",
    "schedule search",
    "data prepare",
}
RUN_ITS_CODE |= {"find lr", "find batch", "fleet up", "fleet resume", "fleet host"}


def leaves(group: click.Group, before: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def hostile(folder: Path, task: str, mark: Path, **more: Any) -> RunDir:
    """A run with a record and a checkpoint, whose config names code that lies beside it."""
    with writing(folder, {"name": "theirs"}) as writer:
        writer.start()
        writer.train(1, 3.0)
        writer.write(Eval(split="val", loss=2.0, **place(2)))
        writer.stop(2)
    run = RunDir(folder)
    text = run.config.read_text().replace("task: language", f"task: {task}")
    section = "\nmodel: {width: 3, copy: 1, inner: {depth: 2}}\n\ndata: {val: 21, side: left}\n"
    head, _, remainder = text.partition("\nmodel:")
    tail = remainder[remainder.index("\ntrain:") :]
    run.config.write_text(head + section + tail)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(CANARY.format(mark=str(mark)))
    change = {"operation": {"name": "change_lr", "value": 0.5}, "step": 1, "cursor": 4}
    publish_checkpoint(
        folder,
        2,
        CheckpointContent(
            {"model": {"weight": torch.zeros(3, 2)}},
            {},
            {"width": 3},
            history=more.get("history", [change]),
            facts=Facts(reason="test"),
        ),
    )
    return run


@pytest.fixture
def foreign_runs(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with two foreign runs and their modules, and the file that a module writes."""
    mark = tmp_path / "was-run"
    folder = tmp_path / "there"
    save(deltas_of(hostile(folder / "a", "notes:Task", mark).path), 4)
    save_file(first(), folder / "old.safetensors")
    save_file(after(first(), 1), folder / "new.safetensors")
    hostile(folder / "b", "b.notes:Task", mark, history=[])
    for name in SHADOWS:
        shutil.copy(folder / "a" / f"{name}.py", folder)
    return folder, mark


def test_every_command_is_known_to_read_or_to_run_code() -> None:
    names = {*leaves(commands), "fleet host"}  # which engines type, and no help lists
    assert names == READING.keys() | TAKE_NO_RUN | RUN_ITS_CODE  # type: ignore[arg-type]


def test_the_page_on_security_names_every_command_that_runs_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    text = page.partition("## Commands that run a folder's code")[2].partition(". So do")[0]
    assert {*re.findall(r"`([a-z ]+)`", text)} == RUN_ITS_CODE


def test_reading_a_foreign_run_imports_nothing_of_it(foreign_runs: tuple[Path, Path]) -> None:
    folder, mark = foreign_runs
    command_lines = {name: [*name.split(), *words] for name, words in READING.items() if words}
    outcomes = dict(
        zip(
            command_lines,
            run_commands([(folder, argv) for argv in command_lines.values()]),
            strict=True,
        )
    )
    for name, outcome in outcomes.items():
        assert "Traceback" not in outcome.err, (name, outcome.err)
    assert not mark.exists()
    good = ("logs", "report", "config", "checkpoint list", "checkpoint diff", "control", "delta")
    model = ("sample", "checkpoint export", "delta export")  # say whose it is
    failures = {
        n: o.err for n, o in outcomes.items() if n.startswith(good) and n not in model and o.code
    }
    assert failures == {}
    for name in model:
        assert outcomes[name].code in (2, 3), name
    output = outcomes["config show"].out
    assert "inner: {depth: 2}" in output
    assert "copy: 1" in output
    assert "side: left" in output


def test_a_foreign_folder_as_working_directory_shadows_no_module(
    foreign_runs: tuple[Path, Path],
) -> None:
    folder, mark = foreign_runs
    for argv in (
        ["logs", "compare", ".", "../b"],
        ["checkpoint", "diff", ".", "../b"],
        ["checkpoint", "analyze", "."],
        ["config", "show", "run.yaml"],
        ["logs", "summary", "."],
    ):
        result = subprocess.run(
            [SCRIPT, *argv], cwd=folder / "a", capture_output=True, text=True, check=False
        )
        assert "Traceback" not in result.stderr, result.stderr
    assert not mark.exists()


def test_what_the_dashboard_tells_of_a_foreign_run_imports_nothing(
    foreign_runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = foreign_runs
    monkeypatch.chdir(folder)
    catalog = Catalog(folder, app.catalog_row, app.unread_row)
    catalog.refresh()
    run = catalog.find("a")
    assert run is not None
    assert "notes:Task" in str(app.sections_of(run, "config"))
    app.summary_of(run)
    for part in PARTS:
        app.sections_of(run, part)
    app.compare_runs([run, run])
    assert not mark.exists()


@pytest.mark.torture
def test_difference_tells_settings_of_a_task_whose_class_is_not_there(
    foreign_runs: tuple[Path, Path],
) -> None:
    folder, _ = foreign_runs
    (outcome,) = run_commands([(folder, ["checkpoint", "diff", "a", "b", "--json"])])
    settings = json.loads(outcome.out)["settings"]
    assert settings["in force: lr"] == {"a": 5e-4, "b": 1e-3}
    assert settings["task"] == {"a": "notes:Task", "b": "b.notes:Task"}


# whoever trains


def config(folder: Path, text: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def foreign_files(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Files that another user owns, as far as `stat` says: a test may not be root."""
    paths: set[Path] = set()
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        status = real(path, **options)
        if path.absolute() in paths:
            return os.stat_result([*status[:4], 54321, *status[5:10]])
        return status

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    return paths


NAMED = {
    "task": "task: theirs_task:Task",
    "source": "task: graph\ndata: {source: theirs_task:samples}",
    "transform": "data: {transform: theirs_task:change}",
    "alert": "record: {alerts: {command: [theirs]}}",
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("foreign_part", ["config", "folder", "module"])
def test_another_users_code_is_not_run_unasked(
    kind: str,
    foreign_part: str,
    tmp_path: Path,
    foreign_files: set[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (kind, foreign_part) == ("alert", "module"):
        return  # a program is no module
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, NAMED[kind])
    mark = tmp_path / "was-run"
    module = tmp_path / "theirs_task.py"
    module.write_text(CANARY.format(mark=str(mark)))
    foreign_files.add({"config": path, "folder": tmp_path, "module": module}[foreign_part])
    with pytest.raises(Untrusted) as error:
        load_config("own.yaml")
    assert "--trust-code" in str(error.value)
    assert "54321" in str(error.value)
    assert not mark.exists()


PLACES = {
    "record.alerts.webhook": "record: {alerts: {webhook: 'http://127.0.0.1/SECRET'}}",
    "record.trackers.mlflow.uri": "record: {trackers: {mlflow: {uri: 'http://me:SECRET@host/'}}}",
    "record.trackers.tensorboard.dir": "record: {trackers: {tensorboard: {dir: /SECRET}}}",
}


@pytest.mark.parametrize("key", PLACES)
def test_another_users_config_sends_a_run_nowhere_unasked(
    key: str, tmp_path: Path, foreign_files: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, PLACES[key])
    load_config("own.yaml", checks=())
    foreign_files.add(path)
    with pytest.raises(Untrusted, match=f"{key} says where the run is sent") as error:
        load_config("own.yaml", checks=())
    assert "SECRET" not in str(error.value)
    for override in (
        f"{key}=null",
        "record.alerts={}",
        "record.trackers=null",
        f"{key}=http://mine.org/",
    ):
        if key.startswith(override.partition("=")[0]):
            load_config("own.yaml", [override], checks=())
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    load_config("own.yaml", checks=())


def test_a_foreign_config_without_code_needs_no_trust(
    tmp_path: Path, foreign_files: set[Path]
) -> None:
    path = config(tmp_path, "train: {batch_size: 3}")
    foreign_files.add(path)
    assert load_config(str(path)).config.train.batch_size == 3


def test_a_package_is_followed_to_the_module_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "was-run"
    for package in ("outer", "outer/inner"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(CANARY.format(mark=str(mark)))
    (tmp_path / "outer" / "inner" / "task.py").write_text("")
    (tmp_path / "plain" / "deep").mkdir(parents=True)
    (tmp_path / "plain" / "deep" / "task.py").write_text("")
    files = set(module_files("outer.inner.task:Task"))
    assert {tmp_path / "outer/__init__.py", tmp_path / "outer/inner/task.py"} <= files
    assert {tmp_path / "plain", tmp_path / "plain/deep/task.py"} <= set(
        module_files("plain.deep.task:Task")
    )
    assert not mark.exists()


GATED = """
import os, sys
from pathlib import Path
real = Path.stat
def stat(path, **options):
    found = real(path, **options)
    if path.name == "own.yaml":
        return os.stat_result([*found[:4], 54321, *found[5:10]])
    return found
Path.stat = stat
from instar.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_a_terminal_a_foreign_config_is_refused_and_the_flag_runs_it(
    tmp_path: Path,
) -> None:
    config(tmp_path, "task: theirs_task:Task")
    (tmp_path / "theirs_task.py").write_text("print('was run')\nclass Task: pass\n")
    argv = [sys.executable, "-c", GATED, "config", "show", "own.yaml"]
    refusal = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refusal.returncode == 2
    assert "--trust-code" in refusal.stderr
    assert "was run" not in refusal.stdout
    result = subprocess.run(
        [*argv, "--trust-code"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "was run" in result.stdout


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
def test_on_a_terminal_whoever_sits_there_is_asked(answer: str, code: int, tmp_path: Path) -> None:
    config(tmp_path, "task: theirs_task:Task")
    (tmp_path / "theirs_task.py").write_text("print('was run')\nclass Task: pass\n")
    output = on_terminal(["config", "show", "own.yaml"], f"{answer}\n", tmp_path, code)
    assert "Run this code?" in output
    assert ("was run" in output) == (answer == "y")


def on_terminal(argv: Sequence[str], answer: str, folder: Path, code: int) -> str:
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-c", GATED, *argv])
    os.write(descriptor, answer.encode())
    output = b""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    assert os.waitstatus_to_exitcode(status) == code, output.decode()
    return output.decode()
