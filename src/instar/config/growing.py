"""The presets `moult` and `family`: the config names the final shape, and they make of it the shape to
begin with and a schedule of growth.

They are expanded once, after all layers of a config are merged. The result names them no longer, so
that whatever reads it later (a run's own `run.yaml`, a rank, a branch) finds an ordinary schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from instar.config.budget import Budget, parse_budget
from instar.config.errors import ConfigProblem
from instar.config.language import LanguageConfig
from instar.config.schema import RunConfig

MOULT, FAMILY = "moult", "family"

DIVISORS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    MOULT: ((4, 2), (2,), (3,)),
    FAMILY: ((4, 2), (2,), (3,)),
}
"""What the layers of the final shape are divided by for the sizes before it: the first row in which
all come out whole. Doubling twice needs less compute than a factor of 4 at once; from an eighth of the layers
on copies do not make up for the start (docs/growth-study.md)."""
GROWN_AT = 0.7
"""Share of the budget at which the final size begins; growths before it are spread evenly. The decay of
the rate, whose share is in the presets' files, must not begin earlier."""

_COUNTED = ("steps", "tokens", "samples")


def presets_in(config: RunConfig) -> list[str]:
    """Return which of these presets a config selects."""
    return [name for name in dict.fromkeys(_presets(config)) if name in DIVISORS]


