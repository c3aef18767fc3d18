"""Streams changes to a page as server-sent events, resuming where the page left off."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from instar.config.errors import ConfigError, redact_text
from instar.config.files import open_regular
from instar.extensions.board.catalog import Catalog, Fleets
from instar.extensions.board.curves import curve
from instar.logs.query.stages import marks
from instar.logs.query.tail import Follower, last_lines
from instar.logs.read.columns import TableBuilder, is_measured, present, tables_of
from instar.logs.read.record import RecordedEvent, RunRecord, Series, read_record
from instar.logs.read.segments import SegmentTree
from instar.record.events import Event, Placed, RecordError, RunStarted
from instar.record.format import encodable
from instar.record.rundir import RunDir

POLL_S = 0.2
HEARTBEAT_S = 10.0
"""seconds after which a silent stream sends an event"""
BEHIND_BYTES = 4 << 20
"""a page that is further behind reloads the run instead"""
LOG_BYTES = 64 << 10
MAX_RUNS = 500
ID_BYTES = 1 << 14
_ID = re.compile(r"([0-9a-f]+)\.(\d+)\|([\d,]*)\|(\d*)\|(\d*)", re.ASCII)
_RANK = re.compile(r"\d{1,6}", re.ASCII)


@dataclass
class RunView:
    """A run that the page shows."""

    key: str
    run: RunDir
    follower: Follower
    names: set[str] = field(default_factory=set)


@dataclass
class LogView:
    """The log that the page shows: of a rank, or of a process of a fleet."""

    event: str
    """name of its messages"""
    about: dict[str, Any]
    """which log it is, in each message"""
    path: Path
    offset: int


class PageUpdates:
    """The changes that one page has not been sent yet."""

    def __init__(
        self, catalog: Catalog, query: QueryParams, last_id: str = "", fleets: Fleets | None = None
    ) -> None:
        self._catalog = catalog
        self._fleets = fleets
        self._fleet = query.get("fleet", "")
        self._sent = {"fleets": msgspec.json.encode({"rows": []})}
        self._metrics = frozenset(query.getlist("metric"))
        self._boot, version = _pair(query.get("seen", "."), ".")
        self._version = _to_int(version)
        places = [_pair(text, ":") for text in query.getlist("run")[:MAX_RUNS]]
        log, log_offset = _pair(query.get("log", ""), ":")
        fleet_log, fleet_log_offset = _pair(query.get("fleet_log", ""), ":")
        offsets = [_to_int(offset) for _, offset in places]
        if match := _ID.fullmatch(last_id[:ID_BYTES]):
            self._boot, self._version = match[1], _to_int(match[2])
            offsets = [_to_int(offset) for offset in match[3].split(",") if offset]
            log_offset = match[4] or log_offset
            fleet_log_offset = match[5] or fleet_log_offset
        self._run_views = [
            RunView(key, run, Follower(run.events, offset))
            for (key, _), offset in zip(places, offsets, strict=False)
            if (run := catalog.find(key)) is not None
        ]
        self._requested_keys = [key for key, _ in places]
        self._log = self._log_of(log, _to_int(log_offset))
        self._fleet_log = self._fleet_log_of(fleet_log, _to_int(fleet_log_offset))

    @property
    def id(self) -> str:
        """The event id: the state up to which everything has been sent."""
        at = {view.key: view.follower.offset for view in self._run_views}
        offsets = ",".join(str(at.get(key, 0)) for key in self._requested_keys)
        ends = ["" if log is None else str(log.offset) for log in (self._log, self._fleet_log)]
        return "|".join([f"{self._boot}.{self._version}", offsets, *ends])

    def poll(self) -> list[bytes]:
        """Return new messages, as whole server-sent events; the last one carries the id."""
        messages = [
            *self._list(),
            *self._points(),
            *_lines(self._log),
            *self._of_fleets(),
            *_lines(self._fleet_log),
        ]
        if not messages:
            return []
        parts = [
            b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
            for name, data in messages
        ]
        parts[-1] = b"id: %b\n" % self.id.encode() + parts[-1]
        return parts

    def _list(self) -> Iterator[tuple[str, dict[str, Any]]]:
        self._catalog.refresh()
        boot, version = self._catalog.boot, self._catalog.version
        if (boot, version) == (self._boot, self._version):
            return
        reset = boot != self._boot
        rows, removed_runs = self._catalog.since(0 if reset else self._version)
        self._boot, self._version = boot, version
        yield (
            "runs",
            {"seen": f"{boot}.{version}", "all": reset, "rows": rows, "gone": removed_runs},
        )

    def _points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for view in self._run_views:
            follower, restarts = view.follower, view.follower.restarts
            try:
                size = follower.path.stat().st_size
            except OSError:
                continue
            if size == follower.offset:
                continue
            if size - follower.offset > BEHIND_BYTES:
                # a line that is being written is read when it is whole
                _, follower.offset = last_lines(follower.path, 0)
                yield "anew", {"key": view.key}
                continue
            events = follower.poll()
            if follower.restarts > restarts or _branches(view.run, events):
                yield "anew", {"key": view.key}
                continue
            for message in stream_messages(view.run, events, self._metrics):
                yield "news", {"key": view.key, "offset": follower.offset, **message}

    def _log_of(self, text: str, offset: int) -> LogView | None:
        key, _, rank = text.rpartition("/")
        run = self._catalog.find(key) if _RANK.fullmatch(rank) else None
        if run is None or (path := self._catalog.file(run, run.log(int(rank)))) is None:
            return None
        return LogView("log", {"key": key, "rank": int(rank)}, path, offset)

    def _fleet_log_of(self, log: str, offset: int) -> LogView | None:
        path = self._fleets.log(self._fleet, log) if self._fleets and log else None
        about = {"fleet": self._fleet, "log": log}
        return None if path is None else LogView("fleet_log", about, path, offset)

    def _of_fleets(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the list of fleets and the fleet that the page shows, if they have changed."""
        if self._fleets is None:
            return
        messages: dict[str, dict[str, Any]] = {"fleets": {"rows": self._fleets.rows()}}
        if self._fleet:
            messages["fleet"] = self._fleets.view(self._fleet) or {"name": self._fleet, "state": ""}
        for name, data in messages.items():
            as_bytes = msgspec.json.encode(data)
            if as_bytes != self._sent.get(name):
                self._sent[name] = as_bytes
                yield name, data


