"""What the order of an epoch of 10⁹ samples costs: memory, seek, indices per second.

    python benchmarks/order.py [--quick]

Peak memory is taken both from tracemalloc (numpy reports to it) and from the process itself, in a
process of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from instar.data.order import Order, OrderKind, make_order
from report import Case, case, options, parser, publish

SAMPLES = 10**9
BATCH = 4096
POSITION = SAMPLES * 9 // 10
KINDS: tuple[OrderKind, ...] = ("shuffled", "sequential", "random")


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    repeats, count = (1, BATCH) if run_options.quick else (9, 1 << 21)
    cases = [entry for kind in KINDS for entry in measure(kind, repeats, count)]
    publish("order", cases, run_options)


def measure(kind: OrderKind, repeats: int, count: int) -> list[Case]:
    """What seeking costs, and the pace at which `count` indices come."""

    def seek() -> Order:
        order = make_order(kind, SAMPLES, seed=1337)
        order.indices(3, POSITION, POSITION + BATCH)
        return order

    seek_ms = [1e3 * seconds(seek) for _ in range(repeats)]
    memory_mb = [traced_mb(seek) for _ in range(repeats)]
    resident_mb = [resident_growth_mb(kind) for _ in range(min(3, repeats))]
    order = make_order(kind, SAMPLES, seed=1337)
    rates = [count / 1e6 / seconds(lambda: order.indices(0, 0, count)) for _ in range(repeats)]
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
    process = subprocess.run(
        [sys.executable, __file__, "resident", kind], capture_output=True, text=True, check=True
    )
    return float(process.stdout)


def print_resident_growth(kind: OrderKind) -> None:
    make_order(kind, 2 * BATCH, seed=1).indices(0, 0, BATCH)
    before = peak_mb()
    make_order(kind, SAMPLES, seed=1).indices(3, POSITION, POSITION + BATCH)
    print(peak_mb() - before)


def peak_mb() -> float:
    """The most memory this program has held."""
    with suppress(OSError):  # elsewhere than on Linux
        # ru_maxrss would begin at what the parent held when it started this process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["resident"]:
        print_resident_growth(next(kind for kind in KINDS if kind == sys.argv[2]))
    else:
        main()
