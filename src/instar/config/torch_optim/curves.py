"""Schedulers of torch as pure functions: the share of the peak learning rate at a step, counted from 0.

Where torch multiplies the rate of the step before, the product is written out, so that a rate does not depend on
earlier ones. Formulas are those of `torch.optim.lr_scheduler`.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]
"""Complete options of a scheduler, with rates as shares of the peak; see `complete_options`."""


def _step(options: Options, step: int) -> float:
    return _power(options["gamma"], step // options["step_size"])


def _multi_step(options: Options, step: int) -> float:
    return _power(options["gamma"], bisect_right(options["milestones"], step))


def _constant(options: Options, step: int) -> float:
    factor: float = options["factor"]
    return factor if step < options["total_iters"] else 1.0


def _linear(options: Options, step: int) -> float:
    total = options["total_iters"]
    return _line(options["start_factor"], options["end_factor"], min(step, total) / total)


def _exponential(options: Options, step: int) -> float:
    return _power(options["gamma"], step)


def _polynomial(options: Options, step: int) -> float:
    total = options["total_iters"]
    return math.pow(1.0 - min(step, total) / total, options["power"])


def _cosine(options: Options, step: int) -> float:
    return _half_wave(1.0, options["eta_min"], step / options["T_max"])


def _warm_restarts(options: Options, step: int) -> float:
    period, factor = options["T_0"], options["T_mult"]
    if factor == 1:
        step %= period
    while step >= period:
        step, period = step - period, period * factor
    return _half_wave(1.0, options["eta_min"], step / period)


def _one_cycle(options: Options, step: int) -> float:
    """After the last step of the cycle, at which torch stops with an error, the rate stays."""
    total, up = options["total_steps"], options["pct_start"] * options["total_steps"] - 1
    initial: float = 1.0 / options["div_factor"]
    lowest: float = initial / options["final_div_factor"]
    phases = [(up, initial, 1.0), (total - 1, 1.0, lowest)]
    if options["three_phase"]:
        down = 2 * options["pct_start"] * total - 2
        phases = [(up, initial, 1.0), (down, 1.0, initial), (total - 1, initial, lowest)]
    anneal = _half_wave if options["anneal_strategy"] == "cos" else _line
    begin = 0.0
    for end, first, last in phases:
        if step <= end:
            return anneal(first, last, (step - begin) / (end - begin) if end > begin else 1.0)
        begin = end
    return lowest


def _cyclic(options: Options, step: int) -> float:
    up = float(options["step_size_up"])
    down = up if options["step_size_down"] is None else float(options["step_size_down"])
    rising = up / (up + down)
    cycle = math.floor(1 + step / (up + down))
    place = 1.0 + step / (up + down) - cycle
    height = place / rising if place <= rising else (place - 1) / (rising - 1)
    match options["mode"]:
        case "triangular2":
            height = math.ldexp(height, 1 - cycle)
        case "exp_range":
            height *= _power(options["gamma"], step)
    base: float = options["base_lr"]
    return base + (1.0 - base) * height


def _power(gamma: float, exponent: int) -> float:
    """Return gamma to that power. With gamma above 1 it may exceed every float: the largest then, with which the loss is no
    number and the run says so, at the step that it comes to."""
    try:
        return math.pow(gamma, exponent)
    except OverflowError:
        return sys.float_info.max


def _half_wave(first: float, last: float, progress: float) -> float:
    return last + (first - last) / 2.0 * (1.0 + math.cos(math.pi * progress))


def _line(first: float, last: float, progress: float) -> float:
    return first + (last - first) * progress


CURVES: Mapping[str, Callable[[Options, int], float]] = {
    "StepLR": _step,
    "MultiStepLR": _multi_step,
    "ConstantLR": _constant,
    "LinearLR": _linear,
    "ExponentialLR": _exponential,
    "PolynomialLR": _polynomial,
    "CosineAnnealingLR": _cosine,
    "CosineAnnealingWarmRestarts": _warm_restarts,
    "OneCycleLR": _one_cycle,
    "CyclicLR": _cyclic,
}
"""The share of the peak by the options and the step after the warm-up, for each shape of torch."""
