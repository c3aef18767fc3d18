"""The dashboard in a real Chromium, clicked through while real records grow."""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from browser import chromium, watch_page
from dashboards import dashboard, serve_dashboard
from opened import PANEL, expect_points, open_dashboard, picture, tab_through, wait_for_frame
from playwright.sync_api import Browser, expect
from recorded import make_run, start_event, train

from instar.extensions.board import PLACES
from instar.record.events import Alert, Branched, Eval, Saved, encode_event
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, hold

VIEWS = ("Overview", "Stages", "Results", "Events", "System", "Logs", "Config")
HOSTILE = "<img src=x onerror=document.title='owned'>&amp;-hhhhh"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    make_run(runs, "small-bbbbb", steps=20)
    make_run(runs, "grow-aaaaa", grows=True)
    return runs


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serve_dashboard(folder) as url:
        yield url


def test_the_latest_run_is_shown_with_its_losses(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address) as session:
        page = session.page
        expect(page.locator("#chosen .name")).to_have_text("grow-aaaaa")
        expect_points(page, "loss", 40)
        expect_points(page, "val/loss", 4)
        expect(page.locator("#figures")).to_contain_text("Step40")
        expect(page.locator("#figures")).to_contain_text("1.5k")
        expect(page.locator("#runs .badge").first).to_have_text("crashed")


def test_a_run_that_nothing_was_trained_in_is_stopped_and_not_what_is_shown_first(
    browser: Browser, tmp_path: Path
) -> None:
    """As that of an imported model."""
    make_run(tmp_path, "grow-aaaaa", steps=20)
    imported_run = RunDir(tmp_path / "imported")
    imported_run.path.mkdir()
    imported_run.config.write_text("name: imported\n")
    imported_run.await_start()
    with serve_dashboard(tmp_path) as address, open_dashboard(browser, address) as session:
        expect(session.page.locator("#chosen .name")).to_have_text("grow-aaaaa")
        session.page.locator("#runs").get_by_text("imported").first.click()
        expect(session.page.locator("#chosen .name")).to_have_text("imported")
        expect(session.page.locator("#chosen")).to_contain_text("nothing trained in it yet")


def test_a_point_that_is_recorded_is_drawn_and_nothing_is_asked_for_again(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path, "live-lllll")
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
        Recorder(run.events) as record,
    ):
        page = session.page
        expect_points(page, "loss", 40)
        expect(page.locator("#figures")).to_contain_text("1k")
        request_count, before = len(session.requests), picture(page, "loss")
        for step in range(41, 61):
            record.write(train(step, 3.0))
        record.write(Eval(step=60, split="val", loss=3.1))
        expect_points(page, "loss", 60)
        expect_points(page, "val/loss", 5)
        expect(page.locator(f"{PANEL.format('loss')} .last")).to_have_text("3")
        expect(page.locator("#figures")).to_contain_text("Step60")
        wait_for_frame(page)
        assert picture(page, "loss") != before
        expect(page.locator("#runs .facts")).to_contain_text("step 60")
        assert len(session.requests) == request_count


def test_a_resume_masks_what_it_supersedes(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, "again-aaaaa", steps=20)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
        Recorder(run.events) as record,
    ):
        expect_points(session.page, "loss", 20)
        record.write(start_event(10, "step-10"))
        expect_points(session.page, "loss", 10)
        for step in (11, 12, 13):
            record.write(train(step, 2.0))
        expect_points(session.page, "loss", 13)
        expect(session.page.locator(".ic-mark.ic-resume").first).to_be_attached()
        session.page.reload()
        expect_points(session.page, "loss", 13)


def test_a_second_evaluation_of_a_step_is_drawn_at_once(browser: Browser, tmp_path: Path) -> None:
    """As after a growth, by a message of its own."""
    run = make_run(tmp_path, "twice-aaaaa", steps=20)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
        Recorder(run.events) as record,
    ):
        expect_points(session.page, "loss", 20)
        panel = session.page.locator(PANEL.format("val/loss"))
        expect(panel).to_have_attribute("data-points", re.compile(r"\d"))
        before = int(panel.get_attribute("data-points") or 0)
        record.write(Eval(step=21, split="val", loss=3.1))
        expect_points(session.page, "val/loss", before + 1)
        time.sleep(0.2)  # the clock is all that tells them apart, by a tenth of a second
        record.write(Eval(step=21, split="val", loss=3.0))
        expect_points(session.page, "val/loss", before + 2)


