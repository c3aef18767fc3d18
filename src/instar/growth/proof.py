"""The proof of growth: how far it changed the function, on a probe batch before and after, and that the tensors of the
model that will train are those of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from instar.distributed.shards import GatheredTensors, is_sharded, local_rows, to_local
from instar.growth.apply import (
    Key,
    Mode,
    apply_one,
    grow_state,
    grown_states,
    neighbours,
)
from instar.growth.peers import Alone, Peers, run_in_step, unless_refused
from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, Label, New, TensorPlan
from instar.growth.states import FACTORS, Role, state_role

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest change of the logits, relative to the largest logit, and of the loss in nats, that
rounding explains in a model of this dtype."""

_COMPARED = 1 << 20
"""elements that are compared at once"""
_ULPS = 4
"""units of the last place that a plan's few products round, between two precisions"""


@dataclass(frozen=True)
class Probe:
    """A model's output for a batch: logits (…, V), and the mean loss in nats."""

    logits: Tensor
    loss: float


@dataclass(frozen=True)
class Proof:
    """How far the function changed, and whether that is within the bounds of the label."""

    label: Label
    max_logit_diff: float
    max_logit_diff_relative: float
    """relative to the largest logit before"""
    delta_loss: float
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def compare_outputs(
    plan: GrowthPlan, before: Probe, after: Probe, dtype: torch.dtype = torch.float32
) -> Proof:
    """Compare outputs for the same batch before and after growth with the label of the plan.

    Logits of new tokens are not compared. Non-finite outputs never hold.

    Args:
        dtype: in which the models computed.
    """
    columns = min(before.logits.shape[-1], after.logits.shape[-1])
    old, new = (probe.logits[..., :columns] for probe in (before, after))
    difference, largest = _differences(old, new)
    relative = difference / max(largest, torch.finfo(torch.float64).tiny)
    delta, rounding = after.loss - before.loss, TOLERANCE[dtype]
    rounded_nats = rounding * max(1.0, abs(before.loss))
    holds = math.isfinite(difference) and math.isfinite(delta)
    if plan.label == "exact":
        holds = holds and relative <= rounding and abs(delta) <= rounded_nats
    elif plan.bound_nats is not None:
        holds = holds and delta <= plan.bound_nats + rounded_nats
    return Proof(plan.label, difference, relative, delta, holds)


