"""Streams changes to a page as server-sent events, from where the page left off."""

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

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.logs.query.tail import Follower
from instar.logs.read.columns import TableBuilder, present, tables_of
from instar.logs.read.lineage import Lineage
from instar.logs.read.record import RecordedEvent, RunRecord, Series, read
from instar.logs.web.catalog import Catalog
from instar.logs.web.curves import curve, marks, printable
from instar.record.events import Eval, Event, Layers, Placed, RecordError, RunStarted, Train
from instar.record.rundir import RunDir

POLL_S = 0.2
BEAT_S = 10.0
"""seconds after which a silent stream sends an event"""
BEHIND_BYTES = 4 << 20
"""A page that is further behind reads the run anew instead."""
LOG_BYTES = 64 << 10
RUNS_AT_MOST = 500
ID_BYTES = 1 << 14
_ID = re.compile(r"([0-9a-f]+)\.(\d+)\|([\d,]*)\|(\d*)", re.ASCII)
_RANK = re.compile(r"\d{1,6}", re.ASCII)


@dataclass
class Shown:
    """A run that the page shows."""

    key: str
    run: RunDir
    follower: Follower
    names: set[str] = field(default_factory=set)


@dataclass
class ShownLog:
    """The rank's log that the page shows."""

    key: str
    rank: int
    path: Path
    offset: int


class PageUpdates:
    """The changes that one page has not been sent yet."""

    def __init__(self, catalog: Catalog, asked: QueryParams, last_id: str = "") -> None:
        self._catalog = catalog
        self._metrics = frozenset(asked.getlist("metric"))
        self._boot, version = _pair(asked.get("seen", "."), ".")
        self._version = _whole(version)
        places = [_pair(text, ":") for text in asked.getlist("run")[:RUNS_AT_MOST]]
        log, log_offset = _pair(asked.get("log", ""), ":")
        offsets = [_whole(offset) for _, offset in places]
        if told := _ID.fullmatch(last_id[:ID_BYTES]):
            self._boot, self._version = told[1], _whole(told[2])
            offsets = [_whole(offset) for offset in told[3].split(",") if offset]
            log_offset = told[4] or log_offset
        self._shown = [
            Shown(key, run, Follower(run.events, offset))
            for (key, _), offset in zip(places, offsets, strict=False)
            if (run := catalog.find(key)) is not None
        ]
        self._asked = [key for key, _ in places]
        self._log = self._log_of(log, _whole(log_offset))

    @property
    def id(self) -> str:
        """The event id: the place up to which everything has been sent."""
        at = {shown.key: shown.follower.offset for shown in self._shown}
        offsets = ",".join(str(at.get(key, 0)) for key in self._asked)
        log = "" if self._log is None else self._log.offset
        return f"{self._boot}.{self._version}|{offsets}|{log}"

    def look(self) -> list[bytes]:
        """Messages of what is new, whole events of the stream; the last one has the id."""
        told = [*self._list(), *self._points(), *self._lines()]
        if not told:
            return []
        parts = [
            b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
            for name, data in told
        ]
        parts[-1] = b"id: %b\n" % self.id.encode() + parts[-1]
        return parts

    def _list(self) -> Iterator[tuple[str, dict[str, Any]]]:
        self._catalog.refresh()
        boot, version = self._catalog.boot, self._catalog.version
        if (boot, version) == (self._boot, self._version):
            return
        anew = boot != self._boot
        rows, gone = self._catalog.since(0 if anew else self._version)
        self._boot, self._version = boot, version
        yield "runs", {"seen": f"{boot}.{version}", "all": anew, "rows": rows, "gone": gone}

    def _points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shown in self._shown:
            follower, restarts = shown.follower, shown.follower.restarts
            try:
                size = follower.path.stat().st_size
            except OSError:
                continue
            if size == follower.offset:
                continue
            if size - follower.offset > BEHIND_BYTES:
                follower.offset = size
                yield "anew", {"key": shown.key}
                continue
            events = follower.poll()
            if follower.restarts > restarts or _branches(shown.run, events):
                yield "anew", {"key": shown.key}
                continue
            for message in news(shown.run, events, self._metrics):
                yield "news", {"key": shown.key, "offset": follower.offset, **message}

    def _log_of(self, text: str, offset: int) -> ShownLog | None:
        key, _, rank = text.rpartition("/")
        run = self._catalog.find(key) if _RANK.fullmatch(rank) else None
        if run is None or (path := self._catalog.file(run, run.log(int(rank)))) is None:
            return None
        return ShownLog(key, int(rank), path, offset)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        log = self._log
        if log is None:
            return
        text, offset, skipped = log_after(log.path, log.offset)
        if offset != log.offset:
            log.offset = offset
            place = {"key": log.key, "rank": log.rank, "offset": offset}
            yield "log", place | {"text": text, "skipped": skipped}


@dataclass
class EventStream:
    """The answer that does not end: an ASGI app."""

    news: PageUpdates
    is_ending: Callable[[], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(_leave(receive))
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        parts = [b"retry: 1000\n: here\n\n"]
        try:
            while not (self.is_ending() or gone.done()):
                if not parts and loop.time() - spoke > BEAT_S:
                    parts = [b"event: beat\ndata: {}\n\n"]
                for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    spoke = loop.time()
                await asyncio.wait({gone}, timeout=POLL_S)
                parts = await asyncio.to_thread(self.news.look)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _branches(run: RunDir, events: list[Event]) -> bool:
    try:
        return branches(run, events)
    except RecordError:
        return True  # the page asks for the curves, and is told what is wrong


def log_after(path: Path, offset: int) -> tuple[str, int, bool]:
    """Returns whole lines of a log behind `offset`, where they end, and whether some were skipped.

    No more than the last `LOG_BYTES`; a log that has become shorter is read anew.
    """
    try:
        size = path.stat().st_size
        if size < offset:
            offset = 0
        skipped = size - offset > LOG_BYTES
        if skipped:
            offset = size - LOG_BYTES
        with open_regular(path) as file:
            file.seek(offset)
            block = file.read(LOG_BYTES)
    except OSError:
        return "", offset, False
    whole = block[: block.rfind(b"\n") + 1]
    shown = whole.partition(b"\n")[2] if skipped else whole
    return shown.decode("utf-8", "replace"), offset + len(whole), skipped


def stream(
    catalog: Catalog, asked: QueryParams, last_id: str, is_ending: Callable[[], bool]
) -> EventStream:
    """The stream that a page asks for, from the beginning or from where one broke off.

    Raises:
        ConfigError: it asks for too much.
    """
    if len(asked.getlist("run")) > RUNS_AT_MOST:
        raise ConfigError.one(f"no more than {RUNS_AT_MOST} runs can be followed at once")
    return EventStream(PageUpdates(catalog, asked, last_id), is_ending)


def _pair(text: str, sign: str) -> tuple[str, str]:
    before, _, after = text.rpartition(sign)
    return before, after


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else 0


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
    """Returns one message with the events of a stretch within one segment."""
    measured = [event for event in events if isinstance(event, Train | Eval | Layers)]
    told = [RecordedEvent(e) for e in events if not isinstance(e, Train | Eval | Layers)]
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
    builder = TableBuilder()
    builder.add(events)
    table = builder.table()
    for name, value in table.metrics.items():
        whole = Series(name, value, table.axes, np.ones(len(value), np.bool_))
        yield name, whole.take(present(value))
