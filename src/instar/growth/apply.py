"""Applies growth plans to parameters, buffers and optimizer states.

A parameter times s has a gradient times 1 / s: its first moment is divided by s, its second by s².
A plan gives the factor of the gradient of every old slice, which is not always the inverse of the
factor of its value: where a reader's weight is divided among copies, each share is smaller and its
gradient is the old one. torch counts the steps of a tensor as a whole, so new slices of an old
tensor begin with a mean second moment, and wholly new tensors with no state.

A model in memory is grown plan by plan (`apply`). A checkpoint that may be larger than memory is
grown one tensor at a time: `grow_parameters` and `grow_states` compose plans, and read what a
tensor is made of when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Module

from instar.checkpoint.tensor_file import Outline
from instar.config.sections import Operation
from instar.growth.plan import (
    Averaged,
    Edit,
    Fresh,
    Grown,
    GrowthError,
    GrowthPlan,
    Merged,
    New,
    Old,
    Reindexed,
    Stacked,
    Truncated,
    check_buffers,
    source_of,
    sources_of,
)
from instar.growth.states import (
    FACTORS,
    KNOWN_STATES,
    Role,
    factor_shape,
    shape_of_factors,
    state_role,
)
from instar.models.gpt import named_generator
from instar.models.module import empty_buffers, persistent_buffers
from instar.models.shape import Parameter

Key = tuple[int, ...]
"""The key of the random generator of new values: (seed of the run, index of the operation in its
history)."""

Read = Callable[[str], Tensor]
"""Returns an old tensor by its name."""

Copies = Literal["asymmetric", "mapped"]
"""Moments of copied slices. `asymmetric`: m = 0 and the source's v, which breaks the symmetry;
`mapped`: both are the source's, so that copies stay equal for ever."""

Mode = Literal["asymmetric", "mapped", "reset"]
"""How optimizer states grow: as `Copies`, or all states are dropped."""

_ROWS = 4096
"""means of rows that are made at once"""
_SUMMED = 1 << 18
"""elements that are converted to float64 at once"""


def apply(
    plan: GrowthPlan,
    tensors: Mapping[str, Tensor],
    role: Role,
    key: Key,
    copies: Copies = "asymmetric",
) -> dict[str, Tensor]:
    """Return the tensors of the grown model, in its order.

    An unchanged tensor is returned itself, not a copy. Moments may be missing: a tensor that had
    none, or is wholly new, has none afterwards.

    Raises:
        KeyError: a parameter is missing.
    """
    return dict(apply_each(plan, tensors, role, key, copies))


