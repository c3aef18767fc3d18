"""Shapes of models: every parameter by name, with named axes.

Every axis of every parameter has a name, and a name determines a size. A model grows when the size
of an axis does. A `Mask` lets new indices of an axis take effect little by little.

A composite axis such as ``heads*head_dim`` is a product, the first factor outermost: index
``h * head_dim + d`` of a query's output is channel d of head h. A factor may be a number, as in
``4*hidden``. A sum of products, as in ``heads*head_dim+kv_heads*head_dim``, is one after the other, as
in a fused projection.

The kind of a parameter determines which axis it writes and which it reads:

============ ======================= ============== ============ ========================
kind         axes                    writes         reads        what it is
============ ======================= ============== ============ ========================
embedding    (rows, channels)        channels       –            a table of rows
matrix, head (output, input, …)      output         input        a linear map, or a convolution
transposed   (input, output, …)      output         input        a transposed convolution
experts      (experts, output, input) output        input        a linear map for each expert
bias         (…, output)             output         –            added to a matrix's output, or to that
                                                                 of each expert
norm         (axis,)                 –              –            gain or shift of each channel,
                                                                 normalized over all of them
post_norm    (channels,)             channels       –            gain of a norm whose output is added to a
                                                                 residual stream
channel      (axis, …)               –              –            gain, shift or filter of each channel on
                                                                 its own, as in BatchNorm, or a
                                                                 depthwise convolution
grouped      any                     –              –            a map or norm that divides an
                                                                 axis into groups or heads, which
                                                                 therefore cannot grow
buffer       any                     –              –            a persistent buffer
============ ======================= ============== ============ ========================
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, get_args, runtime_checkable

from instar.config.errors import ConfigProblem

Kind = Literal[
    "embedding",
    "matrix",
    "transposed",
    "experts",
    "grouped",
    "norm",
    "post_norm",
    "channel",
    "bias",
    "head",
    "buffer",
]


def problem(field: str, message: str, hint: str = "") -> ConfigProblem:
    """Return a problem of one field of a shape, under its config key ``model.<field>``."""
    return ConfigProblem((f"model.{field}",), message, hint)


class ArchitectureError(ValueError):
    """No model can have this shape; `problems` lists all reasons in the order of the fields."""

    def __init__(self, *problems: ConfigProblem) -> None:
        self.problems = problems
        super().__init__(
            "\n".join(
                f"{p.keys[0]}: {p.message}" + (f" ({p.hint})" if p.hint else "") for p in problems
            )
        )


def size_problems(
    shape: object, fields: Iterable[str], limits: Mapping[str, int], may_be_zero: str = ""
) -> list[ConfigProblem]:
    """Return a problem for each of the fields that is not a positive integer, or 0 where it may be, and for
    each that exceeds its limit."""
    sizes = {name: getattr(shape, name) for name in dict.fromkeys((*fields, *limits))}
    problems = [
        problem(
            name,
            f"must be a whole number {'from 0 on' if name == may_be_zero else 'above 0'}, "
            f"not {sizes[name]!r}",
        )
        for name in fields
        if type(sizes[name]) is not int or sizes[name] < (name != may_be_zero)
    ]
    return problems + [
        problem(name, f"must be at most {limit:,}, not {sizes[name]:,}")
        for name, limit in limits.items()
        if type(sizes[name]) is int and sizes[name] > limit
    ]


def check_fields(shape: type, values: Mapping[str, Any], optional: Iterable[str] = ()) -> None:
    """Raise ArchitectureError if JSON values lack fields of a shape, or have unknown ones."""
    names = [field.name for field in dataclasses.fields(shape)]
    wrong = [problem(name, "is missing") for name in names if name not in {*values, *optional}]
    wrong += [problem(name, "is unknown") for name in values if name not in names]
    if wrong:
        raise ArchitectureError(*wrong)


@dataclass(frozen=True)
class Parameter:
    """One tensor: its named axes, its shape and its kind (see the table of the module)."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind
    std: float = 0.0
    """standard deviation of normal initial values; 0: a gain is 1, everything else 0"""
    parts: tuple[str, ...] = ()
    """what each summand of its output is, of ``query``, ``key`` and ``value``; empty elsewhere"""
    offset: float = 0.0
    """what the module adds to the tensor: 1 for gains that are stored as their difference from 1"""

    @property
    def dimensions(self) -> int:
        """Dimensions of the tensor, or of that of each expert."""
        return len(self.axes) - (self.axes[:1] == ("experts",))

    @property
    def writes(self) -> str | None:
        """The axis that it produces."""
        if self.kind in ("norm", "channel", "grouped", "buffer"):
            return None
        if self.kind == "bias":
            return self.axes[-1]
        return self.axes[1 if self.kind in ("embedding", "transposed", "experts") else 0]

    @property
    def reads(self) -> str | None:
        """The axis that it consumes."""
        inputs = {"transposed": 0, "matrix": 1, "head": 1, "experts": 2}
        return self.axes[inputs[self.kind]] if self.kind in inputs else None


