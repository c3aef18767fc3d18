"""What benchmarks share: cases against bars, the table a person reads, the JSON and the history that are kept."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from instar.record.system import cpu_model, has_bf16_units, versions

RESULTS = Path(__file__).parent / "results"
HISTORY = "history"
"""folder beside the results, with a file of JSON lines for each benchmark"""


@dataclass(frozen=True)
class Case:
    """One figure; with a bar, whether it is met."""

    case: str
    figure: float
    """median of the repeats"""
    unit: str
    spread: float
    """distance between the quartiles of the repeats, in the figure's unit; 0 for a single one"""
    bar: str | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class Options:
    """How a benchmark was asked to run."""

    quick: bool
    results: Path | None
    """folder of the JSON; None: print only"""
    load: float
    """the machine's load average over the last minute, before anything was started"""
    start_time: float | None = None
    """Unix time at which the benchmark began; None: it is a part of something else"""


def parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes; `about` is the script's docstring."""
    command_line = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument(
        "--quick",
        action="store_true",
        help="a smoke run: hardly any work, figures mean nothing and are not kept",
    )
    command_line.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help=f"where the JSON goes (default: {RESULTS.parent.name}/{RESULTS.name}; --quick: nowhere)",
    )
    return command_line


def options(arguments: argparse.Namespace) -> Options:
    """What the shared arguments say."""
    results = arguments.results or (None if arguments.quick else RESULTS)
    return Options(arguments.quick, results, os.getloadavg()[0], psutil.Process().create_time())


def case(
    name: str,
    figures: Sequence[float],
    unit: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Case:
    """The median of `figures`, held against one bar, if any: ≥ least, ≤ most or > above."""
    figure = statistics.median(figures)
    first, _, third = (
        statistics.quantiles(figures, method="inclusive") if len(figures) > 1 else (figure,) * 3
    )
    bar = ok = None
    if least is not None:
        bar, ok = f"≥ {least:g}", figure >= least
    elif most is not None:
        bar, ok = f"≤ {most:g}", figure <= most
    elif above is not None:
        bar, ok = f"> {above:g}", figure > above
    return Case(name, figure, unit, third - first, bar, ok)


def publish(
    name: str,
    cases: Sequence[Case],
    run_options: Options,
    *,
    libraries: Sequence[str] = (),
    history: bool = True,
    **facts: str | int | float,
) -> None:
    """Print the table; write <results>/<name>.json, and a line of its history.

    Args:
        libraries: distributions whose versions matter beside Instar's own.
        history: whether the figures are kept by commit.
        facts: what else to say of the machine, such as the number of threads.
    """
    print(table(cases))
    if run_options.results is None:
        return
    library_versions = {library: importlib.metadata.version(library) for library in libraries}
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - run_options.start_time, 1)
        if run_options.start_time
        else None,
        "machine": {
            "system": sys.platform,
            "cpu": cpu_model(),
            "cores": psutil.cpu_count(),
            "bf16_units": has_bf16_units(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_before": round(run_options.load, 2),
            **facts,
        },
        "versions": versions() | library_versions,
        "cases": [asdict(entry) for entry in cases],
    }
    run_options.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (run_options.results / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if history:
        remember(result, run_options.results / HISTORY)


def remember(result: Mapping[str, Any], folder: Path) -> None:
    """Append the figures of a result to <folder>/<name>.jsonl.

    The line replaces the last one if that is of the same commit, machine and day: of a benchmark that
    publishes what it knows so far, or was repeated, the last figures are kept.
    """
    path = folder / f"{result['name']}.jsonl"
    line = history_line(result)
    lines = (
        [json.loads(text) for text in path.read_text("utf-8").splitlines()] if path.exists() else []
    )
    if lines and _occasion(lines[-1]) == _occasion(line):
        lines.pop()
    texts = [json.dumps(entry, ensure_ascii=False) for entry in [*lines, line]]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def history_line(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the history keeps of a result; `cases`: figure, spread, unit and bar of each, by name."""
    machine = result["machine"]
    return {
        "date": result["date"],
        "commit": result["versions"].get("commit"),
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "bf16_units": machine["bf16_units"],
        "load": machine["load_before"],
        "seconds": result["seconds"],
        "cases": {
            entry["case"]: [
                float(f"{entry['figure']:.6g}"),
                float(f"{entry['spread']:.3g}"),
                entry["unit"],
                entry["bar"],
            ]
            for entry in result["cases"]
        },
    }


def _occasion(line: Mapping[str, Any]) -> tuple[object, ...]:
    return (line["date"][:10], *(line[key] for key in ("commit", "cpu", "cores", "bf16_units")))


def table(cases: Sequence[Case]) -> str:
    """The cases as lines of text, one each."""
    width = max(len("case"), *(len(entry.case) for entry in cases))
    lines = [f"{'case':<{width}}  {'figure':>10}  {'spread':>8}  {'unit':<8}  {'bar':<8}  ok"]
    words = {None: "", True: "yes", False: "NO"}
    lines += [
        f"{entry.case:<{width}}  {number(entry.figure):>10}  {number(entry.spread):>8}  "
        f"{entry.unit:<8}  {entry.bar or '':<8}  {words[entry.ok]}".rstrip()
        for entry in cases
    ]
    return "\n".join(lines)


def number(value: float) -> str:
    """Four significant digits, never an exponent: 0.9874, 12.34, 48,210."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4f}"
