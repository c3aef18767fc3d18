"""What the page asks of runs, as JSON-ready data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from instar.logs.dashboard.catalog import Catalog
from instar.logs.dashboard.live import log_after
from instar.logs.reading.glance import glance
from instar.logs.reading.record import AXES, Logged, RunRecord, read
from instar.logs.reporting.chartdata import marks, printable
from instar.logs.reporting.stages import stages
from instar.logs.telling.state import stand
from instar.logs.telling.summary import summarize, to_json
from instar.record.events import Event, RunStarted, to_words
from instar.record.rundir import RunDir

EVENTS_AT_MOST = 1000
CONFIG_BYTES = 1 << 20
_RANK = re.compile(r"rank_(\d{1,6})\.log")


def row(run: RunDir) -> dict[str, Any]:
    """A run in the list; one that cannot be read says why."""
    seen = glance(run)
    begun = run.events.exists()
    if seen.fault and begun:
        return {"id": run.id, "name": printable(run.path.name), "state": "unread"} | {
            "reason": printable(seen.fault)
        }
    written = run.events if begun else run.config
    standing = stand(run, seen.events, seen.seen or written.stat().st_mtime)
    told: dict[str, Any] = to_words(
        {
            "id": seen.id,
            "name": printable(seen.name),
            "state": standing.state,
            "reason": printable(standing.reason),
            "step": seen.step or 0,
            "loss": seen.loss,
            "best": seen.best,
            "started": seen.started or written.stat().st_mtime,
            "seen": seen.seen,
            "model": printable(seen.model),
            "unit": seen.unit,
        }
    )
    return told


def unseen(run: RunDir, written: float) -> dict[str, Any]:
    """A run in the list that was not looked at yet, last written to at `written`, Unix seconds."""
    return {"id": run.id, "name": printable(run.name), "state": "unseen", "started": written}


def summary_of(run: RunDir) -> dict[str, Any]:
    """All that `instar logs summary` tells."""
    return to_json(summarize(read(run)))


def stages_of(run: RunDir) -> list[dict[str, Any]]:
    """The shapes that the model had, one after the other."""
    told: list[dict[str, Any]] = to_words(
        [
            msgspec.to_builtins(replace(s, architecture=dict(s.architecture)))
            for s in stages(read(run))
        ]
    )
    return told


def events_of(run: RunDir) -> dict[str, Any]:
    """What happened beside the metrics, the latest `EVENTS_AT_MOST` in their order."""
    record = read(run)
    shown = record.events[-EVENTS_AT_MOST:]
    return {
        "total": len(record.events),
        "events": [_event(record, logged) for logged in shown],
        "faults": list(map(printable, record.faults)),
    }


def system_of(run: RunDir) -> dict[str, Any]:
    """What the run ran on, each time that it was started."""
    starts = [logged.event for logged in read(run).of(RunStarted)]
    names = ("time", "segment", "step", "devices", "world_size", "machine", "versions")
    told: list[dict[str, Any]] = to_words(
        [{name: getattr(start, name) for name in names} for start in starts]
    )
    return {"segments": told}


def logs_of(catalog: Catalog, run: RunDir) -> list[int]:
    """The ranks that have a log."""
    try:
        names = [_RANK.fullmatch(path.name) for path in run.logs.iterdir()]
    except OSError:
        return []
    ranks = sorted(int(name[1]) for name in names if name)
    return [rank for rank in ranks if catalog.file(run, run.log(rank)) is not None]


def log_of(catalog: Catalog, run: RunDir, rank: int) -> dict[str, Any] | None:
    """The end of a rank's log, and from which byte it goes on; None: there is none."""
    path = catalog.file(run, run.log(rank))
    if path is None:
        return None
    text, offset, skipped = log_after(path, 0)
    return {"rank": rank, "text": text, "offset": offset, "skipped": skipped}


def config_of(catalog: Catalog, run: RunDir) -> str:
    """The text of the resolved config; empty where there is none."""
    path = catalog.file(run, run.config)
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(CONFIG_BYTES).decode("utf-8", "replace")


def _event(record: RunRecord, logged: Logged) -> dict[str, Any]:
    event = logged.event
    fields = dict(_fields(event))
    mark = next(iter(marks(RunRecord(record.run, [logged], {}, ()), axes=("step",))), None)
    kind = str(fields.pop("name", "")) if "fields" in fields else _kind(event)
    return {
        "kind": kind,
        "time": event.time,
        "segment": event.segment,
        "step": getattr(event, "step", None),
        "title": mark["title"] if mark else kind.replace("_", " "),
        "text": mark["text"] if mark else printable(_text(fields)),
        "superseded": not logged.kept,
        "fields": fields,
    }


def _text(fields: dict[str, Any]) -> str:
    """A message, or the figures of an event that has none."""
    if "message" in fields:
        return str(fields["message"])
    shown = {k: v for k, v in fields.items() if isinstance(v, str | int | float) and k not in _AXES}
    told = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in shown.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in told.items())


def _kind(event: Event) -> str:
    return str(event.__struct_config__.tag)


_AXES = frozenset(AXES)
_PLACE = frozenset({"v", "time", "segment", "step"})


def _fields(event: Event) -> Iterator[tuple[str, Any]]:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name not in _PLACE and value not in (None, "", (), {}, []):
            yield name, to_words(value)
