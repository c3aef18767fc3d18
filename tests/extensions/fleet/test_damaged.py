"""What a fleet says of its processes, with everything that it is read from damaged in turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fleets import plan_fleet

from instar.extensions.fleet.health import Checker, Unhealthy
from instar.extensions.fleet.launcher import completed_jobs
from instar.extensions.fleet.spec import Healthcheck
from instar.extensions.fleet.state import (
    InstanceChanged,
    StateLog,
    fold_events,
    read_fleet_events,
    read_result,
    result_path,
)

SOUND: dict[str, Any] = {
    "status": 0,
    "stopped": False,
    "time": 1.0,
    "cpu_s": 0.5,
    "peak_bytes": 1,
}
FLEET = "name: f\njobs: {job: {command: [ls]}}\n"


def _completed(folder: Path, content: str) -> bool:
    """Whether a job with this result counts as completed, and is not run again."""
    plan = plan_fleet(folder, FLEET)
    path = result_path(folder, "f-0", "job", 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return bool(completed_jobs(folder, plan.instances[0], plan, {"job": 1}))


def test_a_job_has_succeeded_only_if_its_result_says_so(tmp_path: Path) -> None:
    sound = json.dumps(SOUND)
    assert _completed(tmp_path, sound)
    for end in range(len(sound)):
        assert not _completed(tmp_path, sound[:end]), sound[:end]
    damages: dict[str, list[Any]] = {
        "status": [1, -9, False, None, "0", 0.0, 0.5, [0], float("nan")],
        "stopped": [True, 0, None, "false", []],
        "time": [None, "1", float("nan"), float("inf"), [1]],
        "cpu_s": [None, "1", float("nan"), True],
        "peak_bytes": [None, 1.5, "1", True],
    }
    for key, values in damages.items():
        without = {name: value for name, value in SOUND.items() if name != key}
        assert not _completed(tmp_path, json.dumps(without)), key
        for value in values:
            assert not _completed(tmp_path, json.dumps(SOUND | {key: value})), (key, value)
    result_path(tmp_path, "f-0", "job", 1).unlink()
    assert read_result(result_path(tmp_path, "f-0", "job", 1)) is None


def test_a_damaged_line_of_the_state_says_nothing(tmp_path: Path) -> None:
    log = StateLog(tmp_path)
    log.write(InstanceChanged(1.0, 0, "running"))
    log.write(InstanceChanged(2.0, 0, "succeeded"))
    log.close()
    path = tmp_path / "state.jsonl"
    before, last = path.read_bytes().splitlines(keepends=True)
    assert fold_events(read_fleet_events(tmp_path)).instances[0].phase == "succeeded"
    damaged = [last[:end] for end in range(len(last) - 1)]
    damaged += [
        last.replace(b"succeeded", word) for word in (b"Succeeded", b"succeeded ", b"", b"\xff")
    ]
    damaged += [
        last.replace(b'"instance":0', each) for each in (b'"instance":"0"', b'"instance":0.5')
    ]
    damaged += [
        last.replace(b'"time":2.0', b'"time":"2.0"'),
        b"null\n",
        b"[]\n",
        b"\0" * 40 + b"\n",
    ]
    for line in damaged:
        path.write_bytes(before + line)
        assert fold_events(read_fleet_events(tmp_path)).instances[0].phase == "running", line


@contextmanager
def _server(answer: bytes, status: int = 200) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _check(answer: Any, status: int = 200) -> None:
    async def check(port: int) -> None:
        checker = Checker(Healthcheck(probe="completion", model="m"), port, {}, {})
        try:
            await checker.check(10.0, probe=True)
        finally:
            await checker.close()

    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with _server(body, status) as port:
        asyncio.run(check(port))


@pytest.mark.parametrize(
    "answer", [{"choices": [{"text": ""}]}, {"choices": [{"message": {"content": "1"}}]}]
)
def test_a_server_that_completes_is_ready(answer: Any) -> None:
    _check(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"ok",
        b"{",
        b"\xff",
        [],
        None,
        {},
        {"error": "out of memory"},
        {"choices": []},
        {"choices": None},
        {"choices": "text"},
        {"choices": {"text": "a"}},
        {"choices": [{}]},
        {"choices": ["text"]},
        {"choices": [{"text": None}]},
        {"choices": [{"text": "a"}, {}]},
    ],
)
def test_a_server_whose_answer_is_no_completion_is_not_ready(answer: Any) -> None:
    with pytest.raises(Unhealthy, match="not a completion"):
        _check(answer)


@pytest.mark.parametrize("status", [204, 302, 404, 500, 503])
def test_a_server_whose_status_is_another_is_not_ready(status: int) -> None:
    with pytest.raises(Unhealthy, match=f"status {status}"):
        _check({"choices": [{"text": "a"}]}, status)