def test_a_resume_from_another_branch_has_the_curves_read_anew_once(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path, "branch-aaaaa", steps=20)
    with Recorder(run.events) as record:
        record.write(Saved(step=20, path="checkpoints/step-20"))
        record.write(start_event(10, "step-10"))
        record.write(train(11, 2.0))
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
        Recorder(run.events) as record,
    ):
        expect_points(session.page, "loss", 11)
        record.write(train(12, 2.0))
        expect_points(session.page, "loss", 12)
        curve_requests = sum("metric=loss" in url and "curves" in url for url in session.urls())
        record.write(start_event(20, "step-20"))
        expect_points(session.page, "loss", 20)
        record.write(train(21, 1.0))
        expect_points(session.page, "loss", 21)
        later_curve_requests = sum(
            "metric=loss" in url and "curves" in url for url in session.urls()
        )
        assert later_curve_requests == curve_requests + 1
        expect(session.page.locator(".ic-mark.ic-resume").first).to_be_attached()
        wait_for_frame(session.page)
        live = picture(session.page, "loss")
        session.page.reload()
        expect_points(session.page, "loss", 21)
        wait_for_frame(session.page)
        assert picture(session.page, "loss") == live


def test_runs_are_found_by_words_and_states(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address) as session:
        page = session.page
        expect(page.locator("#runs li")).to_have_count(2)
        page.keyboard.press("/")
        page.keyboard.type("SMALL bbb")
        expect(page.locator("#runs li")).to_have_count(1)
        expect(page.locator("#count")).to_have_text("1 of 2 runs")
        page.fill("#search", "")
        page.get_by_role("button", name="crashed 2").click()
        expect(page.locator("#runs li")).to_have_count(2)
        page.select_option("#sort", "best")
        expect(page.locator("#runs .name").first).to_have_text("grow")
        page.select_option("#sort", "name")
        assert "states=crashed" in page.url
        assert "sort=name" in page.url


def test_runs_are_laid_over_each_other_and_keep_their_colours(
    browser: Browser, address: str
) -> None:
    with open_dashboard(browser, address, "runs=grow-aaaaa") as session:
        page = session.page
        expect_points(page, "loss", 40)
        page.get_by_label("Show small-bbbbb").check()
        expect_points(page, "loss", 60)
        expect(page.locator("#chosen li")).to_have_count(2)

        def colour() -> str:
            item = page.locator("#runs li[data-key='small-bbbbb']")
            return str(item.evaluate("e => e.style.getPropertyValue('--swatch')"))

        before = colour()
        page.get_by_label("Hide grow-aaaaa").click()
        expect_points(page, "loss", 20)
        assert colour() == before
        page.locator("#runs button.run", has_text="grow").click()
        expect_points(page, "loss", 40)
        expect(page.locator("#chosen li")).to_have_count(1)


def test_what_is_chosen_is_kept_in_the_address(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address) as session:
        page = session.page
        page.get_by_label("Show small-bbbbb").check()
        page.get_by_label("Over", exact=True).select_option("tokens")
        page.get_by_label("Log", exact=True).check()
        page.get_by_label("Smooth").fill("0.5")
        page.get_by_label("Add a metric").select_option("lr")
        expect_points(page, "lr", 60)
        page.get_by_label("Remove val/loss").click()
        with watch_page(browser) as other:
            other.page.goto(address + page.url[page.url.index("#") :])
            expect_points(other.page, "lr", 60)
            expect(other.page.locator(".panel")).to_have_count(2)
            expect(other.page.get_by_label("Over", exact=True)).to_have_value("tokens")
            expect(other.page.get_by_label("Log", exact=True)).to_be_checked()
            expect(other.page.get_by_label("Smooth")).to_have_value("0.5")
            axis = other.page.locator(f"{PANEL.format('loss')} canvas").first
            expect(axis).to_have_attribute("aria-label", re.compile("over tokens"))
            assert other.errors == []


def test_a_metric_of_which_nothing_is_known_is_no_error(browser: Browser, address: str) -> None:
    with open_dashboard(
        browser, address, "metrics=loss,a%252Cb,nothing&runs=grow-aaaaa,gone"
    ) as session:
        expect_points(session.page, "loss", 40)
        expect(session.page.locator(f"{PANEL.format('nothing')} .none")).to_have_text(
            "not measured"
        )
        expect(session.page.locator(".panel")).to_have_count(3)


