"""Names that tools give the same metrics, and which of a record's become the loss, the held-out loss and the axes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from instar.config.errors import ConfigError, nearest_hint
from instar.extensions.foreign.records.table import RecordedCurve
from instar.logs.read.columns import Ints

LOSS, VAL_LOSS = "loss", "val/loss"
LOSSES = (
    *("loss", "train/loss", "train_loss", "loss/train", "train_loss_step", "train/loss_step"),
    *("train/train_loss", "training_loss", "training/loss", "loss_step", "losses/train"),
    *("loss_metrics/global_avg_loss", "train_loss_epoch", "train/loss_epoch", "loss_epoch"),
)
"""names of the training loss, in lower case; the first one that a record has counts"""
VAL_LOSSES = (
    *("val/loss", "eval/loss", "eval_loss", "val_loss", "loss/val", "loss/eval", "val/val_loss"),
    *("validation_loss", "validation/loss", "loss/validation", "valid_loss", "valid/loss"),
    *("validation_metrics/loss", "loss/valid", "losses/val", "val_loss_epoch", "dev_loss"),
    "val_loss/dataloader_idx_0",
)
"""the same of the loss on held-out samples"""
STEPS = ("trainer/global_step", "train/global_step", "global_step", "step", "iter")
"""metrics that tools log in place of their own count of rows"""
AXES: Mapping[str, tuple[str, ...]] = {
    "epoch": ("epoch", "train/epoch", "at/epoch"),
    "tokens": (
        *("num_input_tokens_seen", "train/num_input_tokens_seen", "n_tokens_seen"),
        *("at/tokens", "tokens"),
    ),
    "flops": ("total_flos", "train/total_flos", "at/flops"),
    "samples": ("at/samples",),
    "active_s": ("at/active_s",),
    "wall_s": ("_runtime", "at/wall_s"),
}
"""names of what is no metric but a place in the run, by axis"""
_FRACTIONS = ("mfu", "data_wait")
"""metrics that are shown as percentages, which other tools may have recorded as such"""
_LIMIT, _COUNT_LIMIT = 1e300, 2.0**62
"""of places on axes, and on those that count"""
_SHOWN = 12
"""names in a line"""
_FIELDS = {
    "lr": re.compile(r"((train|optimizer)[/_])?(lr|learning_rate)|lr[-/]\w+(/pg1)?", re.I),
    "grad_norm": re.compile(r"(train[/_])?(grad_norm|gradient_norm|grad_2(\.0)?_norm_total)", re.I),
}
_SPLITS = {
    "val": re.compile(
        r"(?:val|eval|valid|validation)[/_](.+)|(.+)/(?:val|eval|valid|validation)", re.I
    ),
    "test": re.compile(r"test[/_](.+)|(.+)/test", re.I),
}


class Naming(NamedTuple):
    """What becomes of the metrics of a record."""

    metrics: dict[str, str]
    """their names in the imported run, by the tool's"""
    axes: dict[str, str]
    """the tool's names by axis"""

    def source(self, name: str) -> str:
        """Return the tool's name of a metric; empty if it has none."""
        return next((source for source, n in self.metrics.items() if n == name), "")

    def text(self) -> str:
        """Return what became of the metrics in one line."""
        losses = [
            f"{label} ← {self.source(name) or 'none'}"
            for name, label in ((LOSS, "loss"), (VAL_LOSS, "val"))
        ]
        more = [
            name if name == source else f"{name} ← {source}"
            for source, name in self.metrics.items()
            if name not in (LOSS, VAL_LOSS)
        ]
        axes = [name if name == axis else f"{axis} ← {name}" for axis, name in self.axes.items()]
        parts = [", ".join(losses)]
        if more:
            metrics = f"{len(more)} other metric{'' if len(more) == 1 else 's'} kept"
            parts.append(f"{metrics}: {', '.join(more[:_SHOWN])}{', …' * (len(more) > _SHOWN)}")
        if axes:
            parts.append(f"axes: {', '.join(axes)}")
        return "; ".join(parts)


def name_metrics(
    curves: Mapping[str, RecordedCurve], tool: str, loss: str | None = None, val: str | None = None
) -> Naming:
    """Decide what becomes of the metrics of a record.

    Args:
        tool: its short name, which precedes a metric's where that means something else here.
        loss, val: the losses, if they are not those of the tables above.

    Raises:
        ConfigError: the record has no metric of such a name; suggests one.
    """
    chosen_loss = _choose(curves, LOSSES, loss, "--loss")
    chosen_val = _choose(curves, VAL_LOSSES, val, "--val")
    if chosen_loss and chosen_loss == chosen_val:
        raise ConfigError.of(f"{chosen_loss!r} cannot be both losses", "--val", "name another one")
    names = {chosen_loss: LOSS, chosen_val: VAL_LOSS}
    names.pop("", None)
    loss_steps = [curves[name].step for name in names]
    axes = dict(_axes(curves, loss_steps or [curve.step for curve in curves.values()]))
    names_in_use = {*names.values()}
    for name, curve in curves.items():
        if name not in names and name not in axes.values():
            behind_tool = (f"{tool}/" * number + name for number in count(1))
            candidates = chain(_candidates(name, curve), behind_tool)
            names[name] = next(n for n in candidates if n not in names_in_use)
            names_in_use.add(names[name])
    return Naming(names, axes)


def _choose(
    curves: Mapping[str, RecordedCurve], table: Iterable[str], name: str | None, option: str
) -> str:
    """Return the metric that is a loss, by its name in the record; empty if there is none."""
    if name is None:
        by_lower = {metric.lower(): metric for metric in curves}
        return next((by_lower[lower] for lower in table if lower in by_lower), "")
    if name not in curves:
        hint = nearest_hint(name, curves, f"there are {', '.join([*curves][:_SHOWN])}")
        raise ConfigError.of(f"there is no metric {name!r}", option, hint)
    return name


def _axes(
    curves: Mapping[str, RecordedCurve], loss_steps: Iterable[Ints]
) -> Iterator[tuple[str, str]]:
    """Yield axes and their metrics: recorded wherever a loss is, finite, and never falling."""
    steps = np.unique(np.concatenate([*loss_steps, np.empty(0, np.int64)]))
    for axis, names in AXES.items():
        for name in names:
            limit = _COUNT_LIMIT if axis in ("samples", "tokens") else _LIMIT
            if name in curves and _is_axis(curves[name], steps, limit):
                yield axis, name
                break


def _is_axis(curve: RecordedCurve, steps: Ints, limit: float) -> bool:
    values = curve.value
    is_complete = bool(np.isin(steps, curve.step).all())
    is_rising = bool(np.isfinite(values).all() and (np.diff(values) >= 0).all())
    return is_complete and is_rising and bool(values[0] >= 0 and values[-1] < limit)


def _candidates(name: str, curve: RecordedCurve) -> Iterator[str]:
    """Yield names that a metric may have, the best first."""
    for field, pattern in _FIELDS.items():
        if pattern.fullmatch(name):
            yield field
    for split, pattern in _SPLITS.items():
        if match := pattern.fullmatch(name):
            yield f"{split}/{match[match.lastindex or 0]}"
    finite_values = curve.value[np.isfinite(curve.value)]
    if name not in _FRACTIONS or np.abs(finite_values).max(initial=0.0) <= 1:
        yield name
