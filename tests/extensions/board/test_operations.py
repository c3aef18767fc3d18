"""What the page's user asks a running run for: over HTTP, and in a browser over a real run."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import science
from browser import chromium
from click.testing import CliRunner
from dashboards import asking, serve_dashboard
from opened import open_dashboard
from playwright.sync_api import expect
from recorded import make_run
from tiny_run import codes, events, output_of

from instar.extensions.board import operations, server
from instar.extensions.board.cli import dashboard
from instar.record.control import MOST_BYTES
from instar.record.rundir import RunDir, hold

URL = "/api/runs/live-lllll"
CONFIG = "name: live\nmodel: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}\n"
SCHEDULE = "schedule: [{name: change_lr, value: 0.5, when: {at_step: 900}}]\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run that this process holds as if it trained there."""
    run_dir = make_run(tmp_path / "runs", "live-lllll", steps=3)
    run_dir.config.write_text(CONFIG + SCHEDULE)
    with hold(run_dir):
        yield run_dir


@pytest.fixture
def site(run: RunDir) -> Iterator[httpx.Client]:
    with serve_dashboard(run.path.parent, read_only=False) as address, asking(address) as client:
        yield client


def requests_of(run: RunDir) -> dict[str, Any]:
    """The requests in a run's folder, by name."""
    files = run.control.glob("*.*") if run.control.exists() else ()
    return {file.name: json.loads(file.read_text()) for file in files}


def test_an_operation_is_checked_asked_for_and_given_up(site: httpx.Client, run: RunDir) -> None:
    body = {"text": "widen_mlp=x2 moments=reset"}
    assert site.post(f"{URL}/check", json=body).json() == {"refusal": ""}
    assert requests_of(run) == {}
    request_id = site.post(f"{URL}/apply", json=body).json()["id"]
    given_up = site.post(f"{URL}/cancel", json={"id": request_id}).json()["id"]
    entry = site.post(f"{URL}/cancel", json={"entry": 0}).json()["id"]
    assert requests_of(run) == {
        f"{request_id}.apply": {"name": "widen_mlp", "value": "x2", "moments": "reset"},
        f"{given_up}.cancel": {"id": request_id},
        f"{entry}.cancel": {"entry": 0},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chnge_lr=0.5", "change_lr"),
        ("change_lr=fast", "change_lr"),
        ("0.5", "name=value"),
        (" ", "nothing was typed"),
        ("change_lr=" + "[" * 9000, ""),
        ("change_lr=\ud800", ""),
    ],
)
def test_what_no_run_could_carry_out_is_told_and_not_posted(
    site: httpx.Client, run: RunDir, text: str, expected: str
) -> None:
    body, headers = json.dumps({"text": text}), {"Content-Type": "application/json"}
    check_response = site.post(f"{URL}/check", content=body, headers=headers)
    apply_response = site.post(f"{URL}/apply", content=body, headers=headers)
    assert apply_response.status_code == 422
    refusal = check_response.json().get("refusal") or check_response.json()["error"]
    assert refusal == apply_response.json()["error"]
    assert expected in refusal
    assert requests_of(run) == {}


GOOD = b'{"text": "change_lr=0.5"}'


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, GOOD, 200),
        ({"Origin": "http://{authority}", "Sec-Fetch-Site": "same-origin"}, GOOD, 200),
        ({"Authorization": ""}, GOOD, 401),
        ({"Origin": "http://127.0.0.1:1"}, GOOD, 403),
        ({"Origin": "null"}, GOOD, 403),
        ({"Sec-Fetch-Site": "same-site"}, GOOD, 403),
        ({"Origin": "http://{authority}", "Sec-Fetch-Site": "cross-site"}, GOOD, 403),
        ({"Content-Type": "text/plain"}, GOOD, 415),
        ({}, b'{"text": "change_lr=0.5", "more": ' + b"[" * 9000 + b"]" * 9000 + b"}", 413),
        ({}, b'{"text": "change_lr=0.5", "more": ' + b"[" * 4000 + b"]" * 4000 + b"}", 422),
        ({}, GOOD.ljust(MOST_BYTES), 200),
        ({}, GOOD.ljust(MOST_BYTES + 1), 413),
        ({}, b"", 422),
        ({}, b'{"text": 1}', 422),
        ({}, b"\xff", 422),
    ],
)
def test_who_may_ask_and_how(
    site: httpx.Client, run: RunDir, headers: dict[str, str], body: bytes, status: int
) -> None:
    authority = f"{site.base_url.host}:{site.base_url.port}"
    request_headers = {"Content-Type": "application/json"}
    request_headers |= {
        name: value.replace("{authority}", authority) for name, value in headers.items()
    }
    assert site.post(f"{URL}/apply", content=body, headers=request_headers).status_code == status
    chunks = iter([body[:10], body[10:]])  # without a length beforehand
    assert site.post(f"{URL}/apply", content=chunks, headers=request_headers).status_code == status
    assert len(requests_of(run)) == 2 * (status == 200)


