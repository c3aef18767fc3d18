"""Synthetic records in exactly the writer's format, made much faster than by training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from instar.record.events import Eval, OperationEvent, RunFinished, RunStarted, Saved, encode_event
from instar.record.rundir import RunDir

START = 1_795_300_000.0
_json = msgspec.json.Encoder()


def make_runs(folder: Path, runs: int, steps: int, **how: int) -> list[RunDir]:
    """`runs` runs of `steps` train lines each, no two alike: `<folder>/made-<five letters>`."""
    names = ["".join("abcdefgh"[run >> 3 * k & 7] for k in range(5)) for run in range(runs)]
    return [
        make_run(folder / f"made-{name}", steps, seed, **how) for seed, name in enumerate(names)
    ]


def make_run(path: Path, steps: int, seed: int = 0, **how: int) -> RunDir:
    """One run of `steps` train lines: see `lines`."""
    path.mkdir(parents=True)
    run = RunDir(path)
    with run.events.open("wb") as file:
        file.writelines(lines(steps, seed, **how))
    return run


def lines(
    steps: int, seed: int = 0, *, evals: int = 20, spikes: int = 3, rewinds: int = 0
) -> Iterator[bytes]:
    """Lines of about 310 bytes: one for each step, with `evals` evaluations, checkpoints and
    operations among them, `spikes` single steps with a loss of 50 to 60, and `rewinds` resumes
    from an earlier checkpoint, after which the steps from there on come again.
    """
    rng = np.random.default_rng(seed)
    every = max(1, steps // max(1, evals))
    at = {int(step) for step in rng.choice(np.arange(1, steps + 1), min(spikes, steps), False)}
    stops = [steps * (part + 1) // (rewinds + 1) for part in range(rewinds)]
    begin, segment = 0, 1
    yield encode_event(_start_event(0, None), START, 1)
    for stop in [*stops, steps]:
        yield from _segment(begin, stop, every, segment, rng, at)
        if stop < steps or segment <= rewinds:
            begin = max(0, (stop - every) // every * every)
            segment += 1
            name = f"step-{begin}" if begin else None
            yield encode_event(_start_event(begin, name), START + stop + segment, segment)
    yield encode_event(
        RunFinished(loss=3.0, tokens_per_s=16351.3, **_place(steps)), START + 2 * steps, segment
    )


def _segment(
    begin: int, stop: int, every: int, segment: int, rng: np.random.Generator, spikes: set[int]
) -> Iterator[bytes]:
    steps = np.arange(begin + 1, stop + 1)
    noise = rng.normal(0, 0.05, len(steps))
    losses = (2 + 5 * np.exp(-steps / (0.3 * stop + 1)) + noise).round(5).tolist()
    norms = rng.uniform(0.5, 1.5, len(steps)).round(4).tolist()
    for step, loss, norm in zip(steps.tolist(), losses, norms, strict=True):
        line = {
            "v": 1,
            "kind": "train",
            "time": START + step + segment,
            "segment": segment,
            **_place(step),
            "loss": 50 + 10 * norm / 1.5 if step in spikes else loss,
            "grad_norm": norm,
            "lr": 0.0004,
            "tokens_per_s": 16351.3,
            "mfu": 0.3409,
            "data_wait": 0.018,
            "memory_bytes": 579407872,
            "extra": {},
        }
        yield _json.encode(line) + b"\n"
        if step % every == 0:
            now, place = START + step + segment, _place(step)
            yield encode_event(Eval(split="val", loss=loss + 0.1, **place), now, segment)
            if step // every % 4 == 2:
                yield encode_event(
                    OperationEvent(name="change_lr", value=0.5, **place), now, segment
                )
            yield encode_event(Saved(path=f"checkpoints/step-{step}", **place), now, segment)


def _place(step: int) -> dict[str, int | float]:
    return {
        "step": step,
        "samples": 16 * step,
        "tokens": 2048 * step,
        "epoch": round(1e-5 * step, 6),
        "flops": 7449083904.0 * step,
        "wall_s": round(0.14 * step, 3),
        "active_s": round(0.12 * step, 3),
    }


def _start_event(step: int, resumed_from: str | None) -> RunStarted:
    return RunStarted(
        run_id="made", step=step, resumed_from=resumed_from, model="2L/128d", parameters=803456
    )
