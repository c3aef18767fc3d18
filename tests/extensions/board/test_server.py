"""The dashboard's process and its answers, asked without a browser."""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner
from dashboards import asking, dashboard, serve_dashboard
from figures import FULL
from recorded import make_run, start_event, train
from written_runs import write_run

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.extensions.board import server as connection
from instar.extensions.board.cli import dashboard as command
from instar.extensions.board.report import report_html
from instar.extensions.board.server import Ending, bind, server_config
from instar.logs.query.config import config_values
from instar.logs.read.record import read_record
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.record.trackers.tracker import flat_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    make_run(runs, "grow-aaaaa", grows=True)
    make_run(runs, "other-bbbbb", steps=20)
    return runs


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[httpx.Client]:
    with dashboard(folder, "--port", "0") as (address, _), asking(address) as client:
        yield client


def events(client: httpx.Client, query: str, until: str, **headers: str) -> list[tuple[str, dict]]:
    """The events of the stream up to one of the kind `until`, each with its data; ids as data."""
    found: list[tuple[str, dict]] = []
    named = ""
    with client.stream("GET", f"/api/stream?{query}", headers=headers, timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("id: "):
                found.append(("id", {"id": line[4:]}))
            elif line.startswith("event: "):
                named = line[7:]
            elif line.startswith("data: "):
                found.append((named, json.loads(line[6:])))
                if named == until:
                    return found
    raise AssertionError(f"the stream ended before {until}: {found}")


def test_runs_are_listed_with_their_state_step_and_losses(site: httpx.Client) -> None:
    rows = {row["key"]: row for row in site.get("/api/runs").json()["rows"]}
    assert set(rows) == {"grow-aaaaa", "other-bbbbb"}
    row = rows["grow-aaaaa"]
    assert (row["id"], row["name"], row["step"]) == ("aaaaa", "grow", 40)
    assert row["state"] == "crashed"  # it has said nothing of an end, and nobody holds it
    assert row["loss"] == pytest.approx(5 / 40**0.5)
    assert row["best"] == pytest.approx(5.1 / 40**0.5)


def test_curves_have_only_what_was_asked_for_and_every_axis(site: httpx.Client) -> None:
    asked = {"run": ["grow-aaaaa", "other-bbbbb", "nothing"], "metric": ["loss", "no/such"]}
    first, second = site.get("/api/curves", params=asked).json()["runs"]
    assert (first["key"], second["key"]) == ("grow-aaaaa", "other-bbbbb")
    assert list(first["series"]) == ["loss"]
    assert {"lr", "val/loss"} <= set(first["names"])
    assert len(first["series"]["loss"]["value"]) == 40
    assert first["series"]["loss"]["x"]["tokens"][-1] == 4000
    assert [mark["kind"] for mark in first["marks"]] == ["operation"]


def test_long_curves_are_thinned_and_keep_their_spikes(site: httpx.Client, folder: Path) -> None:
    run = RunDir(folder / "long-ccccc")
    run.path.mkdir()
    with Recorder(run.events) as record:
        record.write(start_event())
        for step in range(1, 6001):
            record.write(train(step, 77.0 if step == 3333 else 1.0))
    asked = {"run": "long-ccccc", "metric": "loss", "points": "1000000"}
    (found,) = site.get("/api/curves", params=asked).json()["runs"]
    values = found["series"]["loss"]["value"]
    assert len(values) <= 2000
    assert max(values) == 77.0
    shutil.rmtree(run.path)


def test_one_run_tells_its_stages_events_system_logs_and_config(site: httpx.Client) -> None:
    def ask(what: str) -> dict:
        return site.get(f"/api/runs/grow-aaaaa/{what}").raise_for_status().json()

    def section(what: str, title: str) -> dict:
        return next(each for each in ask(what)["sections"] if each["title"] == title)

    (first, second), changed = (
        section("stages", "Stages")["rows"],
        {"text": "32", "class": "changed"},
    )
    assert (first[3], second[3]) == ("1.00k", "1.50k")
    assert section("stages", "Architecture")["rows"][1] == ["n_mlp", "16", changed]
    told = ask("events")
    operation = next(event for event in told["events"] if event["kind"] == "operation")
    assert operation["title"] == "widen_mlp 16→32"
    assert "val 1.13 < 1.20" in operation["text"]
    assert operation["fields"]["proof"]["max_logit_diff"] == 2e-6
    assert ["memory", "16.0 GiB"] in section("system", "Environment")["items"]
    assert ask("logs") == {"ranks": [0]}
    assert "rank 0 of 1" in ask("logs/0")["text"]
    assert section("config", "Config")["lines"] == [["name: grow", ""]]
    assert ask("summary")["step"] == 40


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/nothing/summary",
        "/api/runs/../config",
        "/api/runs/..%2f..%2fetc/config",
        "/api/runs/%2e%2e/config",
        "/api/runs/grow-aaaaa/logs/7",
        "/api/runs/grow-aaaaa/logs/..%2f..%2frun.yaml",
        "/page/..%2fapp.py",
        "/page/%2fetc%2fpasswd",
        "/page/app.py",
        "/etc/passwd",
    ],
)
def test_nothing_else_can_be_read(site: httpx.Client, path: str) -> None:
    assert site.get(path).status_code == 404