class Growable(Protocol):
    """A shape that can grow: a frozen dataclass with these methods.

    Axes may have any names under three conditions: two dimensions share a name only if an index
    means the same in both; between a tensor that writes an axis and one that reads it there are
    only channelwise functions; a tensor inside block n is called ``blocks.<n>.…``, and the number
    of blocks is the size of the axis ``layers``.
    """

    def parameters(self) -> Mapping[str, Parameter]:
        """Return every parameter by name, in the model's order."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each simple axis."""
        ...

    def resized(self, **sizes: int) -> Self:
        """Return a copy with other sizes of some axes."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the shape as JSON values."""
        ...


@runtime_checkable
class TransformerShape(Growable, Protocol):
    """A decoder-only transformer with the axes ``embed``, ``mlp``, ``heads``, ``kv_heads``, ``head_dim``,
    ``vocab``, ``context`` and ``layers``.

    Query head h reads key and value head ``h // (heads / kv_heads)``.
    """

    @property
    def norm(self) -> Literal["layernorm", "rmsnorm"]: ...

    @property
    def norm_eps(self) -> float:
        """Eps of all norms over the residual stream."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the head is the token table."""
        ...

    @property
    def final_norm(self) -> str:
        """Name of the norm before the head."""
        ...

    @property
    def positions(self) -> Literal["learned", "rope"]: ...

    @property
    def rope_base(self) -> float:
        """Base of the frequencies ``rope_base ** (-2 i / head_dim)`` of RoPE, for pairs i, i + head_dim / 2."""
        ...

    @property
    def scales_by_head_dim(self) -> bool:
        """Whether scores are divided by √head_dim, and not by a constant."""
        ...

    def refusals(self) -> Mapping[str, str]:
        """Return the operations that this shape does not support, with the reason."""
        ...

    def changed(self, *, norm_eps: float | None = None, rope_base: float | None = None) -> Self: ...

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """Return a copy whose block j is made from the old block ``sources[j]``, or drawn."""
        ...


def streams_of(arch: Growable) -> tuple[str, ...]:
    """Return `arch.streams`, the axes that blocks add to, such as ``embed`` of a GPT.

    It is empty for a shape without the attribute. Only a model with residual streams can get a block
    that leaves its function as it is.
    """
    streams: tuple[str, ...] = getattr(arch, "streams", ())
    return streams


def buffers_of(arch: Growable) -> Mapping[str, Parameter]:
    """Return `arch.buffers()`, the buffers with named axes; none without the method."""
    buffers: Mapping[str, Parameter] = getattr(arch, "buffers", dict)()
    return buffers


@dataclass(frozen=True)
class ModuleFacts:
    """Properties of a module that only the constructed module has."""

    frozen: frozenset[str] = frozenset()
    """parameters that do not train"""
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """shapes of its persistent buffers"""


Facts = Callable[[Any], ModuleFacts]
"""Returns the facts of the module of a shape."""


def no_facts(shape: object) -> ModuleFacts:  # noqa: ARG001
    """Facts of a module that trains as a whole and has no persistent buffers."""
    return ModuleFacts()


@dataclass(frozen=True)
class Fixed:
    """The shape of a model without named axes: nothing can grow."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def parameters(self) -> dict[str, Parameter]:
        return {
            name: Parameter(
                tuple(f"{name}.{dim}" for dim in range(len(shape))),
                shape,
                "matrix" if len(shape) > 1 else "bias",
            )
            for name, shape in self.tensors
        }

    def sizes(self) -> dict[str, int]:
        return {}

    def resized(self, **sizes: int) -> Fixed:
        raise ValueError(
            f"the task names no axes, so {', '.join(sizes)} cannot grow: give it shape()"
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: list(shape) for name, shape in self.tensors}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, each counted once.

    `non_embedding` excludes token and position tables and the head (arXiv 2001.08361). `matmul`
    counts parameters of matrix products: all matrices and the head, also a tied one, and kernels of
    convolutions. Adapters count like their weights.
    """

    total: int
    non_embedding: int
    matmul: int


@dataclass(frozen=True)
class Loop:
    """Blocks first … last that run `times` times, one after the other and then again, with the same weights."""

    first: int
    last: int
    times: int

    def passes(self, layers: int) -> tuple[int, ...]:
        """Return the block of each pass of a model of so many layers."""
        looped = range(self.first, self.last + 1)
        return (
            *range(self.first),
            *(layer for _ in range(self.times) for layer in looped),
            *range(self.last + 1, layers),
        )

    def problem(self, layers: int) -> str:
        """Return why a model of so many layers cannot have it; empty: it can."""
        if not 0 <= self.first <= self.last < layers:
            return f"there are no layers {self.first} to {self.last}: layers are 0 to {layers - 1}"
        return "" if self.times > 1 else f"times must be at least 2, not {self.times}"


