"""What user code logs beside loss and metrics: numbers, images and tables.

`recording` says where it goes while a step, an evaluation or a hook runs; elsewhere, as in the proof
of a growth operation, it goes nowhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
from torch import Tensor

from instar.config.errors import shorten_text
from instar.distributed.agree import Json, gather
from instar.distributed.all_reduce import exact_sum, nearest_float, parse_sum
from instar.distributed.world import World
from instar.record.events import TRAIN_METRICS, Event, ImageEvent, TableEvent, Warn
from instar.record.media import save_image
from instar.tasks.images import Pixels, to_pixels

Reduction = Literal["mean", "sum", "min", "max", "last"]
Cell = str | int | float | bool | None

MOST_NAMES, MOST_IMAGES, MOST_TABLES = 200, 16, 16
"""names of numbers, of images and of tables until they are recorded"""
MOST_ROWS, MOST_COLUMNS, LONGEST_TEXT = 200, 30, 500
_Sums = tuple[Reduction, str, str, str]
"""reduction, exact sums of values and of weights, and the decisive value"""
_SUM = re.compile(r"-?\d{1,4000}(/[1-9]\d{0,3999})?|nan|-?inf")
_NAME = re.compile(r"[A-Za-z][\w./-]{0,99}")
_MEASURED = ("val/", "test/", "grad_norm/", "update_ratio/")


@dataclass(frozen=True)
class TableData:
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass
class _Number:
    """What one name was given on this rank."""

    reduce: Reduction
    values: list[Tensor | float | Fraction] = field(default_factory=list)
    """for a mean, multiplied by the weights"""
    weights: list[float | Fraction] = field(default_factory=list)


class Logged:
    """Collects what user code logs on one rank until it is recorded."""

    def __init__(self, world: World, *, of_training: bool = False) -> None:
        """
        Args:
            of_training: whether it is logged in training steps, where some names are taken.
        """
        self.world, self.of_training = world, of_training
        self.weight = 1.0
        """of the next number in its mean: samples of the micro-batch; 0: log nothing"""
        self.images: dict[str, Pixels] = {}
        """the first of each name, on rank 0"""
        self.tables: dict[str, TableData] = {}
        """the first of each name, on rank 0"""
        self._numbers: dict[str, _Number] = {}

    def number(self, name: str, value: Tensor | float, reduce: Reduction = "mean") -> None:
        """Add a number, or one number per sample, [samples].

        Raises:
            ValueError: the name, the value or the reduction is not possible.
        """
        _check_name(name, self._numbers, MOST_NAMES)
        if self.of_training and name.startswith(_MEASURED):
            raise ValueError(
                f"{name!r} cannot be logged in training: names with {', '.join(_MEASURED)} are those of what is "
                "measured on held-out samples and by layer"
            )
        entry = self._numbers.setdefault(name, _Number(reduce))
        if reduce not in get_args(Reduction) or reduce != entry.reduce:
            raise ValueError(
                f"log({name!r}): reduce is {reduce!r}; it must be one of "
                f"{', '.join(get_args(Reduction))}, the same in each call"
            )
        weight = self.weight
        if isinstance(value, Tensor):
            value = value.detach().double()
            if value.ndim:
                value, weight = _reduce(value, reduce), float(value.numel())
            elif reduce == "mean":
                value = value * weight
        else:
            value = float(value) * weight if reduce == "mean" else float(value)
        if self.weight and weight:
            entry.values.append(value)
            entry.weights.append(weight)

    def image(self, name: str, image: object) -> None:
        """Add an image; see `to_pixels`."""
        _check_name(name, self.images, MOST_IMAGES)
        if self.weight and self.world.is_main and name not in self.images:
            self.images[name] = to_pixels(name, image)

    def table(self, name: str, rows: object, columns: Sequence[str] | None = None) -> None:
        """Add a table; see `to_table`."""
        _check_name(name, self.tables, MOST_TABLES)
        if self.weight and self.world.is_main and name not in self.tables:
            self.tables[name] = to_table(name, rows, columns)

    def numbers(self) -> dict[str, float]:
        """Return the numbers reduced over all calls and ranks, rounded once. A collective.

        Raises:
            ValueError: ranks reduce a name differently.
        """
        by_name: dict[str, list[_Sums]] = {}
        for state in cast(list[dict[str, _Sums]], gather(self.world, self.state())):
            for name, sums in state.items():
                by_name.setdefault(name, []).append(sums)
        return {name: _reduced_over_ranks(name, parts) for name, parts in by_name.items()}

    def clear(self) -> None:
        """Forget everything, because it is recorded."""
        self._numbers, self.images, self.tables = {}, {}, {}

    def state(self) -> dict[str, Json]:
        """Return this rank's numbers as JSON: the reduction, exact sums, and the value that decides
        a minimum, maximum or last value."""
        return {
            name: [
                number.reduce,
                *(str(exact_sum(_plain(part))) for part in (number.values, number.weights)),
                repr(_decisive(number)),
            ]
            for name, number in self._numbers.items()
            if number.values
        }

    def restore(self, saved_sums: object) -> None:
        """Restore the `state` of each rank; of another number of ranks, all of them on rank 0.

        Raises:
            ValueError: this is no `state`.
        """
        states = msgspec.convert(saved_sums, list[dict[str, _Sums]])
        if len(states) == self.world.size:
            states = [states[self.world.rank]]
        elif not self.world.is_main:
            states = []
        for state in states:
            for name, (reduce, values, weights, decisive) in state.items():
                number = self._numbers.setdefault(name, _Number(reduce))
                if reduce == "last" and number.values:
                    continue  # that of rank 0 counts, see `_reduced_over_ranks`
                is_sum = reduce in ("mean", "sum")
                number.values.append(_parse(values) if is_sum else float(decisive))
                number.weights.append(_parse(weights))


def _reduced_over_ranks(name: str, parts: Sequence[_Sums]) -> float:
    (reduce, *other_reductions) = {part[0] for part in parts}
    if other_reductions:
        raise ValueError(
            f"log({name!r}): ranks reduce it differently, by {reduce} and {other_reductions[0]}"
        )
    values, weights = (exact_sum([parse_sum(part[n]) for part in parts]) for n in (1, 2))
    decisive = [float(part[3]) for part in parts]
    match reduce:
        case "mean":
            return nearest_float(values / weights)
        case "sum":
            return nearest_float(values)
        case "min" | "max":
            return _extreme(decisive, reduce)
        case "last":
            return decisive[0]


def _decisive(number: _Number) -> float:
    values = [*map(nearest_float, _plain(number.values))]
    return _extreme(values, number.reduce) if number.reduce in ("min", "max") else values[-1]


def _extreme(values: Sequence[float], reduce: Reduction) -> float:
    """Return the smallest or the largest value; NaN if one is NaN."""
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if reduce == "min" else max(values)


_current: ContextVar[Logged | None] = ContextVar("logged", default=None)


@contextmanager
def recording(log_buffer: Logged | None) -> Iterator[None]:
    """Context manager: what user code logs goes to this buffer; a number counts once in its mean."""
    token = _current.set(log_buffer)
    try:
        with weighted(1.0):
            yield
    finally:
        _current.reset(token)


@contextmanager
def weighted(weight: float) -> Iterator[None]:
    """Context manager that sets the weight of a number in its mean; 0: log nothing."""
    log_buffer = _current.get()
    before = log_buffer.weight if log_buffer is not None else 0.0
    if log_buffer is not None:
        log_buffer.weight = weight
    try:
        yield
    finally:
        if log_buffer is not None:
            log_buffer.weight = before


def log(name: str, value: Tensor | float, *, reduce: Reduction = "mean") -> None:
    """Log a number, or a tensor [samples] with one for each sample of the batch.

    In training it is recorded with the loss, every `record.log_interval` steps; in an evaluation
    with the metrics, as `val/<name>`.

    Args:
        reduce: over calls, steps and ranks: mean (a number counts as often as the batch has
            samples), sum, min, max, or last (the last call on rank 0).
    """
    if (log_buffer := _current.get()) is not None:
        log_buffer.number(name, value, reduce)


def log_image(name: str, pixels: object) -> None:
    """Log an image of rank 0. Each record has the first image of a name.

    Args:
        pixels: a tensor or an array, [height, width], [height, width, channels] or [channels, height, width] with 1, 3 or
            4 channels, uint8 or floats from 0 to 1; an image of PIL; or a figure of matplotlib, which stays open.
    """
    if (log_buffer := _current.get()) is not None:
        log_buffer.image(name, pixels)


def log_table(name: str, rows: object, columns: Sequence[str] | None = None) -> None:
    """Log a table of rank 0: a list of mappings by column, or of rows with `columns`. Each record
    has the first table of a name."""
    if (log_buffer := _current.get()) is not None:
        log_buffer.table(name, rows, columns)


def to_table(name: str, rows: object, columns: Sequence[str] | None = None) -> TableData:
    """Convert to a table of at most `MOST_ROWS` rows, with texts of `LONGEST_TEXT` characters.

    Raises:
        ValueError: this is no table, or it has too many columns.
    """
    if isinstance(rows, str | Mapping) or not isinstance(rows, Sequence):
        raise ValueError(f"log_table({name!r}): rows must be a list, not {type(rows).__name__}")
    table_rows = list(rows[:MOST_ROWS])
    if table_rows and all(isinstance(row, Mapping) for row in table_rows):
        heads = list(columns or dict.fromkeys(str(key) for row in table_rows for key in row))
        table_rows = [[row.get(head) for head in heads] for row in table_rows]
    elif columns is None:
        raise ValueError(f"log_table({name!r}): rows that are no mappings need columns=[…]")
    else:
        heads = list(columns)
    if len(heads) > MOST_COLUMNS or any(len(row) != len(heads) for row in table_rows):
        raise ValueError(
            f"log_table({name!r}): {len(heads)} columns; each row must have a value for each, and "
            f"there are at most {MOST_COLUMNS}"
        )
    return TableData(
        tuple(_short(str(head)) for head in heads),
        tuple(tuple(_cell(value) for value in row) for row in table_rows),
    )


def _cell(value: Any) -> Cell:
    """Convert a value: numbers of NumPy and torch to those of Python, others to text."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    return value if isinstance(value, int | float | None) else _short(str(value))


