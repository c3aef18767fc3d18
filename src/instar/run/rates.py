"""Factors of learning rates that follow the size of the model, so that the best rate of a small one is that of a large one.

**Width** (`optimizer.lr_base_width`): the spectral norm of an update is to be proportional to √(fan_out / fan_in)
(arXiv 2310.17813, condition 1). This gives the rates of µP (arXiv 2203.03466, table 3): AdamW's updates of a matrix have a
norm of about √(fan_in · fan_out), and need 1 / fan_in; those of SGD fan_out / fan_in; Muon's have a norm of 1, times what
it scales them by itself.

**Depth** (`optimizer.lr_base_depth`): L blocks together are to change the residual stream by as much at every L, as with
CompleteP (arXiv 2505.01618, α = 1), whose blocks add 1 / L of what they compute. Here that factor is part of the
parameters that write the stream. Steps of AdamW and Muon do not depend on the scale of a gradient, so that those
parameters need 1 / L, and all others keep their rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from instar.config.schema import OptimizerConfig
from instar.growth.axes import factors_of
from instar.models.lora import is_adapter
from instar.models.shape import Growable, Parameter, axis_size, layer_of, passes_of, streams_of

Update = Literal["adamw", "sgd", "muon"]


def rate_factors(
    arch: Growable, began: Growable, config: OptimizerConfig, update: Update
) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, 1 at the base width and depth.

    The base of widths is a model with the proportions of `began` and a residual stream of `lr_base_width` channels. Token
    tables are inputs, whose rows AdamW updates alike at every width; so is a table that is the head too. Adapters
    have a scale of their own.

    Args:
        arch: the present shape.
        began: that of step 0.

    Raises:
        ValueError: the model names no residual stream, or has no blocks, so that it has no width or depth.
    """
    streams = streams_of(began)
    if config.lr_base_width is not None and not streams:
        raise ValueError(
            "optimizer.lr_base_width is the width of the residual stream, and this model names none: give its shape "
            "`streams`, or leave it out"
        )
    if config.lr_base_depth is not None and not (streams and "layers" in began.sizes()):
        raise ValueError(
            "optimizer.lr_base_depth is the number of blocks that write the residual stream, and this model names no "
            "stream or no axis `layers`: name them in its shape, or leave it out"
        )
    table = {name: entry for name, entry in arch.parameters().items() if not is_adapter(name)}
    factors = dict.fromkeys(arch.parameters(), 1.0)
    if config.lr_base_width is not None:
        ratio = _ratios(arch, began.sizes(), config.lr_base_width / began.sizes()[streams[0]])
        for name, entry in table.items():
            factors[name] *= _width_factor(entry, ratio, update)
    if config.lr_base_depth is not None:
        for name in _stream_writers(table, streams):
            factors[name] *= config.lr_base_depth / len(passes_of(arch))
    return factors


def _stream_writers(table: Mapping[str, Parameter], streams: tuple[str, ...]) -> set[str]:
    """Return the parameters whose rate decides how much the blocks change a residual stream: the gains of norms
    after the branches in blocks with such norms, else what writes the stream."""
    writers = {
        name: entry
        for name, entry in table.items()
        if layer_of(name) is not None and entry.writes in streams
    }
    normed = {layer_of(name) for name, entry in writers.items() if entry.kind == "post_norm"}
    return {
        name
        for name, entry in writers.items()
        if layer_of(name) not in normed or entry.kind == "post_norm"
    }


def _width_factor(entry: Parameter, ratio: Callable[[str | None], float], update: Update) -> float:
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
        {factor for axis in axes if axis for factor in factors_of(axis)}
        for axes in ((entry.reads for entry in table), (entry.writes for entry in table))
    )
    widths = {
        axis: first_sizes[axis]
        for axis in ((read & output_axes) | {"kv_heads"}) & first_sizes.keys()
    }

    def ratio(axis: str | None) -> float:
        if axis is None or not widths.keys() & set(factors_of(axis)):
            return 1.0
        return axis_size(now, axis) / axis_size({**now, **widths}, axis) / share

    return ratio
