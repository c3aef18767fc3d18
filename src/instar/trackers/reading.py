"""Events as other tools can hold them: places, totals, and notes in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instar.record.events import (
    Alert,
    Analysis,
    Event,
    Failed,
    Operation,
    Placed,
    RunFinished,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Warn,
    Wrote,
)
from instar.record.lines import operation_lines, saved_line

AXES = ("samples", "tokens", "epoch", "flops", "wall_s", "active_s")
"""What a curve can be drawn over beside the step and the time."""

_TOTALS = ("loss", "best_loss", "best_step", "tokens_per_s", "step", *AXES)

Level = Literal["info", "warn", "error"]


@dataclass(frozen=True)
class Note:
    """Something that happened at a step, in words."""

    kind: str
    """operation, checkpoint, alert, …"""
    step: int
    title: str
    text: str
    level: Level = "info"


def places(event: Placed) -> dict[str, float]:
    """Where in the run it is, for tools that have no other axis than the step: `at/tokens`, …"""
    return {f"at/{axis}": getattr(event, axis) for axis in AXES}


def totals(event: RunFinished) -> dict[str, float]:
    """What the run came to."""
    values = ((name, getattr(event, name)) for name in _TOTALS)
    return {name: value for name, value in values if value is not None}


def note(event: Event) -> Note | None:
    """What happened, of every event that is no measurement; None of those that say nothing."""
    match event:
        case RunStarted(resumed_from=str(name), step=step):
            return Note("resume", step, "resume", f"goes on from {name}, step {step:,}")
        case Operation(step=step, verb=verb, name=name):
            text = "\n".join(line.strip() for line in operation_lines(event))
            return Note("operation", step, f"{verb} {name}", text)
        case Saved(step=step):
            return Note("checkpoint", step, "checkpoint", saved_line(event).strip())
        case Alert(step=step, name=name, message=message):
            return Note("alert", step, name, message, "warn")
        case Analysis(step=step, suggestions=suggestions) if suggestions:
            return Note("analysis", step, "analysis", "\n".join(suggestions))
        case Wrote(step=step, prompt=prompt, text=text):
            return Note("sample", step, "sample", f"{prompt}{text}")
        case Skip(step=step, reason=reason):
            return Note("skip", step, "update skipped", reason, "warn")
        case Warn(step=step, message=message):
            return Note("warning", step or 0, "warning", message, "warn")
        case Failed(step=step, rank=rank, message=message):
            return Note("failed", step or 0, f"rank {rank} failed", message, "error")
        case Stop(step=step, reason=reason):
            return Note("stop", step, "stop", reason)
    return None