def passes_of(arch: Growable) -> tuple[int, ...]:
    """Return the block of each pass through the model, in order: each once, but for those of a loop."""
    layers, loop = arch.sizes().get("layers", 0), getattr(arch, "loop", None)
    return tuple(range(layers)) if loop is None else loop.passes(layers)


def windows_text(windows: Sequence[int | None]) -> str:
    """Return `16 in layers 0, 2; 32 in layers 1`; empty without windows."""
    layers: dict[int, list[str]] = {}
    for layer, window in enumerate(windows):
        if window is not None:
            layers.setdefault(window, []).append(str(layer))
    return "; ".join(f"{window} in layers {', '.join(layers[window])}" for window in layers)


def count_parameters(arch: Growable) -> ParameterCount:
    """Count the parameters of a shape; if it is `tied`, the token table counts as the head too."""
    by_kind: dict[str, int] = {}
    tied = 0
    for name, entry in arch.parameters().items():
        size = math.prod(entry.shape)
        by_kind[entry.kind] = by_kind.get(entry.kind, 0) + size
        if getattr(arch, "tied", False) and (
            name.startswith("token_embedding.") or entry.axes == ("vocab", "embed")
        ):
            tied += size
    total, head = sum(by_kind.values()), by_kind.get("head", 0)
    return ParameterCount(
        total=total,
        non_embedding=total - by_kind.get("embedding", 0) - head,
        matmul=sum(by_kind.get(kind, 0) for kind in ("matrix", "transposed", "experts"))
        + head
        + tied,
    )


MaskedAxis = Literal["layers", "mlp", "heads", "embed"]


@dataclass(frozen=True)
class Mask:
    """A mask over new indices of an axis, ranges start … stop-1, which opens linearly."""

    axis: MaskedAxis
    new: tuple[tuple[int, int], ...]
    begin: int
    """last step at which the mask is 0"""
    steps: int

    @property
    def end(self) -> int:
        """First step at which the mask is 1."""
        return self.begin + self.steps

    def opening(self, step: int) -> float:
        """Value of the mask at a step of the run, 0 to 1."""
        return min(1.0, max(0.0, (step - self.begin) / self.steps))

    def has(self, axis: MaskedAxis, index: int) -> bool:
        """Return whether an index of an axis is masked."""
        return axis == self.axis and any(start <= index < stop for start, stop in self.new)

    def problems(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield (problem, hint) if it is invalid for a model of these sizes."""
        if self.axis not in get_args(MaskedAxis):
            yield f"{self.axis!r} cannot be masked", f"one of {', '.join(get_args(MaskedAxis))}"
            return
        numbers = [self.begin, self.steps, *(limit for part in self.new for limit in part)]
        if any(type(number) is not int for number in numbers) or self.begin < 0 or self.steps < 1:
            yield f"begin, steps and ranges must be whole numbers, steps above 0, not {self}", ""
            return
        size, last = sizes[self.axis], 0
        for start, stop in self.new:
            if not last <= start < stop <= size:
                yield f"{start} … {stop - 1} is not a range of {size} {self.axis} after {last}", ""
            last = stop
        # a model may begin without layers
        old = size - sum(stop - start for start, stop in self.new)
        if not self.new or (not old and self.axis != "layers"):
            yield f"some of the {size} {self.axis} must be new, and some old", ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`. Raises TypeError or ValueError."""
        return cls(**{**values, "new": tuple((start, stop) for start, stop in values["new"])})


def mask_of(arch: object) -> Mask | None:
    """Return the mask of an architecture; None if it has none, or does not support masks."""
    mask: Mask | None = getattr(arch, "mask", None)
    return mask


def axis_size(sizes: Mapping[str, int], axis: str) -> int:
    """Return the size of a simple or composite axis, e.g. ``embed`` or ``heads*head_dim``."""
    return sum(
        math.prod(factor_size(sizes, factor) for factor in product.split("*"))
        for product in axis.split("+")
    )


def factor_size(sizes: Mapping[str, int], factor: str) -> int:
    """Return the size of a factor of a composite axis, which may be a number."""
    return int(factor) if factor.isdecimal() else sizes[factor]


def size_text(shape: tuple[int, ...] | None) -> str:
    """Format the shape of a tensor, as in 3×4; None if there is no such tensor."""
    return "not there" if shape is None else "×".join(map(str, shape))


def layer_of(name: str) -> int | None:
    """Return the index of the block of a parameter; None outside the blocks."""
    first, _, tail = name.partition(".")
    return int(tail.partition(".")[0]) if first == "blocks" else None


def in_block(name: str, layer: int) -> str:
    """Return the name of the same tensor in another block."""
    first, _, tail = name.split(".", 2)
    return f"{first}.{layer}.{tail}"
