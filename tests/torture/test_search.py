"""A search with pruning against the full grid: how close it comes, and at what cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import figures
import pytest
from fleets import FleetPlace, first_port
from forks import Forks
from tiny_run import TEXT, events

RATES = figures.times(3, 16)
STEPS = figures.times(50, 1000)
EVERY = STEPS // figures.times(10, 25)
WORST_LOSS = 1.10
WORST_COMPUTE_PERCENT = 40

RUN = f"""\
model: {{n_layer: 2, n_head: 2, n_embd: 32, context: 32}}
data: {{source: squares.txt, path: tokens, tokenizer: char}}
train: {{until: {STEPS}it, batch_size: 8}}
eval: {{eval_interval: {EVERY}, eval_iters: 4}}
checkpoint: {{keep_last: 1}}
record: {{log_interval: {EVERY}, sample_tokens: 0, report: false}}
"""
SEARCH = f"""\
search:
  trials: {RATES}
  pruner: successive_halving
  space: {{optimizer.lr: {{low: 1e-5, high: 1.0, log: true}}}}
"""


@pytest.mark.torture
@pytest.mark.timeout(7000)
def test_a_search_comes_close_to_the_full_grid_for_a_part_of_its_cost(
    tmp_path: Path, forks: Forks
) -> None:
    place = FleetPlace(tmp_path, first_port(), forks.python)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(RUN)
    grid = [10 ** (-5 + 5 * i / (RATES - 1)) for i in range(RATES)]
    jobs = "max_parallel: 1\njobs: {train: {run: run.yaml, stop: {grace: 60s}}}\n"
    place.write(f"name: full\nmatrix: {{optimizer.lr: {grid}}}\n{jobs}", "full.yaml")
    place.write(f"name: part\n{SEARCH}{jobs}", "part.yaml")
    for name in ("full", "part"):
        code, output = place.run("up", f"{name}.yaml", timeout_s=3000)
        assert code == 0, output
        print(output)
    full = {i: losses(tmp_path / f"runs/full-{i}") for i in range(RATES)}
    part = {i: losses(tmp_path / f"runs/part-{i}") for i in range(RATES)}
    best = json.loads(place.run("status", "part", "--json")[1])["best"]
    assert best["value"] == part[best["instance"]][-1]["loss"]
    listing = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "logs", "list", "runs", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    missing = [i for i in range(RATES) if f'"part-{i}"' not in listing.stdout]
    loss = best["value"] / min(evals[-1]["loss"] for evals in full.values())
    cost = sum(steps(tmp_path / f"runs/part-{i}") for i in range(RATES)) / (RATES * STEPS)
    figures.write(
        "search",
        [
            figures.at_most(
                f"final loss of {RATES} trials with pruning, to that of the grid's best",
                [loss],
                "×",
                WORST_LOSS if figures.FULL else 1.5,
            ),
            figures.at_most(
                "steps trained, of the grid's",
                [100 * cost],
                "%",
                WORST_COMPUTE_PERCENT if figures.FULL else 80,
            ),
            figures.none_of(RATES, "trial is not in logs", missing),
        ],
    )


def losses(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run, "eval") if event["split"] == "val"]


def steps(run: Path) -> int:
    """The steps that a run has trained."""
    return max(int(event["step"]) for event in events(run) if "step" in event)
