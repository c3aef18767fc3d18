"""Formats events as the lines that the console prints while a run trains."""

from __future__ import annotations

import json
from pathlib import Path

from instar.config.budget import parse_budget
from instar.config.errors import shorten_text
from instar.record.events import (
    Alert,
    AnalysisEvent,
    Asked,
    BeginsAnew,
    Branched,
    Eval,
    Event,
    ExtensionEvent,
    Failed,
    ImageEvent,
    Layers,
    NewGradients,
    OperationEvent,
    RunFinished,
    RunStarted,
    SampleText,
    Saved,
    Skip,
    Stop,
    TableEvent,
    Train,
    Unrecognised,
    Warn,
    to_words,
)
from instar.record.format import (
    TOK,
    asked_text,
    begins_anew_line,
    data_lines,
    eval_line,
    finished_line,
    header_line,
    loss,
    operation_lines,
    saved_line,
    si,
    step_text,
    train_line,
    unit_text,
)

_LONGEST = 200


class EventFormatter:
    """Formats the events of one run in order; remembers its token unit and its stop reason."""

    def __init__(self, where: Path, width: int | None = None, unit: str = "token") -> None:
        """`width`: columns to which lines are shortened; None: unlimited."""
        self.where = where
        self.width = width
        self._unit = unit_text(unit) if unit else TOK
        self._stopped = ""

    def lines(self, event: Event) -> list[str]:
        """Return the console's lines for one event; empty for kinds that the console omits."""
        match event:
            case RunStarted():
                self._unit = unit_text(event.unit)
                data = data_lines(event.splits, event.drawing)
                return [header_line(event, self.where), *data]
            case Train():
                return [train_line(event, width=self.width, unit=self._unit)]
            case Eval():
                return [eval_line(event, width=self.width, unit=self._unit)]
            case BeginsAnew():
                return [begins_anew_line(event)]
            case OperationEvent():
                return operation_lines(event)
            case Asked():
                return [asked_text(event)]
            case Saved():
                return [saved_line(event)]
            case Stop():
                self._stopped = "" if _is_budget(event.reason) else event.reason
                return []
            case RunFinished():
                return [finished_line(event, self.where, self._stopped, self._unit)]
        return self._rare(event)

    def every(self, event: Event) -> list[str]:
        """Return `lines`, or one line for a kind that the console omits."""
        match event:
            case Stop():
                self.lines(event)
                resumable = "  resumable" if event.resumable else ""
                return [f"{step_text(event)}  stop: {event.reason}{resumable}"]
            case NewGradients():
                old, new = (loss(g, 4) for g in (event.grad_norm_kept, event.grad_norm_new))
                return [f"{step_text(event)}  after {event.operation}  gn kept {old}  new {new}"]
            case Layers():
                return [f"{step_text(event)}  layers  gn {_groups(event.grad_norm)}"]
            case ExtensionEvent():
                return [line] if (line := event.line()) else []
            case AnalysisEvent() if not event.suggestions:
                return [f"{step_text(event)}  analysis: nothing to suggest"]
        return self.lines(event)

    def _rare(self, event: Event) -> list[str]:
        match event:
            case Skip():
                return [f"{step_text(event)}  update skipped: {event.reason}"]
            case Alert():
                return [f"{step_text(event)}  alert: {event.name}: {event.message}"]
            case SampleText():
                return [f"{step_text(event)}  wrote: {_short(event.prompt + event.text)}"]
            case ImageEvent():
                size = f"{event.width} × {event.height}"
                return [
                    f"{step_text(event)}  image {event.name} ({event.split}): {size}, {event.path}"
                ]
            case TableEvent():
                row = dict(zip(event.columns, event.rows[0], strict=False)) if event.rows else {}
                first = _short(json.dumps(to_words(row), ensure_ascii=False))
                count = f"{len(event.rows)} rows, the first {first}"
                return [f"{step_text(event)}  table {event.name} ({event.split}): {count}"]
            case AnalysisEvent():
                return [f"{step_text(event)}  {suggestion}" for suggestion in event.suggestions]
            case Branched():
                return [f"branch {event.name} of {event.parent}, from step {event.step:,}"]
            case Warn():
                return [f"warning: {event.message}"]
            case Failed():
                return [f"failed: {event.message}"]
            case Unrecognised():
                fields = {
                    key: event.fields[key] for key in event.fields if key not in ("v", "kind")
                }
                return [f"{event.name}: {_short(json.dumps(to_words(fields)))}"]
        return []


def _groups(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {si(value)}" for name, value in values.items())


def _is_budget(reason: str) -> bool:
    """Return whether a run ended because its budget was used up."""
    try:
        parse_budget(reason.removeprefix("reached "))
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return shorten_text(text.replace("\n", "⏎"), _LONGEST)
