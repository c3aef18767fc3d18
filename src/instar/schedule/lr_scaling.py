"""Learning rates that follow the width, so that the best rate of a narrow model is that of a wide one.

The spectral norm of an update is to be proportional to √(fan_out / fan_in) (arXiv 2310.17813, condition 1). This
gives the rates of µP (arXiv 2203.03466, table 3): AdamW's updates of a matrix have a norm of about √(fan_in · fan_out), and
need 1 / fan_in; those of SGD fan_out / fan_in; Muon's have a norm of 1, times what it scales them by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from instar.models.lora import is_adapter
from instar.models.shape import Growable, Parameter, axis_size, streams_of

Update = Literal["adamw", "sgd", "muon"]


def rate_factors(
    arch: Growable, began: Growable, base_width: int, update: Update
) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, 1 at the base width.

    The base is a model with the proportions of `began` and a residual stream of `base_width` channels. Token
    tables are inputs, whose rows AdamW updates alike at every width; so is a table that is the head too. Adapters
    have a scale of their own.

    Args:
        arch: the present shape.
        began: that of step 0.

    Raises:
        ValueError: the model names no residual stream, so it has no width.
    """
    if not (streams := streams_of(began)):
        raise ValueError(
            "optimizer.lr_base_width is the width of the residual stream, and this model names none: give its shape "
            "`streams`, or leave it out"
        )
    ratio = _ratios(arch, began.sizes(), base_width / began.sizes()[streams[0]])
    return {
        name: 1.0 if is_adapter(name) else _factor(entry, ratio, update)
        for name, entry in arch.parameters().items()
    }


def _factor(entry: Parameter, ratio: Callable[[str | None], float], update: Update) -> float:
    inputs = ratio(entry.reads)
    if update == "adamw":
        return 1 / inputs
    outputs = ratio(entry.writes or entry.axes[-1]) if entry.axes else 1.0
    if update == "sgd":
        return outputs / inputs
    if entry.reads is None:
        return 1.0  # which Muon does not update
    rows, columns = entry.shape[-2:]
    before = rows / ratio(entry.axes[-2]), columns / ratio(entry.axes[-1])
    growth_of_ratio = max(1.0, rows / columns) / max(1.0, before[0] / before[1])
    return math.sqrt(outputs / inputs / growth_of_ratio)


def _ratios(
    arch: Growable, first_sizes: Mapping[str, int], share: float
) -> Callable[[str | None], float]:
    """Return a function from an axis to its size as a multiple of that in the base model; 1 unless it is a width,
    which tensors write and others read.

    Args:
        first_sizes: sizes at step 0.
        share: widths of the base model as a share of those.
    """
    now, table = arch.sizes(), arch.parameters().values()
    read, output_axes = (
        {factor for axis in axes if axis for factor in _factors(axis)}
        for axes in ((entry.reads for entry in table), (entry.writes for entry in table))
    )
    widths = {
        axis: first_sizes[axis]
        for axis in ((read & output_axes) | {"kv_heads"}) & first_sizes.keys()
    }

    def ratio(axis: str | None) -> float:
        if axis is None or not widths.keys() & set(_factors(axis)):
            return 1.0
        return axis_size(now, axis) / axis_size({**now, **widths}, axis) / share

    return ratio


def _factors(axis: str) -> list[str]:
    return axis.replace("+", "*").split("*")
