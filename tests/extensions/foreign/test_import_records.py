"""`instar logs import`: what a tool has recorded is listed, drawn and compared with the tool's own figures."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from tool_records import TOOLS, Written
from written_runs import write_run as write_run

from instar.record.rundir import find_run

Instar = Callable[..., subprocess.CompletedProcess[str]]
RecordOf = Callable[[str], Written]
ORIGINS = {
    "transformers": "transformers' trainer_state.json",
    "transformers_accuracy": "transformers' trainer_state.json",
    "lightning": "Lightning's metrics.csv",
    "tensorboard": "TensorBoard's event files",
    "wandb": "W&B's offline run",
    "trackio": "trackio's project demo",
    "nanogpt": "nanoGPT's output",
    "forgather": "forgather's trainer_logs.json",
}
NAMES = {
    "transformers": "tiny",
    "transformers_accuracy": "accuracy",
    "lightning": "small-version_0",
    "tensorboard": "exp1",
    "wandb": "a-run",
    "trackio": "first",
    "nanogpt": "train",
    "forgather": "log_2026",
}
"""of the runs that they become"""


def same(value: Any, other: Any) -> bool:
    """Whether two numbers, perhaps words of JSON, are the same."""
    return math.isclose(float(value), float(other), rel_tol=1e-12) or str(float(value)) == str(
        float(other)
    )


def run_of(instar: Instar, place: Path, tool: str, path: Path) -> str:
    """Import a record; return the folder of its first run, of which the command says the same."""
    result = instar("logs", "import", str(path))
    folder = result.stdout.splitlines()[0]
    assert folder.startswith(f"runs/{NAMES[tool]}-")
    assert f"{folder}: {ORIGINS[tool]}: loss ← " in result.stderr
    assert sorted(entry.name for entry in (place / folder).iterdir()) == ["events.jsonl"]
    return folder


def test_a_table_of_lightning_that_was_edited_is_one_by_its_name(
    instar: Instar, place: Path
) -> None:
    folder = place / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    text = "epoch,step,train_loss,val_loss,val_acc\r\n0,1,3.0,,\r\n0,2,2.5,2.6,0.5\r\n"
    (folder / "metrics.csv").write_text(text)
    for words in ((), ("--from", "lightning")):
        result = instar("logs", "import", "lightning_logs/version_0", *words)
        assert "Lightning's metrics.csv" in result.stderr
    (folder / "own.csv").write_text(text)
    instar("logs", "import", "lightning_logs/version_0/own.csv", code=2)


def test_an_axis_that_a_record_does_not_have_is_named(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    write_run(place / "runs" / "mine-abcde", {1: 4.0, 4: 3.0}, {4: 3.5})
    folder = run_of(instar, place, "tensorboard", record_of("tensorboard").path)
    refusal = instar("logs", "compare", folder, "runs/mine-abcde", "--x", "tokens", code=2)
    assert f"--x: the record of {folder} has no tokens; give another axis" in refusal.stderr
    assert "loss" in instar("logs", "compare", folder, "runs/mine-abcde").stdout


@parametrize_first("tool", TOOLS, first=4)
def test_a_record_is_read_beside_runs_of_our_own(
    tool: str, record_of: RecordOf, instar: Instar, place: Path
) -> None:
    record = record_of(tool)
    write_run(place / "runs" / "mine-abcde", {1: 4.0, 4: 3.0}, {4: 3.5})
    folder = run_of(instar, place, tool, record.path)

    # drawn and compared: the tool's own figures
    plot = instar(
        "logs", "plot", folder, "--metrics", ",".join(record.curves), "--format", "json"
    ).stdout
    curves = {
        curve["metric"]: list(zip(curve["x"], curve["value"], strict=True))
        for panel in json.loads(plot)["panels"]
        for curve in panel["curves"]
    }
    assert curves.keys() == record.curves.keys()
    for name, points in record.curves.items():
        assert len(curves[name]) == len(points) > 0, name
        for (x, value), (step, figure) in zip(curves[name], points, strict=True):
            assert x == step, name
            assert same(value, figure), (name, step)
    step, value = next(p for p in record.curves["loss"][::-1] if math.isfinite(p[1]))
    at = ("--metric", "loss", "--at", f"step={step}", "--json")
    comparison = json.loads(instar("logs", "compare", folder, "mine", *at).stdout)
    (cell,) = comparison["metrics"]["loss"][Path(folder).name]
    assert same(cell["mean"], value)
    assert any(f"{Path(folder).name}: imported from" in text for text in comparison["warnings"])

    # listed and summarized: marked
    rows = json.loads(instar("logs", "list", "--json").stdout)
    (row,) = [row for row in rows if row["path"] == folder]
    last_step = max(points[-1][0] for points in record.curves.values())
    assert (row["state"], row["step"], row["imported_from"]) == (
        "finished",
        last_step,
        ORIGINS[tool],
    )
    assert same(row["loss"], record.curves["loss"][-1][1])
    assert {row["imported_from"] for row in rows if row["name"] == "mine"} == {None}
    listing = instar("logs", "list").stdout.splitlines()
    assert listing[0].endswith("imported from")
    assert any(line.endswith(ORIGINS[tool]) for line in listing)
    summary = instar("logs", "summary", folder).stdout
    assert f"imported     from {ORIGINS[tool]}\n" in summary
    assert ORIGINS[tool] in instar("logs", "events", folder).stdout.splitlines()[0]


def numbers(instar: Instar, folder: str) -> dict[str, Any]:
    """What `instar logs summary` says of a run."""
    (summary,) = json.loads(instar("logs", "summary", folder, "--json").stdout)
    return dict(summary)


def test_a_checkpoint_of_transformers_is_a_record_of_its_own_steps(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    output = record_of("transformers").path
    folder = run_of(instar, place, "transformers", output / "checkpoint-4")
    summary = numbers(instar, folder)
    assert (summary["step"], summary["tokens"]) == (4, 4 * 2 * 12)
    assert summary["flops"] > 0
    assert summary["reason"] == "its record ends at step 4 of 6"
    # times are in no log of transformers, and none are made up
    assert (summary["started"], summary["seen"], summary["active_s"]) == (0.0, 0.0, 0.0)
    text = instar("logs", "summary", folder).stdout
    assert "started" not in text
    assert "active" not in text
    refusal = instar("logs", "plot", folder, "--x", "wall", code=2)
    assert "has no values on the axis wall_s" in refusal.stderr
    for run in ("--x", "tokens"), ("--x", "epoch"):
        instar("logs", "plot", folder, *run, "--format", "json")


def test_the_best_value_is_that_of_the_tools_metric(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    """A state of transformers has the best value, and says neither of which metric nor in which direction."""
    record = record_of("transformers_accuracy")
    folder = run_of(instar, place, "transformers_accuracy", record.path)
    (row,) = json.loads(instar("logs", "list", "--json").stdout)
    assert (row["best_metric"], row["best_step"], row["best_is_max"]) == ("accuracy", 2, True)
    assert same(row["best"], 0.5)
    best = numbers(instar, folder)["best"]
    assert (best["val/loss"]["step"], best["val/accuracy"]["step"]) == (6, 2)


def test_a_run_of_wandb_has_its_config_and_its_clock(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    folder = run_of(instar, place, "wandb", record_of("wandb").path)
    output = instar("logs", "import", str(record_of("wandb").path.parent)).stderr
    assert "steps are those of train/global_step" in output
    assert "3 histograms left out" in output
    assert "1 NaN or infinite value kept" in output
    assert "axes: epoch ← train/epoch" in output
    summary = numbers(instar, folder)
    assert summary["started"] > 1.7e9
    assert summary["wall_s"] > 0
    assert summary["best"]["val/hits"]["step"] == 70
    start = json.loads(
        instar("logs", "events", folder, "--kind", "run_started", "--format", "jsonl").stdout
    )
    assert start["imported_config"] == {"lr": 0.1, "model.n_layer": 2, "hub.token": "[hidden]"}
    assert "SECRET" not in (place / folder / "events.jsonl").read_text()


def test_a_project_of_trackio_has_a_run_for_each_of_its_own(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    path = record_of("trackio").path
    before = sorted(path.rglob("*"))
    folders = instar("logs", "import", str(path)).stdout.splitlines()
    assert [folder.partition("-")[0] for folder in folders] == ["runs/first", "runs/second"]
    assert sorted(path.rglob("*")) == before
    comparison = json.loads(instar("logs", "compare", *folders, "--at", "step=7", "--json").stdout)
    first, second = (comparison["metrics"]["loss"][Path(folder).name][0] for folder in folders)
    assert same(second["mean"], first["mean"] + 1)
    rates = dict(zip([Path(folder).name for folder in folders], [0.1, 0.05], strict=True))
    assert comparison["config"] == {"lr": rates}
    refusal = instar("logs", "import", str(path), "--to", "runs/both", code=2)
    assert "it is the folder of one run, and there are several" in refusal.stderr
    assert not (place / "runs" / "both").exists()


def test_what_tensorboard_has_besides_scalars_is_counted(
    record_of: RecordOf, instar: Instar
) -> None:
    output = instar("logs", "import", str(record_of("tensorboard").path), "--to", "board").stderr
    assert "3 histograms left out" in output
    assert "1 image left out" in output
    assert "cut off" not in output
    refusal = instar("logs", "import", str(record_of("tensorboard").path), "--to", "board", code=3)
    assert "board is not empty" in refusal.stderr


def test_logs_in_folders_within_a_log_are_named(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    """As `SummaryWriter.add_scalars` and `add_hparams` write them."""
    file = next(record_of("tensorboard").path.rglob("*tfevents*"))
    note = "logs in folders within left out, to import each by its path: "
    for count in (0, 2, 7):
        for name in [f"loss_{number}" for number in range(count)]:
            folder = place / "own" / "curves" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes(file.read_bytes())
        (place / "own").mkdir(exist_ok=True)
        (place / "own" / file.name).write_bytes(file.read_bytes())
        output = instar("logs", "import", "own", "--to", f"own-{count}").stderr
        names = [f"curves/loss_{number}" for number in range(min(count, 5))]
        more = " and 2 more" if count > 5 else ""
        assert (note in output) == (count > 0)
        assert count == 0 or f"{note}{', '.join(names)}{more}" in output
    for path in ("own/curves/loss_1", f"own/{file.name}"):
        assert note not in instar("logs", "import", path, "--to", f"from/{path}").stderr


def test_an_output_of_nanogpt_has_tokens_and_both_losses(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    folder = run_of(instar, place, "nanogpt", record_of("nanogpt").path)
    summary = numbers(instar, folder)
    assert (summary["tokens"], summary["unit"]) == (7 * 1024, "token")
    assert same(summary["last"]["train/loss"]["value"], 0.9)
    output = instar("logs", "import", str(record_of("nanogpt").path)).stderr
    assert "mfu left out where nanoGPT had not measured it yet: 5" in output


def test_a_log_that_forgather_still_writes_is_read_as_far_as_it_goes(
    record_of: RecordOf, instar: Instar, place: Path
) -> None:
    path = record_of("forgather").path
    folder = run_of(instar, place, "forgather", path)
    summary = numbers(instar, folder)
    assert summary["reason"].startswith("its record has no end")
    assert (summary["started"], summary["wall_s"]) == (1.7e9, 7.0)
    output = instar("logs", "import", str(path.parent)).stderr
    assert "read up to line 11, where it is cut off (20 bytes left out)" in output
    complete = path.read_text().rpartition(",\n")[0] + "\n]"
    (place / "trainer_logs.json").write_text(complete)
    folder = instar("logs", "import", "trainer_logs.json").stdout.strip()
    assert numbers(instar, folder)["reason"] == ""


def test_losses_of_other_names_are_named(record_of: RecordOf, instar: Instar) -> None:
    path = str(record_of("trackio").path)
    result = instar("logs", "import", path, "--loss", "val_loss", "--val", "train_loss", "--json")
    runs = json.loads(result.stdout)
    assert [run["metrics"] for run in runs] == [{"val_loss": "loss", "train_loss": "val/loss"}] * 2
    refusal = instar("logs", "import", path, "--loss", "trian_loss", code=2)
    assert "there is no metric 'trian_loss'; did you mean 'train_loss'?" in refusal.stderr


def test_what_is_exported_and_imported_is_the_same_run(instar: Instar, place: Path) -> None:
    """Through TensorBoard, whose scalars are float32, and with all axes."""
    write_run(place / "runs" / "mine-abcde", {n: 4.0 / n for n in range(1, 9)}, {4: 3.5, 8: 3.25})
    instar("logs", "export", "mine", "--to", "tensorboard", "-o", "boards")
    (path,) = (place / "boards").rglob("*tfevents*")
    folder = instar("logs", "import", str(path), "--to", "runs/back").stdout.strip()
    own_events, back_events = (find_run(name, place / "runs").events for name in ("mine", "back"))
    rows = [
        [event for event in map(json.loads, lines) if event["kind"] in ("train", "eval")]
        for lines in (own_events.read_text().splitlines(), back_events.read_text().splitlines())
    ]
    assert folder == "runs/back"
    assert len(rows[0]) == len(rows[1]) == 10
    for own_event, back_event in zip(*rows, strict=True):
        for name in ("kind", "step", "samples", "tokens", "flops", "wall_s", "active_s"):
            assert back_event[name] == own_event[name], name
        assert back_event["loss"] == pytest.approx(own_event["loss"], rel=1e-6)


REFUSED = (
    ("resume", "runs/theirs"),
    ("test", "theirs"),
    ("sample", "theirs"),
    ("train", "tiny.yaml", "--resume", "theirs"),
    ("train", "tiny.yaml", "--set", "resume=auto", "--set", "record.run_dir=runs/theirs"),
    ("train", "tiny.yaml", "--set", "model.from=runs/theirs"),
    ("control", "theirs", "save"),
    ("checkpoint", "export", "theirs", "model", "--to", "hf"),
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_needs_a_model_is_refused_in_a_sentence(
    words: tuple[str, ...], instar: Instar, place: Path
) -> None:
    (place / "metrics.csv").write_text("step,train_loss\n1,2.5\n2,2.25\n")
    instar("logs", "import", "metrics.csv", "--to", "runs/theirs")
    before = (place / "runs/theirs/events.jsonl").read_bytes()
    code = 3 if words[0] == "checkpoint" else 2
    refusal = instar(*words, code=code).stderr
    assert "runs/theirs was imported from Lightning's metrics.csv" in refusal
    assert "Traceback" not in refusal
    assert (place / "runs/theirs/events.jsonl").read_bytes() == before
    assert [entry.name for entry in (place / "runs/theirs").iterdir()] == ["events.jsonl"]
