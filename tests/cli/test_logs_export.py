"""`instar logs export`: a run that went back twice, as tables and in other tools."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cases import parametrize_first
from tracked import TOOLS, read_back

from instar.record.events import Eval, OperationEvent, RunFinished, RunStarted, Saved, Stop, Train
from instar.record.recorder import Recorder

Instar = Callable[..., subprocess.CompletedProcess[str]]
PLACES = ["step", "samples", "tokens", "epoch", "flops", "wall_s", "active_s", "time", "segment"]


def loss(step: int, segment: int) -> float:
    return math.nan if step == 4 else math.inf if step == 5 else segment + 1.0 / step


def record(folder: Path, *starts: int) -> None:
    """Segments of ten steps each; validated twice at the last, before and after it grew."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: demo\nmodel:\n  n_layer: 2\n")
    with Recorder(folder / "events.jsonl") as sink:
        for segment, start in enumerate(starts, 1):
            came_from = f"step-{start}" if segment > 1 else None
            sink.write(RunStarted(run_id="ab3cd", step=start, resumed_from=came_from))
            for step in range(start + 1, start + 11):
                sink.write(Train(step=step, tokens=64 * step, loss=loss(step, segment), lr=1e-3))
                sink.write(Saved(step=step, path=f"checkpoints/step-{step}"))
            sink.write(Eval(step=step, tokens=64 * step, split="val", loss=2.0))
            sink.write(OperationEvent(step=step, name="widen_mlp", verb="GROW", change="64→128"))
            sink.write(Eval(step=step, tokens=64 * step, split="val", loss=2.5))
        sink.write(Stop(step=step, reason="done"))
        sink.write(RunFinished(step=step, loss=1.0))


@pytest.fixture
def run(place: Path) -> Path:
    folder = place / "runs" / "demo-ab3cd"
    record(folder, 0, 6, 8)
    return folder


@pytest.mark.usefixtures("run")
def test_csv_has_a_row_for_each_step_that_counts(instar: Instar) -> None:
    rows = list(csv.DictReader(io.StringIO(instar("logs", "export", "--to", "csv").stdout)))
    assert list(rows[0]) == [*PLACES, "loss", "lr", "val/loss"]
    kept = [(step, 1) for step in range(1, 7)] + [(7, 2), (8, 2)]
    kept += [(step, 3) for step in range(9, 19)]
    assert [(int(row["step"]), int(row["segment"])) for row in rows[:-1]] == kept
    for row, (step, segment) in zip(rows, kept, strict=False):
        assert row["loss"] == str(loss(step, segment)).replace("nan", "NaN").replace(
            "inf", "Infinity"
        )
        assert row["tokens"] == str(64 * step)
    assert [row["val/loss"] for row in rows[-3:]] == ["", "2.0", "2.5"]
    assert rows[-1]["loss"] == ""


def test_what_was_superseded_is_there_on_request(instar: Instar, run: Path) -> None:
    text = instar("logs", "export", str(run), "--to", "csv", "--superseded").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    measured = [(int(row["segment"]), int(row["step"])) for row in rows if row["loss"]]
    assert measured == [
        (n, step) for n, start in ((1, 0), (2, 6), (3, 8)) for step in range(start + 1, start + 11)
    ]


def test_parquet_tells_what_is_missing_from_what_is_no_number(instar: Instar, run: Path) -> None:
    said = instar("logs", "export", "--to", "parquet", "-o", "out", "--json").stdout
    where = run.parents[1] / "out" / "demo-ab3cd.parquet"
    assert json.loads(said) == [
        {"run": "runs/demo-ab3cd", "to": "parquet", "where": "out/demo-ab3cd.parquet", "rows": 19}
    ]
    table = pq.read_table(where).to_pydict()
    assert math.isnan(table["loss"][3])
    assert table["loss"][4] == math.inf
    assert table["val/loss"] == [None] * 17 + [2.0, 2.5]
    assert table["step"][-1] == 18


def test_jsonl_has_the_lines_of_the_record_that_count(instar: Instar, run: Path) -> None:
    lines = instar("logs", "export", "--to", "jsonl").stdout.splitlines()
    original = (run / "events.jsonl").read_text().splitlines()
    assert set(lines) < set(original)
    steps = [each["step"] for each in map(json.loads, lines) if each["kind"] == "train"]
    assert steps == list(range(1, 19))
    every = instar("logs", "export", "--to", "jsonl", "--superseded").stdout.splitlines()
    assert every == original


