"""Small runs to be drawn, written event by event."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instar.logs.read.record import RunRecord, read_record
from instar.record.events import Eval, Event, OperationEvent, RunStarted, Saved, Train, encode_event
from instar.record.rundir import RunDir

BEGAN = 1_795_300_000.0


def place(step: int, **changes: Any) -> dict[str, Any]:
    every = {
        "step": step,
        "samples": 16 * step,
        "tokens": 2048 * step,
        "epoch": step / 1000,
        "flops": 1e10 * step,
        "wall_s": 0.5 * step,
        "active_s": 0.4 * step,
    }
    return every | changes


def train(step: int, loss: float, **changes: Any) -> Train:
    return Train(loss=loss, lr=1e-3 / (1 + step), **place(step, **changes))


def eval_event(step: int, loss: float, **changes: Any) -> Eval:
    return Eval(split="val", loss=loss, **place(step, **changes))


def write_run(path: Path, events: Iterable[Event | tuple[int, Event]], config: str = "") -> RunDir:
    """A run with these events, those of a later segment with its number."""
    path.mkdir(parents=True)
    run = RunDir(path)
    first = RunStarted(run_id="drawn", model="2L/128d", parameters=803456)
    with run.events.open("wb") as file:
        file.write(encode_event(first, BEGAN, 1))
        for event in events:
            segment, what = event if isinstance(event, tuple) else (1, event)
            file.write(
                encode_event(what, BEGAN + getattr(what, "step", 0) + 500 * (segment - 1), segment)
            )
    if config:
        run.config.write_text(config)
    return run


def read_run(
    path: Path, events: Iterable[Event | tuple[int, Event]], config: str = ""
) -> RunRecord:
    return read_record(write_run(path, events, config))


def falling(steps: int = 100, high: float = 6.0) -> list[Event]:
    """A loss that falls from `high` to 2, evaluated ten times, with one operation halfway."""
    events: list[Event] = []
    for step in range(1, steps + 1):
        loss = 2 + (high - 2) * (1 - step / steps)
        events.append(train(step, loss))
        if step % max(1, steps // 10) == 0:
            events.append(eval_event(step, loss + 0.1))
        if step == steps // 2:
            growth = {"name": "widen_mlp", "value": 352, "verb": "GROW", "change": "192→352"}
            events.append(OperationEvent(**growth, **place(step)))
            events.append(Saved(path=f"checkpoints/step-{step}", **place(step)))
    return events
