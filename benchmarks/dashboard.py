"""How soon the dashboard shows what there is, and what is new.

A folder of runs with a record per step, made up in the writer's own format, is opened in headless
Chromium. Painted is when the curves stand on the screen, counted by the page from its navigation;
a new point's delay runs from before the recorder writes it until the frame after it was drawn.
"cold" has no column caches, "warm" those that the cold one left.

    python benchmarks/dashboard.py --minutes 10
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page

from instar.logs.read.reader_cache import cache_folder
from instar.logs.read.record import read_record
from instar.record.events import Train
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, runs_in

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Watched, chromium, watch_page
from dashboards import dashboard
from records import make_runs

from report import Case, case, options, parser, publish

PAINTED = """async (count) => {
  const runs = () => [...document.querySelectorAll('.panel')].every((panel) =>
    Number(panel.dataset.runs) >= count);
  while (!(document.querySelector('.panel') && runs())) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() / 1000;
}"""
WATCH = """() => {
  const panel = document.querySelector(".panel[data-metric='loss']");
  window.drawn = [];
  new MutationObserver(() => {
    const points = Number(panel.dataset.points);
    requestAnimationFrame(() => requestAnimationFrame(() =>
      window.drawn.push([points, Date.now() / 1000])));
  }).observe(panel, { attributeFilter: ['data-points'] });
  return Number(panel.dataset.points);
}"""
DRAWN = """async (count) => {
  while (!(window.drawn.at(-1)?.[0] >= count)) await new Promise(requestAnimationFrame);
  return window.drawn;
}"""
EVERY_S = 0.05


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=100)
    made.add_argument("--records", type=int, default=100_000, help="of each run")
    made.add_argument("--points", type=int, default=300, help="new ones that are waited for")
    made.add_argument("--minutes", type=float, default=1.0, help="that the page is left open")
    made.add_argument("--folder", type=Path, help="of runs that are there already; is written to")
    parsed = made.parse_args()
    if parsed.quick:
        parsed.runs, parsed.records, parsed.points, parsed.minutes = 3, 2000, 20, 0.1
    with folder(parsed) as runs, chromium() as browser:
        cases = [*painted(browser, runs), *live(browser, runs, parsed)]
    publish("dashboard", cases, options(parsed), libraries=("starlette", "uvicorn", "playwright"))


@contextmanager
def folder(parsed: argparse.Namespace) -> Iterator[Path]:
    if parsed.folder:
        yield parsed.folder
        return
    with tempfile.TemporaryDirectory() as made:
        make_runs(Path(made), parsed.runs, parsed.records)
        yield Path(made)


def painted(browser: Browser, runs: Path) -> Iterator[Case]:
    """Seconds from navigation to curves: the latest run, and all runs laid over each other."""
    keys = sorted(path.name for path in runs.iterdir())
    views = {
        "latest run": ("", 1),
        f"{len(keys)} runs overlaid": (f"#runs={','.join(keys)}", len(keys)),
    }
    for run in runs_in(runs):
        if (kept := cache_folder(run)) is not None:
            shutil.rmtree(kept, ignore_errors=True)
    for state in ("cold", "warm"):
        for name, (hash_, count) in views.items():
            found = []
            for _ in range(1 if state == "cold" else 3):
                with dashboard(runs, "--port", "0") as (address, _), watch_page(browser) as seen:
                    seen.page.set_default_timeout(300_000)
                    seen.page.goto(address + hash_)
                    found.append(seen.page.evaluate(PAINTED, count))
                    assert seen.errors == []
            bar = 2.0 if state == "warm" or count == 1 else None
            yield case(f"painted, {name}, {state}", found, "s", most=bar)


def live(browser: Browser, runs: Path, parsed: argparse.Namespace) -> Iterator[Case]:
    """New points, and a page that is left open while they come."""
    run = RunDir(max(runs.iterdir(), key=lambda path: path.name))
    with (
        dashboard(runs, "--port", "0") as (address, process),
        watch_page(browser) as seen,
        Recorder(run.events) as record,
    ):
        seen.page.goto(f"{address}#runs={run.path.name}")
        seen.page.evaluate(PAINTED, 1)
        yield from idle(process)
        asked = len(seen.requests)
        last = int(read_record(run).series("loss").step.max())
        delays = measured(seen.page, record, parsed.points, last)
        ordered = sorted(delays)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        yield case("new point on screen, median", [statistics.median(delays)], "s")
        yield case("new point on screen, 95th percentile", [p95], "s", most=1.0)
        yield case("requests while they came", [len(seen.requests) - asked], "", most=0)
        yield from left_open(seen, record, last + parsed.points, parsed.minutes)


def idle(process: subprocess.Popen[str]) -> Iterator[Case]:
    """What watching costs while nothing happens."""
    server = psutil.Process(process.pid)
    server.cpu_percent()
    time.sleep(5)
    yield case("server while nothing happens", [server.cpu_percent()], "% of a core", most=5)


def measured(page: Page, record: Recorder, points: int, last: int) -> list[float]:
    """Seconds of each new point from before it is written, behind step `last`, to its frame."""
    before = page.evaluate(WATCH)
    written = []
    for number in range(1, points + 1):
        written.append(time.time())
        record.write(point(last + number))
        page.wait_for_timeout(EVERY_S * 1000)
    drawn: list[tuple[int, float]] = page.evaluate(DRAWN, before + points)
    return [
        next(at for count, at in drawn if count >= before + number) - at_first
        for number, at_first in enumerate(written, 1)
    ]


def left_open(seen: Watched, record: Recorder, step: int, minutes: float) -> Iterator[Case]:
    asked, heap = len(seen.requests), "performance.memory.usedJSHeapSize"
    begin, memory = time.monotonic(), seen.page.evaluate(heap)
    while time.monotonic() - begin < minutes * 60:
        step += 1
        record.write(point(step))
        seen.page.wait_for_timeout(200)
    grown = (seen.page.evaluate(heap) - memory) / 2**20
    yield case(f"page errors in {minutes:g} min", [len(seen.errors)], "", most=0)
    yield case(f"requests in {minutes:g} min", [len(seen.requests) - asked], "", most=0)
    yield case(f"page's memory, grown in {minutes:g} min", [grown], "MiB")


def point(step: int) -> Train:
    return Train(step=step, loss=2.0, samples=step, tokens=step, lr=1e-3, wall_s=float(step))


if __name__ == "__main__":
    main()