def test_an_operation_is_explained_where_the_pointer_is(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address, "runs=grow-aaaaa") as session:
        mark = session.page.locator(f"{PANEL.format('loss')} .ic-mark.ic-operation")
        mark.hover()
        tip = session.page.locator(f"{PANEL.format('loss')} .ic-tip")
        expect(tip).to_contain_text("widen_mlp 16→32")
        expect(tip).to_contain_text("val 1.13 < 1.20")
        expect(tip).to_contain_text("exact")
        session.page.get_by_label("Operations").uncheck()
        expect(mark).to_have_count(0)


def test_the_views_tell_of_one_run(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address, "runs=grow-aaaaa,small-bbbbb") as session:
        page = session.page
        page.get_by_role("tab", name="Stages").click()
        expect(page.locator("td.changed")).to_have_text("32")
        expect(page.get_by_role("table", name="Stages")).to_contain_text("widen_mlp 16→32")
        expect(page.get_by_role("table", name="Operations")).to_contain_text("exact")
        page.get_by_role("tab", name="Stages").press("ArrowRight")
        expect(page.get_by_role("tab", name="Results")).to_be_focused()
        expect(page.locator("#view")).to_contain_text("instar test ")
        page.get_by_role("tab", name="Events").click()
        page.locator("li[data-kind='operation'] summary").click()
        expect(page.locator("li[data-kind='operation']")).to_contain_text("max_logit_diff")
        page.get_by_role("tab", name="System").click()
        expect_points(page, "tokens_per_s", 60)
        expect(page.locator(".pairs")).to_contain_text("16.0 GiB")
        page.get_by_role("tab", name="Config").click()
        expect(page.locator("pre")).to_have_text("name: grow")
        page.get_by_label("Run", exact=True).select_option("small-bbbbb")
        expect(page.locator("pre")).to_have_text("name: small")
        page.get_by_role("tab", name="Overview").click()
        rows = page.get_by_role("table", name="Runs", exact=True).locator("tbody tr")
        expect(rows.locator("th")).to_have_text(["grow-aaaaa", "small-bbbbb"])
        page.get_by_label("Hide grow-aaaaa").click()
        expect(page.locator(".figures")).to_contain_text("training loss")


def test_a_log_is_followed(browser: Browser, address: str, folder: Path) -> None:
    with open_dashboard(browser, address, "runs=small-bbbbb&tab=logs") as session:
        lines = session.page.locator(".log div")
        expect(lines).to_have_count(1)
        with RunDir(folder / "small-bbbbb").log(0).open("a") as log:
            log.write("[RANK 0] 2026-01-01 00:00:01 ERROR: <b>bad</b>\n")
        expect(lines).to_have_count(2)
        expect(lines.last).to_have_text("[RANK 0] 2026-01-01 00:00:01 ERROR: <b>bad</b>")
        expect(lines.last).to_have_class("error")
        session.page.get_by_label("Only lines with").fill("of 1 on")
        expect(lines.filter(visible=True)).to_have_count(1)