def test_a_cookie_does_not_serve_another_port_of_this_host(run: RunDir) -> None:
    """SameSite knows no ports: the browser sends the cookie along."""
    with serve_dashboard(run.path.parent, read_only=False) as address, httpx.Client() as client:
        client.get(address)
        url = address.partition("?")[0].rstrip("/") + URL
        other = {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}
        responses = [
            client.post(f"{url}/apply", json=json.loads(GOOD), headers=h) for h in (other, {})
        ]
        assert [answer.status_code for answer in responses] == [403, 200]


def test_a_body_that_does_not_come_is_not_waited_for(
    site: httpx.Client, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "BODY_S", 0.1)

    def halves() -> Iterator[bytes]:
        yield GOOD[:5]
        time.sleep(1)
        yield GOOD[5:]

    headers = {"Content-Type": "application/json"}
    assert site.post(f"{URL}/apply", content=halves(), headers=headers).status_code == 408
    assert requests_of(run) == {}


@pytest.mark.parametrize("content", ["{}", '{"id": "a", "entry": 0}', '{"entry": "0"}', "[0]"])
def test_what_is_given_up_is_named(site: httpx.Client, run: RunDir, content: str) -> None:
    headers = {"Content-Type": "application/json"}
    assert site.post(f"{URL}/cancel", content=content, headers=headers).status_code == 422
    assert requests_of(run) == {}


def test_a_run_that_does_not_run_is_not_asked(run: RunDir) -> None:
    finished_run = make_run(run.path.parent, "ended-eeeee", steps=3)
    with serve_dashboard(run.path.parent, read_only=False) as address, asking(address) as site:
        url = f"/api/runs/{finished_run.path.name}"
        assert site.post(f"{url}/apply", json=json.loads(GOOD)).status_code == 409
        assert site.get(f"{url}/waiting").json()["refusal"] == "the run is not running"
        assert site.post("/api/runs/nothing/apply", json=json.loads(GOOD)).status_code == 404
    assert requests_of(finished_run) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_users_run_is_not_asked(site: httpx.Client, run: RunDir) -> None:
    os.chown(run.path, 12345, -1)
    for command in ("check", "apply"):
        answer = site.post(f"{URL}/{command}", json=json.loads(GOOD))
        assert answer.status_code == 403
        assert "the run belongs to user 12345" in answer.json()["error"]
    assert "12345" in site.get(f"{URL}/waiting").json()["refusal"]
    assert requests_of(run) == {}


def test_a_folder_of_requests_that_is_a_link_is_not_written_to(
    site: httpx.Client, run: RunDir, tmp_path: Path
) -> None:
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    (other_folder / "waiting.json").write_text('{"asked": [{"name": "secret", "when": ""}]}')
    run.control.symlink_to(other_folder)
    assert site.post(f"{URL}/apply", json=json.loads(GOOD)).status_code == 422
    assert "secret" not in site.get(f"{URL}/waiting").text
    assert len(list(other_folder.iterdir())) == 1


def test_a_read_only_dashboard_asks_for_nothing(run: RunDir) -> None:
    with serve_dashboard(run.path.parent) as address, asking(address) as site:
        assert site.post(f"{URL}/apply", json=json.loads(GOOD)).status_code == 404
        assert site.get(f"{URL}/waiting").json()["refusal"] == "this dashboard is read-only"
    assert requests_of(run) == {}


