"""What has been added to a run since a byte of its record, in the form in which a page takes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from instar.logs.reading.columns import Growing, present, tables_of
from instar.logs.reading.lineage import Lineage
from instar.logs.reading.record import Logged, RunRecord, Series, read
from instar.logs.reporting.chartdata import curve, marks, printable
from instar.record.events import Eval, Event, Layers, Placed, RunStarted, Train
from instar.record.rundir import RunDir

EVERY_POINT = sys.maxsize


def news(run: RunDir, events: Iterable[Event], metrics: frozenset[str]) -> Iterator[dict[str, Any]]:
    """The events as messages, in their order.

    `{points: {metric: {segment, x: {axis: […]}, value: […]}}, names, marks}` of a stretch within
    one segment; `{rewind: {step, segment}}` where a segment begins. `told` is true where something
    happened beside the metrics; without `marks`, only the whole record can place it.
    """
    stretch: list[Placed] = []
    for event in events:
        same = isinstance(event, Placed) and stretch and event.segment == stretch[0].segment
        if stretch and not same:
            yield _stretch(run, stretch, metrics)
            stretch = []
        if isinstance(event, Placed):
            stretch.append(event)
        elif isinstance(event, RunStarted):
            yield {"rewind": {"step": event.step, "segment": event.segment}, "told": True}
        else:
            yield {"told": True}
    if stretch:
        yield _stretch(run, stretch, metrics)


def branches(run: RunDir, events: Iterable[Event]) -> bool:
    """Whether one of the segments that begin here goes on from another one than the last: what it
    superseded had superseded something that counts again, which the stream does not bring.

    Raises:
        RecordError: the record cannot be read.
    """
    began = [e.segment for e in events if isinstance(e, RunStarted) and e.resumed_from]
    if not began or max(began) <= 2:
        return False
    lineage = Lineage()
    for logged in read(run).events:
        lineage.take(logged.event)
    return any(lineage.parents.get(segment, segment - 1) < segment - 1 for segment in began)


def _stretch(run: RunDir, events: list[Placed], metrics: frozenset[str]) -> dict[str, Any]:
    """One message of what stands in one segment."""
    measured = [event for event in events if isinstance(event, Train | Eval | Layers)]
    told = [Logged(e) for e in events if not isinstance(e, Train | Eval | Layers)]
    series = {name: one for part in tables_of(measured).values() for name, one in _series(part)}
    return {
        "points": {
            printable(name): {"segment": events[0].segment} | curve(one, EVERY_POINT)
            for name, one in series.items()
            if name in metrics
        },
        "names": [printable(name) for name in series if not name.endswith(":error")],
        "marks": marks(RunRecord(run, told, {}, ())),
        "told": bool(told),
    }


def _series(events: Any) -> Iterator[tuple[str, Series]]:
    """The metrics of measurements of one kind."""
    growing = Growing()
    growing.add(events)
    table = growing.table()
    for name, value in table.metrics.items():
        whole = Series(name, value, table.axes, np.ones(len(value), np.bool_))
        yield name, whole.take(present(value))