def test_runs_appear_change_and_go(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "none yet"
    with (
        serve_dashboard(folder) as address,
        open_dashboard(browser, address) as session,
    ):
        page = session.page
        expect(page.locator("#view")).to_contain_text("No run yet")
        run = make_run(folder, "first-fffff", steps=5)
        expect_points(page, "loss", 5)
        with Recorder(run.events) as record:
            record.write(Alert(step=5, name="divergence", message="loss is 9"))
            expect(page.locator(".ic-mark.ic-alert").first).to_be_attached()
        make_run(folder, "second-ggggg", steps=5)
        expect(page.locator("#runs li")).to_have_count(2)
        expect(page.locator("#chosen .name")).to_have_text("first-fffff")
        shutil.rmtree(folder / "second-ggggg")
        expect(page.locator("#runs li")).to_have_count(1)


def test_the_state_follows_the_process_that_trains(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, "held-hhhhh", steps=5)
    with serve_dashboard(tmp_path) as address, open_dashboard(browser, address) as session:
        badge = session.page.locator("#runs .badge")
        expect(badge).to_have_text("crashed")
        with hold(run), Recorder(run.events) as record:
            record.write(train(6, 1.0))
            expect(badge).to_have_text("running")
        expect(badge).to_have_text("crashed")


def test_a_lost_connection_is_told_and_taken_up_again(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, "lost-lllll", steps=10)
    with opened_twice(browser, tmp_path) as (session, kill, start), Recorder(run.events) as record:
        page = session.page
        expect_points(page, "loss", 10)
        kill()
        expect(page.locator("#link")).to_have_text("no connection")
        expect(page.get_by_role("alert")).to_be_visible()
        for step in range(11, 31):
            record.write(train(step, 1.0))
        curve_requests = len([url for url in session.urls() if "/api/curves" in url])
        start()
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect_points(page, "loss", 30)
        record.write(train(31, 1.0))
        expect_points(page, "loss", 31)
        assert len([url for url in session.urls() if "/api/curves" in url]) == curve_requests
        assert all("ERR_" in error for error in session.errors)


@contextmanager
def opened_twice(browser: Browser, folder: Path) -> Iterator[tuple]:
    """A page, and how its server is killed and started again on the same port."""
    with ExitStack() as stack:
        token = ("--token", "let-me_in")
        address, process = stack.enter_context(dashboard(folder, "--port", "0", *token))
        port = address.partition("/?")[0].rpartition(":")[2]

        def kill() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait(10)

        def start() -> None:
            stack.enter_context(dashboard(folder, "--port", port, *token))

        with open_dashboard(browser, address, errors=True) as session:
            yield session, kill, start


def test_hostile_names_are_only_ever_text(browser: Browser, tmp_path: Path) -> None:
    markup = "<script>document.title='owned'</script>"
    name = HOSTILE.replace("/", "")
    run = make_run(tmp_path, name, steps=5)
    with Recorder(run.events) as record:
        record.write(Alert(step=5, name=markup, message=markup))
        record.write(train(6, 1.0, extra={f"<b>{markup}": 1.0}))  # type: ignore[arg-type]
    run.log(0).write_text(markup + "\n")
    run.config.write_text(markup)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
    ):
        page = session.page
        expect(page.locator("#chosen .name")).to_have_text(name)
        expect_points(page, "loss", 6)
        page.get_by_label("Add a metric").select_option(f"<b>{markup}")
        expect(page.locator(".panel h2").last).to_have_text(f"<b>{markup}")
        page.locator(".ic-mark.ic-alert").first.hover()
        expect(page.locator(".ic-tip").first).to_contain_text(markup)
        for tab in VIEWS:
            page.get_by_role("tab", name=tab).click()
            expect(page.locator("#view")).not_to_be_empty()
        expect(page.locator("#view pre")).to_have_text(markup)
        assert "owned" not in page.title().replace(name, "")
        assert page.locator("#runs img, #view img, main script").count() == 0


def test_broken_records_are_listed_with_their_reason(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path, "good-ggggg", steps=5)
    (tmp_path / "bad-bbbbb").mkdir()
    (tmp_path / "bad-bbbbb" / "events.jsonl").write_bytes(b"\x89PNG" * 99)
    (tmp_path / "empty-eeeee").mkdir()
    (tmp_path / "empty-eeeee" / "events.jsonl").touch()
    hash_ = "runs=good-ggggg,bad-bbbbb,empty-eeeee"
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address, hash_) as session,
    ):
        expect(session.page.locator("#runs li")).to_have_count(3)
        expect_points(session.page, "loss", 5)
        bad = session.page.locator("#runs li[data-key='bad-bbbbb']")
        expect(bad.locator(".badge")).to_have_text("unreadable")
        expect(bad.locator(".facts")).to_contain_text("not the record of a run")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_the_machine_or_its_user_is(
    browser: Browser, address: str, scheme: str
) -> None:
    with open_dashboard(browser, address, scheme=scheme) as session:
        page = session.page

        def lightness() -> float:
            rgb = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
            return sum(map(int, rgb)) / 3

        assert (lightness() > 128) == (scheme == "light")
        button = page.locator("#theme")
        while button.text_content() != ("● Dark" if scheme == "light" else "○ Light"):
            button.click()
        assert (lightness() > 128) == (scheme == "dark")
        page.reload()
        expect(page.locator("#link")).to_have_text("live")
        assert (lightness() > 128) == (scheme == "dark")


def test_a_phone_has_room_for_it(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address, width=375, height=667) as session:
        page = session.page
        expect_points(page, "loss", 40)
        expect(page.locator("#side")).to_be_hidden()
        for tab in (*VIEWS, "Curves"):
            page.get_by_role("tab", name=tab).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, tab
        page.get_by_role("button", name="Runs", exact=True).click()
        expect(page.locator("#side")).to_be_visible()
        page.locator("#runs button.run", has_text="small").click()
        expect(page.locator("#side")).to_be_hidden()
        expect_points(page, "loss", 20)


