"""What any model says of its shape: every parameter by name, with named axes.

Every axis of every parameter has a name, and a name fixes a size: a model grows when the size of an
axis does, and `parameters` then says what each tensor must become.

A composite axis such as ``heads*head_dim`` is a product, the first factor outermost: index
``h * head_dim + d`` of a query's output is channel d of head h.

Who writes and who reads an axis follows from a parameter's kind:

============ ======================= ============== ============ ========================
kind         axes                    writes         reads        what it is
============ ======================= ============== ============ ========================
embedding    (rows, channels)        channels       –            a table of rows
matrix, head (output, input)         output         input        a linear map
bias         (output,)               output         –            added to a matrix's output
norm         (axis,)                 –              –            gain or shift of each channel
============ ======================= ============== ============ ========================
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

Kind = Literal["embedding", "matrix", "norm", "bias", "head"]


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a shape: the dotted config key, what is wrong, what to do instead."""

    key: str
    message: str
    hint: str = ""


class ArchitectureError(ValueError):
    """A shape no model can have; `mistakes` holds everything found, in the fields' order."""

    def __init__(self, *mistakes: Mistake) -> None:
        self.mistakes = mistakes
        super().__init__(
            "\n".join(
                f"{m.key}: {m.message}" + (f" ({m.hint})" if m.hint else "") for m in mistakes
            )
        )


@dataclass(frozen=True)
class Parameter:
    """One tensor: its named axes, its shape, and what it does with them (see the module's table)."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind
    std: float = 0.0
    """of its first values, which are normal; 0: they are ones for a gain, zeros for all else"""

    @property
    def writes(self) -> str | None:
        """The axis it produces."""
        if self.kind == "norm":
            return None
        return self.axes[1] if self.kind == "embedding" else self.axes[0]

    @property
    def reads(self) -> str | None:
        """The axis it consumes."""
        return self.axes[1] if self.kind in ("matrix", "head") else None


class Growable(Protocol):
    """What growth asks of a model's shape: a frozen dataclass that can say this much grows.

    Axes are named freely, under three conditions: two dimensions have the same name only where an
    index means the same in both; between a tensor that writes an axis and one that reads it there
    are only functions of each channel for itself; a tensor inside block number n is called
    ``blocks.<n>.…``, and there are as many as the size of the axis ``layers``.
    """

    def parameters(self) -> Mapping[str, Parameter]:
        """Every parameter by name, in the model's order."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Size of each simple axis."""
        ...

    def resized(self, **sizes: int) -> Self:
        """The same with other sizes of some axes."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        ...


@runtime_checkable
class Residual(Protocol):
    """A model whose blocks add to what passes by: only such a one can get a block that does nothing."""

    @property
    def streams(self) -> tuple[str, ...]:
        """The axes that blocks add to: one for a GPT, perhaps nodes and edges for a graph network."""
        ...


def streams_of(arch: Growable) -> tuple[str, ...]:
    """The axes that blocks add to; none if the model names none."""
    return arch.streams if isinstance(arch, Residual) else ()


class Table:
    """Collects the parameters of a model as its modules are called, for axes of these sizes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.entries = dict(sizes), dict[str, Parameter]()

    def linear(
        self, name: str, output: str, source: str, *, bias: bool = True, drawn: bool = False
    ) -> None:
        """An `nn.Linear`: `source` is the axis of its inputs. First values of the matrix, and of a
        bias that is `drawn`, have the variance of torch's own, 1 / (3 · inputs)."""
        shape = axis_size(self.sizes, output), axis_size(self.sizes, source)
        std = (3 * shape[1]) ** -0.5
        self.entries[f"{name}.weight"] = Parameter((output, source), shape, "matrix", std)
        if bias:
            of_bias = std if drawn else 0.0
            self.entries[f"{name}.bias"] = Parameter((output,), shape[:1], "bias", of_bias)

    def norm(self, name: str, axis: str, *, bias: bool = True) -> None:
        """An `nn.LayerNorm`, `nn.RMSNorm` (`bias=False`): a gain and a shift of each channel."""
        for part in ("weight", "bias") if bias else ("weight",):
            shape = (axis_size(self.sizes, axis),)
            self.entries[f"{name}.{part}"] = Parameter((axis,), shape, "norm")

    def embedding(self, name: str, rows: str, axis: str) -> None:
        """An `nn.Embedding` of `rows` rows."""
        shape = axis_size(self.sizes, rows), axis_size(self.sizes, axis)
        self.entries[f"{name}.weight"] = Parameter((rows, axis), shape, "embedding", 0.02)


@dataclass(frozen=True)
class Shape:
    """A base for shapes whose fields are the sizes of their axes: a frozen dataclass, one field an
    axis, and `table`, which calls every module that has parameters."""

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
        table = Table(self.sizes())
        self.table(table)
        return table.entries

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, each counted once.

    `non_embedding` leaves out token and position tables and the head, tied or not (arXiv
    2001.08361). `matmul` are those in matrix products: all matrices and the head, also where the
    head is the token table. Adapters count as their weights do.
    """

    total: int
    non_embedding: int
    matmul: int


def count_parameters(arch: Growable) -> ParameterCount:
    """Counts from the table of a shape; where it is `tied`, the token table is the head too."""
    by_kind: dict[str, int] = {}
    tied = 0
    for name, entry in arch.parameters().items():
        size = math.prod(entry.shape)
        by_kind[entry.kind] = by_kind.get(entry.kind, 0) + size
        if getattr(arch, "tied", False) and name.startswith("token_embedding."):
            tied += size
    total, head = sum(by_kind.values()), by_kind.get("head", 0)
    return ParameterCount(
        total=total,
        non_embedding=total - by_kind.get("embedding", 0) - head,
        matmul=by_kind.get("matrix", 0) + head + tied,
    )


def axis_size(sizes: Mapping[str, int], axis: str) -> int:
    """Elements along a simple or composite axis, e.g. ``embed`` or ``heads*head_dim``."""
    return math.prod(sizes[factor] for factor in axis.split("*"))


def layer_of(name: str) -> int | None:
    """The block a parameter belongs to; None outside the blocks."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None
