"""Runs with all that a page can show, written in the writer's own format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instar.record.events import (
    Alert,
    Eval,
    Event,
    Failed,
    Layers,
    OperationEvent,
    RunFinished,
    RunStarted,
    SampleText,
    Saved,
    Skip,
    Stop,
    Train,
    Warn,
    encode_event,
)
from instar.record.rundir import RunDir

START = 1_795_300_000.0
SMALL = {"n_layer": 2, "n_embd": 32, "n_mlp": 64}
LARGE = {"n_layer": 2, "n_embd": 32, "n_mlp": 96}


def place(step: int, segment: int = 1) -> dict[str, Any]:
    """Where a step stands; every segment begins a minute after what came before."""
    return {
        "step": step,
        "samples": 8 * step,
        "tokens": 128 * step,
        "epoch": step / 1000,
        "flops": 1e9 * step,
        "wall_s": 0.5 * step + 60.0 * (segment - 1),
        "active_s": 0.25 * step,
    }


def write(path: Path, lines: Sequence[tuple[Event, int]], config: str = "name: told\n") -> RunDir:
    """A run's folder with these events, each with its segment."""
    (path / "checkpoints").mkdir(parents=True)
    run = RunDir(path)
    run.config.write_text(config)
    with run.events.open("wb") as file:
        for event, segment in lines:
            at = START + getattr(event, "wall_s", 0.0) + 60.0 * (segment - 1)
            file.write(encode_event(event, at, segment))
    return run


def steps(first: int, last: int, segment: int = 1, lift: float = 0.0) -> list[tuple[Event, int]]:
    """A train line for each step, and an evaluation at each tenth."""
    lines: list[tuple[Event, int]] = []
    for step in range(first, last + 1):
        position = place(step, segment)
        loss = 2 + 4 / (1 + step / 10) + lift
        lines.append(
            (
                Train(loss=loss, grad_norm=1.0 + lift, lr=1e-3, memory_bytes=1 << 28, **position),
                segment,
            )
        )
        if step % 10 == 0:
            lines.append(
                (Eval(split="val", loss=loss + 0.125, standard_error=0.01, **position), segment)
            )
    return lines


def start_event(
    segment: int = 1, step: int = 0, architecture: dict[str, Any] | None = None
) -> Event:
    return RunStarted(
        run_id="told",
        step=step,
        resumed_from=f"step-{step}" if segment > 1 else None,
        model="2L/32d",
        parameters=20_000 if architecture is None else 24_096,
        devices="cpu",
        architecture=architecture or SMALL,
        versions={"instar": "0.1.0", "torch": "2.13.0"},
        machine={"host": "here", "memory_bytes": 1 << 34},
    )


def widen_event(step: int) -> OperationEvent:
    return OperationEvent(
        name="widen_mlp",
        value=96,
        verb="GROW",
        change="64→96",
        reason="val 3.12 < 3.50",
        notes=("20.0k→24.1k", "optimizer mapped"),
        preserves="exact",
        proof={
            "max_logit_diff": 2.5e-7,
            "delta_loss": 0.0,
            "parameters_before": 20_000,
            "parameters_after": 24_096,
        },
        seconds=0.125,
        architecture=LARGE,
        **place(step),
    )


def told_run(path: Path) -> RunDir:
    """40 steps: grown at 20, gone on with from 30 after it had come to 35, then finished."""
    last = place(40, 2)
    return write(
        path,
        [
            (start_event(), 1),
            *steps(1, 20),
            (widen_event(20), 1),
            (
                Saved(
                    path=str(path / "checkpoints/step-20"),
                    reason="after growth",
                    size_bytes=4096,
                    seconds=0.5,
                    stall_s=0.002,
                    **place(20),
                ),
                1,
            ),
            *steps(21, 30),
            (
                Saved(path=str(path / "checkpoints/step-30"), reason="every 10 steps", **place(30)),
                1,
            ),
            (Skip(consecutive=2, **place(31)), 1),
            *steps(31, 35, lift=1.0),
            (Alert(name="divergence", message="loss 3.9 is far above 2.8", **place(35)), 1),
            (Failed(message="CUDA out of memory", rank=0, step=35), 1),
            (start_event(2, 30, LARGE), 2),
            *steps(31, 40, 2),
            (
                Layers(
                    grad_norm={"blocks.0": 0.5, "head": 0.25},
                    update_ratio={"blocks.0": 1e-3, "head": 2e-3},
                    **place(40, 2),
                ),
                2,
            ),
            (Warn(message="the disk is nearly full", step=40), 2),
            (SampleText(prompt="def ", text="square(n): return n * n", **last), 2),
            (Stop(reason="reached 40it", **last), 2),
            (RunFinished(loss=2.8, **last), 2),
        ],
        config=(
            "name: told                     # --set\n"
            "seed: 1                        # default\n"
            "\n"
            "# The shape of the GPT.\n"
            "model:\n"
            "  n_layer: 2                   # told.yaml:3:3\n"
            "  bias: false                  # default\n"
            "schedule:                      # told.yaml:5:1\n"
            "  - {name: widen_mlp, value: 96}  # told.yaml:6:5\n"
        ),
    )