def apply_each(
    plan: GrowthPlan,
    tensors: Mapping[str, Tensor],
    role: Role,
    key: Key,
    copies: Copies = "asymmetric",
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `apply` returns, one tensor at a time; read only those that each is made of."""
    neighbour = neighbours(tensors)
    for name, tensor_plan in plan.tensors.items():
        if role is Role.PARAMETER or source_of(tensor_plan) in tensors:
            like = tensors.get(neighbour(name)) if isinstance(tensor_plan, Fresh) else None
            tensor = apply_one(plan, name, tensors.__getitem__, role, key, copies, like)
            if tensor is not None:
                yield name, tensor


@torch.no_grad()
def grow_buffers(
    plan: GrowthPlan, buffers: Mapping[str, Tensor], model: Module
) -> dict[str, Tensor]:
    """Return the persistent buffers to load into a new module of the grown shape.

    Args:
        buffers: buffers of the old model.
        model: the new module; new elements keep its values.

    Raises:
        GrowthError: a buffer's shape would change and the plan does not say how, or the new module
            does not have it.
    """
    initial = persistent_buffers(model)
    # None in a new module, filled by now in the old one
    later = {name: plan.buffer(name) for name in empty_buffers(model)}
    filled_buffers = {
        name: buffers[buffer_plan.source]
        for name, buffer_plan in later.items()
        if buffer_plan is not None and not buffer_plan.edits and buffer_plan.source in buffers
    }
    plans = (plan.buffer(name) for name in (*initial, *filled_buffers))
    if missing := buffers.keys() - {
        buffer_plan.source for buffer_plan in plans if buffer_plan is not None
    }:
        raise GrowthError(
            f"the buffer {min(missing)} would be lost: a new module does not have it; register it in the "
            "constructor, as None if it is filled later"
        )
    shapes = (
        {name: tuple(t.shape) for name, t in tensors.items()} for tensors in (buffers, initial)
    )
    check_buffers(plan, *shapes)
    grown_buffers = {}
    for name, initial_value in initial.items():
        plan_of_buffer = plan.buffer(name)
        old = None if plan_of_buffer is None else buffers.get(plan_of_buffer.source)
        grown_buffers[name] = (
            initial_value
            if plan_of_buffer is None or old is None
            else _grown_buffer(plan_of_buffer, old, initial_value)
        )
    return {**grown_buffers, **filled_buffers}


def _grown_buffer(buffer_plan: Grown, old: Tensor, fresh: Tensor) -> Tensor:
    """Return `fresh` with the old values where the plan keeps or copies them."""
    if not buffer_plan.edits:
        return old.to(fresh, copy=True)
    sources = [list(range(size)) for size in old.shape]
    for edit in buffer_plan.edits:
        indices = sources[edit.dim]
        sources[edit.dim] = [
            index
            for piece in edit.pieces
            for index in (
                indices[piece.start : piece.stop] if isinstance(piece, Old) else [-1] * len(piece)
            )
        ]
    positions = [[at for at, source in enumerate(line) if source >= 0] for line in sources]
    origins = [[source for source in line if source >= 0] for line in sources]
    buffer = fresh.clone()
    buffer[_grid(positions, fresh)] = old.to(fresh)[_grid(origins, fresh)]
    return buffer


def _grid(indices: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, ...]:
    lines = [
        torch.tensor(positions, dtype=torch.int64, device=like.device) for positions in indices
    ]
    return torch.meshgrid(*lines, indexing="ij")


@torch.no_grad()
def apply_one(
    plan: GrowthPlan,
    name: str,
    read: Read,
    role: Role,
    key: Key,
    copies: Copies = "asymmetric",
    like: Tensor | None = None,
) -> Tensor | None:
    """Return one tensor of the grown model; None for the moments of a wholly new parameter.

    Args:
        read: called only for the tensors that this one is made of.
        like: has the dtype and the device of a wholly new parameter; default float32, CPU.
    """
    tensor_plan = plan.tensors[name]
    if isinstance(tensor_plan, Grown):
        return _Growing(role, copies, name, key).grow(tensor_plan, read(tensor_plan.source))
    if isinstance(tensor_plan, Stacked):
        joined_sources = torch.cat([read(source) for source in tensor_plan.sources])
        return _stack(tensor_plan, joined_sources, role, named_generator(*key, name, "noise"))
    if isinstance(tensor_plan, Reindexed):
        return _reindex(tensor_plan, read(tensor_plan.source), role, copies)
    if isinstance(tensor_plan, Averaged):
        # as of any copy, moments of the first order begin at 0
        zero = role is Role.FIRST_MOMENT and copies == "asymmetric"
        return _average(tensor_plan, read).mul_(0.0 if zero else 1.0)
    if role is not Role.PARAMETER:
        # an average of a matrix takes in a merged adapter as it goes on averaging
        if not isinstance(tensor_plan, Merged):
            return None
        # merging an adapter does not change the gradient of the matrix
        moments = read(tensor_plan.source)
        return moments.clone() if tensor_plan.is_second else moments
    if isinstance(tensor_plan, Merged):
        weight, a, b = read(tensor_plan.source), read(tensor_plan.a), read(tensor_plan.b)
        return torch.addmm(weight, b, a, alpha=tensor_plan.scale)
    if isinstance(tensor_plan, Truncated):
        factor, is_unused = _truncate(tensor_plan, read(tensor_plan.a), read(tensor_plan.b))
        rows = torch.zeros_like(factor)
        if tensor_plan.side == "a":
            _fill(rows, New(1, "normal", tensor_plan.std), named_generator(*key, name, 0))
        return torch.where(
            is_unused[:, None] if tensor_plan.side == "a" else is_unused, rows, factor
        )
    assert isinstance(tensor_plan, Fresh)
    fresh = torch.empty(tensor_plan.shape)
    if like is not None:
        fresh = fresh.to(like)
    _fill(
        fresh,
        New(1, tensor_plan.fill, tensor_plan.std),
        named_generator(*key, name, "fresh"),
        tensor_plan.offset,
    )
    return fresh


def _stack(tensor_plan: Stacked, tensor: Tensor, role: Role, generator: torch.Generator) -> Tensor:
    stack = tensor.expand(tensor_plan.count, *tensor.shape).clone()
    _, of_gradient = role.powers
    if of_gradient:
        return stack.div_(tensor_plan.count * (tensor_plan.per_token if of_gradient == 2 else 1))
    if tensor_plan.noise and role is Role.PARAMETER:
        noise = torch.empty_like(stack)
        _fill(noise, New(1, "normal", tensor_plan.noise), generator)
        stack += noise * tensor.square().mean().sqrt()
    return stack


def _average(tensor_plan: Averaged, read: Read) -> Tensor:
    """Return the weighted mean, one source at a time and in float32 at least."""
    first = read(tensor_plan.sources[0])
    wide = torch.promote_types(first.dtype, torch.float32)
    mean = torch.zeros_like(first, dtype=wide)
    for source, weight in zip(tensor_plan.sources, tensor_plan.weights, strict=True):
        tensor = first if source == tensor_plan.sources[0] else read(source)
        mean.add_(tensor.to(wide), alpha=weight)
    return mean.to(first.dtype)


def _reindex(tensor_plan: Reindexed, tensor: Tensor, role: Role, copies: Copies) -> Tensor:
    """Return a tensor with other rows; means are taken in float32 at least, a few thousand at a time."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    firsts = torch.tensor([row[0] if row else 0 for row in tensor_plan.rows])
    out = tensor.index_select(0, firsts.to(tensor.device))
    new = [at for at in range(len(tensor_plan.rows)) if at not in tensor_plan.kept_rows]
    if role is Role.FIRST_MOMENT and copies == "asymmetric":
        out[torch.tensor(new, dtype=torch.int64, device=out.device)] = 0.0
        return out
    of_all = [at for at in new if not tensor_plan.rows[at]]
    out[torch.tensor(of_all, dtype=torch.int64, device=out.device)] = _mean([tensor], 0).to(
        out.dtype
    )
    combined_rows = [at for at in new if len(tensor_plan.rows[at]) > 1]
    for first in range(0, len(combined_rows), _ROWS):
        rows = combined_rows[first : first + _ROWS]
        sources = torch.tensor([source for at in rows for source in tensor_plan.rows[at]])
        counts = torch.tensor([len(tensor_plan.rows[at]) for at in rows])
        targets = torch.arange(len(rows)).repeat_interleave(counts).to(out.device)
        sums = torch.zeros(len(rows), *tensor.shape[1:], dtype=wide, device=out.device)
        sums.index_add_(0, targets, tensor.index_select(0, sources.to(out.device)).to(wide))
        shares = counts.to(sums).reciprocal().view(-1, *[1] * (sums.ndim - 1))
        out[torch.tensor(rows, device=out.device)] = (sums * shares).to(out.dtype)
    return out


class _Growing:
    """Scales the old slices of one tensor and fills its new ones, in one role."""

    def __init__(self, role: Role, copies: Copies, name: str, key: Key) -> None:
        self.role, self.copies, self.name, self.key = role, copies, name, key

    def grow(self, tensor_plan: Grown, tensor: Tensor) -> Tensor:
        offset = tensor_plan.offset if self.role.is_weight else 0.0
        for edit in tensor_plan.edits:
            tensor = self._apply_edit(edit, tensor, offset)
        factor = self._factor(tensor_plan)
        if factor != 1.0:
            # what an edit returned is new memory already
            scaled_tensor = tensor.mul_(factor) if tensor_plan.edits else tensor * factor
            return scaled_tensor.add_((factor - 1.0) * offset) if offset else scaled_tensor
        is_other = tensor_plan.is_copy or tensor_plan.is_second
        return tensor.clone() if is_other and not tensor_plan.edits else tensor

    def _factor(self, piece: Old | Grown) -> float:
        if self.role is Role.FIRST_MOMENT and piece.is_copy and self.copies == "asymmetric":
            return 0.0
        return self.role.factor(piece.value, piece.gradient)

    def _apply_edit(self, edit: Edit, tensor: Tensor, offset: float) -> Tensor:
        shape = list(tensor.shape)
        shape[edit.dim] = sum(len(piece) for piece in edit.pieces)
        out = _empty_like(tensor, shape)
        views = torch.split(out, [len(piece) for piece in edit.pieces], edit.dim)
        old, waiting = [], []
        generator = named_generator(*self.key, self.name, edit.dim)
        for piece, view in zip(edit.pieces, views, strict=True):
            if isinstance(piece, Old):
                source = tensor.narrow(edit.dim, piece.start, len(piece))
                factor = self._factor(piece)
                if factor == 1.0:
                    view.copy_(source)
                else:
                    torch.mul(source, factor, out=view)
                    if offset:
                        view.add_((factor - 1.0) * offset)
                old.append(view)
            elif self._takes_mean(piece):
                waiting.append(view)
            elif self.role.is_weight:
                _fill(view, piece, generator, offset)
            else:
                view.zero_()
        for view in waiting:
            view.copy_(_mean(old, edit.dim))
        return out

    def _takes_mean(self, piece: New) -> bool:
        # a second moment of 0 with a large step count would make the first updates of new slices
        # about 3 learning rates long (β₂ = 0.999)
        return self.role.is_size or (self.role.is_weight and piece.fill == "mean")


def _empty_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor whose dimensions have the order in memory of another's, such as channels_last."""
    if tensor.is_contiguous():
        return tensor.new_empty(shape)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def _mean(views: list[Tensor], dim: int) -> Tensor:
    """Mean of all slices along a dimension; in float64, so that devices nearly always agree."""
    sums = [_sum(view, dim) for view in views]
    count = sum(view.shape[dim] for view in views)
    return torch.stack(sums).sum(0).div_(count)


def _sum(view: Tensor, dim: int) -> Tensor:
    """Sum along a dimension in float64, some rows at a time: torch converts all that it adds up first."""
    rows = max(1, _SUMMED * len(view) // max(1, view.numel()))
    sums = [part.sum(dim, keepdim=True, dtype=torch.float64) for part in torch.split(view, rows)]
    return torch.stack(sums).sum(0) if dim == 0 else torch.cat(sums)


def _fill(view: Tensor, new: New, generator: torch.Generator, offset: float = 0.0) -> None:
    if new.fill == "normal":
        # on the CPU, so that every device has the same values
        values = torch.empty(view.shape, dtype=torch.float32, device="cpu")
        view.copy_(values.normal_(0.0, new.std, generator=generator))
    else:
        view.fill_((1.0 if new.fill == "one" else 0.0) - offset)


def _truncate(tensor_plan: Truncated, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return one factor of the best approximation of b @ a by a lower rank (Eckart and Young), and
    the mask of its ranks whose singular value is 0 up to rounding, as in
    `torch.linalg.matrix_rank`.

    The decomposition is that of the small matrix between the orthogonal parts of both factors; b @
    a itself is never computed.
    """
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().mT)
    u, s, v_h = torch.linalg.svd(r_b @ r_a.mT)
    root, rank = s[: tensor_plan.rank].sqrt(), tensor_plan.rank
    factor: Tensor = (
        root[:, None] * v_h[:rank] @ q_a.mT if tensor_plan.side == "a" else q_b @ u[:, :rank] * root
    )
    rounding = max(a.shape[1], b.shape[0]) * torch.finfo(a.dtype).eps
    return factor.to(a.dtype), s[:rank] <= s.amax() * rounding


def moments_mode(operation: Operation) -> Mode:
    """Return how an operation grows optimizer states."""
    mode: Mode = operation.options.get("moments", "asymmetric")
    return mode


STAY_EQUAL = (
    "have the optimizer state of their sources, or none, and will stay equal to them but for dropout: grow after a step of "
    "training, by an optimizer that keeps a mean of gradients, with moments: asymmetric"
)
"""What is said of copies for which `copies_stay_equal` is true."""


def copies_stay_equal(plan: GrowthPlan, states: Mapping[str, Tensor], mode: Mode) -> bool:
    """Return whether copies that divide the weights that read them will never become different.

    They get the same gradients, or under uneven division multiples of them, which AdamW and Muon update alike. Only
    different first moments set them apart, which asymmetric moments are, or dropout.

    Args:
        states: of the optimizer before the growth, named ``<parameter>/<state>``.
    """
    if mode == "asymmetric" and any(
        tensor.ndim and state_role(name.rpartition("/")[2]) is Role.FIRST_MOMENT
        for name, tensor in states.items()
    ):
        return False
    pieces = (
        piece
        for tensor_plan in plan.tensors.values()
        for edit in (tensor_plan.edits if isinstance(tensor_plan, Grown) else ())
        for piece in edit.pieces
    )
    return any(isinstance(old, Old) and old.is_copy and old.value != 1.0 for old in pieces)


def grown_states(plan: GrowthPlan, states: Iterable[str], mode: Mode = "asymmetric") -> list[str]:
    """Return the names of the optimizer states of the grown model, ``<parameter>/<state>``, for those of the old one."""
    if mode == "reset":
        return []
    of: dict[str, dict[str, None]] = {}
    for name in states:
        parameter, _, state = name.rpartition("/")
        of.setdefault(parameter, {})[state] = None
    return [
        f"{name}/{state}"
        for name, tensor_plan in plan.tensors.items()
        if (sources := sources_of(tensor_plan))
        for state in of.get(sources[0], ())
        if all(state in of.get(other, ()) for other in sources[1:])
    ]


def grow_state(
    plan: GrowthPlan, name: str, read: Read, key: Key, mode: Mode = "asymmetric"
) -> Tensor:
    """Return one of `grown_states`."""
    parameter, _, state = name.rpartition("/")
    tensor_plan = plan.tensors[parameter]
    first = source_of(tensor_plan)
    tensor = read(f"{first}/{state}")
    if state in FACTORS and tensor.ndim > 1:
        factors = {source: read(f"{source}/{state}") for source in sources_of(tensor_plan)}
        shape = shape_of_factors(read(f"{first}/row_var"), read(f"{first}/col_var"))
        return grow_factor(plan, parameter, factors, (FACTORS[state], shape), key, mode)
    if not tensor.ndim and state not in KNOWN_STATES:
        is_second = isinstance(tensor_plan, Grown | Merged) and tensor_plan.is_second
        return tensor.clone() if is_second or not plan.source(parameter) else tensor

    def of(source: str) -> Tensor:
        return tensor if source == first else read(f"{source}/{state}")

    copies: Copies = "mapped" if mode == "mapped" else "asymmetric"
    state_tensor = apply_one(plan, parameter, of, state_role(state), key, copies)
    assert state_tensor is not None
    return state_tensor


def grow_factor(
    plan: GrowthPlan,
    parameter: str,
    factors: Mapping[str, Tensor],
    place: tuple[int, tuple[int, ...]],
    key: Key,
    mode: Mode,
) -> Tensor:
    """Grow a mean of squared gradients over one dimension as the matrix that it stands for, and take the mean again.

    Args:
        factors: the mean of each old parameter that the new one is made from.
        place: the dimension, from the last one, and the shape of these parameters.
    """
    dim, shape = place
    value = next(iter(factors.values()))
    keeps_dim = value.ndim == len(shape)
    squares = {
        f"{source}/exp_avg_sq": (mean if keeps_dim else mean.unsqueeze(dim)).expand(shape)
        for source, mean in factors.items()
    }
    grown = grow_state(plan, f"{parameter}/exp_avg_sq", squares.__getitem__, key, mode)
    is_unchanged = any(grown is square for square in squares.values())
    return value if is_unchanged else grown.mean(dim, keepdim=keeps_dim)


@dataclass(frozen=True)
class GrowthStep:
    """One growth of a checkpoint: its plan, the parameter table of the grown model, the key of new
    values, and how optimizer states grow."""

    plan: GrowthPlan
    parameters: Mapping[str, Parameter]
    key: Key
    mode: Mode = "asymmetric"


@dataclass(frozen=True)
class TensorReader:
    """Tensors known by name, dtype and shape, which are read one at a time."""

    outlines: Mapping[str, Outline]
    read: Read


def grow_parameters(steps: Iterable[GrowthStep], tensors: TensorReader) -> TensorReader:
    """Return a reader of the parameters, or of their moving average, after all growth steps."""
    for step in steps:
        neighbour = neighbours(tensors.outlines)
        outlines = {
            name: Outline(
                tensors.outlines[nearest_source(step.plan, name, neighbour)].dtype, entry.shape
            )
            for name, entry in step.parameters.items()
        }
        tensors = TensorReader(outlines, partial(_read_parameter, step, tensors.read, outlines))
    return tensors


def grow_states(steps: Iterable[GrowthStep], tensors: TensorReader) -> TensorReader:
    """Return a reader of the optimizer states, named ``<parameter>/<state>``, after all steps."""
    for step in steps:
        outlines = {
            name: _state_outline(step, name, tensors.outlines)
            for name in grown_states(step.plan, tensors.outlines, step.mode)
        }
        tensors = TensorReader(outlines, partial(_read_state, step, tensors.read))
    return tensors


def _read_parameter(
    step: GrowthStep, read: Read, outlines: Mapping[str, Outline], name: str
) -> Tensor:
    like = torch.empty(0, dtype=outlines[name].dtype)
    tensor = apply_one(step.plan, name, read, Role.PARAMETER, step.key, like=like)
    assert tensor is not None
    return tensor


def _read_state(step: GrowthStep, read: Read, name: str) -> Tensor:
    return grow_state(step.plan, name, read, step.key, step.mode)


def nearest_source(plan: GrowthPlan, name: str, neighbour: Callable[[str], str]) -> str:
    """Return the old tensor that has the dtype of a new one."""
    tensor_plan = plan.tensors[name]
    return (
        tensor_plan.a if isinstance(tensor_plan, Truncated) else source_of(tensor_plan)
    ) or neighbour(name)


def neighbours(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function from a wholly new tensor's name to that of the old tensor next to it: its
    like in another block, the matrix of an adapter, or else one of the same module or block."""
    old: dict[tuple[str, ...], str] = {}
    for name in names:
        parts = _without_numbers(name)
        for end in range(len(parts) + 1):
            old.setdefault(parts[:end], name)

    def neighbour(name: str) -> str:
        parts = _without_numbers(name)
        return next((old[parts[:n]] for n in range(len(parts), -1, -1) if parts[:n] in old), "")

    return neighbour


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if not part.isdigit())


def _state_outline(step: GrowthStep, name: str, outlines: Mapping[str, Outline]) -> Outline:
    parameter, _, state = name.rpartition("/")
    before = outlines[f"{source_of(step.plan.tensors[parameter])}/{state}"]
    shape = step.parameters[parameter].shape
    if state in FACTORS and len(before.shape) > 1:
        return Outline(before.dtype, factor_shape(shape, state))
    # a state without dimensions is one number for the whole parameter
    return Outline(before.dtype, shape if before.shape else ())