def _differences(old: Tensor, new: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest magnitude of `old`, in float64; a few rows at a time,
    because those of a large vocabulary take much memory."""
    rows = max(1, _COMPARED // old.shape[-1])
    pairs = [torch.split(logits.reshape(-1, old.shape[-1]), rows) for logits in (old, new)]
    extremes = [
        torch.stack(((after.double() - before.double()).abs().max(), before.abs().max().double()))
        for before, after in zip(*pairs, strict=True)
    ]
    difference, largest = torch.stack(extremes).amax(0).tolist()
    return difference, largest


class NotFiniteError(GrowthError):
    """The outputs of a grown model are not finite, where the old one's are."""


class Doubled(NamedTuple):
    """Both models in float64, the grown one made by the same plan."""

    before: Probe
    after: Probe
    dtype: torch.dtype
    """whose tolerance holds for the outputs"""
    tensors: Mapping[str, Tensor]
    """of the grown one, laid out as those of the model to prove"""


def prove(
    plan: GrowthPlan,
    outputs: Callable[[], tuple[Probe, Probe]],
    dtypes: Collection[torch.dtype],
    *,
    tensors: Mapping[str, Tensor] | None = None,
    in_double: Callable[[], Doubled | None] | None = None,
    name: str = "",
    peers: Peers | None = None,
) -> Proof:
    """Compare the old model with the grown one that is to be used. A collective of the peers, who decide together
    before each exchange that depends on it.

    Rounding in deep models can exceed the tolerance. Then both are compared in float64, and every tensor of the grown one
    must be that of float64, rounded.

    Args:
        outputs: of both, for the same batch.
        dtypes: of the models' parameters.
        tensors: parameters and persistent buffers of the grown model.
        in_double: returns both in float64; raises what is no GrowthError if their code does not accept it.
        name: of the model, for the log.

    Returns:
        the proof; it holds if it does for every peer.

    Raises:
        NotFiniteError: the grown model's outputs are not, where the old one's are.
        GrowthError: a tensor is not that of float64.
    """
    peers = peers or Alone()
    with peers.phase():
        before, after = outputs()
        if _is_finite(before) and not _is_finite(after):
            raise NotFiniteError("the outputs of the grown model are not finite")
        dtype = coarsest({*dtypes, after.logits.dtype})
        proof = compare_outputs(plan, before, after, dtype)
    if peers.all_agree(proof.holds):
        return proof
    finite = peers.all_agree(math.isfinite(proof.max_logit_diff + proof.delta_loss))
    if in_double is not None and finite and plan.label != "lossy" and dtype is not torch.float64:
        double = unless_refused(peers, name, in_double)
        if double is not None:
            with peers.phase():
                proof = compare_outputs(plan, double.before, double.after, double.dtype)
                if proof.holds:
                    verify_rounded(plan, tensors or {}, double.tensors)
    return replace(proof, holds=peers.all_agree(proof.holds))


def coarsest(types: Collection[torch.dtype]) -> torch.dtype:
    """Return the floating point type that rounds most."""
    order = (torch.bfloat16, torch.float16, torch.float32)
    return next((dtype for dtype in order if dtype in types), torch.float64)


def _is_finite(probe: Probe) -> bool:
    flat = probe.logits.reshape(-1)
    return math.isfinite(probe.loss) and all(
        bool(part.isfinite().all()) for part in torch.split(flat, _COMPARED)
    )


def verify_rounded(
    plan: GrowthPlan, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Check that tensors are others, which are laid out alike, but for rounding.

    Raises:
        GrowthError: one is not, or is missing.
    """
    if odd := sorted(tensors.keys() ^ expected.keys()):
        raise GrowthError(f"the grown model has other tensors than were planned: {odd[0]}")
    for name, tensor in tensors.items():
        tensor_plan = plan.tensors.get(name)
        margin = None if tensor_plan is None else _margin(tensor_plan, Role.PARAMETER)
        _check(name, to_local(tensor), to_local(expected[name]), margin)


def verify_parameters(
    plan: GrowthPlan,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    key: Key,
    peers: Peers | None = None,
) -> None:
    """Check that the parameters of a grown model, or their moving average, are what the plan makes of the old ones.

    One tensor at a time is made again, and whole. A collective of the peers.

    Raises:
        GrowthError: one is not, or is missing.
    """
    gathered, neighbour = GatheredTensors(old), neighbours(old)

    def make(name: str) -> Tensor:
        tensor_plan = plan.tensors[name]
        like = old.get(neighbour(name)) if isinstance(tensor_plan, Fresh) else None
        tensor = apply_one(
            plan,
            name,
            gathered.__getitem__,
            Role.PARAMETER,
            key,
            like=None if like is None else to_local(like),
        )
        assert tensor is not None
        return tensor

    _check_all(plan, list(plan.tensors), make, old, new, peers or Alone())


def verify_states(
    plan: GrowthPlan,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    key: Key,
    mode: Mode,
    peers: Peers | None = None,
    grow_other: Callable[[str], Tensor] | None = None,
) -> None:
    """Do the same for optimizer states, named ``<parameter>/<state>``.

    Args:
        grow_other: makes a state that is not of the parameter's shape; default: `grow_state`.
    """
    gathered = GatheredTensors(old)
    names = grown_states(plan, old, mode)

    def make(name: str) -> Tensor:
        return grow_state(plan, name, gathered.__getitem__, key, mode)

    _check_all(plan, names, grow_other or make, old, new, peers or Alone())


def _check_all(
    plan: GrowthPlan,
    names: Collection[str],
    make: Callable[[str], Tensor],
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    peers: Peers,
) -> None:
    def check() -> Iterator[None]:
        if odd := sorted(set(names) ^ new.keys()):
            raise GrowthError(f"the grown model has other tensors than were planned: {odd[0]}")
        for name in names:
            _check_one(plan, name, make, old, new[name])
            yield

    run_in_step(peers, check(), gathers=any(map(is_sharded, old.values())))


def _check_one(
    plan: GrowthPlan,
    name: str,
    make: Callable[[str], Tensor],
    old: Mapping[str, Tensor],
    new: Tensor,
) -> None:
    parameter, slash, state = (name, "", "") if name in plan.tensors else name.rpartition("/")
    tensor_plan = plan.tensors[parameter]
    role = state_role(state) if slash else Role.PARAMETER
    source = old.get(f"{tensor_plan.source}{slash}{state}") if _is_kept_whole(tensor_plan) else None
    if source is not None and _laid_out_alike(source, new):
        _check(name, to_local(new), to_local(source), None)  # without communication
    else:
        margin = 0.0 if state in FACTORS else _margin(tensor_plan, role)
        _check(name, to_local(new), local_rows(make(name), new), margin)


def _is_kept_whole(tensor_plan: TensorPlan) -> TypeGuard[Grown]:
    return isinstance(tensor_plan, Grown) and tensor_plan == Grown(tensor_plan.source)


def _laid_out_alike(tensor: Tensor, other: Tensor) -> bool:
    if not is_sharded(tensor) or not is_sharded(other) or tensor.shape != other.shape:
        return False
    return tensor.device_mesh == other.device_mesh and tensor.placements == other.placements


def _margin(tensor_plan: TensorPlan, role: Role) -> float | None:
    """Return the magnitude, beside the tensor's own, of what is added up for its elements; None if each element is one
    old element times factors, or drawn."""
    if isinstance(tensor_plan, Grown):
        pieces = [
            piece for edit in tensor_plan.edits for piece in edit.pieces if isinstance(piece, New)
        ]
        means = pieces and role.is_size
        if tensor_plan.offset or means or any(piece.fill == "mean" for piece in pieces):
            return abs(tensor_plan.offset)
        return None
    return None if isinstance(tensor_plan, Fresh) else 0.0


def _check(name: str, tensor: Tensor, expected: Tensor, margin: float | None) -> None:
    if tensor.shape != expected.shape:
        raise GrowthError(
            f"{name} has the shape {list(tensor.shape)}, not {list(expected.shape)} as planned"
        )
    if count := differing(tensor, expected, margin):
        raise GrowthError(
            f"{name} is not what the plan makes: {count:,} of its {tensor.numel():,} elements differ by more than "
            "rounding; the model in memory is damaged"
        )


@torch.no_grad()
def differing(tensor: Tensor, expected: Tensor, margin: float | None) -> int:
    """Return how many elements differ by more than rounding; a few at a time in float64.

    Args:
        margin: magnitude, beside the tensor's own, of what was added up for its elements; None: nothing was.
    """
    expected = expected.to(tensor)
    if _is_same(tensor, expected) or torch.equal(tensor, expected):
        return 0
    if not tensor.is_floating_point():
        return int(tensor.ne(expected).sum())
    info, scale = torch.finfo(tensor.dtype), 0.0
    if margin is not None:
        scale = margin + float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    count = 0
    pairs = (torch.split(elements.reshape(-1), _COMPARED) for elements in (tensor, expected))
    for tensor_part, expected_part in zip(*pairs, strict=True):
        count += int((~_rounds_to(tensor_part.double(), expected_part.double(), info, scale)).sum())
    return count


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both are the same memory."""
    return (tensor.data_ptr(), tensor.stride()) == (other.data_ptr(), other.stride())


def _rounds_to(values: Tensor, expected: Tensor, info: torch.finfo, scale: float) -> Tensor:
    tolerance = _ULPS * info.eps * (expected.abs() + scale + info.tiny)
    close = expected.isfinite() & ((values - expected).abs() <= tolerance)
    return close | (values == expected) | (values.isnan() & expected.isnan())
