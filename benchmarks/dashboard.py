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
    command_line = parser(__doc__)
    command_line.add_argument("--runs", type=int, default=100)
    command_line.add_argument("--records", type=int, default=100_000, help="of each run")
    command_line.add_argument(
        "--points", type=int, default=300, help="new ones that are waited for"
    )
    command_line.add_argument(
        "--minutes", type=float, default=1.0, help="that the page is left open"
    )
    command_line.add_argument(
        "--folder", type=Path, help="of runs that are there already; is written to"
    )
    arguments = command_line.parse_args()
    if arguments.quick:
        arguments.runs, arguments.records, arguments.points, arguments.minutes = 3, 2000, 20, 0.1
    with folder(arguments) as runs, chromium() as browser:
        cases = [*painting_cases(browser, runs), *live(browser, runs, arguments)]
    publish(
        "dashboard", cases, options(arguments), libraries=("starlette", "uvicorn", "playwright")
    )


@contextmanager
def folder(arguments: argparse.Namespace) -> Iterator[Path]:
    if arguments.folder:
        yield arguments.folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_runs(Path(scratch), arguments.runs, arguments.records)
        yield Path(scratch)


def painting_cases(browser: Browser, runs: Path) -> Iterator[Case]:
    """Seconds from navigation to curves: the latest run, and all runs laid over each other."""
    keys = sorted(path.name for path in runs.iterdir())
    views = {
        "latest run": ("", 1),
        f"{len(keys)} runs overlaid": (f"#runs={','.join(keys)}", len(keys)),
    }
    for run in runs_in(runs):
        if (cache := cache_folder(run)) is not None:
            shutil.rmtree(cache, ignore_errors=True)
    for state in ("cold", "warm"):
        for name, (hash_, count) in views.items():
            seconds = []
            for _ in range(1 if state == "cold" else 3):
                with dashboard(runs, "--port", "0") as (address, _), watch_page(browser) as window:
                    window.page.set_default_timeout(300_000)
                    window.page.goto(address + hash_)
                    seconds.append(window.page.evaluate(PAINTED, count))
                    assert window.errors == []
            bar = 2.0 if state == "warm" or count == 1 else None
            yield case(f"painted, {name}, {state}", seconds, "s", most=bar)


def live(browser: Browser, runs: Path, arguments: argparse.Namespace) -> Iterator[Case]:
    """New points, and a page that is left open while they come."""
    run = RunDir(max(runs.iterdir(), key=lambda path: path.name))
    with (
        dashboard(runs, "--port", "0") as (address, process),
        watch_page(browser) as window,
        Recorder(run.events) as record,
    ):
        window.page.goto(f"{address}#runs={run.path.name}")
        window.page.evaluate(PAINTED, 1)
        yield from idle(process)
        request_count = len(window.requests)
        last = int(read_record(run).series("loss").step.max())
        delays = measure_delays(window.page, record, arguments.points, last)
        sorted_delays = sorted(delays)
        p95 = sorted_delays[min(len(sorted_delays) - 1, int(0.95 * len(sorted_delays)))]
        yield case("new point on screen, median", [statistics.median(delays)], "s")
        yield case("new point on screen, 95th percentile", [p95], "s", most=1.0)
        yield case("requests while they came", [len(window.requests) - request_count], "", most=0)
        yield from left_open(window, record, last + arguments.points, arguments.minutes)


def idle(process: subprocess.Popen[str]) -> Iterator[Case]:
    """What watching costs while nothing happens."""
    server = psutil.Process(process.pid)
    server.cpu_percent()
    time.sleep(5)
    yield case("server while nothing happens", [server.cpu_percent()], "% of a core", most=5)


def measure_delays(page: Page, record: Recorder, points: int, last: int) -> list[float]:
    """Seconds of each new point from before it is written, behind step `last`, to its frame."""
    before = page.evaluate(WATCH)
    write_times = []
    for number in range(1, points + 1):
        write_times.append(time.time())
        record.write(point(last + number))
        page.wait_for_timeout(EVERY_S * 1000)
    frames: list[tuple[int, float]] = page.evaluate(DRAWN, before + points)
    return [
        next(at for count, at in frames if count >= before + number) - at_first
        for number, at_first in enumerate(write_times, 1)
    ]


def left_open(window: Watched, record: Recorder, step: int, minutes: float) -> Iterator[Case]:
    request_count, heap = len(window.requests), "performance.memory.usedJSHeapSize"
    begin, memory = time.monotonic(), window.page.evaluate(heap)
    while time.monotonic() - begin < minutes * 60:
        step += 1
        record.write(point(step))
        window.page.wait_for_timeout(200)
    growth = (window.page.evaluate(heap) - memory) / 2**20
    yield case(f"page errors in {minutes:g} min", [len(window.errors)], "", most=0)
    yield case(f"requests in {minutes:g} min", [len(window.requests) - request_count], "", most=0)
    yield case(f"page's memory, grown in {minutes:g} min", [growth], "MiB")


def point(step: int) -> Train:
    return Train(step=step, loss=2.0, samples=step, tokens=step, lr=1e-3, wall_s=float(step))


if __name__ == "__main__":
    main()