def test_links_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = make_run(tmp_path / "elsewhere", "secret-ddddd")
    inside = tmp_path / "runs"
    shutil.copytree(folder / "grow-aaaaa", inside / "grow-aaaaa")
    (inside / "link-eeeee").symlink_to(secret.path)
    for file in ("events.jsonl", "run.yaml"):
        (inside / f"files-{file[:1] * 5}").mkdir()
        (inside / f"files-{file[:1] * 5}" / file).symlink_to(secret.path / file)
    (inside / "grow-aaaaa" / "logs" / "rank_1.log").symlink_to(secret.log(0))
    with dashboard(inside, "--port", "0") as (address, _), asking(address) as site:
        assert [row["key"] for row in site.get("/api/runs").json()["rows"]] == ["grow-aaaaa"]
        assert site.get("/api/runs/grow-aaaaa/logs").json() == {"ranks": [0]}
        assert site.get("/api/runs/grow-aaaaa/logs/1").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(site: httpx.Client, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/grow-aaaaa/summary"):
        assert site.request(method, path).status_code == 405


def test_the_folder_is_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder / "grow-aaaaa", runs / "grow-aaaaa")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    with dashboard(runs, "--port", "0") as (address, _), asking(address) as site:
        site.get("/api/curves", params={"run": "grow-aaaaa", "metric": "loss"})
        site.get("/api/runs/grow-aaaaa/events")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("", 421),
        ("localhost:9", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
    ],
)
def test_a_name_that_is_made_to_point_here_is_refused(
    site: httpx.Client, host: str, status: int
) -> None:
    assert site.get("/api/runs", headers={"Host": host}).status_code == status


def test_every_answer_forbids_what_a_page_need_not_do(site: httpx.Client) -> None:
    for path in ("/", "/page/dashboard.js", "/api/runs", "/nothing"):
        headers = site.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"


def test_a_token_is_asked_for_in_the_address_once_then_in_a_cookie(folder: Path) -> None:
    with dashboard(folder, "--port", "0", "--token", "let-me_in1") as (address, _):
        base, _, query = address.partition("?")
        assert query == "token=let-me_in1"
        with httpx.Client(base_url=base) as site:
            assert site.get("/").status_code == 401
            assert site.get("/api/runs").status_code == 401
            assert site.get("/api/runs?token=let-me_in1").status_code == 401
            assert site.get("/?token=let-me_in2").status_code == 401
            assert site.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
            bearer = {"Authorization": "Bearer let-me_in1"}
            assert site.get("/api/runs", headers=bearer).status_code == 200
            page = site.get("/?token=let-me_in1")
            assert page.status_code == 200
            assert "let-me_in1" not in page.text
            cookie = page.headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert site.get("/api/runs").status_code == 200


