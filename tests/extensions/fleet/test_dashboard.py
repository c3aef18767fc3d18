"""Fleets in the dashboard: followed live in a real Chromium, and read as untrusted data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium
from dashboards import serve_dashboard
from fleets import RunningFleet
from opened import PANEL, expect_points, open_dashboard, picture, wait_for_frame
from playwright.sync_api import Browser, expect
from recorded import make_run, train

from instar.extensions.fleet.state import (
    InstanceChanged,
    ProcessChanged,
    TrialDrawn,
    TrialEvaluated,
)
from instar.extensions.fleet.view import site
from instar.extensions.fleet.view.site import FleetCatalog
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

COLOUR = "(swatch) => getComputedStyle(swatch).backgroundColor"
HOSTILE = "<img src=x onerror=document.title='owned'>\x1b[31m\u202e"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "FRESH_S", 0.0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningFleet]:
    (tmp_path / "runs").mkdir()
    fleet = RunningFleet(tmp_path)
    yield fleet
    fleet.state.close()


def _server(phase: str, attempt: int = 1, reason: str = "") -> ProcessChanged:
    ports = {"http": 8000}
    return ProcessChanged(2.0, 0, "server", phase, attempt, 5, (3,), ports, reason=reason)  # type: ignore[arg-type]


def test_a_fleet_is_followed_live(browser: Browser, tmp_path: Path, running: RunningFleet) -> None:
    make_run(tmp_path / "runs", "s1", steps=20)
    make_run(tmp_path / "runs", "s2", steps=10)
    running.state.write(_server("starting"))
    running.log("server.log", "one\n")
    with serve_dashboard(tmp_path / "runs") as address, open_dashboard(browser, address) as seen:
        page = seen.page
        page.get_by_role("link", name="two").click()
        head, instances = page.locator(".fleet-head"), page.locator("tr.instance")
        expect(head).to_contain_text("1 running, 1 waiting")
        expect(instances).to_have_count(2)
        expect(instances.first.locator("td").nth(3)).to_have_text("20")
        server = page.locator("tr.process")
        expect(server).to_contain_text("server service")
        expect(server.locator(".badge")).to_have_text("starting")
        expect(server).to_contain_text("http 8000")
        overlay = page.get_by_role("link", name="Curves of its 2 runs")
        expect(overlay).to_have_attribute("href", "#runs=s1%2Cs2&mean=1")
        page.get_by_role("button", name="Log of s1/server").click()
        lines = page.get_by_role("log").locator("div")
        expect(lines).to_have_text(["one"])
        asked = len(seen.requests)
        running.state.write(_server("unhealthy", 2, HOSTILE))
        expect(server.locator(".badge")).to_have_text("unhealthy")
        expect(server).to_contain_text("attempt 2, <img src=x")
        running.log("server.log", "two\n10%\r20%\n")
        expect(lines).to_have_text(["one", "two", "20%"])
        running.state.write(InstanceChanged(3.0, 1, "starting"))
        expect(head).to_contain_text("1 running, 1 starting")
        assert len(seen.requests) == asked
        page.reload()
        expect(lines).to_have_text(["one", "two", "20%"])
        running.lock.close()
        expect(head).to_contain_text("launcher died")
        expect(instances.first.locator(".badge")).to_have_text("stopped")
        expect(server.locator(".badge")).to_have_text("ended")
        assert page.title() == "two – Instar"
        page.get_by_role("link", name="s1").click()
        expect(page.locator("#chosen .name")).to_have_text("s1")
        expect(page.locator("#fleets .badge")).to_have_text("launcher died")


def test_curves_of_a_fleet_are_means_over_its_seeds(browser: Browser, tmp_path: Path) -> None:
    fleet = RunningFleet(tmp_path)
    runs = [make_run(tmp_path / "runs", name, steps=20) for name in ("s1", "s2", "other-aaaaa")]
    with (
        serve_dashboard(tmp_path / "runs") as address,
        open_dashboard(browser, address, "fleet=two") as seen,
    ):
        page = seen.page
        page.get_by_role("link", name="Curves of its 2 runs").click()
        panel = page.locator(PANEL.format("loss"))
        keys, swatches = panel.locator(".ic-key"), page.locator("#chosen .swatch")
        expect(keys).to_have_text(["two (2 runs)"])
        assert len({each.evaluate(COLOUR) for each in swatches.all()}) == 1
        page.get_by_label("Show other-aaaaa").check()
        expect(keys).to_have_text(["two (2 runs)", "other"])
        assert len({each.evaluate(COLOUR) for each in swatches.all()}) == 2
        page.get_by_label("Hide other-aaaaa").click()
        expect(keys).to_have_text(["two (2 runs)"])
        wait_for_frame(page)
        asked, before = len(seen.requests), picture(page, "loss")
        for run in runs[:2]:
            with Recorder(run.events) as record:
                record.write(train(21, 9.0))
        expect_points(page, "loss", 42)
        wait_for_frame(page)
        assert picture(page, "loss") != before
        assert len(seen.requests) == asked
        page.reload()
        expect(keys).to_have_text(["two (2 runs)"])
        page.get_by_label("Draw").select_option("runs")
        expect(keys).to_have_count(0)
        assert len({each.evaluate(COLOUR) for each in swatches.all()}) == 2
        assert "mean" not in page.url
    fleet.end()


def test_the_best_trial_of_a_search_is_named(browser: Browser, tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 1e-4, "high": 1e-1}}
    fleet = RunningFleet(
        tmp_path, matrix={}, search={"trials": 2, "space": space}, run_name="s${index}"
    )
    make_run(tmp_path / "runs", "s1", steps=10)
    for trial, value in enumerate([3.5, 2.25]):
        fleet.state.write(TrialDrawn(2.0, trial, {"optimizer.lr": 0.5 / (trial + 1)}))
        fleet.state.write(TrialEvaluated(3.0, trial, 10, value))
    with (
        serve_dashboard(tmp_path / "runs") as address,
        open_dashboard(browser, address, "fleet=two") as seen,
    ):
        head = seen.page.locator(".fleet-head")
        expect(head).to_contain_text("waiting")
        assert "best" not in head.inner_text()
        for trial in (0, 1):
            fleet.state.write(InstanceChanged(4.0, trial, "succeeded"))
        best = head.get_by_role("link", name="best: trial 1, val/loss 2.25, optimizer.lr 0.25")
        expect(best).to_have_attribute("href", "#runs=s1")
    fleet.end()


def test_names_lead_to_nothing_outside_a_fleet(tmp_path: Path, running: RunningFleet) -> None:
    inside = running.log("job.log", "mine\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.log").write_text("secret\n")
    (inside.parent / "link.log").symlink_to(tmp_path / "outside" / "x.log")
    (inside.parent.parent / "linked").symlink_to(tmp_path / "outside")
    (running.folder.parent / "other").symlink_to(running.folder)
    fleets = FleetCatalog(tmp_path / "runs", dict)
    assert [row["name"] for row in fleets.rows()] == ["two"]
    assert fleets.log("two", "s1/job") == inside
    for log in ("s1/link", "linked/x", "../../../outside/x", "s1/../s1/job", "s1/job.log", "s1"):
        assert fleets.log("two", log) is None, log
    for name in ("other", "../fleets/two", "two/../two", str(running.folder), ".", ""):
        assert fleets.view(name) is None, name
        assert fleets.log(name, "s1/job") is None


def test_a_folder_of_fleets_that_is_a_link_has_none(tmp_path: Path, running: RunningFleet) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "fleets").symlink_to(running.folder.parent)
    (tmp_path / "elsewhere" / "runs").mkdir()
    assert FleetCatalog(tmp_path / "elsewhere" / "runs", dict).rows() == []


@pytest.mark.parametrize("output_dir", ["/elsewhere/${run_name}", "runs/../../runs/${run_name}"])
def test_only_runs_of_the_dashboard_are_linked(tmp_path: Path, output_dir: str) -> None:
    fleet = RunningFleet(tmp_path, output_dir=output_dir)
    run = make_run(tmp_path / "runs", "s1")
    shown = FleetCatalog(tmp_path / "runs", lambda: {"s1": run}).view("two")
    assert shown is not None
    assert [(each["run"], each["step"]) for each in shown["instances"]] == [("", None)] * 2
    fleet.end()


def test_a_record_without_end_and_names_of_any_kind_hide_no_other_fleet(
    tmp_path: Path, running: RunningFleet
) -> None:
    running.state.write(InstanceChanged(2.0, 0, "failed", HOSTILE + "x" * 5000))
    large = running.folder.parent / "large"
    large.mkdir()
    with (large / "state.jsonl").open("wb") as file:
        file.truncate(site.MAX_BYTES + 1)
    pipe = running.folder.parent / "blocks"
    pipe.mkdir()
    (pipe / "state.jsonl").symlink_to("/dev/zero")
    strange = running.folder.parent / "strange"
    strange.mkdir()
    (strange / "fleet.json").write_text("[" * 100_000)
    (strange / "state.jsonl").write_bytes(
        b'{"kind":"process","time":1.0,"instance":-5,"process":"../../x","phase":"running",'
        b'"attempt":1,"ports":{"\\u0000":-1}}\n\xff\xfe\n'
    )
    fleets = FleetCatalog(tmp_path / "runs", dict[str, RunDir])
    states = {row["name"]: row["state"] for row in fleets.rows()}
    assert states == {
        "two": "running",
        "large": "unread",
        "blocks": "unread",
        "strange": "not started",
    }
    pages = {name: fleets.view(name) or {} for name in states}
    json.dumps(pages)
    assert "larger than 32 MiB" in pages["large"]["reason"]
    reason = pages["two"]["instances"][0]["reason"]
    assert "\\u001b[31m\\u202e" in reason
    assert len(reason) <= 1000
    (process,) = pages["strange"]["instances"][0]["processes"]
    assert (process["name"], process["log"]) == ("../../x", "")
