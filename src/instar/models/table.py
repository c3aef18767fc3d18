"""Shapes of users' models: the table of modules, with the axes of each parameter and its FLOPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from instar.config.errors import ConfigError
from instar.models.shape import (
    Growable,
    Kind,
    ModuleFacts,
    Parameter,
    axis_size,
    buffers_of,
    size_text,
)

GATES: Mapping[str, int] = {"rnn": 1, "gru": 3, "lstm": 4}


class Table:
    """Builds the parameter table of a model from its modules, for axes of given sizes.

    `flops` adds up the floating-point operations of a forward pass of one sample: two per weight of
    a matrix product, for each of the `times` that the module is applied (tokens, nodes, positions).
    Initial values of new weights have the variance of torch's defaults, 1 / (3 · inputs).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.entries = dict(sizes), dict[str, Parameter]()
        self.buffers = dict[str, Parameter]()
        self.flops = 0

    def linear(
        self,
        name: str,
        output: str,
        source: str,
        *,
        bias: bool = True,
        random_bias: bool = False,
        times: int = 1,
    ) -> None:
        """Add an `nn.Linear` from axis `source` to axis `output`; `random_bias`: the bias begins with
        random values as well, and not with 0."""
        _, inputs = self._size(name, output), self._size(name, source)
        std = (3 * inputs) ** -0.5
        self._add(f"{name}.weight", "matrix", (output, source), std=std, times=times)
        if bias:
            self._add(f"{name}.bias", "bias", (output,), std=std if random_bias else 0.0)

    def conv(
        self,
        name: str,
        output: str,
        source: str,
        kernel: Sequence[int],
        *,
        positions: int = 1,
        groups: int | str = 1,
        bias: bool = True,
        is_transposed: bool = False,
    ) -> None:
        """Add an `nn.Conv1d`, `2d` or `3d`, or an `nn.ConvTranspose1d`, `2d` or `3d`.

        The axes of a convolution in groups cannot grow; with `groups` the name of the axis that is
        both `output` and `source`, each channel has a kernel of its own and the axis can.

        Args:
            kernel: its size in each dimension.
            positions: number of output positions, or of input positions if `transposed`.
        """
        if isinstance(kernel, int):
            raise ValueError(
                f"{name}: kernel is the size in each dimension, e.g. ({kernel},) of an nn.Conv1d and ({kernel}, {kernel}) of an "
                f"nn.Conv2d, not {kernel}"
            )
        axes: tuple[str, ...] = output, source
        inputs = self._size(name, source)
        if is_transposed:
            axes, inputs = (source, output), self._size(name, output)
        count = axis_size(self.sizes, groups) if isinstance(groups, str) else groups
        outer, inner = (self._size(name, axis) for axis in axes)
        for axis, size in zip(axes, (outer, inner), strict=True):
            if size % count:
                raise ValueError(f"{name}: {axis} of {size} is not divisible into {count} groups")
        shape = (outer, inner // count, *kernel)
        axes = (*axes, *(f"{name}.kernel.{dim}" for dim in range(len(kernel))))
        kind: Kind = "transposed" if is_transposed else "matrix"
        if isinstance(groups, str):
            if not groups == output == source:
                raise ValueError(
                    f"{name}: groups {groups!r} must be both its output and its source"
                )
            kind, axes = "channel", (output, f"{name}.one", *axes[2:])
        elif groups > 1:
            kind = "grouped"
        std = (3 * inputs // count * math.prod(kernel)) ** -0.5
        self.entries[f"{name}.weight"] = Parameter(axes, shape, kind, std)
        self.flops += 2 * math.prod(shape) * positions
        if bias:
            self._add(f"{name}.bias", "bias" if kind != "channel" else "channel", (output,))

    def norm(self, name: str, axis: str, *, bias: bool = True) -> None:
        """Add an `nn.LayerNorm`, or an `nn.RMSNorm` (`bias=False`)."""
        for part in ("weight", "bias") if bias else ("weight",):
            self._add(f"{name}.{part}", "norm", (axis,))

    def batch_norm(self, name: str, axis: str) -> None:
        """Add an `nn.BatchNorm1d`, `2d` or `3d` with its running statistics."""
        for part in ("weight", "bias"):
            self._add(f"{name}.{part}", "channel", (axis,))
        for part in ("running_mean", "running_var"):
            self.buffer(f"{name}.{part}", axis)

    def group_norm(self, name: str, axis: str) -> None:
        """Add an `nn.GroupNorm`; its axis cannot grow, because channels would change groups."""
        for part in ("weight", "bias"):
            self._add(f"{name}.{part}", "grouped", (axis,))

    def embedding(self, name: str, rows: str, axis: str) -> None:
        """Add an `nn.Embedding` with an axis of rows."""
        self._add(f"{name}.weight", "embedding", (rows, axis), std=0.02)

    def attention(self, name: str, width: str, *, tokens: int = 1, bias: bool = True) -> None:
        """Add an `nn.MultiheadAttention` of each of `tokens` to all; its width cannot grow, because
        channels would change heads."""
        size = self._size(name, width)
        std = (3 * size) ** -0.5
        packed_shape = ((f"3*{width}", width), (f"3*{width}",))
        self._add(f"{name}.in_proj_weight", "grouped", packed_shape[0], std=std)
        if bias:
            self._add(f"{name}.in_proj_bias", "grouped", packed_shape[1])
        self.linear(f"{name}.out_proj", width, width, bias=bias, times=tokens)
        self.flops += 6 * size**2 * tokens + 4 * size * tokens**2

    def encoder_layer(self, name: str, width: str, hidden: str, *, tokens: int = 1) -> None:
        """Add an `nn.TransformerEncoderLayer`; `hidden` is its `dim_feedforward`, which can grow."""
        self.attention(f"{name}.self_attn", width, tokens=tokens)
        self.linear(f"{name}.linear1", hidden, width, times=tokens)
        self.linear(f"{name}.linear2", width, hidden, times=tokens)
        for part in ("norm1", "norm2"):
            self.norm(f"{name}.{part}", width)

    def recurrent(
        self,
        name: str,
        kind: Literal["rnn", "gru", "lstm"],
        hidden: str,
        source: str,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        bias: bool = True,
        steps: int = 1,
    ) -> None:
        """Add an `nn.RNN`, `nn.GRU` or `nn.LSTM` that reads `steps` positions of a sample.

        Modules that read the output of one in both directions have the axis ``2*hidden``.
        """
        std = (3 * self._size(name, hidden)) ** -0.5
        gates = hidden if GATES[kind] == 1 else f"{GATES[kind]}*{hidden}"
        for layer in range(layers):
            for suffix in ("", "_reverse") if bidirectional else ("",):
                end = f"l{layer}{suffix}"
                for part, read in (("ih", source), ("hh", hidden)):
                    entry = f"{name}.weight_{part}_{end}"
                    self._add(entry, "matrix", (gates, read), std=std, times=steps)
                if bias:
                    for part in ("ih", "hh"):
                        self._add(f"{name}.bias_{part}_{end}", "bias", (gates,))
            source = f"2*{hidden}" if bidirectional else hidden

    def buffer(self, name: str, *axes: str) -> None:
        """Add a persistent buffer that grows with these axes; new elements have the values of a
        new module of that shape."""
        shape = tuple(axis_size(self.sizes, axis) for axis in axes)
        self.buffers[name] = Parameter(axes, shape, "buffer")

    def _add(
        self, name: str, kind: Kind, axes: tuple[str, ...], *, std: float = 0.0, times: int = 0
    ) -> None:
        shape = tuple(self._size(name.rpartition(".")[0], axis) for axis in axes)
        self.entries[name] = Parameter(axes, shape, kind, std)
        self.flops += 2 * math.prod(shape) * times

    def _size(self, name: str, axis: str) -> int:
        missing = [
            factor
            for factor in axis.split("*")
            if factor not in self.sizes and not factor.isdecimal()
        ]
        if missing:
            raise ValueError(
                f"{name} has an axis {missing[0]!r}, which is not a whole-number field of the shape; "
                f"there are {', '.join(self.sizes) or 'none'}"
            )
        return axis_size(self.sizes, axis)


@dataclass(frozen=True)
class Shape:
    """Base class of shapes whose fields are the sizes of their axes: a frozen dataclass with one
    field per axis, and `table`, which names every module with parameters."""

    def table(self, table: Table) -> None:
        """Name every module and its axes, in the model's order."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if type(getattr(self, field.name)) is int
        }

    def resized(self, **sizes: int) -> Self:
        return replace(self, **sizes)

    def parameters(self) -> dict[str, Parameter]:
        return self._filled().entries

    def buffers(self) -> dict[str, Parameter]:
        return self._filled().buffers

    def flops(self) -> int:
        """Return the floating-point operations of a forward pass of one sample."""
        return self._filled().flops

    def _filled(self) -> Table:
        table = Table(self.sizes())
        self.table(table)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


def check_table(task: str, shape: Growable, actual: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError if a shape's table and a model of the shape differ in a parameter.

    Args:
        actual: shapes of the model's parameters, by name.
    """
    expected = {parameter: entry.shape for parameter, entry in shape.parameters().items()}
    if actual == expected:
        return
    for name in [*actual, *expected]:
        if actual.get(name) != expected.get(name):
            raise _mismatch(
                f"{task}: the shape's table says that {name} is "
                f"{size_text(expected.get(name))}, and in the model it is {size_text(actual.get(name))}",
                "the table must name every parameter of the module, with the axes it has",
            )


def check_shape_buffers(task: str, shape: Growable, facts: ModuleFacts) -> None:
    """Raise ConfigError if a buffer of the shape's table is missing in the model or differs."""
    for name, entry in buffers_of(shape).items():
        if facts.buffers.get(name) != entry.shape:
            raise _mismatch(
                f"{task}: the shape's table says that the buffer {name} is {size_text(entry.shape)}, and "
                f"in the model it is {size_text(facts.buffers.get(name))}",
                "table.buffer and table.batch_norm are for persistent buffers of the module",
            )


def _mismatch(message: str, hint: str) -> ConfigError:
    return ConfigError.of(message, where="task", hint=hint, key="task")
