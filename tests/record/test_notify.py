"""Alerts told by a program and to a web address."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from instar.record.alerts import Notifier
from instar.record.events import Alert
from instar.record.rundir import RunDir

ALERT = Alert(step=120, tokens=7680, name="divergence", message="step 120: the loss → rises")
SLOW_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "demo-ab3cd")


class Hook(ThreadingHTTPServer):
    """A web address that keeps what it is sent, and answers with `status`, or when it is let go."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status = 204
        self.requests: list[tuple[str, str, object]] = []
        self.logins: list[str | None] = []
        self.waits = False
        self.go = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hooks/1"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hook = self.server
        assert isinstance(hook, Hook)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hook.requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
        hook.logins.append(self.headers["Authorization"])
        if hook.waits:
            hook.go.wait(SLOW_S)
        self.send_response(hook.status)
        if hook.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        hook = self.server
        assert isinstance(hook, Hook)
        hook.logins.append(self.headers["Authorization"])
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go.set()
        server.shutdown()
        thread.join()


def payload(run: RunDir) -> dict[str, object]:
    return {
        "text": "demo-ab3cd: step 120: the loss → rises",
        "run": "ab3cd",
        "folder": str(run.path),
        "name": "divergence",
        "message": "step 120: the loss → rises",
        "step": 120,
        "tokens": 7680,
        "flops": 0.0,
        "wall_s": 0.0,
        "active_s": 0.0,
    }


def test_a_program_has_the_alert_on_stdin_and_in_its_environment(
    run: RunDir, tmp_path: Path
) -> None:
    code = (
        "import json, os, sys; from pathlib import Path;"
        "told = {key: value for key, value in os.environ.items() if key.startswith('INSTAR_ALERT')};"
        "Path(sys.argv[1]).write_text(json.dumps([json.load(sys.stdin), told]))"
    )
    notifier = Notifier(run, [sys.executable, "-c", code, str(tmp_path / "told it")])
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    stdin, environment = json.loads((tmp_path / "told it").read_text())
    assert stdin == payload(run)
    assert json.loads(environment.pop("INSTAR_ALERT")) == stdin
    assert environment == {
        "INSTAR_ALERT_RUN": "ab3cd",
        "INSTAR_ALERT_NAME": "divergence",
        "INSTAR_ALERT_STEP": "120",
    }
    assert notifier.failures() == []


def test_a_web_address_is_sent_the_alert_as_json(run: RunDir, hook: Hook) -> None:
    notifier = Notifier(run, webhook=hook.address)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert hook.requests == [("/hooks/1", "application/json", payload(run))]
    assert notifier.failures() == []


@pytest.mark.parametrize(
    ("argv", "trouble"),
    [
        (["false"], "its program ended with exit code 1"),
        (["/no/such/program"], "No such file"),
    ],
    ids=["fails", "is not there"],
)
def test_a_program_s_failure_is_a_trouble_and_the_address_is_told_all_the_same(
    run: RunDir, hook: Hook, argv: list[str], trouble: str
) -> None:
    notifier = Notifier(run, argv, hook.address)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    (failure,) = notifier.failures()
    assert failure.startswith("an alert could not be delivered: ")
    assert trouble in failure
    assert len(hook.requests) == 1
    assert notifier.failures() == []


def test_a_program_that_takes_too_long_is_ended_with_all_it_started(
    run: RunDir, tmp_path: Path
) -> None:
    pid_file = tmp_path / "started"
    script = f"sleep {SLOW_S} & echo $! > '{pid_file}'; wait"
    notifier = Notifier(run, ["sh", "-c", script], timeout_s=1.0)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert "took longer than 1 s" in notifier.failures()[0]
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    # a busy machine carries the kill out a moment later
    deadline = time.monotonic() + SLOW_S / 2
    while state.exists() and " Z " not in state.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_that_is_a_failure_is_a_trouble(run: RunDir, hook: Hook) -> None:
    hook.status = 500
    notifier = Notifier(run, webhook=hook.address)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert "500" in notifier.failures()[0]


def test_user_and_password_of_an_address_are_sent_as_basic_authentication(
    run: RunDir, hook: Hook
) -> None:
    notifier = Notifier(run, webhook=hook.address.replace("//", "//al%40ice:s3:cret%2Fpw@"))
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert notifier.failures() == []
    assert hook.logins == [f"Basic {base64.b64encode(b'al@ice:s3:cret/pw').decode()}"]


def test_where_an_address_redirects_its_password_is_not_sent(run: RunDir, hook: Hook) -> None:
    hook.status = 302
    notifier = Notifier(run, webhook=hook.address.replace("//", "//me:pass@"))
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert hook.logins == [f"Basic {base64.b64encode(b'me:pass').decode()}", None]


@pytest.mark.parametrize(
    "address",
    [
        "http://alice:SECRET@127.0.0.1:1/hook?token=SECRET",
        "http://alice:SECRET@127.0.0.1:SECRET/hook",
        "http://127.0.0.1/services/T0/SECRET x",
        "http://127.0.0.1/services/T0/SECRET\u00e9",
        "http:///SECRET",
        "http://[SECRET/",
    ],
)
def test_no_failure_tells_what_is_secret_of_an_address(run: RunDir, address: str) -> None:
    """Also of those that a config would refuse."""
    notifier = Notifier(run, webhook=address, timeout_s=5)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    (failure,) = notifier.failures()
    assert failure.startswith("an alert could not be delivered: ")
    assert "SECRET" not in failure


def test_nobody_at_the_address_is_a_trouble(run: RunDir, hook: Hook) -> None:
    hook.server_close()
    notifier = Notifier(run, webhook=hook.address)
    notifier.send(ALERT)
    notifier.close(SLOW_S)
    assert "could not be delivered" in notifier.failures()[0]


def test_an_address_that_hangs_holds_up_neither_training_nor_its_end(
    run: RunDir, hook: Hook
) -> None:
    hook.waits = True
    notifier = Notifier(run, webhook=hook.address)
    began = time.monotonic()
    for _ in range(500):
        notifier.send(ALERT)
    notifier.close(0.1)
    assert time.monotonic() - began < 5.0
    assert "not yet delivered" in notifier.failures()[0]


def test_with_nobody_to_tell_nothing_is_started(run: RunDir) -> None:
    before = threading.active_count()
    notifier = Notifier(run)
    notifier.send(ALERT)
    assert threading.active_count() == before
    notifier.close()
    assert notifier.failures() == []
