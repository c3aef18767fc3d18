"""`instar logs events`: what happened, by kind and step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written_runs import place, writing

from instar.cli.main import main
from instar.logs.text.format_event import EventFormatter
from instar.record.events import (
    Alert,
    AnalysisEvent,
    Asked,
    Failed,
    Layers,
    NewGradients,
    OperationEvent,
    SampleText,
    Skip,
    Unrecognised,
    Warn,
)
from instar.record.rundir import RunDir

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that went back from step 20 to step 10."""
    monkeypatch.chdir(tmp_path)
    with writing(Path("runs/back-abcde")) as writer:
        writer.start()
        writer.train(10, 4.0)
        writer.save(10)
        writer.train(20, 9.0)
        writer.write(OperationEvent(name="change_lr", change="1→2", **place(20)))
        writer.start(step=10, resumed_from="step-10")
        writer.recorder.write(Warn(message="gone back"))
        writer.train(20, 3.0)
        writer.stop(20)
    return writer.run


def lines(capsys: Capture, *words: str) -> list[str]:
    assert main(["logs", "events", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_json_lines_are_those_of_the_record(run: RunDir, capsys: Capture) -> None:
    record_lines = run.events.read_text().splitlines()
    assert lines(capsys, "--format", "jsonl") == record_lines[:3] + record_lines[5:]


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (("--kind", "train"), ["train", "train"]),
        (("--kind", "train", "--kind", "stop"), ["train", "train", "stop"]),
        (("--kind", "train", "--superseded"), ["train", "train", "train"]),
        (("--kind", "operation"), []),
        (("--kind", "operation", "--superseded"), ["operation"]),
        (("--from-step", "11"), ["train", "stop", "run_finished"]),
        (("--to-step", "9"), ["run_started"]),
        (("--from-step", "10", "--to-step", "10", "--kind", "train"), ["train"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_events_are_chosen(capsys: Capture, words: tuple[str, ...], kinds: list[str]) -> None:
    assert [
        json.loads(line)["kind"] for line in lines(capsys, *words, "--format", "jsonl")
    ] == kinds
    events = json.loads("\n".join(lines(capsys, *words, "--json")))
    assert [event["kind"] for event in events] == kinds


def test_what_is_superseded_is_marked(capsys: Capture) -> None:
    records = lines(capsys, "--kind", "train", "--superseded", "--format", "jsonl")
    assert [json.loads(line)["superseded"] for line in records] == [False, True, False]
    text = lines(capsys, "--kind", "train", "--superseded")
    assert [line.endswith("(superseded)") for line in text] == [False, True, False]


def test_several_runs_are_told_apart(capsys: Capture) -> None:
    with writing(Path("runs/other-fghjk")) as writer:
        writer.start()
        writer.stop(3)
    arguments = ("back", "other", "--kind", "stop")
    stops = json.loads("\n".join(lines(capsys, *arguments, "--json")))
    assert [(stop["run"], stop["step"]) for stop in stops] == [
        ("runs/back-abcde", 20),
        ("runs/other-fghjk", 3),
    ]
    assert lines(capsys, *arguments)[0] == "runs/back-abcde"


def test_an_unknown_kind_is_told_and_one_of_a_newer_instar_is_found(
    run: RunDir, capsys: Capture
) -> None:
    assert main(["logs", "events", "--kind", "opration"]) == 2
    assert "did you mean 'operation'?" in capsys.readouterr().err
    with run.events.open("ab") as file:
        file.write(b'{"v":1,"kind":"teleported","time":1,"segment":2,"to":"moon"}\n')
    assert lines(capsys, "--kind", "teleported") == ['teleported: {"to": "moon"}']


def test_lines_that_are_no_events_are_passed_over(run: RunDir, capsys: Capture) -> None:
    before = lines(capsys, "--format", "jsonl")
    with run.events.open("ab") as file:
        file.write(b'\xff\xfe{"v":1,"kind":"train"\n[1, 2]\n{"v":1,"kind":"tra')
    assert lines(capsys, "--format", "jsonl") == before


def test_every_kind_has_a_line(tmp_path: Path) -> None:
    at = place(7)
    events = [
        Alert(name="stall", message="no step for 5 min", **at),
        Asked(id="3f", by="ann", outcome="waits", operation="freeze", reason="at step 9", **at),
        Asked(id="4f", by="ann", outcome="cancelled", operation="change_lr", value=0.5, **at),
        Skip(**at),
        SampleText(prompt="a", text="b\nc", **at),
        AnalysisEvent(findings={}, suggestions=("more width",), **at),
        AnalysisEvent(findings={}, **at),
        NewGradients(operation="widen_mlp", grad_norm_kept=1.0, grad_norm_new=0.5, **at),
        Layers(grad_norm={"blocks.0": 0.5}, update_ratio={"blocks.0": 1e-3}, **at),
        Warn(message="careful"),
        Failed(message="rank 1 failed", rank=1),
        Unrecognised(name="new", fields={"x": float("nan")}),
    ]
    teller = EventFormatter(tmp_path)
    texts = [line for event in events for line in teller.every(event)]
    assert texts == [
        "      7  alert: stall: no step for 5 min",
        "      7 ann asked for freeze: waits: at step 9 (3f)",
        "      7 ann change_lr 0.5: cancelled (4f)",
        "      7  update skipped: non-finite gradient",
        "      7  wrote: ab⏎c",
        "      7  more width",
        "      7  analysis: nothing to suggest",
        "      7  after widen_mlp  gn kept 1.0000  new 0.5000",
        "      7  layers  gn blocks.0 0.5",
        "warning: careful",
        "failed: rank 1 failed",
        'new: {"x": "NaN"}',
    ]
