"""In which order `pytest -n` begins what it gives to its workers: what takes longest first, so that
none of it is left at the end.

    make test PYTEST_ADDOPTS="--durations 0 --durations-min 0.3" | python tests/support/durations.py

writes anew what is known of that; likewise `make torture`, with INSTAR_TORTURE=full.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from figures import FULL

RECORDED = Path(__file__).parents[1] / ("durations-torture.txt" if FULL else "durations.txt")
LEAST_S = 2.0
"""Of what takes less, the order does not matter."""
ALONE = ("tests/docs/test_snippets.py", "tests/benchmarks/test_quick.py")
"""files whose tests share nothing and take long"""
TOGETHER = {
    "GRPO": (
        "tests/extensions/grpo/test_grpo.py",
        "tests/extensions/grpo/test_server.py",
        "tests/extensions/grpo/test_fleet.py",
        "tests/docs/test_snippets.py::test_the_commands_of_a_page_work_one_after_the_other[grpo.md]",
    )
}
"""what shares something dear, which each worker would make: see `forks_for_grpo`"""
LINE = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)


def unit_of(nodeid: str) -> str:
    """With what else one worker runs a test."""
    for name, starts in TOGETHER.items():
        if nodeid.startswith(starts):
            return name
    return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]


def seconds_of(nodeid: str) -> float:
    """How long its unit takes; 0 where that is little or not known."""
    return _recorded_seconds().get(unit_of(nodeid), 0.0)


@cache
def _recorded_seconds() -> dict[str, float]:
    lines = RECORDED.read_text("utf-8").splitlines()
    return {unit: float(seconds) for seconds, unit in (line.split(" ", 1) for line in lines)}


def unit_sums(log: str) -> Iterable[str]:
    """Of the output of `pytest --durations`: each unit, longest first."""
    units: dict[str, float] = {}
    for seconds, nodeid in LINE.findall(log):
        unit = unit_of(nodeid.encode().decode("unicode_escape"))
        units[unit] = units.get(unit, 0.0) + float(seconds)
    for unit, all_of_it in sorted(units.items(), key=lambda item: -item[1]):
        if all_of_it >= LEAST_S:
            yield f"{all_of_it:.0f} {unit}"


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{line}\n" for line in unit_sums(sys.stdin.read())), "utf-8")
