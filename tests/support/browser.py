"""Headless Chromium that keeps what a page did: its errors, its console, every request."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

TIMEOUT_MS = 15_000
ARGUMENTS = (
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-site-isolation-trials",
    "--process-per-site",
    "--renderer-process-limit=1",
)

_idle = WeakKeyDictionary[Browser, dict[tuple[Any, ...], list[Page]]]()
"""blank pages, by what they were opened with: a new one starts a window and a process"""


@dataclass
class Watched:
    """A page, and what it did since it was opened."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Exceptions that nobody caught, and what was written with `console.error`."""
    requests: list[Request] = field(default_factory=list)

    def listen(self) -> Callable[[], None]:
        """Begin to keep what the page does; returns how to stop."""

        def on_error(error: Error) -> None:
            self.errors.append(str(error))

        def on_console(message: ConsoleMessage) -> None:
            if message.type == "error":
                self.errors.append(message.text)

        def on_request(request: Request) -> None:
            self.requests.append(request)

        listeners: dict[Any, Any] = {
            "pageerror": on_error,
            "console": on_console,
            "request": on_request,
        }
        for event, listener in listeners.items():
            self.page.on(event, listener)

        def stop() -> None:
            for event, listener in listeners.items():
                self.page.remove_listener(event, listener)

        return stop

    def urls(self) -> list[str]:
        return [request.url for request in self.requests]

    def urls_outside(self, *origins: str) -> list[str]:
        """Requests over a network to anything but these origins, e.g. `http://127.0.0.1:80`."""
        urls = [url for url in self.urls() if urlsplit(url).scheme not in ("data", "blob", "file")]
        return [url for url in urls if not url.startswith(tuple(f"{o}/" for o in origins))]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium; as root it runs without its sandbox."""
    arguments = [*ARGUMENTS, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watch_page(
    browser: Browser,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 800,
    scale: float = 1,
    fresh: bool = False,
) -> Iterator[Watched]:
    """A page (no cookies) in a viewport of CSS pixels, `scale` device pixels to each; a `fresh` one
    has no history either."""
    idle = _idle.setdefault(browser, {}).setdefault((scheme, scale), [])
    if idle and not fresh:
        page = idle.pop()
    else:
        context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            device_scale_factor=scale,
            reduced_motion="reduce",
        )
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
    visit = Watched(page)
    try:
        page.set_viewport_size({"width": width, "height": height})
        stop = visit.listen()
        yield visit
        stop()
        page.evaluate("localStorage.clear()")
        page.goto("about:blank")
        page.context.clear_cookies()
    except BaseException:
        page.context.close()
        raise
    idle.append(page)


@contextmanager
def open_page(
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 800,
    scale: float = 1,
) -> Iterator[Watched]:
    """One page in a Chromium of its own."""
    with (
        chromium() as browser,
        watch_page(browser, scheme=scheme, width=width, height=height, scale=scale) as visit,
    ):
        yield visit
