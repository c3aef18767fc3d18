"""Runs as they stand on the disk, their records written by the real recorder, without training."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.config.load import load_config
from instar.record.events import Eval, Placed, RunFinished, RunStarted, Saved, Stop, Train
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

BEGAN = 1_700_000_000.0
"""Unix seconds at step 0; a step takes one."""


def place(step: int) -> dict[str, Any]:
    """Where a run is after so many steps."""
    return {
        "step": step,
        "samples": 4 * step,
        "tokens": 64 * step,
        "epoch": step / 100,
        "flops": 1e6 * step,
        "wall_s": 1.0 * step,
        "active_s": 0.5 * step,
    }


@dataclass
class Writer:
    """Writes into one run's record, at the hour of the step."""

    run: RunDir
    recorder: Recorder
    now: float = BEGAN

    def start(self, step: int = 0, **more: Any) -> None:
        fields: dict[str, Any] = {
            "run_id": self.run.id,
            "model": "2L/32d",
            "parameters": 1000,
            "devices": "cpu",
            "machine": {"host": platform.node()},
        }
        self.recorder.write(RunStarted(step=step, **fields | more))

    def train(self, step: int, loss: float, **more: Any) -> None:
        self.write(Train(loss=loss, **place(step), **more))

    def val(self, step: int, loss: float, **more: Any) -> None:
        self.write(Eval(split="val", loss=loss, **place(step), **more))

    def save(self, step: int) -> None:
        """A checkpoint, as far as anyone who only looks can tell."""
        folder = self.run.checkpoints / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text("{}")
        (self.run.checkpoints / "latest").write_text(f"{folder.name}\n")
        self.write(Saved(path=str(folder), **place(step)))

    def stop(self, step: int, reason: str = "reached 8it", *, resumable: bool = False) -> None:
        self.write(Stop(reason=reason, resumable=resumable, **place(step)))
        self.write(RunFinished(**place(step)))

    def write(self, event: Placed) -> None:
        self.now = BEGAN + event.step
        self.recorder.write(event)


@contextmanager
def writing(folder: Path, config: Mapping[str, object] | None = None) -> Iterator[Writer]:
    """Write into the run in `folder`; the first time makes it, with a config of these keys."""
    run = RunDir(folder)
    if not run.logs.exists():
        run.logs.mkdir(parents=True)
        run.checkpoints.mkdir()
        run.lock.write_text("1\n")
        sets = [
            f"{key}={value}" for key, value in ({"name": "written"} | dict(config or {})).items()
        ]
        run.config.write_text(load_config(None, sets, checks=()).to_yaml())
    with Recorder(run.events, clock=lambda: writer.now) as recorder:
        writer = Writer(run, recorder)
        yield writer


def write_run(
    folder: Path,
    losses: Mapping[int, float],
    val: Mapping[int, float] | None = None,
    config: Mapping[str, object] | None = None,
) -> RunDir:
    """A run that made these steps and ended in order."""
    with writing(folder, config) as writer:
        writer.start()
        for step in sorted({*losses, *(val or {})}):
            if step in losses:
                writer.train(step, losses[step], tokens_per_s=640.0, lr=1e-3, memory_bytes=1 << 20)
            if val and step in val:
                writer.val(step, val[step], standard_error=0.01)
        last = max({*losses, *(val or {})})
        writer.save(last)
        writer.stop(last, f"reached {last}it")
    return RunDir(folder)


def written_fleet(path: Path) -> Path:
    """A fleet of two learning rates and two seeds each; one of its runs has not started."""
    folder = path / "fleets" / "rates"
    folder.mkdir(parents=True)
    spec = {
        "name": "rates",
        "matrix": {"optimizer.lr": [0.1, 0.2], "seed": [1, 2]},
        "run_name": "lr${optimizer.lr}-s${seed}",
        "jobs": {"train": {"command": ["true"]}},
    }
    content = {"format": "instar-fleet/1", "spec": spec, "configs": {}, "gpus": None}
    (folder / "fleet.json").write_text(json.dumps(content | {"cwd": str(path)}))
    (folder / "state.jsonl").touch()
    for lr, seed, loss in ((0.1, 1, 3.0), (0.1, 2, 4.0), (0.2, 1, 2.0)):
        config = {"name": "rates", "seed": seed, "optimizer.lr": lr}
        run = path / "runs" / f"lr{lr}-s{seed}"
        write_run(run, {10: 4.0, 20: loss}, {10: 4.0, 20: loss}, config)
    return folder
