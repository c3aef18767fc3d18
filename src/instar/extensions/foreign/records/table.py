"""What a tool recorded of one run, as columns: rows are added as they are read, and what is left out is counted."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instar.config.errors import ConfigError, shorten_text
from instar.logs.read.columns import Floats, Ints
from instar.logs.read.record import Direction

MAX_VALUES = 20_000_000
MAX_METRICS = 10_000
MAX_NAME = 200
"""characters of a metric's name"""
MAX_STEP = 2**40 - 1
LAST_TIME = 253_402_300_800.0
"""Unix seconds of the year 10000"""
NO_STEP = -1
_SHOWN_NAMES = 5


class RecordedCurve(NamedTuple):
    """A metric by step; all arrays have shape [n], and steps ascend."""

    step: Ints
    value: Floats
    time: Floats
    """Unix seconds, NaN where unknown"""


class _Column(NamedTuple):
    rows: array[int]
    values: array[float]


class RecordTable:
    """The record of a run as it is read."""

    def __init__(self, name: str, tool: str, origin: str) -> None:
        """
        Args:
            name: of the run; untrusted.
            tool: short name, as `wandb`.
            origin: what was read, as `Lightning's metrics.csv`.
        """
        self.name, self.tool, self.origin = name, tool, origin
        self.config: dict[str, Any] = {}
        self.start_time: float | None = None
        """Unix seconds; None: at the first row"""
        self.better: dict[str, Direction] = {}
        """what the tool says of metrics, by its names"""
        self.best_metric = ""
        """the metric that the tool's best checkpoint follows, by its name"""
        self.totals: dict[str, float] = {}
        """at the end, by axis"""
        self.end_reason = ""
        """why the record ends before the run should"""
        self.remarks: list[str] = []
        self.left_out: Counter[str] = Counter()
        """what is no number, by kind, such as `image`"""
        self._without_number: Counter[str] = Counter()
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, _Column] = {}
        self._restarts: list[tuple[int, int]] = []
        self._n_values = self._n_infinite = self._n_superseded = 0
        self._n_repeats: Counter[str] = Counter()

    def add(self, step: Any, values: Mapping[str, Any], time: Any = None) -> None:
        """Add what was measured at a step; neither needs to be what it should.

        Raises:
            ConfigError: there are more values or metrics than are read.
        """
        row = len(self._steps)
        self._steps.append(_step_number(step))
        seconds = number_of(time)
        is_time = seconds is not None and 0 < seconds < LAST_TIME
        self._times.append(seconds if seconds is not None and is_time else math.nan)
        for name, value in values.items():
            number = number_of(value)
            if number is not None:
                self._add_number(name, number, row)
            elif isinstance(value, Mapping) and isinstance(kind := value.get("_type"), str):
                self.left_out[shorten_text(kind, 40)] += 1
            else:
                self._without_number[name] += 1

    def _add_number(self, name: str, number: float, row: int) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) == MAX_METRICS or len(name) > MAX_NAME:
                raise ConfigError.of(
                    f"{self.origin}: more than {MAX_METRICS:,} metrics, or a name of more than {MAX_NAME} characters"
                )
            column = self._columns[name] = _Column(array("q"), array("d"))
        column.rows.append(row)
        column.values.append(number)
        self._n_infinite += not math.isfinite(number)
        self._n_values += 1
        if self._n_values > MAX_VALUES:
            raise ConfigError.of(f"{self.origin}: more than {MAX_VALUES:,} values")

    def restart(self, step: int) -> None:
        """Leave out what was added so far of this step and later ones: the run went back."""
        self._restarts.append((len(self._steps), step))

    def use_step(self, names: Sequence[str]) -> None:
        """Take the steps from the first of these metrics that most rows have, instead of the tool's own."""
        for name in names:
            column = self._columns.get(name)
            if column is not None and 2 * len(column.rows) > len(self._steps):
                values = np.frombuffer(column.values)
                is_step = (values >= 0) & (values <= MAX_STEP) & (values == np.floor(values))
                steps = np.full(len(self._steps), NO_STEP, np.int64)
                rows = np.frombuffer(column.rows, np.int64)
                steps[rows[is_step]] = values[is_step].astype(np.int64)
                self._steps = array("q", steps.tobytes())
                del self._columns[name]
                self.remarks.append(f"steps are those of {name}")
                return

    def curves(self) -> dict[str, RecordedCurve]:
        """Return the metrics that have a value at a step, by their names; call it once.

        Of several values at a step the last one counts.
        """
        steps = np.array(self._steps, np.int64)
        for row_count, step in self._restarts:
            is_superseded = steps[:row_count] >= step
            steps[:row_count][is_superseded] = NO_STEP
            self._n_superseded += int(is_superseded.sum())
        times = np.array(self._times, np.float64)
        curves: dict[str, RecordedCurve] = {}
        for name, column in self._columns.items():
            rows = np.frombuffer(column.rows, np.int64)
            order = np.argsort(steps[rows], kind="stable")
            at = steps[rows][order]
            has_step = at != NO_STEP
            is_last = has_step & np.append(at[1:] != at[:-1], True)
            values = np.frombuffer(column.values)[order]
            if is_last.any():
                curve = RecordedCurve(at[is_last], values[is_last], times[rows[order]][is_last])
                curves[name] = curve
                is_earlier = has_step & ~is_last
                later_values = curve.value[np.searchsorted(curve.step, at[is_earlier])]
                is_same = np.isclose(values[is_earlier], later_values, 0, 0, equal_nan=True)
                self._n_repeats[name] = int(np.count_nonzero(~is_same))
        return curves

    def notes(self, axes: Collection[str] = ()) -> Iterator[str]:
        """Yield once what was left out or is odd, after `curves`; `axes`: metrics that are places, not measurements."""
        no_step = int(np.count_nonzero(np.array(self._steps) == NO_STEP))
        names = [
            shorten_text(name, 40) for name, _ in self._without_number.most_common(_SHOWN_NAMES)
        ]
        counts = [
            (no_step, "row{s} without a step left out"),
            (self._n_superseded, "row{s} from before a restart left out"),
            (
                sum(n for name, n in self._n_repeats.items() if name not in axes),
                "value{s} left out, for a later one at the same step",
            ),
            (
                self._without_number.total(),
                f"value{{s}} without a number left out: {', '.join(names)}",
            ),
            *((count, f"{kind}{{s}} left out") for kind, count in self.left_out.items()),
            (self._n_infinite, "NaN or infinite value{s} kept"),
        ]
        yield from self.remarks
        if self.end_reason:
            yield self.end_reason
        for count, text in counts:
            if count:
                yield f"{count:,} {text.replace('{s}', '' if count == 1 else 's')}"


def number_of(value: Any) -> float | None:
    """Return a number, also of its text; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _step_number(value: Any) -> int:
    """Return a step; `NO_STEP` for what is none."""
    number = number_of(value)
    if number is None or not 0 <= number <= MAX_STEP or number != math.floor(number):
        return NO_STEP
    return int(number)