def test_several_runs_take_a_file_each(instar: Instar, run: Path) -> None:
    record(run.with_name("demo-xy4ef"), 0)
    said = instar("logs", "export", "demo", "--to", "csv", "-o", "tables").stdout
    assert sorted(said.split()) == ["tables/demo-ab3cd.csv", "tables/demo-xy4ef.csv"]
    one = instar("logs", "export", "ab3cd", "--to", "csv", "-o", "here.csv").stdout
    assert one == "here.csv\n"
    assert (run.parents[1] / "here.csv").read_bytes() == (
        run.parents[1] / "tables" / "demo-ab3cd.csv"
    ).read_bytes()


def test_runs_in_folders_of_one_name_replace_no_file(instar: Instar, run: Path) -> None:
    for name in "ab":
        record(run.parent / name / "demo-xy4ef", 0)
    runs = [str(run.parent / name / "demo-xy4ef") for name in "ab"]
    for to in ("csv", "tensorboard"):
        refused = instar("logs", "export", *runs, "--to", to, "-o", "tables", code=2)
        assert "several runs have folders named demo-xy4ef" in refused.stderr
    assert not (run.parents[1] / "tables").exists()


@parametrize_first("tool", TOOLS, first=1)
def test_a_run_is_replayed_into_a_tool(instar: Instar, run: Path, tool: str) -> None:
    place = run.parents[1]
    # where `read_back` looks for the tool's own files
    output = {"tensorboard": place, "trackio": place / "runs" / "trackio"}.get(tool, run.parent)
    if tool == "wandb":
        output = run
    said = json.loads(instar("logs", "export", "--to", tool, "-o", str(output), "--json").stdout)
    assert said[0]["events"] == len(instar("logs", "export", "--to", "jsonl").stdout.splitlines())
    if tool == "tensorboard":
        (place / "demo-ab3cd").rename(run / "tensorboard")
    found = read_back(tool, run)
    assert [step for step, _ in found["points"]] == list(range(1, 19))
    assert found["points"][8][1] == pytest.approx(loss(9, 3), rel=1e-6)
    assert "64→128" in found["notes"]["operation"][0][1]
    assert "n_layer" in json.dumps(found["config"])
    assert not (run / "trackers.json").exists()


def test_a_record_with_lines_that_are_none_is_exported_without_them(
    instar: Instar, run: Path
) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('not an event\n{"v":1,"kind":"tra')
    done = instar("logs", "export", "--to", "csv")
    assert len(done.stdout.splitlines()) == 20
    assert "runs/demo-ab3cd/events.jsonl:75: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "excel"], "excel"),
        (["--to", "parquet"], "parquet cannot go to stdout; name a folder with -o DIR"),
        (["--to", "csv", "--json"], "name one with -o"),
        (["--to", "csv", "-o", "squares.txt/x.csv"], "cannot write squares.txt/x.csv"),
        (["demo-zzzzz", "--to", "csv"], "demo-zzzzz"),
        ([], "--to"),
    ],
    ids=[
        "no such format",
        "parquet to stdout",
        "json and stdout",
        "no folder",
        "no run",
        "no --to",
    ],
)
@pytest.mark.usefixtures("run")
def test_a_mistake_is_told_in_a_sentence(instar: Instar, arguments: list[str], said: str) -> None:
    done = instar("logs", "export", *arguments, code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or "--json" in arguments


@pytest.mark.torture
def test_the_command_that_is_told_opens_what_mlflow_was_given(run: Path, instar: Instar) -> None:
    """MLflow's own client refuses a folder without the variable that the command sets."""
    done = instar("logs", "export", str(run), "--to", "mlflow")
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("open it with: ")]
    words = shlex.split(line.removeprefix("open it with: "))
    variable, _, value = words[0].partition("=")
    assert words[1:4] == ["mlflow", "ui", "--backend-store-uri"]
    counted = (
        "import sys\n"
        "from mlflow.tracking import MlflowClient\n"
        "client = MlflowClient(tracking_uri=sys.argv[1])\n"
        "experiments = [each.experiment_id for each in client.search_experiments()]\n"
        "print(len(client.search_runs(experiments)))\n"
    )
    plain = {key: text for key, text in os.environ.items() if key != variable}
    runs = [
        subprocess.run(
            [sys.executable, "-c", counted, words[4]],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        for environment in (plain | {variable: value}, plain)
    ]
    assert runs[0].stdout.split() == ["1"], runs[0].stderr
    assert runs[1].returncode != 0, "then the command may be told without it"
    assert (
        "open it with"
        not in instar("logs", "export", str(run), "--to", "csv", "-o", "a.csv").stderr
    )
