"""Folders that somebody else has made: whoever looks at them is neither stopped nor robbed."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import parametrize_first
from forks import forks
from needed import without_deleted
from terminal import environment, on_terminal
from typed import run_commands
from written_runs import write_run

from instar.cli.main import main
from instar.extensions import built_in
from instar.record.events import (
    Asked,
    Failed,
    OperationEvent,
    RunStarted,
    SampleText,
    Train,
    Warn,
)
from instar.record.recorder import Recorder

READING = without_deleted(
    [
        "logs list",
        "logs summary runs/theirs",
        "logs compare runs/mine runs/theirs",
        "logs plot runs/theirs -o plot.html --format html",
        "logs events runs/theirs",
        "logs tail runs/theirs",
        "logs tail runs/theirs --rank 0",
        "logs export runs/theirs --format csv -o metrics.csv",
        "report runs/theirs -o report.html",
        "control runs/theirs status",
        "config show runs/theirs/run.yaml",
        "checkpoint list runs/theirs",
        "checkpoint verify runs/theirs",
    ]
)
FILES = (
    "run.yaml",
    "events.jsonl",
    "lock",
    "logs/rank_0.log",
    "checkpoints/latest",
    "checkpoints/step-20/manifest.json",
    "test/result.json",
    "test/predictions.parquet",
)


ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202egnp.exe\r\x08\x7f"
SHOWN = r"\u001b]0;pwned\u0007\u001b[2J\u009b31m\u202egnp.exe"


@pytest.mark.timeout(300)
def test_what_would_act_on_a_terminal_is_shown_as_text(tmp_path: Path) -> None:
    """In names, messages, metrics, texts, configs, logs and tags of a run, on a real terminal."""
    run = write_run(tmp_path / "runs" / "theirs", {10: 2.0, 20: 1.0})
    own_run = write_run(tmp_path / "runs" / "mine", {10: 2.0, 20: 1.0})
    place = {"step": 21, "samples": 1, "tokens": 1}
    with Recorder(run.events) as record:
        record.write(RunStarted(run_id=ESCAPES, step=20, model=ESCAPES, devices=ESCAPES))
        record.write(Train(loss=1.0, extra={f"m{ESCAPES}": 1.0}, **place))
        record.write(SampleText(text=ESCAPES, prompt=ESCAPES, **place))
        record.write(Warn(message=ESCAPES, step=21))
        record.write(
            OperationEvent(name=ESCAPES, verb="GROW", change=ESCAPES, reason=ESCAPES, **place)
        )
        request = {"id": ESCAPES, "by": ESCAPES, "operation": ESCAPES, "reason": ESCAPES}
        record.write(Asked(outcome="refused", value=ESCAPES, **request, **place))
        record.write(Failed(message=ESCAPES, rank=0, step=21))
    run.log(0).write_text(f"[RANK 0] 2026-01-01 00:00:00 ERROR: {ESCAPES}\n")
    escaped_text = ESCAPES.encode().decode("latin-1").encode("unicode_escape").decode()
    run.config.write_text(f'name: "{escaped_text}"\nseed: 3\n')
    run.path.rename(run.path.with_name(f"theirs{ESCAPES}"))
    run_path = f"runs/theirs{ESCAPES}"
    lines = [
        ["logs", "list"],
        ["logs", "summary", run_path],
        ["logs", "events", run_path],
        ["logs", "tail", run_path],
        ["logs", "tail", run_path, "--rank", "0"],
        ["logs", "compare", str(own_run.path), run_path],
        ["logs", "plot", run_path, str(own_run.path)],
        ["logs", "plot", run_path, "--metrics", f"m{ESCAPES}"],
        ["logs", "export", run_path, "--to", "jsonl"],
        ["logs", "export", run_path, "--to", "csv"],
        ["control", run_path, "status"],
        ["config", "show", f"{run_path}/run.yaml"],
        ["checkpoint", "verify", run_path],
        ["logs", "summary", ESCAPES],
    ]
    screens = on_terminal(tmp_path, lines, environment(), forks().python, 200)
    count = 0
    for argv, screen in zip(lines, screens, strict=True):
        colourless = re.sub(r"\x1b\[[0-9;]*m", "", screen.out)
        acting = re.findall(
            r"[^\n\r\t -~\xa0-\u061b\u061d-\u200d\u2010-\u2027\u2030-\uffff]", colourless
        )
        assert not [char for char in acting if char != "\u202f"], (argv, screen.out)
        assert "\u202e" not in colourless, argv
        assert "\r" not in colourless.replace("\r\n", ""), argv
        count += SHOWN in "".join(colourless.split("\r\n"))
    assert count >= 8


@pytest.mark.timeout(300)
@parametrize_first("digits", [25, 4200, 5000], first=1)
def test_integers_of_any_length_in_a_record_are_told_or_passed_over(
    tmp_path: Path, digits: int
) -> None:
    number = "9" * digits
    lines = [
        f'"kind":"train","segment":1,"step":{number},"loss":1}}',
        f'"kind":"train","segment":1,"step":5,"loss":{number},"extra":{{"a":{number}}}}}',
        f'"kind":"operation","segment":1,"step":5,"name":"x","value":{{"a":[{number}]}}}}',
        f'"kind":"run_started","segment":1,"step":0,"run_id":"a","machine":{{"pid":{number}}}}}',
        f'"kind":"later","segment":1,"step":{number},"x":{number}}}',
    ]
    commands = []
    for name, line in enumerate(lines):
        run = write_run(tmp_path / "runs" / f"run-{name}", {10: 2.0, 20: 1.0})
        with run.events.open("a") as file:
            file.write(f'{{"v":1,"time":1.0,{line}\n')
        words = ("summary --json", "summary", "events", "plot --format json", "tail")
        commands += [(tmp_path, ["logs", *word.split(), str(run.path)]) for word in words]
    for (_, argv), outcome in zip(commands, run_commands(commands), strict=True):
        assert outcome.code == 0, (argv, outcome.err)
    if "board" not in built_in():
        return
    from dashboards import asking, serve_dashboard

    with serve_dashboard(tmp_path / "runs") as address, asking(address) as client:
        for name in range(len(lines)):
            for part in ("summary", "stages", "events", "system"):
                assert client.get(f"/api/runs/run-{name}/{part}").status_code in (200, 422)


@pytest.mark.parametrize("is_foreign", [True, False])
def test_another_users_config_does_not_say_where_an_export_goes(
    tmp_path: Path, is_foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_dir = tmp_path / "elsewhere"
    run = write_run(
        tmp_path / "runs" / "theirs",
        {10: 2.0},
        config={"record.trackers.tensorboard.dir": str(other_dir)},
    )
    if is_foreign:
        monkeypatch.setattr(os, "geteuid", lambda: run.config.stat().st_uid + 1)
    assert main(["logs", "export", str(run.path), "--to", "tensorboard"]) == 0
    assert other_dir.exists() is not is_foreign


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        working_directory = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may not be long
        listener.bind(path.name)
        os.chdir(working_directory)


def a_link_to_a_secret(path: Path) -> None:
    secret = path.parents[len(path.parts) - 1 - path.parts.index("runs")] / "id_rsa"
    secret.write_text("PRIVATE\n")
    path.symlink_to(secret)


@pytest.mark.timeout(300)
@parametrize_first(
    "make",
    [a_pipe, an_endless_device, a_socket, a_link_to_a_secret],
    first=1,
    ids=lambda make: make.__name__,
)
def test_no_file_of_a_run_stops_whoever_reads_it(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    commands: list[tuple[Path, list[str]]] = []
    for name in FILES:
        place = tmp_path / name.replace("/", "-")
        write_run(place / "runs" / "mine", {10: 2.0, 20: 1.0})
        run = write_run(place / "runs" / "theirs", {10: 2.0, 20: 1.0})
        run.log(0).write_text("[RANK 0] 2026-01-01 00:00:00 INFO: rank 0 of 1 on cpu\n")
        (run.path / "test").mkdir()
        (run.path / name).unlink(missing_ok=True)
        make(run.path / name)
        commands += [(place, shlex.split(command)) for command in READING]
    for (place, argv), outcome in zip(commands, run_commands(commands), strict=True):
        description = f"{place.name}: {argv}: {outcome.out}{outcome.err}"
        assert outcome.code in (0, 2, 3, 4), description
        assert "Traceback" not in outcome.err, description
        if argv[:2] != ["config", "show"]:  # which is given the link itself
            assert "PRIVATE" not in outcome.out + outcome.err, description
        if "theirs" not in " ".join(argv):
            assert outcome.code == 0, description