def _lines(log: LogView | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if log is None:
        return
    text, offset, is_cut = log_after(log.path, log.offset)
    if offset != log.offset:
        log.offset = offset
        yield log.event, log.about | {"offset": offset, "text": text, "skipped": is_cut}


@dataclass
class EventStream:
    """An endless response, as an ASGI app."""

    updates: PageUpdates
    is_ending: Callable[[], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        loop = asyncio.get_running_loop()
        last_sent = loop.time()
        parts = [b"retry: 1000\n: here\n\n"]
        try:
            while not (self.is_ending() or disconnect.done()):
                if not parts and loop.time() - last_sent > HEARTBEAT_S:
                    parts = [b"event: beat\ndata: {}\n\n"]
                for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    last_sent = loop.time()
                await asyncio.wait({disconnect}, timeout=POLL_S)
                parts = await asyncio.to_thread(self.updates.poll)
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _branches(run: RunDir, events: list[Event]) -> bool:
    try:
        return revives_steps(run, events)
    except RecordError:
        return True  # the page requests the curves and gets the error


def log_after(path: Path, offset: int) -> tuple[str, int, bool]:
    """Return whole lines of a log after `offset`, where they end, and whether some were skipped.

    At most the last `LOG_BYTES`; a log that has become shorter is read from its beginning.
    """
    try:
        size = path.stat().st_size
        if size < offset:
            offset = 0
        is_cut = size - offset > LOG_BYTES
        if is_cut:
            offset = size - LOG_BYTES
        with open_regular(path) as file:
            file.seek(offset)
            block = file.read(LOG_BYTES)
    except OSError:
        return "", offset, False
    lines = block[: block.rfind(b"\n") + 1]
    text = lines.partition(b"\n")[2] if is_cut else lines
    return redact_text(text.decode("utf-8", "replace")), offset + len(lines), is_cut


def page_stream(
    catalog: Catalog,
    query: QueryParams,
    last_id: str,
    is_ending: Callable[[], bool],
    fleets: Fleets | None = None,
) -> EventStream:
    """Return the stream that a page requests, from the beginning or from a previous stream's end.

    Raises:
        ConfigError: too many runs.
    """
    if len(query.getlist("run")) > MAX_RUNS:
        raise ConfigError.of(f"no more than {MAX_RUNS} runs can be followed at once")
    return EventStream(PageUpdates(catalog, query, last_id, fleets), is_ending)


def _pair(text: str, sign: str) -> tuple[str, str]:
    before, _, after = text.rpartition(sign)
    return before, after


def _to_int(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else 0


ALL_POINTS = sys.maxsize


def stream_messages(
    run: RunDir, events: Iterable[Event], metrics: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yield the events as messages, in order.

    `{points: {metric: {segment, x: {axis: […]}, value: […]}}, names, marks}` for a stretch within one
    segment; `{rewind: {step, segment}}` where a segment starts. `has_events` is true if there are events
    other than measurements; without `marks`, the page needs the whole record to place them.
    """
    stretch: list[Placed] = []
    for event in events:
        is_same_segment = (
            isinstance(event, Placed) and stretch and event.segment == stretch[0].segment
        )
        if stretch and not is_same_segment:
            yield _stretch(run, stretch, metrics)
            stretch = []
        if isinstance(event, Placed):
            stretch.append(event)
        elif isinstance(event, RunStarted):
            yield {"rewind": {"step": event.step, "segment": event.segment}, "has_events": True}
        else:
            yield {"has_events": True}
    if stretch:
        yield _stretch(run, stretch, metrics)


def revives_steps(run: RunDir, events: Iterable[Event]) -> bool:
    """Return whether a segment that starts here resumes from an earlier segment than the previous one.

    Then points that were superseded may count again, which the stream cannot express.

    Raises:
        RecordError: the record cannot be read.
    """
    resumed_segments = [e.segment for e in events if isinstance(e, RunStarted) and e.resumed_from]
    if not resumed_segments or max(resumed_segments) <= 2:
        return False
    lineage = SegmentTree()
    for entry in read_record(run).events:
        lineage.take(entry.event)
    return any(
        lineage.parents.get(segment, segment - 1) < segment - 1 for segment in resumed_segments
    )


def _stretch(run: RunDir, events: list[Placed], metrics: frozenset[str]) -> dict[str, Any]:
    """Return a message with the events of a stretch within a segment."""
    measurements = [event for event in events if is_measured(type(event))]
    events_only = [RecordedEvent(event) for event in events if not is_measured(type(event))]
    series = {
        name: points for part in tables_of(measurements).values() for name, points in _series(part)
    }
    return {
        "points": {
            encodable(name): {"segment": events[0].segment} | curve(part, ALL_POINTS)
            for name, part in series.items()
            if name in metrics
        },
        "names": [encodable(name) for name in series if not name.endswith(":error")],
        "marks": marks(RunRecord(run, events_only, {}, ())),
        "has_events": bool(events_only),
    }


def _series(events: Any) -> Iterator[tuple[str, Series]]:
    """Yield the metrics of measurements of one kind."""
    builder = TableBuilder()
    builder.add(events)
    table = builder.table()
    for name, value in table.metrics.items():
        all_values = Series(name, value, table.axes, np.ones(len(value), np.bool_))
        yield name, all_values.take(present(value))
