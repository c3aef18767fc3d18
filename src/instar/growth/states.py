"""What the states of an optimizer are, by their names: what becomes of them where a plan scales, copies or adds slices.

A parameter times s has a gradient times 1 / s. A mean of gradients goes with the gradient, that of squared ones with its
square; steps, as Rprop and Adadelta keep them, go with the value. States that have one sign are sizes: new slices get the
mean of the old ones, because a size of 0 with a large count of steps would make the first updates several learning rates
long (second moments), or far too short (steps).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto

from torch import Tensor


class Role(Enum):
    """The role of a tensor. A moving average of parameters is a PARAMETER, a momentum buffer is a FIRST_MOMENT."""

    PARAMETER = auto()
    FIRST_MOMENT = auto()
    SECOND_MOMENT = auto()
    LARGEST_GRADIENT = auto()
    STEP = auto()
    SQUARED_STEP = auto()
    AVERAGE = auto()
    """of a parameter over the steps, which an optimizer keeps"""

    @property
    def is_size(self) -> bool:
        """Whether its elements have one sign."""
        return self not in (Role.PARAMETER, Role.FIRST_MOMENT, Role.AVERAGE)

    @property
    def is_weight(self) -> bool:
        """Whether it has the values of a parameter."""
        return self in (Role.PARAMETER, Role.AVERAGE)

    @property
    def powers(self) -> tuple[int, int]:
        """The powers of the factors of a slice's value and of its gradient that scale it."""
        return _POWERS[self]

    def factor(self, value: float, gradient: float) -> float:
        """Return the factor of a slice whose value and gradient have these."""
        of_value, of_gradient = self.powers
        factor = math.pow(value, of_value) * math.pow(gradient, of_gradient)
        return abs(factor) if self.is_size else factor


_POWERS: Mapping[Role, tuple[int, int]] = {
    Role.PARAMETER: (1, 0),
    Role.FIRST_MOMENT: (0, 1),
    Role.SECOND_MOMENT: (0, 2),
    Role.LARGEST_GRADIENT: (0, 1),
    Role.STEP: (1, 0),
    Role.SQUARED_STEP: (2, 0),
    Role.AVERAGE: (1, 0),
}

KNOWN_STATES: Mapping[str, Role] = {
    "exp_avg": Role.FIRST_MOMENT,
    "momentum_buffer": Role.FIRST_MOMENT,
    "grad_avg": Role.FIRST_MOMENT,
    "prev": Role.FIRST_MOMENT,
    "exp_avg_sq": Role.SECOND_MOMENT,
    "max_exp_avg_sq": Role.SECOND_MOMENT,
    "square_avg": Role.SECOND_MOMENT,
    "sum": Role.SECOND_MOMENT,
    "variance": Role.SECOND_MOMENT,
    "exp_inf": Role.LARGEST_GRADIENT,
    "step_size": Role.STEP,
    "acc_delta": Role.SQUARED_STEP,
    "ax": Role.AVERAGE,
}
"""States of a parameter's shape: those of torch.optim and of Lion. They are also of a parameter without dimensions, whose
other states are numbers for the whole parameter, such as the count of steps, and are kept as they are."""

FACTORS: Mapping[str, int] = {"row_var": -1, "col_var": -2}
"""Means of squared gradients over one dimension, which is kept with the size 1: those of torch's Adafactor."""

_SQUARES = ("sq", "square", "sum", "variance")
"""Parts of the names of states that are sums or means of squared gradients."""


def state_role(state: str) -> Role:
    """Return the role of an optimizer state by its name: of one that is not known, a mean of squares such as `my_square`,
    or else of gradients, as all momenta."""
    is_second = any(part in _SQUARES for part in state.split("_")) or state in FACTORS
    return KNOWN_STATES.get(state, Role.SECOND_MOMENT if is_second else Role.FIRST_MOMENT)


def factor_shape(shape: tuple[int, ...], state: str) -> tuple[int, ...]:
    """Return the shape of one of `FACTORS` of a parameter."""
    dim = FACTORS[state]
    return tuple(1 if at == len(shape) + dim else size for at, size in enumerate(shape))


def is_growable(state: str, shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> bool:
    """Return whether a plan says how a state grows: a number, of the parameter's shape, or a mean over a dimension."""
    if state in FACTORS and len(of_parameter) > 1:
        return shape == factor_shape(of_parameter, state)
    return shape in ((), of_parameter)


def shape_of_factors(row: Tensor, column: Tensor) -> tuple[int, ...]:
    """Return the shape of the parameter of which these are `row_var` and `col_var`."""
    return (*row.shape[:-1], column.shape[-1])
