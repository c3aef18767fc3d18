"""Growth plans: how each tensor of a grown model is made from the old model's tensors, as data.

Plans do not depend on torch. `apply.py` applies the same plan to parameters, to their moving
average and to optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.models.shape import in_block, layer_of

Label = Literal["exact", "bounded", "lossy"]
"""How well growth preserves the function: up to rounding, up to a bound of the loss, or not."""

Fill = Literal["zero", "one", "normal", "mean"]
"""Values of new elements: `normal` draws with mean 0 and standard deviation `std`; `mean` is the
mean of the old slices along the dimension that grows, after scaling."""

SPECIAL = ("bos_token", "eos_token", "pad_token")
"""tokens whose ids a config of transformers has"""


class GrowthError(ValueError):
    """An operation is not possible for this model; the message says what would be."""


@dataclass(frozen=True)
class Old:
    """Old slices start … stop-1 along a dimension.

    Values are multiplied by `value`; their gradients after growth are `gradient` times those
    before. `is_copy` marks a further copy of slices that are kept elsewhere.
    """

    start: int
    stop: int
    value: float = 1.0
    gradient: float = 1.0
    is_copy: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class New:
    """`count` new slices along a dimension."""

    count: int
    fill: Fill
    std: float = 0.0

    def __len__(self) -> int:
        return self.count


Piece = Old | New


@dataclass(frozen=True)
class Edit:
    """A new layout of one dimension: its pieces in order."""

    dim: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Grown:
    """The old tensor `source` with its dimensions edited in order, times `value`.

    `is_copy` marks a copy of a tensor that is also kept elsewhere, as in a stacked layer; `is_second` a tensor that
    continues its source with all its moments, as another one does too. Factors and new values apply to the tensor plus
    `offset`.
    """

    source: str
    edits: tuple[Edit, ...] = ()
    value: float = 1.0
    gradient: float = 1.0
    is_copy: bool = False
    offset: float = 0.0
    is_second: bool = False


@dataclass(frozen=True)
class Fresh:
    """A wholly new tensor: these values minus `offset`."""

    shape: tuple[int, ...]
    fill: Fill
    std: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True)
class Merged:
    """`source` + `scale` · `b` @ `a`: an adapter merged into its matrix; `is_second`: see `Grown`."""

    source: str
    a: str
    b: str
    scale: float
    is_second: bool = False


@dataclass(frozen=True)
class Truncated:
    """Factor `side` of the best approximation of `b` @ `a` by `rank`; both factors have the square
    roots of the singular values. Where these are 0, rows of `a` are drawn with standard deviation
    `std` and columns of `b` are 0: if both were 0, neither would ever receive a gradient."""

    a: str
    b: str
    rank: int
    side: Literal["a", "b"]
    std: float = 0.0


@dataclass(frozen=True)
class Stacked:
    """`count` copies of the sources, joined along their first dimension, along a new one: an expert each.

    Their gradients add up to the old one, so first moments are divided by `count`. Second moments are divided by
    `count` · `per_token`: of a token's gradient, which is mostly noise, `per_token` experts each get that share
    (measured with 4 experts in a GPT of 4 × 128: by 4.6 with one of them per token, by 8.6 with two). Noise is normal,
    with the standard deviation `noise` relative to the root mean square of the sources.
    """

    sources: tuple[str, ...]
    count: int
    per_token: int
    noise: float = 0.0


@dataclass(frozen=True)
class Averaged:
    """A weighted mean of several old tensors of one shape; `weights` add up to 1. It is a copy of them: all are
    kept elsewhere."""

    sources: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Reindexed:
    """The old tensor `source` with other rows: each is the mean of the old rows that `rows` lists for it, of all if it
    lists none. Those in `kept_rows` are old rows at another place, and continue their moments; all others are new."""

    source: str
    rows: tuple[tuple[int, ...], ...]
    kept_rows: frozenset[int]


TensorPlan = Grown | Fresh | Merged | Truncated | Stacked | Averaged | Reindexed


@dataclass(frozen=True)
class GrowthPlan:
    """How every tensor of the grown model is made, in the grown model's order."""

    tensors: Mapping[str, TensorPlan]
    label: Label
    bound_nats: float | None = None
    """bound of the rise of the mean loss, if the label is `bounded`"""
    notes: tuple[str, ...] = ()
    """short remarks for the user"""
    buffers: Mapping[str, Grown] = field(default_factory=dict)
    """buffers of the grown model whose axes it names"""
    blocks: tuple[int | None, ...] = ()
    """the old block, or None, that each new block is made from; empty: all are in place"""
    waits: bool = False
    """whether no gradient reaches what is new until a later operation uses it"""

    def buffer(self, name: str) -> Grown | None:
        """Return how a buffer of the grown model is made; None if it is new.

        A buffer whose axes are not named keeps its shape and moves with its block.
        """
        if name in self.buffers:
            return self.buffers[name]
        layer = layer_of(name) if self.blocks else None
        if layer is None:
            return Grown(name)
        source = self.blocks[layer]
        return None if source is None else Grown(in_block(name, source))

    def submodule(self, name: str) -> str | None:
        """Return the old submodule that one of the grown model continues or copies; None if it is new.

        One outside the blocks keeps its name; there need be none of this name in the old model.
        """
        first, *inside = name.split(".")
        if not self.blocks or first != "blocks" or not inside:
            return name
        source = self.blocks[int(inside[0])]
        return None if source is None else ".".join([first, str(source), *inside[1:]])

    def source(self, name: str) -> str | None:
        """Return the old parameter that a parameter continues; None for a new one or a copy."""
        tensor_plan = self.tensors[name]
        if isinstance(tensor_plan, Truncated):
            return tensor_plan.a if tensor_plan.side == "a" else tensor_plan.b
        if isinstance(tensor_plan, Stacked):
            return tensor_plan.sources[0]
        if isinstance(tensor_plan, Fresh | Averaged) or (
            isinstance(tensor_plan, Grown) and tensor_plan.is_copy
        ):
            return None
        return tensor_plan.source

    @property
    def mostly_new(self) -> tuple[str, ...]:
        """The parameters of which at least half of the elements are new or copies."""
        return tuple(
            name for name, tensor_plan in self.tensors.items() if _kept_share(tensor_plan) <= 0.5
        )

    @property
    def makes_new(self) -> bool:
        """Whether any element of any tensor is new or a copy."""
        return any(
            not isinstance(tensor_plan, Grown | Merged | Stacked)
            or (
                isinstance(tensor_plan, Grown)
                and (tensor_plan.is_copy or any(map(_has_new, tensor_plan.edits)))
            )
            for tensor_plan in self.tensors.values()
        )


