"""How figures went from commit to commit, on machines that can be compared.

    python benchmarks/history.py [NAME …] [--results DIR]

With the name of a benchmark: its figures at the last commits that were measured, one column each, and for
each case how the last one differs from the one before on the same kind of machine. A change is pointed out
when it is larger than both spreads together and than 2 %: as better or worse where a bar says which way is
up. Without a name: of all benchmarks, only the changes that are pointed out.

`results/history/<name>.jsonl` has a line for each commit, machine and day; `report.py` writes it. Seconds of a
busy machine are not those of an idle one: each column says the load before the benchmark began.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import HISTORY, RESULTS, number

SHOWN = 5
"""commits beside each other"""
CHANCE = 0.02
"""share of a figure below which no change is pointed out: a single measurement has no spread"""


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    bf16_units: bool | None
    """None: not recorded"""

    def comparable(self, other: Machine) -> bool:
        """Whether both are of one kind, as far as is known."""
        units = {self.bf16_units, other.bf16_units} - {None}
        return (self.cpu, self.cores) == (other.cpu, other.cores) and len(units) < 2

    def __str__(self) -> str:
        units = {None: "", True: ", bf16 units", False: ", no bf16 units"}[self.bf16_units]
        return f"{self.cpu}, {self.cores} cores{units}"


@dataclass(frozen=True)
class Figure:
    figure: float
    spread: float
    unit: str
    bar: str | None

    def __str__(self) -> str:
        shows_spread = self.spread > 1e-3 * abs(self.figure)
        spread = f" ± {_brief(float(f'{self.spread:.2g}'))}" if shows_spread else ""
        return f"{_brief(self.figure)}{spread}"


@dataclass(frozen=True)
class Entry:
    """What one run of a benchmark found."""

    date: str
    """ISO 8601, UTC"""
    commit: str
    """the first seven digits"""
    machine: Machine
    load: float | None
    cases: dict[str, Figure]


@dataclass(frozen=True)
class Change:
    """Two figures of a case that are further apart than their spreads."""

    before: Figure
    after: Figure

    def __str__(self) -> str:
        if self.before.figure == 0:
            return f"from 0 to {_brief(self.after.figure)}: {self.verdict}"
        percent = 100 * (self.after.figure / self.before.figure - 1)
        return f"{percent:+.3g} %: {self.verdict}"

    @property
    def verdict(self) -> str:
        """`better` or `worse` by the bar; without one, `changed`."""
        if self.after.bar is None:
            return "changed"
        larger_is_better = self.after.bar[0] in "≥>"
        return "better" if larger_is_better == (self.after.figure > self.before.figure) else "worse"


def main() -> None:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("names", nargs="*", metavar="NAME", help="benchmarks; default: all")
    command_line.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="of the JSON"
    )
    arguments = command_line.parse_args()
    folder = arguments.results / HISTORY
    known_names = sorted(path.stem for path in folder.glob("*.jsonl"))
    if unknown := [name for name in arguments.names if name not in known_names]:
        sys.exit(f"no history of {', '.join(unknown)}; there is one of {', '.join(known_names)}")
    for name in arguments.names or known_names:
        if lines := describe(name, read(folder, name), all_cases=bool(arguments.names)):
            print("\n".join(lines), end="\n\n")


def read(folder: Path, name: str) -> list[Entry]:
    """The history of a benchmark, oldest first; empty without one.

    Raises:
        SystemExit: a line is damaged.
    """
    path = folder / f"{name}.jsonl"
    entries = []
    for number_, text in enumerate(
        path.read_text("utf-8").splitlines() if path.exists() else [], 1
    ):
        try:
            entries.append(_entry(json.loads(text)))
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}, line {number_} is damaged: {error!r}; restore it from git")
    return entries


def _entry(line: dict[str, Any]) -> Entry:
    return Entry(
        line["date"],
        (line["commit"] or "unknown")[:7],
        Machine(line["cpu"], line["cores"], line["bf16_units"]),
        line["load"],
        {name: Figure(*values) for name, values in line["cases"].items()},
    )


def comparable_entries(entries: Sequence[Entry], last: int = SHOWN) -> list[Entry]:
    """Those of the machine of the newest entry, at most `last` of them, oldest first."""
    matches = [entry for entry in entries if entry.machine.comparable(entries[-1].machine)]
    return matches[-last:]


def change(entries: Sequence[Entry], case: str) -> Change | None:
    """How the newest figure of a case differs from the one before; None: not beyond the spreads."""
    figures = [entry.cases[case] for entry in entries if case in entry.cases]
    if len(figures) < 2 or case not in entries[-1].cases:
        return None
    before, after = figures[-2:]
    difference = abs(after.figure - before.figure)
    chance = max(before.spread + after.spread, CHANCE * abs(before.figure))
    return Change(before, after) if difference > chance else None


def describe(name: str, entries: Sequence[Entry], *, all_cases: bool) -> list[str]:
    """Lines of text; none if nothing changed and only changes are asked for."""
    recent = comparable_entries(entries)
    changes = {case: change(recent, case) for case in recent[-1].cases}
    rows = [
        (case, *(str(entry.cases.get(case, "")) for entry in recent), str(case_change or ""))
        for case, case_change in changes.items()
        if case_change or all_cases
    ]
    if not rows:
        return []
    heads = [
        ("", *(entry.commit for entry in recent), ""),
        ("", *(entry.date[:10] for entry in recent), ""),
        ("case", *(f"load {_load(entry)}" for entry in recent), "change"),
    ]
    widths = [max(len(row[column]) for row in [*heads, *rows]) for column in range(len(heads[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [*heads, *rows]]
    return [f"{name}: {recent[-1].machine}", *lines]


def _brief(value: float) -> str:
    """As in tables, but small values keep their digits."""
    return f"{value:.2g}" if 0 < abs(value) < 1e-3 else number(value)


def _load(entry: Entry) -> str:
    return "unknown" if entry.load is None else number(entry.load)


if __name__ == "__main__":
    main()