def _short(text: str) -> str:
    return shorten_text(text, LONGEST_TEXT)


def _check_name(name: object, names: Mapping[str, object], limit: int) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in TRAIN_METRICS:
        raise ValueError(
            f"{name!r} cannot be logged under this name: a name begins with a letter, has at most "
            f"100 letters, digits, _, -, . and /, and is none of {', '.join(TRAIN_METRICS)}"
        )
    if name not in names and len(names) >= limit:
        raise ValueError(f"{name!r} is not logged: there are {limit} names already")


def _reduce(values: Tensor, reduce: Reduction) -> Tensor:
    match reduce:
        case "mean" | "sum":
            return values.sum()
        case "min":
            return values.min()
        case "max":
            return values.max()
        case "last":
            return values.reshape(-1)[-1]


def _parse(text: str) -> float | Fraction:
    if not _SUM.fullmatch(text):
        raise ValueError(f"not a sum: {text[:40]!r}")
    return parse_sum(text)


def _plain(values: Sequence[Tensor | float | Fraction]) -> list[float | Fraction]:
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def media_events(
    folder: Path,
    split: str,
    step: int,
    images: Mapping[str, Pixels],
    tables: Mapping[str, TableData],
) -> Iterator[Event]:
    """Yield an event for each; a warning for an image that cannot be saved in the run's folder."""
    for name, pixels in images.items():
        try:
            path = save_image(folder, split, step, pixels)
        except OSError as error:
            yield Warn(message=f"the image {name} is not saved: {error}", step=step)
            continue
        height, width = pixels.shape[:2]
        yield ImageEvent(step=step, name=name, split=split, path=path, width=width, height=height)
    for name, table in tables.items():
        yield TableEvent(step=step, name=name, split=split, columns=table.columns, rows=table.rows)