def source_of(tensor_plan: TensorPlan) -> str | None:
    """Return the old tensor whose moments a new tensor continues, of several the first."""
    return next(iter(sources_of(tensor_plan)), None)


def sources_of(tensor_plan: TensorPlan) -> tuple[str, ...]:
    """Return the old tensors of whose moments those of a new tensor are made."""
    if isinstance(tensor_plan, Averaged | Stacked):
        return tensor_plan.sources
    return (tensor_plan.source,) if isinstance(tensor_plan, Grown | Merged | Reindexed) else ()


def grown_shape(tensor_plan: Grown, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that the plan of a tensor gives to an old tensor of `shape`."""
    sizes = list(shape)
    for edit in tensor_plan.edits:
        sizes[edit.dim] = sum(map(len, edit.pieces))
    return tuple(sizes)


def check_buffers(
    plan: GrowthPlan, old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that every buffer whose shape changes has a plan.

    Args:
        old, new: shapes of the buffers of both modules.

    Raises:
        GrowthError: a buffer has none.
    """
    for name, shape in new.items():
        buffer_plan = plan.buffer(name)
        if buffer_plan is None or buffer_plan.source not in old:
            continue
        was = old[buffer_plan.source]
        if len(was) != len(shape) or grown_shape(buffer_plan, was) != shape:
            raise GrowthError(
                f"the buffer {name} would change from {list(was)} to {list(shape)}, and the shape's "
                "table does not say along which axis: name it there with table.batch_norm(…) or "
                f"table.buffer({name!r}, …)"
            )


def _kept_share(tensor_plan: TensorPlan) -> float:
    """Return the share of the elements of a new tensor that continue old ones."""
    if isinstance(tensor_plan, Fresh | Averaged):
        return 0.0
    if isinstance(tensor_plan, Reindexed):
        return len(tensor_plan.kept_rows) / len(tensor_plan.rows)
    if not isinstance(tensor_plan, Grown):
        return 1.0
    share = 0.0 if tensor_plan.is_copy else 1.0
    for edit in tensor_plan.edits:
        old = (piece for piece in edit.pieces if isinstance(piece, Old) and not piece.is_copy)
        share *= sum(map(len, old)) / sum(map(len, edit.pieces))
    return share


def _has_new(edit: Edit) -> bool:
    return any(isinstance(piece, New) or piece.is_copy for piece in edit.pieces)


@dataclass(frozen=True)
class VocabularyMap:
    """How the rows of a table of tokens are made for a new tokenizer."""

    rows: tuple[tuple[int, ...], ...]
    """for each new row, the old rows whose mean it is; none: all"""
    kept_tokens: frozenset[int]
    """new rows of tokens that both tokenizers have"""
    special: Mapping[str, int]
    """ids that the new tokenizer declares, by their keys in `config.json`"""

    def special_ids(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ids of special tokens in a config with the new tokenizer: the same tokens if it has them, else
        its own, else None."""
        new_rows = {self.rows[new][0]: new for new in self.kept_tokens}
        ids_by_key: dict[str, Any] = {}
        for key in (f"{name}_id" for name in SPECIAL):
            old = config.get(key)
            ids = old if isinstance(old, list) else [old]
            if old is None:
                continue
            new = [new_rows.get(token_id) if type(token_id) is int else None for token_id in ids]
            is_complete = None not in new
            ids_by_key[key] = (
                (new if isinstance(old, list) else new[0]) if is_complete else self.special.get(key)
            )
        return ids_by_key
