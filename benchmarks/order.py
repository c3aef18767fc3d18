"""What the order of an epoch of 10⁹ samples costs: memory, seek, indices per second.

    python benchmarks/order.py

Prints a table and writes benchmarks/results/order.json. Peak memory is taken both from
tracemalloc (numpy reports to it) and from the process itself, in a process of its own.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from instar.data.order import Order, OrderKind, make_order

SAMPLES = 10**9
BATCH = 4096
POSITION = SAMPLES * 9 // 10
REPEATS = 9
KINDS: tuple[OrderKind, ...] = ("shuffled", "sequential", "random")


def main() -> None:
    cases = [case for kind in KINDS for case in measure(kind)]
    result = {
        "name": "order",
        "machine": {"system": platform.platform(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "cases": cases,
    }
    print(f"{'case':<52}{'figure':>12}  {'unit':<6}{'spread':>10}{'bar':>8}  ok")
    for case in cases:
        print(
            f"{case['case']:<52}{case['figure']:>12.4g}  {case['unit']:<6}"
            f"{case['spread']:>10.2g}{case['bar']:>8}  {case['ok']}"
        )
    path = Path(__file__).parent / "results" / "order.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def measure(kind: OrderKind) -> list[dict[str, object]]:
    def seek() -> Order:
        order = make_order(kind, SAMPLES, seed=1337)
        order.indices(3, POSITION, POSITION + BATCH)
        return order

    seek_ms = [1e3 * seconds(seek) for _ in range(REPEATS)]
    memory_mb = [traced_mb(seek) for _ in range(REPEATS)]
    resident_mb = [resident_growth_mb(kind) for _ in range(3)]
    order = make_order(kind, SAMPLES, seed=1337)
    count = 1 << 21
    rates = [count / 1e6 / seconds(lambda: order.indices(0, 0, count)) for _ in range(REPEATS)]
    return [
        case(f"{kind}: build and seek to 90 % of 10⁹", seek_ms, "ms", most=50),
        case(f"{kind}: peak memory of that (traced)", memory_mb, "MB", most=1),
        case(f"{kind}: growth of peak resident memory", resident_mb, "MB", most=1),
        case(f"{kind}: million indices per second", rates, "M/s", least=20),
    ]


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def traced_mb(work: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def resident_growth_mb(kind: OrderKind) -> float:
    """How much a fresh process's peak grows by the order of 10⁹ samples, over that of 8192."""
    done = subprocess.run(
        [sys.executable, __file__, "resident", kind], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def print_resident_growth(kind: OrderKind) -> None:
    def peak_mb() -> float:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6

    make_order(kind, 2 * BATCH, seed=1).indices(0, 0, BATCH)
    before = peak_mb()
    make_order(kind, SAMPLES, seed=1).indices(3, POSITION, POSITION + BATCH)
    print(peak_mb() - before)


def case(
    name: str,
    figures: list[float],
    unit: str,
    most: float | None = None,
    least: float | None = None,
) -> dict[str, object]:
    figure = statistics.median(figures)
    ok = figure <= most if most is not None else least is not None and figure >= least
    return {
        "case": name,
        "figure": figure,
        "unit": unit,
        "spread": statistics.pstdev(figures),
        "bar": f"≤ {most}" if most is not None else f"≥ {least}",
        "ok": ok,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["resident"]:
        print_resident_growth(next(kind for kind in KINDS if kind == sys.argv[2]))
    else:
        main()
