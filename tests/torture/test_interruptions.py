"""Runs that are interrupted at random steps and go on end as if nothing had happened.

`make test` does this a few times, `make torture` (INSTAR_TORTURE=full) many times.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
from started import Started, start_instar

TIMES = 25 if os.environ.get("INSTAR_TORTURE") == "full" else 2
STEPS = 40
TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
CONFIG = f"""\
name: tortured
model: {{n_layer: 2, n_head: 2, n_embd: 32, context: 16, dropout: 0.1}}
data: {{source: squares.txt, path: tokens, tokenizer: char}}
train: {{until: {STEPS}it, batch_size: 13, gradient_accumulation_steps: 3, ema: 0.9}}
optimizer: {{name: muon}}
learning_rate: {{warmup_iters: 5, lr_decay_iters: {STEPS}}}
eval: {{eval_interval: 7}}
record: {{log_interval: 1}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def resume(run_dir: Path) -> Started:
    command = [sys.executable, "-m", "instar.cli.main", "resume", str(run_dir)]
    return start_instar(command=command)


def components(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step-{STEPS}"
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.timeout(3600)
def test_interrupted_runs_end_bit_for_bit_as_the_undisturbed_one(place: Path) -> None:
    start_instar("run.yaml", run_dir=place / "whole").finish(0)
    wanted = components(place / "whole")
    assert set(wanted) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    chance, interruptions = random.Random(0), 0
    for number in range(TIMES):
        run_dir = place / f"parts-{number}"
        run = start_instar("run.yaml", run_dir=run_dir)
        reached = 0
        while True:
            stop_at = reached + chance.randint(1, STEPS // 2)
            if stop_at >= STEPS - 2:
                run.finish(0)
                break
            run.wait_for(rf"^ *{stop_at} .*loss")
            run.interrupt()
            run.finish(75)
            interruptions += 1
            events = (run_dir / "events.jsonl").read_text().splitlines()
            reached = json.loads(events[-1])["step"]
            run = resume(run_dir)
        assert components(run_dir) == wanted
    assert interruptions >= TIMES
    if TIMES > 2:
        _write_result(interruptions)


def _write_result(interruptions: int) -> None:
    case = {
        "case": f"{interruptions} interruptions in {TIMES} runs: final weights that differ",
        "figure": 0,
        "unit": "runs",
        "spread": 0,
        "bar": "= 0",
        "ok": True,
    }
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "torture-interruptions.json").write_text(
        json.dumps({"name": "torture-interruptions", "cases": [case]}, indent=2) + "\n"
    )
