"""The dashboard's routes and responses. All are GET, and write nothing, but those of `operations.py`."""

from __future__ import annotations

import asyncio
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.config.errors import InstarError
from instar.extensions import entry_points, load_target, third_party
from instar.extensions.board import PLACES
from instar.extensions.board.catalog import Catalog, MakeFleets
from instar.extensions.board.comparison import comparison
from instar.extensions.board.curves import POINTS, chart_groups, curves_of_run
from instar.extensions.board.operations import COMMANDS, answer_post, waiting_of
from instar.extensions.board.sections import PARTS, page_sections
from instar.extensions.board.stream import MAX_RUNS, EventStream, log_after, page_stream
from instar.logs.query.runs import branch_start
from instar.logs.query.stages import marks, stages
from instar.logs.query.state import run_status
from instar.logs.query.summary import summarize, summary_to_json
from instar.logs.read.reader_cache import cached_summary
from instar.logs.read.record import AXES, RecordedEvent, RunRecord, read_record
from instar.record.events import Event, to_words
from instar.record.format import encodable
from instar.record.rundir import RunDir

PAGE = tuple(Path(__file__).parent / place for place in PLACES)
MAX_EVENTS = 1000
_RANK = re.compile(r"rank_(\d{1,6})\.log")
MAX_METRICS = 64
MAX_COMPARED = 100
_ONE = "/api/runs/{key}"


def dashboard_app(
    folder: Path,
    is_ending: Callable[[], bool] = lambda: False,
    make_fleets: MakeFleets | None = None,
    *,
    read_only: bool = True,
) -> Starlette:
    """Return the app for a folder of runs or one run; `is_ending` ends open streams.

    Args:
        make_fleets: returns the fleets of these runs; None: fleets are not shown.
        read_only: without the routes that ask running runs for operations.
    """
    site = Site(folder, is_ending, make_fleets, read_only=read_only)
    per_run = {
        "summary": site.summary,
        **dict.fromkeys(PARTS, site.sections),
        "events": site.events,
        "logs": site.logs,
        "logs/{rank}": site.log,
        "waiting": site.waiting,
    }
    posted = () if read_only else COMMANDS
    routes = [
        Route("/", site.page),
        Route("/page/{name}", site.page),
        Route("/extensions/{name}", site.extension),
        Route("/api/runs", site.runs),
        Route("/api/curves", site.curves),
        Route("/api/compare", site.compare),
        Route("/api/groups", site.groups),
        Route("/api/stream", site.stream),
        *(Route(f"{_ONE}/{name}", answer) for name, answer in per_run.items()),
        *(Route(f"{_ONE}/{name}", site.post, methods=["POST"]) for name in posted),
    ]
    handlers: dict[Any, Any] = {InstarError: _error, OSError: _error, HTTPException: _missing}
    return Starlette(routes=routes, exception_handlers=handlers)