def test_the_list_is_walked_by_keyboard(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address) as session:
        page = session.page
        page.select_option("#sort", "name")
        page.locator("#runs button.run").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#chosen .name")).to_have_text("small-bbbbb")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Space")
        expect(page.locator("#chosen li")).to_have_count(2)


def test_everything_that_is_used_has_a_name(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address) as session:
        for tab in (*VIEWS, "Curves"):
            session.page.get_by_role("tab", name=tab).click()
            expect(session.page.locator("#view")).not_to_be_empty()
            nameless = session.page.evaluate(
                """[...document.querySelectorAll('button, input, select')].filter((e) =>
                  !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
                  .map((e) => e.outerHTML)"""
            )
            assert nameless == []


def test_everything_is_reached_by_tab_and_seen_where_it_is(browser: Browser, address: str) -> None:
    with open_dashboard(browser, address, "runs=grow-aaaaa") as session:
        expect_points(session.page, "loss", 40)
        expect(session.page.locator(".ic-mark").first).to_be_attached()
        assert tab_through(session.page) == []


def test_nothing_moves_when_points_arrive(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, "still-sssss", steps=5)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address) as session,
        Recorder(run.events) as record,
    ):
        expect_points(session.page, "loss", 5)
        wait_for_frame(session.page)
        session.page.evaluate(
            """() => {
              window.moved = [];
              new PerformanceObserver((list) => window.moved.push(...list.getEntries().map(
                (e) => e.sources.map((s) => s.node?.outerHTML?.slice(0, 80)))))
                .observe({ type: "layout-shift" });
            }"""
        )
        for step in range(6, 41):
            record.write(train(step, 9e3 / step))
        record.write(Eval(step=40, split="val", loss=5e4))
        record.write(Alert(step=40, name="divergence", message="loss is 9"))
        expect_points(session.page, "loss", 40)
        expect_points(session.page, "val/loss", 1)
        expect(session.page.locator(".ic-mark.ic-alert").first).to_be_attached()
        expect(session.page.locator("#runs .facts")).to_contain_text("step 40")
        wait_for_frame(session.page)
        assert session.page.evaluate("window.moved") == []


def test_the_page_loads_every_script_and_style_sheet_that_there_is() -> None:
    web = files("instar.extensions.board")
    page = (web / "page" / "index.html").read_text()
    references = re.findall(r'(?:src|href)="/page/([^"]*)"', page)
    file_names = [file.name for folder in PLACES for file in (web / folder).iterdir()]
    expected = {name for name in file_names if name.endswith((".js", ".css"))} - {"enter.js"}
    assert len(references) == len(set(references))
    assert set(references) == expected


def test_a_token_becomes_a_cookie_and_leaves_the_address(browser: Browser, folder: Path) -> None:
    with (
        dashboard(folder, "--port", "0", "--token", "abc") as (address, _),
        watch_page(browser, fresh=True) as session,
    ):
        session.page.goto(f"{address}#tab=logs")
        expect(session.page.locator("#link")).to_have_text("live")
        assert "abc" not in session.page.url
        assert session.page.url.endswith("/#tab=logs")
        assert session.page.evaluate("history.length") <= 2  # about:blank, and the page
        assert "abc" not in session.page.evaluate("document.cookie + document.referrer")
        session.page.reload()
        expect(session.page.locator("#link")).to_have_text("live")
        assert session.errors == []


def test_branches_are_listed_below_their_trunk(browser: Browser, tmp_path: Path) -> None:
    for name in ("trunk", "trunk.late", "other", "trunk.early"):
        run = make_run(tmp_path, name, steps=5)
        if name.startswith("trunk."):
            branch, step = name.removeprefix("trunk."), 3 if name == "trunk.early" else 4
            place = {"checkpoint": f"step-{step}", "iters": 2, "decay": 2}
            first = Branched(name=branch, parent="trunk", step=step, **place)
            run.events.write_bytes(encode_event(first, 0.0, 0) + run.events.read_bytes())
    with serve_dashboard(tmp_path) as address, open_dashboard(browser, address) as session:
        session.page.locator("#sort").select_option("name")
        names = session.page.locator("#runs .name")
        expect(names).to_have_text(["other", "trunk", "└ trunk.early", "└ trunk.late"])
        expect(session.page.locator("#runs li").nth(2)).to_contain_text("from 3")
