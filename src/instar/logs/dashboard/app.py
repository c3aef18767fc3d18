"""The dashboard's addresses. All of them are GET; nothing is ever written."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.config.errors import InstarError
from instar.logs.dashboard import answers
from instar.logs.dashboard.catalog import Catalog
from instar.logs.dashboard.curves import POINTS, Curves
from instar.logs.dashboard.live import RUNS_AT_MOST, Stream, stream
from instar.record.rundir import RunDir

PAGE = (Path(__file__).parent / "page", Path(__file__).parent.parent / "page")
METRICS_AT_MOST = 64
_ONE = "/api/runs/{key}"


def dashboard(folder: Path, is_ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The app over a folder of runs, or one run; `is_ending` ends the open streams."""
    site = Site(folder, is_ending)
    about = {
        "summary": site.summary,
        "stages": site.stages,
        "events": site.events,
        "system": site.system,
        "config": site.config,
        "logs": site.logs,
        "logs/{rank:int}": site.log,
    }
    routes = [
        Route("/", site.page),
        Route("/page/{name}", site.page),
        Route("/api/runs", site.runs),
        Route("/api/curves", site.curves),
        Route("/api/stream", site.stream),
        *(Route(f"{_ONE}/{name}", answer) for name, answer in about.items()),
    ]
    handlers: dict[Any, Any] = {InstarError: _told, OSError: _told, HTTPException: _missing}
    return Starlette(routes=routes, exception_handlers=handlers)


class Site:
    """The answers; those that read files run in threads."""

    def __init__(self, folder: Path, is_ending: Callable[[], bool]) -> None:
        self._folder = folder
        self._is_ending = is_ending
        self._catalog = Catalog(folder, answers.row, answers.unseen)
        self._curves = Curves()
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
        return Response(body, media_type=kind, headers={"Cache-Control": "no-cache"})

    def runs(self, request: Request) -> Response:  # noqa: ARG002
        self._catalog.refresh()
        catalog = self._catalog
        seen = f"{catalog.boot}.{catalog.version}"
        rows, _ = catalog.since(0)
        return _json({"folder": str(self._folder), "seen": seen, "rows": rows})

    def curves(self, request: Request) -> Response:
        asked = request.query_params
        points = min(max(_whole(asked.get("points"), POINTS), 5), POINTS)
        metrics = asked.getlist("metric")[:METRICS_AT_MOST]
        parts = []
        for key in asked.getlist("run")[:RUNS_AT_MOST]:
            run = self._catalog.find(key)
            if run is None:
                continue
            try:
                parts.append(self._curves.of(key, run, metrics, points))
            except (InstarError, OSError) as error:
                parts.append(msgspec.json.encode({"key": key, "error": str(error)}))
        return Response(b'{"runs":[' + b",".join(parts) + b"]}", media_type="application/json")

    async def stream(self, request: Request) -> Stream:
        last_id = request.headers.get("last-event-id", "")
        asked = request.query_params
        return await asyncio.to_thread(stream, self._catalog, asked, last_id, self._is_ending)

    def summary(self, request: Request) -> Response:
        return _json(answers.summary_of(self._run(request)))

    def stages(self, request: Request) -> Response:
        return _json({"stages": answers.stages_of(self._run(request))})

    def events(self, request: Request) -> Response:
        return _json(answers.events_of(self._run(request)))

    def system(self, request: Request) -> Response:
        return _json(answers.system_of(self._run(request)))

    def config(self, request: Request) -> Response:
        return _json({"text": answers.config_of(self._catalog, self._run(request))})

    def logs(self, request: Request) -> Response:
        return _json({"ranks": answers.logs_of(self._catalog, self._run(request))})

    def log(self, request: Request) -> Response:
        told = answers.log_of(self._catalog, self._run(request), request.path_params["rank"])
        if told is None:
            raise HTTPException(404)
        return _json(told)

    def _run(self, request: Request) -> RunDir:
        run = self._catalog.find(request.path_params["key"])
        if run is None:
            raise HTTPException(404)
        return run


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _told(request: Request, error: Exception) -> Response:  # noqa: ARG001
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, 422, media_type="application/json")


def _missing(request: Request, error: HTTPException) -> Response:  # noqa: ARG001
    body = msgspec.json.encode({"error": error.detail})
    return Response(body, error.status_code, error.headers, "application/json")


def _whole(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 9 else default
