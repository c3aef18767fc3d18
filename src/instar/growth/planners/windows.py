"""Operations on the windows of attention: which tokens the layers of a GPT attend to; no tensor changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from instar.growth.plan import Grown, GrowthError, GrowthPlan
from instar.growth.values import format_list, make_check, without_x
from instar.models.architecture import Architecture
from instar.models.shape import windows_text

Windows = tuple[int | None, ...]


def is_window(value: Any) -> None:
    """A size for all layers or none, or `{layers: [0, 2], size: 16}`, in which it may be null too."""
    if not isinstance(value, Mapping):
        _is_size(value)
        return
    if value.keys() != {"layers", "size"}:
        raise GrowthError(f"needs a size, null, or {{layers: …, size: …}}, not {value!r}")
    _are_layers(value["layers"])
    _is_size(value["size"])


def set_window(
    arch: Architecture, value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[Architecture, GrowthPlan]:
    """Let a token of some layers see itself and the `size` − 1 tokens before it, or all of them; lossy."""
    is_for_some = isinstance(value, Mapping)
    size = value["size"] if is_for_some else value
    layers = value["layers"] if is_for_some else range(arch.n_layer)
    if unknown_layers := [layer for layer in layers if layer >= arch.n_layer]:
        raise GrowthError(
            f"there is no layer {unknown_layers[0]}: layers are 0 to {arch.n_layer - 1}"
        )
    windows = list(_windows(arch))
    for layer in layers:
        windows[layer] = size
    return _with_windows(arch, windows)


def change_window(
    arch: Architecture, value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[Architecture, GrowthPlan]:
    """Multiply all windows; halves are rounded up."""
    if not arch.windows:
        raise GrowthError("no layer has a window: set_window sets one")
    factor = without_x(value)
    return _with_windows(
        arch, [window and max(1, math.floor(window * factor + 0.5)) for window in arch.windows]
    )


def _windows(arch: Architecture) -> Windows:
    return arch.windows or (None,) * arch.n_layer


def _with_windows(
    arch: Architecture, windows: Sequence[int | None]
) -> tuple[Architecture, GrowthPlan]:
    before = _windows(arch)
    changed = [at for at, (was, now) in enumerate(zip(before, windows, strict=True)) if was != now]
    if not changed:
        text = f"windows of {windows_text(arch.windows)}" if arch.windows else "no windows"
        raise GrowthError(f"the model has {text} already")
    largest = max(window or 0 for window in windows)
    if largest >= arch.context:
        raise GrowthError(
            f"a window of {largest:,} is not shorter than the context of {arch.context:,}: choose less, or "
            "set_window: null to see all of it"
        )
    new = replace(arch, windows=tuple(windows) if largest else ())
    notes = (f"layers {format_list(changed)}",)
    return new, GrowthPlan({name: Grown(name) for name in new.parameters()}, "lossy", notes=notes)


_is_size = make_check(
    lambda value: value is None or (type(value) is int and value > 0),
    "needs a whole number of tokens above 0, or null for no window",
)
_are_layers = make_check(
    lambda value: (
        isinstance(value, list | tuple)
        and value != []
        and all(type(layer) is int and layer >= 0 for layer in value)
        and len({*value}) == len(value)
    ),
    "layers: must be a list of different layers, such as [0, 2]",
)
