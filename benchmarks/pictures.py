"""Draws the pictures of the docs anew, from made-up runs: pages in headless Chromium, and plots.

python benchmarks/pictures.py
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, expect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import chromium, watch_page
from dashboards import serve_dashboard
from opened import wait_for_frame
from scenes import SCENES, config, crash, eight_runs, grows, one_run, resumed_twice, write

from instar.extensions.board.report import report_html
from instar.logs.plot.compose import ChartRequest, compose
from instar.logs.plot.picture import picture
from instar.logs.query.labels import RunLabels, change_labels
from instar.logs.read.record import read_record
from instar.record.rundir import RunDir, runs_in

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MAX_BYTES = 150_000
Scheme = Literal["light", "dark"]


def three(folder: Path) -> None:
    SCENES["two"](folder)
    write(folder, "demo-ccccc", grows(3, 4.2, (40, 120, 160)), config(1, "5e-4"))
    runs = runs_in(folder)
    change_labels(runs[:1], lambda _: RunLabels(("baseline",), "the reference of the others"))


def seeds(folder: Path) -> None:
    for seed, letter in ((1, "a"), (2, "b"), (3, "c")):
        lines = grows(seed, 3.7 + 0.15 * seed)
        write(folder, f"demo-{5 * letter}", lines, f"{config(seed)}data:\n  seed: 7  # --set\n")


def page(
    browser: Browser,
    name: str,
    scene: Callable[[Path], None],
    tab: str = "curves",
    size: tuple[int, int] = (1400, 760),
    scheme: Scheme = "light",
) -> None:
    """Writes a picture of the dashboard with all runs of a scene."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        folder = Path("runs")
        scene(folder)
        runs = ",".join(sorted(run.path.name for run in runs_in(folder)))
        with (
            serve_dashboard(folder) as address,
            watch_page(browser, scheme=scheme, width=size[0], height=size[1]) as seen,
        ):
            seen.page.goto(f"{address}#tab={tab}&runs={runs}")
            seen.page.wait_for_selector("#link[data-state=live]")
            shown = "table.runs" if tab == "overview" else ".panel[data-runs]"
            seen.page.wait_for_selector(shown if runs else "#view code")
            expect(seen.page.locator(".none:visible", has_text="reading")).to_have_count(0)
            wait_for_frame(seen.page)
            wait_for_frame(seen.page)
            keep(name, seen.page.screenshot())


def report(browser: Browser, name: str, scene: Callable[[Path], None]) -> None:
    """Writes a picture of the report of a scene's latest run."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        scene(Path("runs"))
        path = Path(place, "report.html")
        path.write_text(report_html([read_record(runs_in(Path("runs"))[-1])]), encoding="utf-8")
        with watch_page(browser, width=1200, height=1000) as seen:
            seen.page.goto(path.as_uri())
            wait_for_frame(seen.page)
            keep(name, seen.page.screenshot())


def keep(name: str, png: bytes) -> None:
    """Writes a picture with at most 256 colours, which pages do not exceed visibly."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        packed, "png", optimize=True
    )
    assert packed.tell() < MAX_BYTES, (name, packed.tell())
    (PICTURES / f"{name}.png").write_bytes(packed.getvalue())


def plot(name: str, scene: Callable[[Path], object], wanted: ChartRequest) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene(Path(folder))
        records = [read_record(RunDir(path)) for path in sorted(Path(folder).iterdir())]
        (PICTURES / f"{name}.svg").write_bytes(picture(compose(records, wanted), "svg"))


def main() -> None:
    with chromium() as browser:
        page(browser, "dashboard", three)
        page(browser, "dashboard-dark", three, scheme="dark")
        page(browser, "dashboard-phone", one_run, size=(390, 844))
        page(browser, "dashboard-table", eight_runs, "overview")
        for name in ("eight", "hundred", "stopped", "empty"):
            page(browser, f"dashboard-{name}", SCENES[name])
        page(browser, "dashboard-crash", crash)
        report(browser, "report", one_run)
    plot("plot-run", one_run, ChartRequest(lr=True))
    plot("plot-seeds", seeds, ChartRequest(by="seed", weight=0.6))
    plot("plot-resumed", resumed_twice, ChartRequest())


if __name__ == "__main__":
    main()
