"""What is observed of gradients: their norm, norms per layer, new parameters that no gradient reaches,
and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from instar.config.schema import RunConfig
from instar.data.columns import cut
from instar.data.loader import MicroBatch, StepBatch
from instar.growth.plan import (
    Averaged,
    Edit,
    Fresh,
    Grown,
    GrowthPlan,
    Merged,
    Old,
    Reindexed,
    Stacked,
    TensorPlan,
    Truncated,
)
from instar.models import shape
from instar.record.device import recorded_event

Norms = Mapping[str, float]
GroupNorms = Callable[[Sequence[Sequence[Tensor]]], Tensor]
"""Returns the Euclidean norm of each group of tensors; see `Strategy.norms`."""


class GradNorm:
    """The norm of a step's global gradient, which a GPU may still have to compute."""

    def __init__(self, norm: float | Tensor) -> None:
        self._norm = norm if isinstance(norm, float) else norm.to("cpu", non_blocking=True)
        self._computed = None if isinstance(norm, float) else recorded_event(norm.device)

    @property
    def pending(self) -> bool:
        """Whether `item` has to ask the device."""
        return not isinstance(self._norm, float)

    def item(self) -> float:
        """Return the norm, once it is computed."""
        if self._computed is not None:
            self._computed.synchronize()
            self._computed = None
        self._norm = float(self._norm)
        return self._norm

    @property
    def finite(self) -> bool:
        """Whether the weights were updated."""
        return math.isfinite(self.item())


@dataclass(frozen=True)
class Skips:
    """Number of consecutive last steps with a gradient that was not finite.

    Those at which fp16's search for its loss scale lowered it from above 1 do not count: a smaller one may help.
    """

    before: int = 0
    """without the last step"""
    last: GradNorm | None = None
    """of the last step; None: there is none to add"""
    scale: float = 1.0
    """by which the loss of the last step was multiplied"""

    @property
    def lowers_scale(self) -> bool:
        """Whether the last step was skipped, and its loss scale lowered from above 1."""
        return self.scale > 1 and self.last is not None and not self.last.finite

    @property
    def in_a_row(self) -> int:
        """Wait for the last step's norm."""
        if self.last is None or self.lowers_scale:
            return self.before
        return 0 if self.last.finite else self.before + 1


