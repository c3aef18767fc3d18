"""A real run that grew, was resumed three times with rewinds, once from a branch that another one
had superseded, on one rank and on two: every command tells the one story that its events add up to.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forks import Forks
from needed import needs
from starlette.testclient import TestClient
from tiny_run import CONFIG, TEXT, Place, codes, events, output_of

from instar.logs.read.record import AXES, read_record
from instar.record.rundir import RunDir

GROWS = (
    "schedule=[{name: widen_mlp, value: 192, when: {at_step: 10}},"
    " {name: insert_layers, value: 1, when: {at_step: 15}}]"
)
SETTINGS = (
    *("record.run_dir=runs/tortured-ab3cd", "checkpoint.every_steps=4", "checkpoint.keep_last=99"),
    *(
        "record.layers_every=5",
        "record.sample_every=7",
        "record.sample_tokens=8",
        "record.report=true",
        "model.dropout=0",
    ),
)
BRANCHES = ((None, 20, 1), (8, 13, 2), (16, 22, 1), (13, 24, 2))
"""From which step, to which, on how many ranks: that from 16 is the first one's again, for the
second has come to 13 only."""
JSON = msgspec.json.Decoder()


@dataclass
class Story:
    """A run's events replayed as one would by hand: a checkpoint remembers all that led to it."""

    events: list[dict[str, Any]] = field(default_factory=list)
    by_checkpoint: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def tell(self, event: dict[str, Any]) -> None:
        if event["kind"] == "run_started" and event.get("resumed_from"):
            self.events = list(self.by_checkpoint[event["resumed_from"]])
        self.events.append(event)
        if event["kind"] == "checkpoint":
            name = Path(event["path"]).name
            self.by_checkpoint[name] = [e for e in self.events if e.get("step", 0) <= event["step"]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@dataclass(frozen=True)
class Resumed:
    place: Place
    path: Path
    events: list[dict[str, Any]]
    story: Story

    def instar(self, *words: object) -> str:
        (child,) = self.place.instar(*words)
        assert child.finish() == 0, child.output()
        return child.output()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Resumed:
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "squares.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(CONFIG)
    path = folder / "runs" / "tortured-ab3cd"
    place = Place(folder, forks)
    for start, end, ranks in BRANCHES:
        until = ("--until", f"{end}it")
        sets = [word for text in (*SETTINGS, GROWS) for word in ("--set", text)]
        words = ["train", "run.yaml", *sets] if start is None else ["resume", path]
        words += [] if start is None else ["--from", start]
        children = place.instar(*words, *until, ranks=ranks)
        assert set(codes(children)) == {0}, output_of(children)
    story, run_events = Story(), events(path)
    for event in run_events:
        story.tell(event)
    return Resumed(place, path, run_events, story)


def ids(run_events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(event["step"], event["segment"]) for event in run_events]


def test_the_story_is_what_was_meant(run: Resumed) -> None:
    """The reference itself, against what the branches were chosen for."""
    expected = [(step, 1) for step in range(1, 9)] + [(step, 2) for step in range(9, 14)]
    expected += [(step, 4) for step in range(14, 25)]
    assert ids(run.story.of("train")) == expected
    growths = [(e["name"], e["step"]) for e in run.story.of("operation") if e["verb"] == "GROW"]
    assert growths == [("widen_mlp", 10), ("insert_layers", 15)]
    starts = [e.get("resumed_from") for e in run.of("run_started")]
    assert starts == [None, "step-8", "step-16", "step-13"]


def test_every_curve_is_one_and_rises_on_every_axis(run: Resumed) -> None:
    record = read_record(RunDir(run.path))
    for metric in record.metrics:
        series = record.series(metric)
        current = series.current()
        for axis in AXES:
            values = current.axis(axis)
            assert (values[1:] >= values[:-1]).all(), (metric, axis)
        assert (current.step[1:] > current.step[:-1]).all()
    loss = record.series("loss")
    assert loss.value.tolist() == [e["loss"] for e in run.of("train")]
    assert loss.current().value.tolist() == [e["loss"] for e in run.story.of("train")]
    held_out = record.series("val/loss").current()
    assert held_out.value.tolist() == [e["loss"] for e in run.story.of("eval")]
    new_layer = record.series("grad_norm/blocks.2").current()
    assert new_layer.value.tolist() == [
        e["grad_norm"]["blocks.2"] for e in run.story.of("layers") if e["step"] > 15
    ]


def test_summary(run: Resumed) -> None:
    (summary,) = JSON.decode(run.instar("logs", "summary", run.path, "--json"))
    steps, held_out = run.story.of("train"), run.story.of("eval")
    best = min(held_out, key=lambda e: e["loss"])
    assert summary["state"] == "finished"
    assert summary["segments"] == len(BRANCHES)
    for metric, event in (
        (summary["last"]["loss"], steps[-1]),
        (summary["last"]["val/loss"], held_out[-1]),
        (summary["best"]["val/loss"], best),
    ):
        assert (metric["value"], metric["step"]) == (event["loss"], event["step"])
    for axis in ("step", "samples", "tokens", "flops", "active_s"):
        assert summary[axis] == steps[-1][axis]
    operations = [(e["name"], e["step"], e["segment"]) for e in summary["operations"]]
    assert operations == [(e["name"], e["step"], e["segment"]) for e in run.story.of("operation")]
    assert summary["memory_peak_bytes"] == max(e["memory_bytes"] for e in run.of("train"))
    assert summary["model"].startswith("3L")
    assert summary["world_size"] == 2


def test_export_has_what_counts_and_on_request_what_does_not(run: Resumed) -> None:
    for words, expected in (((), run.story.of("train")), (("--superseded",), run.of("train"))):
        text = run.instar("logs", "export", run.path, "--to", "csv", *words)
        rows = [row for row in csv.DictReader(io.StringIO(text)) if row["loss"]]
        actual = sorted((int(r["segment"]), int(r["step"]), float(r["loss"])) for r in rows)
        assert actual == sorted((e["segment"], e["step"], e["loss"]) for e in expected)


def test_events_say_which_of_them_were_superseded(run: Resumed) -> None:
    rows = JSON.decode(run.instar("logs", "events", run.path, "--superseded", "--json"))
    assert len(rows) == len(run.events)
    counting = [e for e in rows if not e.get("superseded") and "step" in e]
    kinds = ("train", "eval", "operation", "checkpoint", "sample", "layers")
    for kind in kinds:
        assert ids([e for e in counting if e["kind"] == kind]) == ids(run.story.of(kind)), kind


def test_tail(run: Resumed) -> None:
    rows = JSON.decode(run.instar("logs", "tail", run.path, "--json", "-n", 30))
    assert [(e["kind"], e["time"]) for e in rows] == [
        (e["kind"], e["time"]) for e in run.events[-30:]
    ]
    assert "resumed" in run.instar("logs", "tail", run.path, "-n", len(run.events))


def test_compare_at_equal_steps(run: Resumed) -> None:
    """With itself: the loss at a step is that of the one curve."""
    copy = run.path.with_name("other-xy2zt")
    copy.mkdir()
    for name in ("run.yaml", "events.jsonl"):
        (copy / name).write_bytes((run.path / name).read_bytes())
    words = ("logs", "compare", run.path, copy, "--json", "--metric", "loss")
    comparison = JSON.decode(run.instar(*words))
    losses = {e["step"]: e["loss"] for e in run.story.of("train")}
    assert len(comparison["metrics"]["loss"]) == 2
    for cells in comparison["metrics"]["loss"].values():
        for place, cell in zip(comparison["places"], cells, strict=True):
            assert cell["mean"] == pytest.approx(losses[int(place["amount"])])


def test_plot(run: Resumed) -> None:
    chart = JSON.decode(run.instar("logs", "plot", run.path, "--metrics", "loss", "--json"))
    (curve,) = chart["panels"][0]["curves"]
    assert curve["x"] == [e["step"] for e in run.story.of("train")]
    assert curve["value"] == [e["loss"] for e in run.story.of("train")]
    picture = run.path / "curves.svg"
    run.instar("logs", "plot", run.path, "-o", picture)
    assert picture.read_bytes().startswith(b"<?xml")


def check_curve(run: Resumed, curve: dict[str, Any]) -> None:
    steps = run.story.of("train")
    assert curve["x"]["step"] == [e["step"] for e in steps]
    assert curve["value"] == pytest.approx([e["loss"] for e in steps], rel=1e-4)
    old_parts = {part["segment"]: part for part in curve["superseded"]}
    current_ids = set(ids(steps))
    old_events = [e for e in run.of("train") if (e["step"], e["segment"]) not in current_ids]
    for segment, group in itertools.groupby(old_events, lambda e: e["segment"]):
        part_events = list(group)
        assert old_parts[segment]["x"]["step"] == [e["step"] for e in part_events]
        assert old_parts[segment]["value"] == pytest.approx(
            [e["loss"] for e in part_events], rel=1e-4
        )
    assert set(old_parts) == {e["segment"] for e in old_events}


def check_marks(run: Resumed, marks: list[dict[str, Any]]) -> None:
    resumes = [mark for mark in marks if mark["kind"] == "resume"]
    assert [mark["x"]["step"] for mark in resumes] == [8, 16, 13]
    counting = [m["x"]["step"] for m in marks if m["kind"] == "operation" and not m["superseded"]]
    assert counting == [e["step"] for e in run.story.of("operation")]
    num_superseded = sum(m["superseded"] for m in marks if m["kind"] == "operation")
    assert num_superseded == len(run.of("operation")) - len(counting)


@needs("board")
def test_the_report(run: Resumed) -> None:
    run.instar("report", run.path, "-o", run.path / "told.html")
    for name in ("report.html", "told.html"):
        text = (run.path / name).read_text("utf-8")
        (data,) = re.findall(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.DOTALL)
        (curves,) = JSON.decode(data)["answers"]["/api/curves"]["runs"]
        check_curve(run, curves["series"]["loss"])
        check_marks(run, curves["marks"])
        sections = JSON.decode(data)["answers"]["/api/runs/0/stages"]["sections"]
        (stages,) = [section for section in sections if section.get("title") == "Stages"]
        assert [row[2][:2] for row in stages["rows"]] == ["2L", "2L", "3L"]


@needs("board")
def test_the_dashboard(run: Resumed) -> None:
    from instar.extensions.board.app import dashboard_app

    with TestClient(dashboard_app(run.path.parent), base_url="http://127.0.0.1") as client:

        def ask(path: str) -> Any:
            return client.get(path).raise_for_status().json()

        keys = [row["key"] for row in ask("/api/runs")["rows"]]
        (key,) = [key for key in keys if "ab3cd" in key]
        (curves,) = ask(f"/api/curves?run={key}&metric=loss")["runs"]
        check_curve(run, curves["series"]["loss"])
        check_marks(run, curves["marks"])
        summary = ask(f"/api/runs/{key}/summary")
        assert summary["last"]["loss"]["value"] == run.story.of("train")[-1]["loss"]
