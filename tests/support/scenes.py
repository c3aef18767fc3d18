"""Folders of runs as somebody would have them, for looking at pages: one, two, eight, a hundred, one
that crashed, one that was stopped, none. Written in the writer's own format, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from instar.record.events import (
    Alert,
    Eval,
    Event,
    Failed,
    OperationEvent,
    RunFinished,
    RunStarted,
    SampleText,
    Saved,
    Stop,
    Train,
    encode_event,
)
from instar.record.rundir import RunDir

START = 1_795_300_000.0
STEPS = 200
SMALL = {"n_layer": 2, "n_embd": 128, "n_mlp": 192}
WIDE = SMALL | {"n_mlp": 352}
DEEP = WIDE | {"n_layer": 4}
TRACEBACK = """\
[RANK 1] 2026-11-22 01:13:20 INFO: rank 1 of 2 on cuda:1
[RANK 1] 2026-11-22 01:14:58 ERROR: rank 1 failed at step 150: OutOfMemoryError: CUDA out of memory. \
Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.07 GiB is free.
Traceback (most recent call last):
  File "src/instar/run/step/stepper.py", line 118, in forward_backward
    loss = task.loss(model, batch)
           ^^^^^^^^^^^^^^^^^^^^^^^
  File "src/instar/models/gpt.py", line 301, in forward
    logits = self.head(x)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.
"""
Lines = Iterator[tuple[Event, int]]


def write(folder: Path, name: str, lines: Lines, config: str, began: float = START) -> RunDir:
    """A run's folder with these events, each with its segment."""
    run = RunDir(folder / name)
    run.logs.mkdir(parents=True)
    run.checkpoints.mkdir()
    run.lock.touch()
    run.config.write_text(f"name: {run.name}  # --set\n{config}")
    run.log(0).write_text("[RANK 0] 2026-11-22 01:13:20 INFO: rank 0 of 2 on cuda:0\n")
    with run.events.open("wb") as file:
        for event, segment in lines:
            at = began + getattr(event, "wall_s", 0.0) + (segment - 1)
            file.write(encode_event(event, at, segment))
    return run


def place(step: int, pause: float = 0.0) -> dict[str, float]:
    return {
        "step": step,
        "samples": 19 * step,
        "tokens": 2432 * step,
        "epoch": step / 1400,
        "flops": 1.15e10 * step,
        "wall_s": 0.175 * step + pause,
        "active_s": 0.14 * step,
    }


def start_event(segment: int = 1, step: int = 0) -> RunStarted:
    return RunStarted(
        run_id="scene",
        step=step,
        resumed_from=f"step-{step}" if segment > 1 else None,
        model="2L/128d",
        parameters=803_000,
        devices="2×H100 DDP",
        world_size=2,
        architecture=SMALL,
        versions={"instar": "0.1.0", "python": "3.12.4", "torch": "2.13.0"},
        machine={
            "host": "node-3",
            "cpu": "AMD EPYC 9654 96-Core Processor",
            "cores": 16,
            "memory_bytes": 1 << 37,
            "gpu": "NVIDIA H100 80GB HBM3",
            "gpu_memory_bytes": 85 << 30,
        },
    )


def training_lines(
    first: int, last: int, segment: int = 1, *, seed: int = 0, floor: float = 3.9, every: int = 25
) -> Lines:
    """A train line every second step, a validation every `every` steps; 0: none."""
    rng = np.random.default_rng(seed + 1000 * first + 100 * segment)
    for step in range(first + 2, last + 1, 2):
        position = place(step, 30.0 * (segment - 1))
        loss = floor + 4 * np.exp(-step / 45) + rng.normal(0, 0.03)
        yield (
            Train(
                loss=float(loss),
                steps=2,
                grad_norm=float(0.9 + rng.uniform(0, 0.3)),
                lr=2e-3 * min(1, step / 25) * (1 - max(0, step - 150) / 55),
                tokens_per_s=float(17_000 + rng.normal(0, 300)),
                mfu=0.45,
                data_wait=0.01,
                memory_bytes=694 << 20,
                **position,
            ),
            segment,
        )
        if every and step % every in (0, 1):
            yield (
                Eval(split="val", loss=float(loss + 0.06), standard_error=0.02, **position),
                segment,
            )


def growth_event(
    step: int, name: str, change: str, shape: dict[str, int], sizes: Sequence[int]
) -> Event:
    return OperationEvent(
        name=name,
        verb="GROW",
        change=change,
        reason="val 4.62 < 4.80",
        notes=("optimizer mapped",),
        preserves="exact",
        proof={
            "max_logit_diff": 2.5e-7,
            "delta_loss": 0.0,
            "parameters_before": sizes[0],
            "parameters_after": sizes[1],
        },
        seconds=0.2,
        architecture=shape,
        **place(step),
    )


