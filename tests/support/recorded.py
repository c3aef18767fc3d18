"""Runs by the real recorder, small enough to be read by eye."""

import platform
from pathlib import Path

from instar.record.events import Eval, OperationEvent, RunStarted, Train
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir


def start_event(step: int = 0, resumed_from: str | None = None) -> RunStarted:
    return RunStarted(
        run_id="aaaaa",
        step=step,
        resumed_from=resumed_from,
        model="2L/8d",
        parameters=1000,
        devices="cpu",
        architecture={"n_layer": 2, "n_mlp": 16},
        machine={"host": platform.node(), "memory_bytes": 1 << 34},
    )


def train(step: int, loss: float, **more: float) -> Train:
    return Train(
        step=step,
        loss=loss,
        samples=step * 4,
        tokens=step * 100,
        flops=step * 1e9,
        wall_s=float(step),
        active_s=step * 0.5,
        lr=1e-3,
        tokens_per_s=1000.0,
        **more,
    )


def make_run(folder: Path, name: str, steps: int = 40, *, grows: bool = False) -> RunDir:
    """A run by the real recorder: a falling loss, evaluations, and an operation in its middle."""
    run = RunDir(folder / name)
    run.logs.mkdir(parents=True)
    run.lock.touch()
    run.config.write_text(f"name: {name.rpartition('-')[0]}\n")
    run.log(0).write_text("[RANK 0] 2026-01-01 00:00:00 INFO: rank 0 of 1 on cpu\n")
    with Recorder(run.events) as record:
        record.write(start_event())
        for step in range(1, steps + 1):
            record.write(train(step, 5 / step**0.5))
            if step % 10 == 0:
                record.write(Eval(step=step, split="val", loss=5.1 / step**0.5))
            if grows and step == steps // 2:
                record.write(
                    OperationEvent(
                        step=step,
                        name="widen_mlp",
                        value=32,
                        verb="GROW",
                        change="16→32",
                        reason="val 1.13 < 1.20",
                        preserves="exact",
                        proof={"max_logit_diff": 2e-6, "parameters_after": 1500},
                        architecture={"n_layer": 2, "n_mlp": 32},
                    )
                )
    return run