@pytest.mark.parametrize("host", [(), ("--host", "0.0.0.0")])
def test_there_is_always_a_token(folder: Path, host: tuple[str, ...]) -> None:
    with dashboard(folder, "--port", "0", *host) as (address, _):
        token = address.partition("?token=")[2]
        assert len(token) >= 16
        port = httpx.URL(address).port
        for path in ("/", "/api/runs", "/page/dashboard.js", "/?token=", "/?token=x"):
            assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 401
        assert httpx.get(f"http://127.0.0.1:{port}/?token={token}").status_code == 200


def test_the_address_that_a_browser_is_started_with_is_good_once(tmp_path: Path) -> None:
    address = bind("127.0.0.1", 0, None)
    os.close(address.descriptor)
    app = server_config(tmp_path, address, Ending()).app
    transport = httpx.ASGITransport(app=app)

    async def enter(url: str) -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url=url.partition("?")[0]) as client:
            entered = (await client.get(url)).status_code
            return [entered, (await client.get("/api/runs")).status_code]

    assert address.ticket not in address.url
    assert asyncio.run(enter(address.url_once)) == [200, 200]
    assert asyncio.run(enter(address.url_once)) == [401, 401]
    assert asyncio.run(enter(address.url)) == [200, 200]


def test_a_port_that_is_taken_is_told_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            bind("127.0.0.1", port, None)
    assert "is free now: --port " in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "192.0.2.1"], "192.0.2.1 is not an address of this machine"),
        (["--token", "with space"], "a token consists of letters"),
        (["file"], "file is not a folder"),
    ],
)
def test_what_cannot_be_served_is_told(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = CliRunner().invoke(command, [*arguments, "--port", "0"])
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_quietly_also_with_a_page_open(folder: Path, number: signal.Signals) -> None:
    with dashboard(folder, "--port", "0") as (address, process):
        with asking(address) as client, client.stream("GET", "/api/stream?seen=.") as answer:
            next(answer.iter_lines())
            os.kill(process.pid, number)
            assert process.wait(10) == 0
        assert process.stderr is not None
        how = "; its running runs can be asked for operations"
        assert process.stderr.read() == f"Shows {folder}{how}. Ctrl-C ends it.\n"


def test_a_stream_begins_where_the_page_is_and_tells_of_each_line_once(
    site: httpx.Client, folder: Path
) -> None:
    run = make_run(folder, "live-fffff", steps=3)
    offset = run.events.stat().st_size
    with Recorder(run.events) as record:
        record.write(train(4, 2.5))
        query = f"run=live-fffff:{offset}&metric=loss&metric=lr&seen=."
        told = events(site, query, "news")
        points = told[-1][1]["points"]
        assert points["loss"]["value"] == [2.5]
        assert points["loss"]["x"]["step"] == [4]
        assert set(points) == {"loss", "lr"}
        last_id = [data["id"] for name, data in told if name == "id"][-1]

        record.write(train(5, 2.4))
        again = events(site, query, "news", **{"Last-Event-ID": last_id})
    assert [data["points"]["loss"]["x"]["step"] for name, data in again if name == "news"] == [[5]]
    shutil.rmtree(run.path)


def test_a_server_started_anew_goes_on_where_the_other_one_left_off(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "grow-aaaaa", tmp_path / "grow-aaaaa")
    events_file = tmp_path / "grow-aaaaa" / "events.jsonl"
    query = f"run=grow-aaaaa:{events_file.stat().st_size}&metric=loss&seen=."
    with Recorder(events_file) as record:
        with dashboard(tmp_path, "--port", "0") as (address, _), asking(address) as client:
            record.write(train(41, 0.7))
            told = events(client, query, "news")
        last_id = [data["id"] for name, data in told if name == "id"][-1]
        record.write(train(42, 0.6))
        with dashboard(tmp_path, "--port", "0") as (address, _), asking(address) as client:
            again = events(client, query, "news", **{"Last-Event-ID": last_id})
    assert [d["points"]["loss"]["x"]["step"] for n, d in again if n == "news"] == [[42]]
    assert next(data for name, data in again if name == "runs")["all"] is True


def test_a_resume_is_told_between_the_points_before_and_after_it(
    site: httpx.Client, folder: Path
) -> None:
    run = make_run(folder, "again-ggggg", steps=10)
    offset = run.events.stat().st_size
    with Recorder(run.events) as record:
        record.write(train(11, 1.1))
        record.write(start_event(5))
        record.write(train(6, 1.2))
    with site.stream("GET", f"/api/stream?run=again-ggggg:{offset}&metric=loss") as answer:
        news = []
        for line in answer.iter_lines():
            if line.startswith("data: ") and "offset" in line:
                news.append(json.loads(line[6:]))
            if len(news) == 3:
                break
    assert [message.get("rewind") for message in news] == [None, {"step": 5, "segment": 2}, None]
    assert [m["points"]["loss"]["segment"] for m in (news[0], news[2])] == [1, 2]
    shutil.rmtree(run.path)


def test_runs_that_appear_change_and_go_are_told(tmp_path: Path) -> None:
    runs = tmp_path / "later"
    with dashboard(runs, "--port", "0") as (address, _), asking(address) as site:
        list_runs = site.get("/api/runs").json()
        assert list_runs["rows"] == []
        seen = list_runs["seen"]

        def next_change() -> dict:
            nonlocal seen
            change = events(site, f"seen={seen}", "runs")[-1][1]
            seen = change["seen"]
            return change

        run = make_run(runs, "new-hhhhh", steps=2)
        assert [row["key"] for row in next_change()["rows"]] == ["new-hhhhh"]
        with Recorder(run.events) as record:
            record.write(train(3, 1.0))
        rows = next_change()["rows"]
        while rows[0]["step"] != 3:
            rows = next_change()["rows"]
        shutil.rmtree(run.path)
        assert next_change()["gone"] == ["new-hhhhh"]


def test_a_rank_s_log_is_followed(site: httpx.Client, folder: Path) -> None:
    run = RunDir(folder / "grow-aaaaa")
    offset = site.get("/api/runs/grow-aaaaa/logs/0").json()["offset"]
    with run.log(0).open("a") as log:
        log.write("a new line\nhalf a li")
    told = events(site, f"log=grow-aaaaa/0:{offset}", "log")[-1][1]
    assert told["text"] == "a new line\n"
    with run.log(0).open("a") as log:
        log.write("ne\n")
    told = events(site, f"log=grow-aaaaa/0:{told['offset']}", "log")[-1][1]
    assert told["text"] == "half a line\n"


def test_a_page_far_behind_is_told_to_read_anew(site: httpx.Client, folder: Path) -> None:
    run = make_run(folder, "huge-iiiii", steps=5)
    line = run.events.read_bytes().splitlines(keepends=True)[-1]
    with run.events.open("ab") as file:
        file.write(line * (5_000_000 // len(line)))
    assert events(site, "run=huge-iiiii:0&metric=loss", "anew")[-1][1] == {"key": "huge-iiiii"}
    shutil.rmtree(run.path)


@contextmanager
def connected(
    serving: AbstractContextManager[str],
) -> Iterator[tuple[str, Callable[..., socket.socket]]]:
    """The address of a dashboard, and what opens a bare connection to it."""
    with ExitStack() as stack:
        address = stack.enter_context(serving)
        port = httpx.URL(address).port

        def connect(sent: bytes, receives: int = 0) -> socket.socket:
            made = stack.enter_context(socket.socket())
            if receives:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
            made.settimeout(30)
            made.connect(("127.0.0.1", port))
            made.sendall(sent)
            return made

        yield address, connect


NOT_WHOLE = (
    b"",
    b"GET / HT",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT",
)


def test_a_request_that_does_not_come_whole_is_given_up(folder: Path) -> None:
    with connected(serve_dashboard(folder)) as (_, connect):
        begun = time.monotonic()
        for made in [connect(sent) for sent in NOT_WHOLE]:
            with suppress(ConnectionResetError):
                while made.recv(1 << 16):
                    pass
        assert time.monotonic() - begun < 10


def test_connections_are_limited_in_number(folder: Path) -> None:
    with connected(serve_dashboard(folder)) as (address, connect):
        held = [connect(b"GET / HT") for _ in range(connection.MAX_CONNECTIONS)]
        one_more = connect(b"")
        with suppress(ConnectionResetError):
            assert one_more.recv(1) == b""
        for each in held:
            each.close()
        with asking(address) as client:
            assert client.get("/api/runs").status_code == 200


@pytest.mark.repeated  # for as long as it says in `make torture`
def test_a_stream_that_nobody_reads_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FULL:
        monkeypatch.setattr(connection, "STUCK_S", 3.0)
    run = make_run(tmp_path, "grow-aaaaa", steps=3)
    with connected(serve_dashboard(tmp_path)) as (address, connect):
        path, _, token = address.partition("?token=")
        port = httpx.URL(path).port
        query = f"run=grow-aaaaa:{run.events.stat().st_size}&metric=loss"
        made = connect(
            f"GET /api/stream?{query} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode(),
            receives=4096,
        )
        begun = time.monotonic()
        steps = count(4)
        with Recorder(run.events) as record:
            while is_open(made, port):
                assert time.monotonic() - begun < 4 * connection.STUCK_S
                # Little by little: of a record that grew by megabytes at once, the page is only
                # told to read it anew, which the receiver's own buffer may hold.
                for step in islice(steps, 100):
                    record.write(train(step, 1.0))
                time.sleep(0.1)


def is_open(made: socket.socket, port: int) -> bool:
    """Whether the other end of a connection is open, as the system has it."""
    mine = made.getsockname()[1]
    return any(
        each.laddr
        and each.raddr
        and (each.laddr.port, each.raddr.port) == (port, mine)
        and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.net_connections("tcp4")
    )


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (f"/api/curves?run=grow-aaaaa&metric=loss&points={LONG}", {}),
        (f"/api/stream?run=grow-aaaaa:{LONG}&seen=ab.{LONG}&log=grow-aaaaa/{LONG}:{LONG}", {}),
        ("/api/stream?run=grow-aaaaa:0&log=grow-aaaaa/\u0663:0", {}),
        ("/api/stream?run=grow-aaaaa:0", {"Last-Event-ID": f"ab.{LONG}|{LONG},{LONG}|{LONG}"}),
        ("/api/stream?run=grow-aaaaa:0", {"Last-Event-ID": f"ab.1|{LONG}|1"}),
        (f"/api/runs/grow-aaaaa/logs/{LONG}", {}),
        ("/api/runs/grow-aaaaa/logs/-1", {}),
        (f"/api/runs/{LONG}/summary", {}),
        (f"/api/curves?run={LONG}&metric={LONG}", {}),
    ],
)
def test_numbers_of_any_length_are_answered(
    site: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    with site.stream("GET", path, headers=headers) as answer:
        assert answer.status_code in (200, 404)


def test_secrets_of_a_config_are_shown_nowhere(tmp_path: Path) -> None:
    secrets = {
        "record.alerts.webhook": "https://hooks.example.org/SECRET",
        "record.trackers.mlflow.uri": "https://me:SECRET@mlflow.example.org",
        "data.source": "https://me:SECRET@data.example.org/a.txt",
    }
    run = write_run(tmp_path / "grow-aaaaa", {10: 2.0, 20: 1.0}, config=secrets)
    other = write_run(tmp_path / "grow-bbbbb", {10: 2.0, 20: 1.0})
    assert "SECRET" in run.config.read_text()
    text = report_html([read_record(run)]) + report_html([read_record(run), read_record(other)])
    text += repr(config_values([run, other])) + str(
        flat_config(load_config(str(run.config), checks=()).config.model_dump())
    )
    with serve_dashboard(tmp_path) as address, asking(address) as client:
        text += client.get("/api/runs/grow-aaaaa/config").text
        text += client.get("/api/runs/grow-aaaaa/system").text
        text += client.get("/api/compare?run=grow-aaaaa&run=grow-bbbbb").text
    assert "data.example.org/a.txt" in text
    assert "SECRET" not in text