def sizes(preset: str, layers: int) -> tuple[int, ...]:
    """Return the default numbers of layers of the sizes of a preset, the last being `layers`; only
    this one if it cannot be divided."""
    for divisors in DIVISORS[preset] if layers else ():
        if all(layers % divisor == 0 for divisor in divisors):
            return (*(layers // divisor for divisor in divisors), layers)
    return (layers,)


def stage_starts(count: int) -> tuple[float, ...]:
    """Return the shares of the budget at which each of `count` sizes but the first begins."""
    return tuple(round(GROWN_AT * n / (count - 1), 6) for n in range(1, count))


def expansion(config: RunConfig) -> dict[str, Any]:
    """Return the values of dotted keys that the selected preset makes of a config without
    `conflicts`; empty if none is selected, or if a budget is invalid."""
    if not presets_in(config) or _budgets(config) is None:
        return {}
    assert isinstance(config, LanguageConfig)
    (preset,) = presets_in(config)
    layers = _sizes(config, preset)
    return left_out(config) | {
        "model.n_layer": layers[0],
        "schedule": _schedule(config, layers, branches=preset == FAMILY),
    }


def left_out(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config that no longer names these presets."""
    other_presets = [name for name in _presets(config) if name not in DIVISORS]
    return {"preset": other_presets, "sizes": []}


def _schedule(
    config: LanguageConfig, layers: tuple[int, ...], *, branches: bool
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for (before, after), share in zip(pairwise(layers), stage_starts(len(layers)), strict=True):
        when = {"at_fraction": share}
        if branches:
            iters = _branch_iters(config, share)
            entries.append({"name": "branch", "value": f"{before}L", "iters": iters, "when": when})
        entries.append({"name": "stack_layers", "value": after // before, "when": when})
    return entries


def _branch_iters(config: LanguageConfig, share: float) -> int:
    """Return the steps of a branch that begins at a share of the budget: in all of them its rate falls,
    and they are as large a share of its steps, with those of the trunk, as the trunk's decay is."""
    steps = _steps(config)
    assert steps is not None
    decay = config.learning_rate.decay_fraction
    return max(1, round(math.ceil(share * steps) * decay / (1 - decay)))


def _steps(config: LanguageConfig) -> int | None:
    """Return the step at which the counted budgets end a run; None if data must be counted for it."""
    batch = config.train.batch_size * config.train.gradient_accumulation_steps
    per_step = {"steps": 1, "samples": batch, "tokens": batch * config.context}
    budgets = _budgets(config) or []
    if any(budget.kind == "epochs" for budget in budgets):
        return None
    ends = [math.ceil(b.amount / per_step[b.kind]) for b in budgets if b.kind in _COUNTED]
    return min(ends, default=None)


def preset_conflicts(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield what keeps the selected preset from being expanded."""
    names = presets_in(config)
    if config.sizes and not names:
        text = "sizes says nothing without a preset that grows"
        yield ConfigProblem(("sizes",), text, "add preset: moult or preset: family")
    if len(names) > 1:
        text = "presets moult and family cannot be combined"
        yield ConfigProblem(("preset",), text, "family is moult with a branch before each growth")
    elif names:
        yield from _conflicts(config, *names)


def _conflicts(config: RunConfig, preset: str) -> Iterator[ConfigProblem]:
    what = f"preset {preset}"
    if not isinstance(config, LanguageConfig):
        text = f"{what} grows GPTs of task language, not models of task {config.task}"
        yield ConfigProblem(("preset", "task"), text, "leave it out, and write a schedule")
        return
    if config.starts_from is not None:
        text = f"{what} begins with a smaller model, not with the weights of model.from"
        yield ConfigProblem(("model.from", "preset"), text, "leave one of them out")
    if config.schedule:
        text = f"{what} makes the schedule, and the config has its own"
        hint = "leave one of them out; schedule: [] trains the final shape without growth"
        yield ConfigProblem(("schedule", "preset"), text, hint)
        return  # whether n_layer is the first shape or the final one is not known
    yield from _of_sizes(config, preset)
    yield from _of_budget(config, preset)
    yield from _of_rate(config, preset)


def _of_sizes(config: LanguageConfig, preset: str) -> Iterator[ConfigProblem]:
    layers, stage_layers = config.model.n_layer, config.sizes
    keys = ("model.n_layer", "sizes", "preset")
    if not stage_layers:
        if len(sizes(preset, layers)) < 2:
            near = [n for n in (layers - 1, layers + 1) if len(sizes(preset, n)) > 1]
            hint = f"write {' or '.join(map(str, near)) or 4}, or the sizes, each a multiple of the one before"
            text = f"preset {preset}: n_layer {layers} has no half and no third to begin with"
            yield ConfigProblem(keys, text, hint)
    elif stage_layers[-1] != layers:
        text = f"sizes ends with {stage_layers[-1]} layers, and model.n_layer, the final shape, is {layers}"
        yield ConfigProblem(("sizes", *keys), text, "the last size is the final shape")
    elif len(stage_layers) < 2 or any(b % a or a == b for a, b in pairwise(stage_layers)):
        text = f"sizes must be two or more, each a multiple of the one before, got {list(stage_layers)}"
        hint = "growth is by copies of all layers, e.g. [2, 4, 8]"
        yield ConfigProblem(("sizes", *keys), text, hint)


def _of_budget(config: LanguageConfig, preset: str) -> Iterator[ConfigProblem]:
    budgets, keys = _budgets(config), ("train.until", "preset")
    if budgets is None:
        return  # an invalid budget is reported elsewhere
    kinds = {budget.kind for budget in budgets}
    if not kinds & {*_COUNTED, "epochs"}:
        text = f"preset {preset} grows at a share of the budget, and only time or the loss ends this run"
        yield ConfigProblem(keys, text, "add a number of steps or tokens, e.g. 2000it")
    elif preset == FAMILY and _steps(config) is None:
        text = f"preset {preset} counts the steps of each size, which epochs do not tell"
        yield ConfigProblem(keys, text, "write steps, tokens or samples, e.g. 2000it")


def _of_rate(config: LanguageConfig, preset: str) -> Iterator[ConfigProblem]:
    rate, steps = config.learning_rate, _steps(config)
    begin = {"wsd": 1 - rate.decay_fraction, "constant": 1.0}.get(rate.shape, 0.0)
    if rate.lr_decay_iters is not None and steps is not None:
        begin *= rate.lr_decay_iters / steps
    if begin < GROWN_AT:
        text = f"preset {preset} grows at {GROWN_AT:g} of the budget, and the rate decays from {begin:.3g} on"
        hint = f"write shape: wsd with a decay_fraction of at most {1 - GROWN_AT:g}, or list {preset} as the last preset"
        keys = ("decay_fraction", "shape", "lr_decay_iters")
        yield ConfigProblem((*(f"learning_rate.{key}" for key in keys), "preset"), text, hint)


def _sizes(config: LanguageConfig, preset: str) -> tuple[int, ...]:
    return config.sizes or sizes(preset, config.model.n_layer)


def _budgets(config: RunConfig) -> list[Budget] | None:
    try:
        return [parse_budget(text) for text in config.train.until]
    except ValueError:
        return None


def _presets(config: RunConfig) -> tuple[str, ...]:
    return (config.preset,) if isinstance(config.preset, str) else config.preset
