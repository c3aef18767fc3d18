"""Runs the benchmarks one after the other: `make bench`.

    python benchmarks/run.py [NAME …] [--quick] [--results DIR] [--list] [--within MINUTES]

Without names, the suite: what answers within half an hour on two idle cores, each benchmark with as many
repeats as its budget allows. On a machine so slow that time runs out, those that would take longer than what is
left are left out, and named. One that fails, or takes several times its budget, does not keep the others from
running; the exit code is then 1. What takes longer, or needs a large disk or a browser, runs by name only, as
does any benchmark with its own number of repeats: `python benchmarks/NAME.py --help`.

At the end: how long each took, how many of its bars are met, and which are not. With the figures of the
repository, the page of all bars (`summary.py`) is written anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import summary
from report import RESULTS, parser

LIMIT = 4
"""times its budget, after which a benchmark is ended"""
WITHIN_MIN = 30
SLACK_S = 120
"""of every limit: on a busy machine starting alone takes long"""


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder."""

    name: str
    budget_s: int
    """seconds that it may take on two idle cores"""
    options: tuple[str, ...] = ()


SUITE = (
    Benchmark("communication", 5),
    Benchmark("order", 5),
    Benchmark("document_masks", 60),
    Benchmark("startup", 65, ("--repeats", "2")),
    Benchmark("graphs", 65, ("--repeats", "2", "--scaled", "32")),
    Benchmark("pauses", 67),
    Benchmark("operations", 85, ("--repeats", "1")),
    Benchmark("throughput", 140, ("--heats", "1")),
    Benchmark(
        "time_to_loss",
        265,
        tuple(
            word
            for name in ("fabric", "hf", "bare-bf16", "instar-plain")
            for word in ("--without", name)
        ),
    ),
    Benchmark("scaling", 155, ("--repeats", "2")),
    Benchmark("slow_link", 185, ("--seeds", "1")),
    Benchmark("loading", 120, ("--rounds", "1", "--workers", "0")),
)
BY_NAME = (
    "dashboard",
    "delta_size",
    "deltas",
    "finetune",
    "folders",
    "logs",
    "precision",
    "sharded_saves",
)
"""what needs long, a large disk or a browser"""
ELSEWHERE = ("gpu", "guards")
"""with commands of their own: `make bench-gpu`, `make bench-quick`"""


@dataclass(frozen=True)
class Outcome:
    benchmark: Benchmark
    seconds: float
    failure: str
    """empty: it ended well"""


def main() -> None:
    words = parser(__doc__)
    words.add_argument("names", nargs="*", metavar="NAME", help="default: the suite")
    words.add_argument(
        "--within", type=float, metavar="MINUTES", help=f"of the suite; default: {WITHIN_MIN}"
    )
    words.add_argument("--list", action="store_true", help="names and budgets, and nothing else")
    arguments = words.parse_args()
    if arguments.list:
        print(listing())
        return
    results = arguments.results or (None if arguments.quick else RESULTS)
    extra = ["--quick"] * arguments.quick + (["--results", str(results)] if results else [])
    limit_s = 60 * (arguments.within or WITHIN_MIN) if not arguments.names else float("inf")
    outcomes = list[Outcome]()
    left_out = list[str]()
    for benchmark in select_benchmarks(arguments.names):
        if not fits(benchmark, outcomes, limit_s):
            left_out.append(benchmark.name)
            continue
        budget = f"at most {benchmark.budget_s} s" if benchmark.budget_s else "no budget"
        print(f"\n=== {benchmark.name} ({budget})", flush=True)
        outcomes.append(run(benchmark, extra))
    print(f"\n{report_outcomes(outcomes, results)}")
    if left_out:
        print(
            f"left out, for they would not end within {limit_s / 60:g} minutes on this machine:"
            f" python benchmarks/run.py {' '.join(left_out)}"
        )
    if results == RESULTS:
        summary.main()
    if failures := [
        f"{outcome.benchmark.name} ({outcome.failure})" for outcome in outcomes if outcome.failure
    ]:
        sys.exit(f"failed: {', '.join(failures)}")


def select_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Those with these names; without any, the suite.

    Raises:
        SystemExit: there is no such benchmark.
    """
    benchmarks = {benchmark.name: benchmark for benchmark in SUITE}
    benchmarks |= {name: Benchmark(name, 0) for name in (*BY_NAME, *ELSEWHERE)}
    if unknown := [name for name in names if name not in benchmarks]:
        sys.exit(
            f"no such benchmark: {', '.join(unknown)}; there are {', '.join(sorted(benchmarks))}"
        )
    return [benchmarks[name] for name in names] or list(SUITE)


def fits(benchmark: Benchmark, outcomes: Sequence[Outcome], limit_s: float) -> bool:
    """Whether it would end in time, if it exceeded its budget as much as those before it."""
    seconds = sum(outcome.seconds for outcome in outcomes)
    budget_s = sum(outcome.benchmark.budget_s for outcome in outcomes)
    slower = max(1.0, seconds / budget_s) if budget_s else 1.0
    return seconds + slower * benchmark.budget_s <= limit_s


def listing() -> str:
    total = sum(benchmark.budget_s for benchmark in SUITE)
    lines = [f"suite, {total / 60:.0f} minutes on two idle cores:"]
    lines += [
        f"  {benchmark.name:<16}{benchmark.budget_s:>4} s  {' '.join(benchmark.options)}"
        for benchmark in SUITE
    ]
    return "\n".join([*lines, "by name:", *(f"  {name}" for name in BY_NAME)])


def run(benchmark: Benchmark, extra: Sequence[str]) -> Outcome:
    """One benchmark in a process group of its own, of which nothing is left afterwards."""
    script = Path(__file__).with_name(f"{benchmark.name}.py")
    limit = LIMIT * benchmark.budget_s + SLACK_S if benchmark.budget_s else None
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(script), *benchmark.options, *extra], start_new_session=True
    )
    try:
        code = process.wait(limit)
        failure = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"ended after {limit} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(benchmark, time.monotonic() - start, failure)


def report_outcomes(outcomes: Sequence[Outcome], results: Path | None) -> str:
    """What came of it: a line for each benchmark, and the bars that are not met."""
    cases = summary.cases_with_bars(results) if results else []
    lines = [f"{'benchmark':<16}{'seconds':>8}{'budget':>8}  bars met"]
    for outcome in outcomes:
        bars = [case for case in cases if case.benchmark == outcome.benchmark.name]
        verdict = (
            f"failed: {outcome.failure}" if outcome.failure else summary.count(bars) if bars else ""
        )
        budget = outcome.benchmark.budget_s or ""
        lines.append(
            f"{outcome.benchmark.name:<16}{outcome.seconds:>8.0f}{budget:>8}  {verdict}".rstrip()
        )
    total = sum(outcome.seconds for outcome in outcomes)
    lines.append(f"{'together':<16}{total:>8.0f}{sum(o.benchmark.budget_s for o in outcomes):>8}")
    names = {outcome.benchmark.name for outcome in outcomes if not outcome.failure}
    unmet = [case for case in cases if case.benchmark in names and not case.is_met]
    lines += [
        f"not met: {case.benchmark}: {case.case}: {case.figure} {case.figure.unit}, {case.figure.bar}"
        for case in unmet
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