def group_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3` for `blocks.3.mlp.up.weight`, else the first part
    of its name.
    """
    first, *parts = name.split(".")
    return f"{first}.{parts[0]}" if parts and parts[0].isdigit() else first


class LayerStats:
    """Gradient norm and update ratio per layer, for one step.

    Call `before` before the update, with reduced gradients that are not clipped yet, and `after`
    after it. A copy of the weights is kept in between.
    """

    def __init__(self, norms: GroupNorms) -> None:
        self._norms = norms
        self.grad_norm: Norms = {}
        self.update_ratio: Norms = {}
        """‖Δw‖ / ‖w‖ per layer"""
        self._weights: dict[str, Tensor] = {}

    def before(self, parameters: Mapping[str, Parameter]) -> None:
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        self.grad_norm = self._by_layer(gradients)
        self._weights = {n: parameters[n].detach().clone() for n in gradients}

    def after(self, parameters: Mapping[str, Parameter]) -> None:
        sizes = self._by_layer(self._weights)
        steps = {n: parameters[n].detach() - old for n, old in self._weights.items()}
        update_norms = self._by_layer(steps)
        self._weights = {}
        self.update_ratio = {g: update_norms[g] / size for g, size in sizes.items() if size > 0}

    def _by_layer(self, tensors: Mapping[str, Tensor]) -> Norms:
        layers: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            layers.setdefault(group_of(name), []).append(tensor)
        norms = self._norms([*layers.values()]).tolist() if layers else []
        return dict(zip(layers, norms, strict=True))


WATCHED_STEPS = 3
"""Under a mask the first step has zero gradients; behind a zero factor the second has more."""
MAX_WATCHED_STEPS = 5
"""Each zero factor in front of a parameter, e.g. of an adapter in a new block, delays its gradient
by one step. Parameters without a gradient by then are dead."""

_ROUNDING = 2.0**-23
"""Gradients below this, relative to the typical one, are what float32 leaves of a sum that is 0."""


class GradientWatch:
    """Watches the gradients of the steps after an operation. New parameters whose gradients are
    0 up to rounding in all of them are dead: they will never get a gradient.

    Rows and columns are checked one by one, except along an embedding's rows, whose gradients
    depend on which rows the samples look up.
    """

    def __init__(
        self, plan: GrowthPlan, operation: str, parameters: Mapping[str, shape.Parameter]
    ) -> None:
        """
        Args:
            parameters: of the grown model.
        """
        self.plan, self.operation = plan, operation
        self._axes = {name: entry.axes for name, entry in parameters.items()}
        self._embedding_axes = {
            entry.axes[0] for entry in parameters.values() if entry.kind == "embedding"
        }
        self.norms: list[tuple[float, float]] = []
        """gradient norms (kept parameters, new parameters) of each step"""
        self._update_norms: list[tuple[float, float]] = []
        """those of the steps that made an update"""
        self._unreached: dict[tuple[str, int], Tensor] = {}
        """by tensor and dimension: bool mask of new slices without a gradient so far"""

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of a step; ignored if not finite, as they make no update."""
        self.norms.append(split_grad_norms(self.plan, gradients))
        if not all(map(math.isfinite, self.norms[-1])):
            return
        self._update_norms.append(self.norms[-1])
        noise = _ROUNDING * typical_size(gradients)
        for name, gradient in gradients.items():
            for dim, new in new_slices(self.plan.tensors[name], gradient.shape):
                if self._axes[name][dim] in self._embedding_axes:
                    continue
                other_dims = [
                    dim_number for dim_number in range(gradient.ndim) if dim_number != dim
                ]
                has_gradient = gradient.abs().gt(noise).any(dim=other_dims).cpu()
                without_gradient = self._unreached.get((name, dim), new)
                self._unreached[name, dim] = without_gradient & ~has_gradient

    @property
    def is_over(self) -> bool:
        """Whether the watch ends: after `WATCHED_STEPS`, or later if a parameter is unreached."""
        steps = len(self._update_norms)
        if steps < WATCHED_STEPS:
            return False
        return steps >= MAX_WATCHED_STEPS or not (
            self.parameters_without_gradient or self._new_norm_is_noise
        )

    @property
    def dead(self) -> bool:
        """Whether no new parameter had a gradient, although the kept ones had."""
        had = all(old > 0.0 for old, _ in self._update_norms)
        return self.is_over and had and self._new_norm_is_noise

    @property
    def parameters_without_gradient(self) -> dict[str, int]:
        """Number of new rows, or columns, of each tensor without a gradient so far."""
        counts: dict[str, int] = {}
        for (name, _), without_gradient in self._unreached.items():
            counts[name] = max(counts.get(name, 0), int(without_gradient.sum()))
        return {name: count for name, count in counts.items() if count}

    @property
    def _new_norm_is_noise(self) -> bool:
        return all(new <= _ROUNDING * old for old, new in self._update_norms)


def typical_size(gradients: Mapping[str, Tensor]) -> float:
    """Return the median over the tensors of the root mean square of a gradient's elements; of those that are not 0."""
    sizes = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64) / math.sqrt(gradient.numel())
        for gradient in gradients.values()
        if gradient.numel()
    ]
    sorted_sizes = sorted(
        size for size in (torch.stack(sizes).tolist() if sizes else []) if size > 0.0
    )
    return sorted_sizes[len(sorted_sizes) // 2] if sorted_sizes else 0.0


def split_grad_norms(plan: GrowthPlan, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the gradient norms of kept elements and of new ones.

    Copies count as new, and so does every element of a new slice along any dimension. A norm of 0
    over the new elements means that they cannot learn.
    """
    if not gradients:
        return 0.0, 0.0
    # one by one: a difference of sums would not be exactly 0
    norms = torch.stack(
        [_split_norm(plan.tensors[name], gradient) for name, gradient in gradients.items()]
    )
    kept_norm, new = torch.linalg.vector_norm(norms, dim=0).tolist()
    return kept_norm, new


def new_slices(how: TensorPlan, shape: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Return (dimension, mask of its new slices) for each dimension with new slices or copies.

    All slices of a wholly new tensor are new. A vector has none: its slices are single numbers.
    """
    if len(shape) < 2 or isinstance(how, Merged | Stacked):
        return []
    if isinstance(how, Reindexed):
        return [(0, ~_kept_rows(how))]
    if not isinstance(how, Grown) or how.is_copy:
        return [(dim, torch.ones(size, dtype=torch.bool)) for dim, size in enumerate(shape)]
    slices = [(edit.dim, ~_kept_mask(edit)) for edit in how.edits]
    return [(dim, new) for dim, new in slices if new.any()]


def _split_norm(how: TensorPlan, gradient: Tensor) -> Tensor:
    """Return the norms over the kept elements and over the new ones: (2,), in float64."""
    zero = gradient.new_zeros((), dtype=torch.float64)
    if isinstance(how, Averaged | Fresh | Truncated) or (isinstance(how, Grown) and how.is_copy):
        return torch.stack((zero, _norm(gradient)))
    kept_gradient, new = gradient, [zero]
    for dim, is_kept in _kept_slices(how).items():
        if not is_kept.all():
            index = is_kept.to(gradient.device)
            new.append(_norm(kept_gradient.index_select(dim, (~index).nonzero().flatten())))
            kept_gradient = kept_gradient.index_select(dim, index.nonzero().flatten())
    return torch.stack((_norm(kept_gradient), _norm(torch.stack(new))))


def _kept_slices(how: TensorPlan) -> dict[int, Tensor]:
    """Return the mask of the kept slices along each dimension that may have others."""
    if isinstance(how, Reindexed):
        return {0: _kept_rows(how)}
    slices_by_dim: dict[int, Tensor] = {}
    for edit in how.edits if isinstance(how, Grown) else ():
        mask = _kept_mask(edit)
        slices_by_dim[edit.dim] = (
            slices_by_dim[edit.dim] & mask if edit.dim in slices_by_dim else mask
        )
    return slices_by_dim


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


def _kept_mask(edit: Edit) -> Tensor:
    """Return the mask of kept slices along an edited dimension."""
    return torch.cat(
        [
            torch.full((len(piece),), isinstance(piece, Old) and not piece.is_copy)
            for piece in edit.pieces
        ]
    )


def _kept_rows(how: Reindexed) -> Tensor:
    return torch.tensor([row in how.kept_rows for row in range(len(how.rows))])


_DECAY = 0.95
_SETTLED = 8
"""Measurements before the noise scale decides anything."""
_PART = 16
_INTERVAL = 50


@dataclass(frozen=True)
class PartNorm:
    """The gradient of a part of a global batch."""

    samples: int
    """of the part, over all ranks"""
    norm: float
    """of the mean gradient per sample of the part"""


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale tr(Σ) / |G|² in samples: the batch size at which noise and signal of a
    gradient are equally large (McCandlish et al. 2018, arXiv 1812.06162, section 2.2).

    Σ is the covariance of the gradients of single samples, G their mean. Both are estimated without
    bias from the gradients of two batch sizes (appendix A.1), and averaged apart. As both averages
    begin at 0, their ratio has no bias from that.
    """

    trace: float = 0.0
    """average of the estimates of tr(Σ)"""
    square: float = 0.0
    """average of the estimates of |G|²"""
    count: int = 0
    """measurements so far"""

    def with_measurement(self, part: PartNorm, samples: int, norm: float) -> NoiseScale:
        """Return the average with one more measurement; unchanged if it is not finite, or if the part
        is the whole batch.

        Args:
            samples, norm: of the global batch.
        """
        if not (0 < part.samples < samples and math.isfinite(part.norm + norm)):
            return self
        small, large = part.norm**2, norm**2
        trace = (small - large) / (1 / part.samples - 1 / samples)
        square = (samples * large - part.samples * small) / (samples - part.samples)
        return NoiseScale(
            _DECAY * self.trace + (1 - _DECAY) * trace,
            _DECAY * self.square + (1 - _DECAY) * square,
            self.count + 1,
        )

    @property
    def value(self) -> float | None:
        """In samples; None while the noise hides the mean gradient."""
        return self.trace / self.square if min(self.trace, self.square) > 0 else None

    @property
    def settled(self) -> float | None:
        """`value`, once there are enough measurements."""
        return self.value if self.count >= _SETTLED else None


def noise_interval(config: RunConfig, global_batch: int, slices: int) -> int | None:
    """Return the steps between measurements of the noise scale; None: it is not measured.

    By default about a hundredth of the work of a step is added at most: the part is a sixteenth of
    each slice, or more of a small one.
    """
    if not config.measures_noise or global_batch < 2:
        return None
    whole_micro_batches = config.compile and slices > 1
    share = 1.0 if whole_micro_batches else min(1.0, slices / global_batch)
    return config.record.noise_every or max(_INTERVAL, round(2 * _INTERVAL * share))


def part_of(batch: StepBatch, *, keep_size: bool) -> StepBatch:
    """Return a part of a step, one micro-batch of each slice: about a sixteenth of the slice's samples,
    at least one; of slices with a single one every other slice.

    Args:
        keep_size: do not cut micro-batches, because their shape is compiled.
    """
    parts: list[MicroBatch] = []
    for rank, group in groupby(batch.micro_batches, lambda micro: micro.rank):
        micro_batches = [*group]
        micro, number = micro_batches[0], sum(micro_batch.samples for micro_batch in micro_batches)
        if number < 2 or (keep_size and len(micro_batches) == 1):
            size = 0 if rank % 2 else micro.samples
        else:
            size = micro.samples if keep_size else min(micro.samples, max(1, number // _PART))
        arrays = micro.arrays if keep_size else cut(micro.arrays, 0, max(1, size))
        if micro.weights is None:
            weight, weights = micro.weight * size / max(1, micro.samples), None
        else:
            weights = micro.weights[:size]
            weight = float(weights.sum())
        parts.append(replace(micro, arrays=arrays, samples=size, weight=weight, weights=weights))
    return replace(batch, micro_batches=tuple(parts), passes=(1,) * len(batch.passes))


def dead_ranks(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return a warning about ranks of adapters that no gradient can reach; empty if there are none.

    Args:
        names: names of a model's parameters.
        read: returns a parameter by name.
    """
    dead: dict[str, int] = {}
    for name in names:
        if name.endswith(".lora_a"):
            weight = name.removesuffix(".lora_a")
            a, b = read(name), read(f"{weight}.lora_b")
            if count := int((a.eq(0).all(dim=1) & b.eq(0).all(dim=0)).sum()):
                dead[weight] = count
    if not dead:
        return ""
    return (
        f"{sum(dead.values())} ranks of adapters ({', '.join(list(dead)[:3])}"
        f"{', …' if len(dead) > 3 else ''}) are zero in both factors: no gradient will ever reach "
        "them; set_lora_rank of these weights to a lower rank and back draws new values"
    )
