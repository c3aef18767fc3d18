"""What stands beside a chart: names of metrics with their units, and what the runs are."""

from __future__ import annotations

from collections.abc import Sequence

from instar.logs.reading.record import RunRecord
from instar.logs.reporting.stages import stages
from instar.record.amounts import count_text

_NAMES = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "mfu": "share of peak FLOPs (MFU)",
    "data_wait": "share of time waiting for data",
    "memory_bytes": "memory",
}
_SPLITS = {"val": "validation", "test": "test"}


def panel_label(metrics: Sequence[str], units: Sequence[str]) -> str:
    """The name of a y axis with its unit: `loss (nats per token)`."""
    different = list(dict.fromkeys(metrics))
    if len(different) == 1:
        return _with_unit(metric_text(different[0]), different[0], units)
    last = {metric.rpartition("/")[2] for metric in different}
    if len(last) == 1:
        return _with_unit(metric_text(last.pop()), different[0], units)
    return ", ".join(map(metric_text, different))


def metric_text(metric: str) -> str:
    """`validation loss` of `val/loss`."""
    split, _, rest = metric.partition("/")
    if split in _SPLITS and rest:
        return f"{_SPLITS[split]} {rest.replace('/', ' ')}"
    return _NAMES.get(metric, metric.replace("_", " ") if "/" not in metric else metric)


def curve_text(metric: str) -> str:
    """As `metric_text`, for a curve beside those of other splits: `training loss`."""
    return (
        metric_text(metric)
        if "/" in metric or metric in _NAMES
        else f"training {metric_text(metric)}"
    )


def subtitle(records: Sequence[RunRecord]) -> str:
    """The models: `2L/128d, 803k → 4L/128d, 1.33M parameters`."""
    shapes = list(dict.fromkeys(filter(None, map(_shapes, records))))
    return shapes[0] if len(shapes) == 1 else ""


def _shapes(record: RunRecord) -> str:
    every = [stage for stage in stages(record) if stage.model]
    if not every:
        return ""
    turns = [every[0]] if len(every) == 1 else [every[0], every[-1]]
    told = [
        stage.model + (f", {count_text(stage.parameters)}" if stage.parameters else "")
        for stage in turns
    ]
    return " → ".join(told) + (" parameters" if turns[-1].parameters else "")


def _with_unit(text: str, metric: str, units: Sequence[str]) -> str:
    different = set(units)
    if metric == "tokens_per_s":
        return " or ".join(f"{unit}s" for unit in sorted(different)) + " per second"
    if metric.rpartition("/")[2] == "loss" and different == {"token"}:
        return f"{text} (nats per token)"
    return text