@pytest.mark.parametrize(
    ("options", "read_only"),
    [
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "0.0.0.0"], True),
        (["--read-only"], True),
        (["--host", "0.0.0.0", "--no-read-only"], False),
    ],
)
def test_only_this_machine_may_ask_unless_told_otherwise(
    options: list[str], read_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only_flags: list[bool] = []

    def serve(_: Path, address: server.Address, __: object, *, read_only: bool) -> None:
        os.close(address.descriptor)
        read_only_flags.append(read_only)

    monkeypatch.setattr(server, "serve_dashboard", serve)
    result = CliRunner().invoke(dashboard, [str(tmp_path), "--port", "0", *options])
    assert result.exit_code == 0
    assert read_only_flags == [read_only]
    assert ("read-only" in result.stderr) is read_only


ROW = {"name": "change_lr", "value": 0.5, "when": "at step 900", "options": {}}


def test_what_waits_is_listed(site: httpx.Client, run: RunDir) -> None:
    assert site.get(f"{URL}/waiting").json() == {"refusal": "", "rows": [], "left_out": 0}
    run.control.mkdir()
    request_row = {
        **ROW,
        "id": "3f0c00000000",
        "by": "ann",
        "since_step": 3,
        "options": {"where": "even"},
    }
    waiting = {"schedule": [{**ROW, "entry": n} for n in range(103)], "asked": [request_row]}
    (run.control / "waiting.json").write_text(json.dumps(waiting))
    answer = site.get(f"{URL}/waiting").json()
    assert answer["rows"][:2] == [
        {
            "which": {"id": "3f0c00000000"},
            "what": "change_lr 0.5 where=even",
            "when": "at step 900",
            "by": "asked for by ann",
        },
        {
            "which": {"entry": 0},
            "what": "change_lr 0.5",
            "when": "at step 900",
            "by": "of the schedule",
        },
    ]
    assert (len(answer["rows"]), answer["left_out"]) == (101, 3)


@pytest.mark.parametrize(
    "content",
    [
        "{" * 9000,
        '{"asked": [{"name": "x", "when": "", "value": ' + "[" * 900 + "]" * 900 + "}]}",
        '{"asked": {}}',
        '{"asked": [{"name": 1, "when": ""}]}',
        '{"schedule": [{"name": "x", "when": "", "entry": ' + "9" * 400 + "}]}",
        '{"schedule": [' + ", ".join([json.dumps(ROW)] * 20_000) + "]}",
        '{"asked": [{"name": "\\ud800<script>", "when": "' + "x" * 9000 + '"}]}',
        "",
        "link",
        "pipe",
    ],
    ids=lambda content: content[:20],
)
def test_nothing_in_a_list_of_what_waits_does_harm(
    site: httpx.Client, run: RunDir, tmp_path: Path, content: str
) -> None:
    run.control.mkdir()
    path = run.control / "waiting.json"
    (tmp_path / "secret").write_text('{"asked": [{"name": "secret", "when": ""}]}')
    if content == "link":
        path.symlink_to(tmp_path / "secret")
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content)
    answer = site.get(f"{URL}/waiting")
    assert answer.status_code in (200, 422), answer.text
    assert len(answer.content) < 2_000
    assert "secret" not in answer.text.replace(str(path), "")
    assert site.get(f"{URL}/summary").status_code == 200


def test_a_running_run_is_asked_in_a_browser(tmp_path: Path) -> None:
    place, run_dir = science.place(tmp_path), tmp_path / "runs" / "live-lllll"
    settings = (
        "train.until=[1Mit]",
        "learning_rate.lr_decay_iters=1000",
        "early_stopping.rules=[]",
    )
    ranks = place.train(run_dir, *settings, "record.log_interval=100", "test.weights=last")
    assert ranks[0].wait_until(lambda: events(run_dir, "train")), output_of(ranks)
    with (
        chromium() as browser,
        serve_dashboard(run_dir.parent, read_only=False) as address,
        open_dashboard(browser, address, "tab=stages") as session,
    ):
        page = session.page
        panel = page.get_by_role("region", name="Live operations")
        operation_field, status = (
            panel.get_by_label("Operation", exact=True),
            panel.get_by_role("status"),
        )
        operation_field.fill("chnge_lr=0.5")
        panel.get_by_role("button", name="Check").click()
        expect(status).to_contain_text("change_lr")
        assert not list((run_dir / "control").glob("*.apply"))
        operation_field.fill("change_lr=0.5")
        panel.get_by_role("button", name="Apply").click()
        expect(status).to_contain_text("the run handles it between two steps")
        expect(page.get_by_role("table", name="Operations")).to_contain_text("asked for by")
        operation_field.fill("change_lr=0.25 when={at_step: 900000}")
        panel.get_by_role("button", name="Apply").click()
        waiting = panel.get_by_role("listitem")
        expect(waiting).to_contain_text("change_lr 0.25")
        panel.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("table", name="Asked for")).to_contain_text("cancelled")
        expect(waiting).to_have_count(0)
    ranks[0].signal(signal.SIGTERM)
    assert codes(ranks) == [75], output_of(ranks)
    outcomes = [(event["outcome"], event["value"]) for event in events(run_dir, "asked")]
    assert outcomes == [("waits", 0.25), ("cancelled", 0.25)]
