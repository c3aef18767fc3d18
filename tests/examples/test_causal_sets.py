"""The examples of causal sets run as they say, only with fewer and smaller sets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from forks import INSTAR, Forks, children_as_ranks

from instar.config.load import load_config
from instar.schedule.checks import load_checked

FOLDER = Path(__file__).parents[2] / "examples/causal_sets"
TRIAL, GROWTH = FOLDER / "causal_sets.yaml", FOLDER / "causal_sets_growth.yaml"
NOTEBOOK = FOLDER / "tutorial.ipynb"

SMALL = ["data.causal_sets.sets=160", "data.causal_sets.min_points=24"]
SMALL += ["data.causal_sets.max_points=40", "train.batch_size=8", "learning_rate.warmup_iters=5"]


EXECUTE = "from nbclient.cli import main; main()"
"""`jupyter execute`, whatever is first in PATH; the kernel is this same Python"""


def train(config: Path, run: Path, forks: Forks, ranks: int, *more: str) -> list[dict[str, Any]]:
    """Run a config with small sets; its events."""
    data = run.parent / "sets"
    overrides = [*SMALL, f"record.run_dir={run}", f"data.path={data}", *more]
    argv = ["train", str(config), *(word for text in overrides for word in ("--set", text))]
    children = children_as_ranks(forks, ranks, INSTAR, argv, place=run.parent)
    codes = [child.finish() for child in children]
    assert codes == [0] * ranks, "\n".join(child.output() for child in children)
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


def result(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "test/result.json").read_text("utf-8"))
    del values["seconds"], values["checkpoint"]
    return values


def reason(events: list[dict[str, Any]]) -> tuple[int, str]:
    """At which step a run ended, and why."""
    (stop,) = (event for event in events if event["kind"] == "stop")
    return stop["step"], stop["reason"]


@pytest.mark.torture
def test_the_trial_ends_early_with_the_same_bits_on_one_rank_and_on_two(
    tmp_path: Path, forks: Forks
) -> None:
    runs = {ranks: tmp_path / f"on-{ranks}" for ranks in (1, 2)}
    reasons = {ranks: reason(train(TRIAL, run, forks, ranks)) for ranks, run in runs.items()}
    assert reasons[1] == reasons[2]
    assert re.search("manifold/accuracy has not .* and dimension/accuracy has not", reasons[1][1])
    assert result(runs[1]) == result(runs[2])
    one, two = ({file.name: file for file in run.rglob("*")} for run in runs.values())
    assert one.keys() - {"rank_0.log"} == two.keys() - {
        "rank_0.log",
        "rank_1.log",
        "rank-1.safetensors",
    }
    for name in ("best", "best-dimension%2Faccuracy", "latest", "predictions.parquet"):
        assert one[name].read_bytes() == two[name].read_bytes(), name
    steps = [path.name for path in sorted((runs[1] / "checkpoints").glob("step-*"))]
    assert steps
    for step in steps:
        weights = [run / "checkpoints" / step / "model.safetensors" for run in runs.values()]
        assert weights[0].read_bytes() == weights[1].read_bytes(), step


def test_the_growing_network_ends_in_the_shape_of_the_other(tmp_path: Path, forks: Forks) -> None:
    schedule = [
        entry.model_dump(mode="json") | {"when": {"at_step": 2 * number}}
        for number, entry in enumerate(load_config(str(GROWTH)).config.schedule, 1)
    ]
    options = [f"schedule={json.dumps(schedule)}", "train.until=8it", "eval.eval_epochs=null"]
    events = train(GROWTH, tmp_path / "growth", forks, 1, *options, "eval.eval_interval=4")
    operations = [event for event in events if event["kind"] == "operation"]
    assert [event["name"] for event in operations] == ["widen", "insert_layers", "widen"]
    model = load_config(str(TRIAL)).config.model
    last = operations[-1]["architecture"]
    assert (last["layers"], last["width"]) == (model.n_layer, model.width)
    assert last["mlp"] == 2 * model.width
    assert result(tmp_path / "growth")["samples"] == 32


def test_the_growing_network_is_asked_the_same_of_the_same_sets() -> None:
    trial, growth = (load_checked(str(path)).config for path in (TRIAL, GROWTH))
    assert growth.data == trial.data
    assert growth.model.heads == trial.model.heads
    assert growth.train == trial.train


def test_the_tutorial_runs_and_what_it_prints_is_what_it_says(tmp_path: Path) -> None:
    copy = shutil.copy(NOTEBOOK, tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", EXECUTE, "--inplace", copy],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    notebook = nbformat.read(copy, as_version=4)
    text = "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    )
    network, baseline = map(float, re.findall(r"the network (\S+), .* alone (\S+)", text)[0])
    assert network >= 0.9
    assert 0.4 < baseline < 0.6
    assert "for 3 evaluations" in text


def test_the_tutorial_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_the_page_names_every_config_and_its_command() -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    for config in FOLDER.glob("*.yaml"):
        assert f"instar train {config.name}" in page