class Site:
    """The responses; those that read files run in threads."""

    def __init__(
        self,
        folder: Path,
        is_ending: Callable[[], bool],
        make_fleets: MakeFleets | None = None,
        *,
        read_only: bool = True,
    ) -> None:
        self._folder = folder
        self._read_only = read_only
        self._is_ending = is_ending
        self._catalog = Catalog(folder, catalog_row, unread_row)
        self._fleets = make_fleets(folder, self._catalog.runs) if make_fleets else None
        self._files = {
            path.name: path for place in PAGE for path in place.iterdir() if path.is_file()
        }

    def page(self, request: Request) -> Response:
        path = self._files.get(request.path_params.get("name", "index.html"))
        if path is None:
            raise HTTPException(404)
        kind = mimetypes.guess_type(path.name)[0] or "text/plain"
        kind = "text/javascript" if path.suffix == ".js" else kind
        body = path.read_bytes()
        if path.name == "index.html":
            body = body.replace(b"</main>", _links_to_extensions() + b"</main>")
        return Response(body, media_type=kind, headers={"Cache-Control": "no-cache"})

    def extension(self, request: Request) -> Response:
        """Return the page of another package's extension, which is imported when it is asked for."""
        extension = third_party(request.path_params["name"])
        if extension is None or not extension.page:
            raise HTTPException(404)
        self._catalog.refresh()
        page: str = load_target(extension.page)(self._catalog.runs())
        return Response(page, media_type="text/html", headers={"Cache-Control": "no-cache"})

    def runs(self, request: Request) -> Response:  # noqa: ARG002
        self._catalog.refresh()
        catalog = self._catalog
        version = f"{catalog.boot}.{catalog.version}"
        rows, _ = catalog.since(0)
        return _json({"folder": str(self._folder), "seen": version, "rows": rows})

    def curves(self, request: Request) -> Response:
        query = request.query_params
        points = min(max(_to_int(query.get("points"), POINTS), 5), POINTS)
        metrics = query.getlist("metric")[:MAX_METRICS]
        parts = []
        for key in query.getlist("run")[:MAX_RUNS]:
            run = self._catalog.find(key)
            if run is None:
                continue
            try:
                answer = curves_of_run(key, run, metrics, points)
            except (InstarError, OSError) as error:
                answer = {"key": key, "error": str(error)}
            parts.append(msgspec.json.encode(answer))  # at once: as text, curves take less memory
        return Response(b'{"runs":[' + b",".join(parts) + b"]}", media_type="application/json")

    async def stream(self, request: Request) -> EventStream:
        last_id = request.headers.get("last-event-id", "")
        query = request.query_params
        return await asyncio.to_thread(
            page_stream, self._catalog, query, last_id, self._is_ending, self._fleets
        )

    def summary(self, request: Request) -> Response:
        return _json(summary_of(self._run(request)))

    def sections(self, request: Request) -> Response:
        part = request.url.path.rpartition("/")[2]
        return _json(sections_of(self._run(request), part))

    def compare(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")[:MAX_COMPARED]
        runs = [run for key in keys if (run := self._catalog.find(key)) is not None]
        return _json({"sections": compare_runs(runs)})

    def groups(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")[:MAX_RUNS]
        runs = {key: run for key in keys if (run := self._catalog.find(key)) is not None}
        of_fleets = self._fleets.groups(runs) if self._fleets else {}
        group_names = {run: of_fleets.get(key, "") for key, run in runs.items()}
        return _json({"groups": chart_groups(runs, "seed", group_names)})

    def events(self, request: Request) -> Response:
        return _json(events_of(self._run(request)))

    def logs(self, request: Request) -> Response:
        return _json({"ranks": logs_of(self._catalog, self._run(request))})

    def log(self, request: Request) -> Response:
        rank = _to_int(request.path_params["rank"], -1)
        answer = log_of_rank(self._catalog, self._run(request), rank)
        if answer is None:
            raise HTTPException(404)
        return _json(answer)

    def waiting(self, request: Request) -> Response:
        return _json(waiting_of(self._run(request), read_only=self._read_only))

    async def post(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._run, request)
        command = request.url.path.rpartition("/")[2]
        return _json(await answer_post(request, run, command))

    def _run(self, request: Request) -> RunDir:
        run = self._catalog.find(request.path_params["key"])
        if run is None:
            raise HTTPException(404)
        return run


def _links_to_extensions() -> bytes:
    names = entry_points()  # of letters, digits, _ and -
    links = " ".join(f'<a href="/extensions/{name}">{name}</a>' for name in names)
    return f'<nav aria-label="Extensions">{links}</nav>\n'.encode() if links else b""


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, 422, media_type="application/json")


def _missing(request: Request, error: HTTPException) -> Response:  # noqa: ARG001
    body = msgspec.json.encode({"error": error.detail})
    return Response(body, error.status_code, error.headers, "application/json")


def _to_int(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 9 else default


def catalog_row(run: RunDir) -> dict[str, Any]:
    """Return a run's row in the list; for a run that cannot be read, the reason."""
    summary = cached_summary(run)
    has_record = run.events.exists()
    if summary.fault and has_record:
        return {"id": encodable(run.id), "name": encodable(run.path.name), "state": "unread"} | {
            "reason": encodable(summary.fault)
        }
    source = run.events if has_record else run.config
    first = branch_start(summary)
    status = run_status(run, summary.events, summary.seen or source.stat().st_mtime)
    as_json: dict[str, Any] = to_words(
        {
            "id": encodable(summary.id),
            "name": encodable(summary.name),
            "state": status.state,
            "reason": encodable(status.reason),
            "step": summary.step or 0,
            "loss": summary.loss,
            "best": summary.best,
            "best_metric": encodable(summary.best_metric),
            "higher_is_better": summary.best_is_max,
            "started": summary.started or source.stat().st_mtime,
            "seen": summary.seen,
            "model": encodable(summary.model),
            "unit": summary.unit,
            "imported_from": summary.imported_from and encodable(summary.imported_from),
            **({} if first is None else {"trunk": first.parent, "branched_at": first.step}),
        }
    )
    return as_json


def unread_row(run: RunDir, written_at: float) -> dict[str, Any]:
    """Return the row of a run that has not been read yet; `written_at`: Unix seconds."""
    return {
        "id": encodable(run.id),
        "name": encodable(run.name),
        "state": "unseen",
        "started": written_at,
    }


def summary_of(run: RunDir) -> dict[str, Any]:
    """Return what `instar logs summary --json` prints."""
    return summary_to_json(summarize(read_record(run)))


def sections_of(run: RunDir, part: str) -> dict[str, Any]:
    """Return one of `sections.PARTS` of a run; with `stages`, also the current model."""
    # a run without a record has a config
    record = RunRecord(run, [], {}, ()) if part == "config" else read_record(run)
    answer: dict[str, Any] = {"sections": page_sections(part, record)}
    if part == "stages" and (run_stages := stages(record)):
        last = run_stages[-1]
        answer["shape"] = {"model": encodable(last.model), "parameters": last.parameters}
    return answer


def compare_runs(runs: Iterable[RunDir]) -> list[dict[str, Any]]:
    """Return the comparison of the runs that can be read."""
    records = []
    for run in runs:
        with suppress(InstarError, OSError):
            records.append(read_record(run))
    return comparison(records)


def events_of(run: RunDir) -> dict[str, Any]:
    """Return the latest `MAX_EVENTS` events other than measurements, in order."""
    record = read_record(run)
    latest = record.events[-MAX_EVENTS:]
    return {
        "total": len(record.events),
        "events": [_event(record, entry) for entry in latest],
        "faults": list(map(encodable, record.faults)),
    }


def logs_of(catalog: Catalog, run: RunDir) -> list[int]:
    """Return the ranks that have a log."""
    try:
        names = [_RANK.fullmatch(path.name) for path in run.logs.iterdir()]
    except OSError:
        return []
    ranks = sorted(int(name[1]) for name in names if name)
    return [rank for rank in ranks if catalog.file(run, run.log(rank)) is not None]


def log_of_rank(catalog: Catalog, run: RunDir, rank: int) -> dict[str, Any] | None:
    """Return the end of a rank's log and the offset after it; None: that rank has no log."""
    path = catalog.file(run, run.log(rank))
    if path is None:
        return None
    text, offset, is_cut = log_after(path, 0)
    return {"rank": rank, "text": text, "offset": offset, "skipped": is_cut}


def _event(record: RunRecord, entry: RecordedEvent[Event]) -> dict[str, Any]:
    event = entry.event
    fields = dict(_fields(event))
    mark = next(iter(marks(RunRecord(record.run, [entry], {}, ()), axes=("step",))), None)
    kind = str(fields.pop("name", "")) if "fields" in fields else str(event.__struct_config__.tag)
    return {
        "kind": kind,
        "time": event.time,
        "segment": event.segment,
        "step": getattr(event, "step", None),
        "title": mark["title"] if mark else kind.replace("_", " "),
        "text": mark["text"] if mark else encodable(_text(fields)),
        "superseded": not entry.is_current,
        "fields": fields,
    }


def _text(fields: dict[str, Any]) -> str:
    """Return the message of an event, or its numbers."""
    if "message" in fields:
        return str(fields["message"])
    plain_fields = {
        k: v for k, v in fields.items() if isinstance(v, str | int | float) and k not in _AXES
    }
    texts = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in plain_fields.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in texts.items())


_AXES = frozenset(AXES)
_PLACE = frozenset({"v", "time", "segment", "step"})


def _fields(event: Event) -> Iterator[tuple[str, Any]]:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name not in _PLACE and value not in (None, "", (), {}, []):
            yield name, to_words(value)
