"""Headless Chromium that keeps what a page did: its errors, its console, every request."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

TIMEOUT_MS = 15_000


@dataclass
class Watched:
    """A page, and what it did since it was opened."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Exceptions that nobody caught, and what was written with `console.error`."""
    requests: list[Request] = field(default_factory=list)

    def urls(self) -> list[str]:
        return [request.url for request in self.requests]

    def elsewhere(self, *origins: str) -> list[str]:
        """Requests over a network to anything but these origins, e.g. `http://127.0.0.1:80`."""
        asked = [url for url in self.urls() if urlsplit(url).scheme not in ("data", "blob", "file")]
        return [url for url in asked if not url.startswith(tuple(f"{o}/" for o in origins))]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium; as root it runs without its sandbox."""
    arguments = ["--disable-background-networking", "--disable-dev-shm-usage"]
    if os.getuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(
    browser: Browser,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 800,
    scale: float = 1,
) -> Iterator[Watched]:
    """A fresh page (no cookies) in a viewport of CSS pixels, `scale` device pixels to each."""
    context = browser.new_context(
        color_scheme=scheme,
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        reduced_motion="reduce",
    )
    context.set_default_timeout(TIMEOUT_MS)
    try:
        seen = Watched(context.new_page())

        def noted(message: ConsoleMessage) -> None:
            if message.type == "error":
                seen.errors.append(message.text)

        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("console", noted)
        seen.page.on("request", lambda request: seen.requests.append(request))
        yield seen
    finally:
        context.close()


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
        watched(browser, scheme=scheme, width=width, height=height, scale=scale) as seen,
    ):
        yield seen