def grows(seed: int, floor: float = 3.9, at: tuple[int, int, int] = (50, 100, 150)) -> Lines:
    """A run that grew twice and has finished."""
    first, second, third = at
    yield start_event(), 1
    yield from training_lines(0, first, seed=seed, floor=floor)
    yield (
        OperationEvent(
            name="change_batch_size", value=1.25, change="16→20", reason="val 5.79 < 6.00",
            **place(first),
        ),
        1,
    )  # fmt: skip
    yield from training_lines(first, second, seed=seed, floor=floor)
    yield growth_event(second, "widen_mlp", "192→352", WIDE, (803_000, 926_000)), 1
    yield (
        Saved(path="checkpoints/step-100", reason="after growth", size_bytes=15 << 20, seconds=0.4,
              stall_s=0.02, **place(second)),
        1,
    )  # fmt: skip
    yield from training_lines(second, third, seed=seed, floor=floor)
    yield growth_event(third, "insert_layers", "2→4", DEEP, (926_000, 1_330_000)), 1
    yield from training_lines(third, STEPS, seed=seed, floor=floor)
    last = place(STEPS)
    yield SampleText(prompt="def ", text="read(path):\n    return open(path).read()\n", **last), 1
    yield Stop(reason=f"reached {STEPS}it", **last), 1
    yield RunFinished(loss=floor, **last), 1


def plain(seed: int, floor: float = 4.0, last: int = STEPS) -> Lines:
    yield start_event(), 1
    yield from training_lines(0, last, seed=seed, floor=floor)
    yield Stop(reason=f"reached {last}it", **place(last)), 1
    yield RunFinished(loss=floor, **place(last)), 1


def crashes() -> Lines:
    """A run that is resumed, and then fails on its second rank."""
    yield start_event(), 1
    yield from training_lines(0, 100)
    yield (
        Saved(path="checkpoints/step-80", reason="every 80it", size_bytes=15 << 20, **place(80)),
        1,
    )
    yield from training_lines(100, 110)
    yield start_event(2, 80), 2
    yield from training_lines(80, 150, 2)
    pause = place(150, 30.0)
    yield Alert(name="divergence", message="loss 5.1 is far above 4.2", **pause), 2
    yield (
        Failed(
            message="rank 1 failed at step 150: OutOfMemoryError: CUDA out of memory. Tried to "
            "allocate 2.50 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.07 GiB is free.",
            rank=1, step=150,
        ),
        2,
    )  # fmt: skip


def crash(folder: Path, name: str = "sweep-crash", lines: Lines | None = None) -> RunDir:
    run = write(folder, name, crashes() if lines is None else lines, config(0))
    run.log(1).write_text(TRACEBACK)
    return run


def resumed_twice(folder: Path) -> RunDir:
    def lines() -> Lines:
        yield start_event(), 1
        yield from training_lines(0, 90)
        yield start_event(2, 60), 2
        yield from training_lines(60, 150, 2)
        yield start_event(3, 110), 3
        yield from training_lines(110, STEPS, 3)

    return write(folder, "demo-ddddd", lines(), config(1))


def stops(folder: Path, name: str = "sweep-stops") -> RunDir:
    def lines() -> Lines:
        yield start_event(), 1
        yield from training_lines(0, 90, every=0)
        yield Stop(reason="SIGTERM", resumable=True, **place(90)), 1

    return write(folder, name, lines(), config(1))


def config(seed: int, lr: str = "2e-3", layers: int = 2) -> str:
    return f"seed: {seed}  # --set\nmodel:\n  n_layer: {layers}  # --set\noptimizer:\n  lr: {lr}  # --set\n"


def one_run(folder: Path) -> None:
    write(folder, "demo-aaaaa", grows(1), config(1))


def two_runs(folder: Path) -> None:
    one_run(folder)
    write(folder, "demo-bbbbb", grows(2, 4.1, (60, 110, 170)), config(1, "1e-3"), START + 600)


def eight_runs(folder: Path) -> None:
    """Four settings with two seeds each, names with much in common, one crashed, one stopped."""
    for n, (lr, floor) in enumerate((("1e-3", 4.1), ("2e-3", 3.9), ("4e-3", 4.3))):
        for seed in (1, 2):
            name = f"pretrain-stdlib-llama-lr{lr}-seed{seed}-{'abc'[n] * 3}{'de'[seed - 1] * 2}"
            at = (40 + 10 * n, 90 + 10 * seed, 150 + 5 * n)
            write(folder, name, grows(seed + 9 * n, floor, at), config(seed, lr), START + 60 * n)
    crash(folder, "pretrain-stdlib-llama-lr8e-3-seed1-fffff")
    stops(folder, "pretrain-stdlib-llama-lr5e-4-seed1-ggggg")


def hundred_runs(folder: Path) -> None:
    for n in range(100):
        name = f"sweep-{'abcdefghjk'[n // 10]}{'abcdefghjk'[n % 10]}xyz"
        lr = f"{1 + n % 7}e-3"
        write(folder, name, plain(n, 3.8 + n % 7 / 10, 60), config(n % 5, lr), START + 60 * n)


def only_crash(folder: Path) -> None:
    crash(folder)


def crashed_at_once(folder: Path) -> None:
    """A run that fails before its first step."""
    lines: list[tuple[Event, int]] = [
        (start_event(), 1),
        (
            Failed(
                message="rank 0 failed at step 0: FileNotFoundError: no file matches data/*.txt",
                rank=0,
                step=0,
            ),
            1,
        ),
    ]
    write(folder, "sweep-early", iter(lines), config(0))


def only_stop(folder: Path) -> None:
    stops(folder)


def empty(folder: Path) -> None:
    """No run."""


SCENES: dict[str, Callable[[Path], None]] = {
    "one": one_run,
    "two": two_runs,
    "eight": eight_runs,
    "hundred": hundred_runs,
    "crashed": only_crash,
    "crashed_at_once": crashed_at_once,
    "stopped": only_stop,
    "empty": empty,
}
