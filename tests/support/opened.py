"""The dashboard's page, opened and watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from browser import Watched, watched
from playwright.sync_api import Browser, Page, expect

PANEL = ".panel[data-metric='{}']"


@contextmanager
def opened(
    browser: Browser, address: str, hash_: str = "", *, errors: bool = False, **how: Any
) -> Iterator[Watched]:
    """The page, live; at its end nothing has gone wrong in it and nothing else was asked."""
    with watched(browser, **how) as seen:
        seen.page.goto(f"{address}#{hash_}")
        expect(seen.page.locator("#link")).to_have_text("live")
        yield seen
        assert seen.elsewhere(address.partition("?")[0].rstrip("/")) == []
        assert errors or seen.errors == []


def expect_points(page: Page, metric: str, count: int) -> None:
    expect(page.locator(PANEL.format(metric))).to_have_attribute("data-points", str(count))


def picture(page: Page, metric: str) -> str:
    return page.locator(f"{PANEL.format(metric)} canvas").first.evaluate("c => c.toDataURL()")
