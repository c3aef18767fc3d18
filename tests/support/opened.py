"""The dashboard's page, opened and watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from browser import Watched, watch_page
from playwright.sync_api import Browser, Page, expect

PANEL = ".panel[data-metric='{}']"


@contextmanager
def open_dashboard(
    browser: Browser, address: str, hash_: str = "", *, errors: bool = False, **how: Any
) -> Iterator[Watched]:
    """The page, live; at its end nothing has gone wrong in it and nothing else was asked."""
    with watch_page(browser, **how) as visit:
        visit.page.goto(f"{address}#{hash_}")
        expect(visit.page.locator("#link")).to_have_text("live")
        yield visit
        assert visit.urls_outside(address.partition("?")[0].rstrip("/")) == []
        assert errors or visit.errors == []


def expect_points(page: Page, metric: str, count: int) -> None:
    expect(page.locator(PANEL.format(metric))).to_have_attribute("data-points", str(count))


def picture(page: Page, metric: str) -> str:
    return page.locator(f"{PANEL.format(metric)} canvas").first.evaluate("c => c.toDataURL()")


def wait_for_frame(page: Page) -> None:
    """Wait until what was asked for is on the screen: charts draw with the next frame."""
    page.evaluate("() => new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")


def tab_through(page: Page, limit: int = 120) -> list[str]:
    """Goes through the page by Tab, and says what is wrong with a stop: without a name, out of
    view, or not to be told from the others; and which control was never come to."""
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    wrong: list[str] = []
    for _ in range(limit):
        page.keyboard.press("Tab")
        problems = page.evaluate(_STOP)
        if problems is None:
            break
        wrong += problems
    return wrong + page.evaluate(_MISSED)


_STOP = """() => {
  const e = document.activeElement;
  if (!e || e === document.body || e.reached) return null;
  e.reached = true;
  const name = e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length;
  const outlined = [e, ...e.children].some((one) => {
    const { outlineStyle, outlineWidth } = getComputedStyle(one);
    return outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
  });
  const { top, bottom, width, height } = e.getBoundingClientRect();
  const there = width && height && bottom > 0 && top < innerHeight;
  const found = Object.entries({ nameless: !name, "no outline": !outlined, "not there": !there });
  return found.filter(([, is]) => is).map(([text]) => `${text}: ${e.outerHTML.slice(0, 120)}`);
}"""
_MISSED = """() => [...document.querySelectorAll("button, input, select, summary, a[href]")]
  .filter((e) => !e.reached && e.tabIndex >= 0 && e.checkVisibility())
  .map((e) => `not reached: ${e.outerHTML.slice(0, 120)}`)"""
