"""No text of a page is cut or lies over another, on a desk and on a phone: measured in a real Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium
from cases import parametrize_first
from dashboards import serve_dashboard
from opened import open_dashboard, wait_for_frame
from playwright.sync_api import Browser, Page, expect
from scenes import SCENES

from instar.logs.query.labels import RunLabels, change_labels
from instar.record.rundir import runs_in

DESK, PHONE = (1400, 1600), (390, 1600)
TABS = ("curves", "overview", "stages", "results", "events", "system", "logs", "config")
SHOWN = {
    "one": TABS,
    "two": ("curves", "overview"),
    "eight": ("curves", "overview", "system"),
    "hundred": ("curves", "overview"),
    "crashed": ("curves",),
    "crashed_at_once": ("curves",),
    "stopped": ("curves",),
    "empty": ("curves",),
}
WRONG = """() => {
  const wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than the screen");
  const scrolls = (e) => /auto|scroll/.test(getComputedStyle(e).overflowX);
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const holder = node.parentElement;
    if (!node.data.trim() || holder.closest("script, select, svg") || !holder.checkVisibility({ checkVisibilityCSS: true })) continue;
    let [left, right, top, bottom] = [0, innerWidth, 0, innerHeight];
    let cut = null;
    for (let e = holder; e !== document.body; e = e.parentElement) {
      const style = getComputedStyle(e);
      const box = e.getBoundingClientRect();
      if (style.overflowX === "visible" || style.display === "inline") continue;
      // what scrolls may hide a part
      if (!scrolls(e) && !cut && left === 0 && e.scrollWidth > e.clientWidth + 1) cut = e;
      [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
      [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
    }
    const name = node.data.trim().slice(0, 60);
    if (cut) wrong.push(`cut: ${name}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      const seen = { left: Math.max(left, box.left), right: Math.min(right, box.right), top: Math.max(top, box.top), bottom: Math.min(bottom, box.bottom) };
      if (seen.right - seen.left < 3 || seen.bottom - seen.top < 3) continue;
      const inScroller = holder.closest(".scroll, .paper, #chosen.unfolded");
      if (!inScroller && (box.left < -1 || box.right > innerWidth + 1)) wrong.push(`beyond the edge: ${name}`);
      texts.push({ name, node, ...seen });
    }
  }
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    // line boxes are taller than letters
    if (a.node !== b.node && across > 2 && down > 5) wrong.push(`${a.name} | lies over | ${b.name}`);
  }));
  return [...new Set(wrong)];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=15_000)  # a hundred runs are read
    with chromium() as chromium_browser:
        yield chromium_browser
    expect.set_options(timeout=5_000)


def wait_for_view(page: Page, runs: int) -> None:
    """Wait until the runs are listed and the view has answered."""
    expect(page.locator("#runs li")).to_have_count(runs)
    expect(page.locator("#view")).not_to_be_empty()
    expect(page.locator("#view .reading")).to_have_count(0)
    expect(page.locator("#view .none:visible", has_text="reading")).to_have_count(0)
    wait_for_frame(page)
    wait_for_frame(page)


@parametrize_first("scene", SCENES, first=1)
def test_no_text_is_cut_or_covered(browser: Browser, tmp_path: Path, scene: str) -> None:
    SCENES[scene](tmp_path)
    runs = runs_in(tmp_path)
    run_names = ",".join(sorted(run.path.name for run in runs)) if len(runs) > 1 else ""
    if scene == "eight":
        note = "The best so far, but its batch is too small to be compared with the others."
        change_labels(runs[:3], lambda _: RunLabels(("baseline", "learning-rate-sweep"), note))
    problems = list[str]()
    with serve_dashboard(tmp_path) as address:
        for width, height in (DESK, PHONE):
            how = {"width": width, "height": height, "scheme": "dark" if width < 500 else "light"}
            with open_dashboard(browser, address, f"runs={run_names}", **how) as session:
                for tab in SHOWN[scene]:
                    if tab != "curves":
                        session.page.locator(f"#tab-{tab}").click()
                    wait_for_view(session.page, len(runs))
                    wrong = session.page.evaluate(WRONG)
                    problems += [f"{width} {tab}: {problem}" for problem in wrong]
    assert problems == []


def test_marks_have_names_in_the_colours_of_their_runs(browser: Browser, tmp_path: Path) -> None:
    SCENES["two"](tmp_path)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(
            browser, address, "runs=demo-aaaaa,demo-bbbbb", width=1400, height=900
        ) as session,
    ):
        page = session.page
        wait_for_view(page, 2)
        labels = page.locator(".panel").first.locator(".ic-label")
        names = labels.all_text_contents()
        assert "insert_layers 2→4" in names
        swatches = page.locator("#chosen .swatch").evaluate_all(
            "all => all.map((e) => getComputedStyle(e).backgroundColor)"
        )
        glyphs = page.locator(".panel").first.locator(".ic-glyph.ic-sign-growth")
        shades = glyphs.evaluate_all("all => all.map((e) => getComputedStyle(e).backgroundColor)")
        assert set(shades) == set(swatches)
        expect(page.locator(".key")).to_contain_text("growth")
        expect(page.locator(".key")).to_contain_text("settings change")
        expect(page.locator("#chosen .name").first).to_have_text("aaaaa")
        expect(page.locator("#chosen .name").first).to_have_attribute("title", "demo-aaaaa")


def test_a_crashed_run_says_why_wherever_it_is_looked_at(browser: Browser, tmp_path: Path) -> None:
    SCENES["crashed"](tmp_path)
    with serve_dashboard(tmp_path) as address, open_dashboard(browser, address) as session:
        failure = session.page.locator("#failure")
        expect(failure).to_contain_text("OutOfMemoryError on rank 1 at step 150")
        expect(failure.locator("pre")).to_contain_text("logits = self.head(x)")
        expect(session.page.locator("#runs .why")).to_contain_text("CUDA out of memory")
        session.page.locator("#tab-config").click()
        expect(failure).to_be_visible()


def test_runs_are_a_table_with_columns_of_ones_choice(browser: Browser, tmp_path: Path) -> None:
    SCENES["eight"](tmp_path)
    keys = sorted(run.path.name for run in runs_in(tmp_path))
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(
            browser, address, f"tab=overview&runs={','.join(keys)}", width=1400
        ) as session,
    ):
        page = session.page
        table = page.locator("table.runs")
        expect(table.locator("tbody tr")).to_have_count(8)
        heads = table.locator("thead th")
        expect(heads.filter(has_text="optimizer.lr")).to_have_count(1)
        expect(heads.filter(has_text="peak memory")).to_have_count(0)
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("peak memory").check()
        page.get_by_role("button", name="best val/loss").click()
        expect(heads.filter(has_text="best val/loss")).to_have_attribute("aria-sort", "ascending")
        first = table.locator("tbody th").first
        expect(first).to_contain_text("lr2e-3")
        assert "columns=" in page.url
        page.reload()
        expect(table.locator("thead th", has_text="peak memory")).to_have_count(1)
        expect(first).to_contain_text("lr2e-3")
        expect(table.locator("tbody tr").last).to_contain_text("–")
        first.get_by_role("link").click()
        expect(page.locator("#chosen li")).to_have_count(1)


def test_labels_are_shown_filtered_and_followed(browser: Browser, tmp_path: Path) -> None:
    SCENES["two"](tmp_path)
    runs = {run.path.name: run for run in runs_in(tmp_path)}
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address, "runs=demo-aaaaa") as session,
    ):
        page = session.page
        expect(page.locator("#runs li")).to_have_count(2)
        change_labels([runs["demo-aaaaa"]], lambda _: RunLabels(("paper",), "<b>the</b> best"))
        expect(page.locator("#note")).to_have_text("paper<b>the</b> best")
        page.fill("#search", "#paper")
        expect(page.locator("#runs li")).to_have_count(1)
        page.fill("#search", "")
        change_labels([runs["demo-bbbbb"]], lambda _: RunLabels(archived=True))
        expect(page.locator("#runs li")).to_have_count(1)
        page.get_by_role("button", name="archived 1").click()
        expect(page.locator("#runs .age")).to_have_count(1)
        expect(page.locator("#runs li")).to_have_attribute("data-key", "demo-bbbbb")


def test_a_bookmark_to_a_run_that_is_gone_says_so(browser: Browser, tmp_path: Path) -> None:
    SCENES["one"](tmp_path)
    with (
        serve_dashboard(tmp_path) as address,
        open_dashboard(browser, address, "runs=demo-zzzzz") as session,
    ):
        view = session.page.locator("#view")
        expect(view).to_contain_text("demo-zzzzz: not in this folder")
        view.get_by_role("link").click()
        expect(session.page.locator("#chosen .name")).to_have_text("demo-aaaaa")


def test_an_empty_folder_says_what_to_type(browser: Browser, tmp_path: Path) -> None:
    with serve_dashboard(tmp_path) as address, open_dashboard(browser, address) as session:
        expect(session.page.locator("#view code").first).to_have_text("instar demo")
        expect(session.page.get_by_role("button", name="Copy instar demo")).to_be_visible()
