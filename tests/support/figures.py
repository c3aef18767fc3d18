"""The figures of fault trials: how often each is tried, and where it is written what came of it.

`make test` tries everything a few times; `make torture` (INSTAR_TORTURE=full) as often as the
figures of docs/reliability.md say, and keeps them beside those of the benchmarks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FULL = os.environ.get("INSTAR_TORTURE") == "full"
SHOWN = 8
"""Of what was found wrong, so much is printed."""
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

Figures = dict[str, Any]
"""case, figure, unit, spread, bar, ok: see benchmarks/report.py"""


def times(short: int, full: int) -> int:
    """How often to try: `short` in `make test`, `full` in `make torture`."""
    return full if FULL else short


def none_of(trials: int, what: str, failures: Sequence[object]) -> Figures:
    """Nothing may be found in `trials` trials; `what` would be wrong if it were. It is printed."""
    for failure in failures[:SHOWN]:
        print(f"{what}: {failure}")
    return _case(f"{trials:,} × {what}", len(failures), "trials", most=0)


def all_of(trials: int, what: str, good: int) -> Figures:
    """The share of `trials` trials that came out as they must, which is all of them."""
    return _case(f"{trials:,} × {what}", 100 * good / trials, "%", least=100)


def at_most(what: str, figures: Sequence[float], unit: str, bar: float) -> Figures:
    """The largest of `figures` against its bar; the spread is that between their quartiles."""
    spread: float = _report.case(what, figures, unit).spread
    return {**_case(what, max(figures), unit, most=bar), "spread": spread}


def count(what: str, number: int) -> Figures:
    """Something counted, without a bar."""
    return _case(what, number, "")


def write(name: str, cases: Sequence[Figures]) -> Path:
    """Print `cases` as JSON; in `make torture`, keep them in the path returned.

    Raises:
        AssertionError: a bar was missed. The figures are written before.
    """
    name = f"torture-{name}"
    results_dir = _report.RESULTS if FULL else None
    path: Path = _report.RESULTS / f"{name}.json"
    options = _report.Options(quick=not FULL, results=results_dir, load=os.getloadavg()[0])
    print(json.dumps({"name": name, "cases": list(cases)}, ensure_ascii=False))
    # without a history: what is counted is what went wrong, and that is nothing
    _report.publish(name, [_report.Case(**case) for case in cases], options, history=False)
    failures = [case["case"] for case in cases if case["ok"] is False]
    assert not failures, f"missed: {failures}"
    return path


def _case(
    name: str, figure: float, unit: str, *, most: float | None = None, least: float | None = None
) -> Figures:
    case = _report.case(name, [figure], unit, most=most, least=least)
    return {field: getattr(case, field) for field in case.__dataclass_fields__}


def _load(path: Path) -> ModuleType:
    """A module that is in no package, without making its neighbours importable."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


_report = _load(BENCHMARKS / "report.py")
