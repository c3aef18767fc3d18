"""Runs the benchmarks one after the other: `make bench`.

    python benchmarks/run.py [NAME …] [--quick] [--results DIR] [--list]

Without names, the suite: what answers within half an hour on two idle cores, each benchmark with as many
repeats as its budget allows. One that fails, or takes several times its budget, does not keep the others from
running; the exit code is then 1. Studies, which take from some minutes to days, run by name only, as does
any benchmark with its own number of repeats: `python benchmarks/NAME.py --help`.

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
    Benchmark("startup", 120, ("--repeats", "2")),
    Benchmark("loading", 192, ("--rounds", "1", "--workers", "0")),
    Benchmark("graphs", 110, ("--repeats", "2")),
    Benchmark("sharded_saves", 60),
    Benchmark("pauses", 67),
    Benchmark("operations", 107, ("--repeats", "1")),
    Benchmark("throughput", 165, ("--heats", "1")),
    Benchmark("scaling", 190, ("--repeats", "2")),
    Benchmark("slow_link", 185, ("--seeds", "1")),
    Benchmark(
        "time_to_loss",
        265,
        tuple(
            word
            for name in ("fabric", "hf", "bare-bf16", "instar-plain")
            for word in ("--without", name)
        ),
    ),
)
STUDIES = (
    "ablation",
    "dashboard",
    "delta_size",
    "deltas",
    "experts",
    "family",
    "finders",
    "finetune",
    "folders",
    "grown_optimizer",
    "growth",
    "logs",
    "moments",
    "moult",
    "noise_scale",
    "pilot",
    "precision",
    "width_rates",
)
"""questions about training or servers rather than about speed, and what needs a large disk or a browser"""
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
    words.add_argument("--list", action="store_true", help="names and budgets, and nothing else")
    parsed = words.parse_args()
    if parsed.list:
        print(listing())
        return
    results = parsed.results or (None if parsed.quick else RESULTS)
    extra = ["--quick"] * parsed.quick + (["--results", str(results)] if results else [])
    outcomes = []
    for benchmark in asked(parsed.names):
        budget = f"at most {benchmark.budget_s} s" if benchmark.budget_s else "a study"
        print(f"\n=== {benchmark.name} ({budget})", flush=True)
        outcomes.append(run(benchmark, extra))
    print(f"\n{told(outcomes, results)}")
    if results == RESULTS:
        summary.main()
    if failed := [f"{each.benchmark.name} ({each.failure})" for each in outcomes if each.failure]:
        sys.exit(f"failed: {', '.join(failed)}")


def asked(names: Sequence[str]) -> list[Benchmark]:
    """Those with these names; without any, the suite.

    Raises:
        SystemExit: there is no such benchmark.
    """
    known = {each.name: each for each in SUITE}
    known |= {name: Benchmark(name, 0) for name in (*STUDIES, *ELSEWHERE)}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [known[name] for name in names] or list(SUITE)


def listing() -> str:
    total = sum(each.budget_s for each in SUITE)
    lines = [f"suite, {total / 60:.0f} minutes on two idle cores:"]
    lines += [f"  {each.name:<16}{each.budget_s:>4} s  {' '.join(each.options)}" for each in SUITE]
    return "\n".join([*lines, "studies, by name:", *(f"  {name}" for name in STUDIES)])


def run(benchmark: Benchmark, extra: Sequence[str]) -> Outcome:
    """One benchmark in a process group of its own, of which nothing is left afterwards."""
    script = Path(__file__).with_name(f"{benchmark.name}.py")
    limit = LIMIT * benchmark.budget_s + SLACK_S if benchmark.budget_s else None
    begun = time.monotonic()
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
    return Outcome(benchmark, time.monotonic() - begun, failure)


def told(outcomes: Sequence[Outcome], results: Path | None) -> str:
    """What came of it: a line for each benchmark, and the bars that are not met."""
    cases = summary.barred(results) if results else []
    lines = [f"{'benchmark':<16}{'seconds':>8}{'budget':>8}  bars met"]
    for each in outcomes:
        found = [case for case in cases if case.benchmark == each.benchmark.name]
        said = f"failed: {each.failure}" if each.failure else summary.count(found) if found else ""
        budget = each.benchmark.budget_s or ""
        lines.append(f"{each.benchmark.name:<16}{each.seconds:>8.0f}{budget:>8}  {said}".rstrip())
    total = sum(each.seconds for each in outcomes)
    lines.append(f"{'together':<16}{total:>8.0f}{sum(o.benchmark.budget_s for o in outcomes):>8}")
    names = {each.benchmark.name for each in outcomes if not each.failure}
    missed = [case for case in cases if case.benchmark in names and not case.met]
    lines += [
        f"not met: {each.benchmark}: {each.case}: {each.figure} {each.figure.unit}, {each.figure.bar}"
        for each in missed
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
