"""What a model makes of the room it has: ranks, attention, change; and where it may be short of it.

Everything here only reads. A rank is *effective at an energy* e: the least number of singular values
whose squares add up to the share e of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.shape import layer_of

ENERGIES = (0.9, 0.99)


@dataclass(frozen=True)
class Rank:
    """Effective ranks of a matrix, or of an adapter's product B A."""

    name: str
    shape: tuple[int, int]
    full: int
    """the most it could be: the smaller dimension, or the adapter's rank"""
    effective: tuple[int, ...]
    """one for each energy; 0 where all is zero"""
    adapter: bool = False


@dataclass(frozen=True)
class Head:
    """How widely a head attends, over held-out tokens."""

    layer: int
    head: int
    entropy_nats: float
    """mean over positions"""
    share: float
    """of the most that is possible at each position: 0 looks at one token, 1 at all alike"""


@dataclass(frozen=True)
class Change:
    """A parameter against an earlier one of the same shape."""

    name: str
    relative: float
    """‖new − old‖ / ‖old‖"""
    relative_per_step: float | None
    """that over the steps between: how large an update is beside its weight"""


@dataclass(frozen=True)
class Drift:
    """The token table against an earlier one, row by row."""

    rows: int
    cosine: float
    """mean of the rows' similarity to what they were"""
    still: int
    """rows that moved by less than `STILL` of their length"""


@dataclass(frozen=True)
class Analysis:
    """All that was found, and what is left out, with the reason."""

    energies: tuple[float, ...]
    ranks: tuple[Rank, ...]
    heads: tuple[Head, ...]
    changes: tuple[Change, ...]
    drift: Drift | None
    left_out: tuple[str, ...]
    suggestions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


STILL = 1e-3
COLLAPSED = 0.05
"""share of the possible entropy below which a head looks at one token only"""
FULL = 0.95
"""share of all directions that a matrix has to use to count as full"""


@torch.no_grad()
def analyze(
    model: GPT,
    *,
    tokens_BT: Tensor | None = None,
    before: Mapping[str, Tensor] | None = None,
    steps: int | None = None,
    energies: Sequence[float] = ENERGIES,
    no_tokens: str = "no held-out tokens were given",
) -> Analysis:
    """Look at a model.

    Args:
        tokens_BT: held-out samples to attend over; None: attention is left out.
        before: parameters of an earlier state, by name; None: change is left out.
        steps: between that state and this one.
        no_tokens: why there are none.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ranks = tuple(matrix_ranks(model.arch, weights, energies))
    heads = () if tokens_BT is None else attention_entropy(model, tokens_BT)
    changes: tuple[Change, ...] = ()
    drift = None
    left_out = []
    if tokens_BT is None:
        left_out.append(f"attention: {no_tokens}")
    if before is None:
        left_out.append("change: there is no earlier state to compare with")
    else:
        alike = _named_alike(before, model.arch.n_layer)
        if len(alike) < len(before):
            left_out.append("change of the blocks: their number is another, and so are their names")
        changes = tuple(relative_changes(weights, alike, steps))
        drift = table_drift(weights["token_embedding.weight"], before.get("token_embedding.weight"))
        unlike = {name for name in weights if name in alike or len(alike) == len(before)}
        if unlike := unlike - {change.name for change in changes}:
            left_out.append(
                f"change of {len(unlike)} tensors: zero then, not there, or of another shape"
            )
    return Analysis(
        tuple(energies),
        ranks,
        heads,
        changes,
        drift,
        tuple(left_out),
        tuple(suggestions(ranks, heads)),
    )


def _named_alike(before: Mapping[str, Tensor], layers: int) -> Mapping[str, Tensor]:
    """Without the blocks where their number was another: a block put in shifts the names of others."""
    if 1 + max((layer_of(name) or 0 for name in before), default=0) == layers:
        return before
    return {name: tensor for name, tensor in before.items() if layer_of(name) is None}


def matrix_ranks(
    arch: Architecture, weights: Mapping[str, Tensor], energies: Sequence[float] = ENERGIES
) -> Iterator[Rank]:
    """Of every matrix in the blocks, and of every adapter."""
    for name, entry in arch.parameters().items():
        weight, _, kind = name.rpartition(".")
        if kind == "lora_a":
            a, b = weights[name], weights[f"{weight}.lora_b"]
            found = effective_ranks(product_spectrum(a, b), energies)
            yield Rank(weight, (b.shape[0], a.shape[1]), a.shape[0], found, adapter=True)
        elif kind == "weight" and entry.kind == "matrix":
            outputs, inputs = entry.shape
            found = effective_ranks(spectrum(weights[name]), energies)
            yield Rank(weight, (outputs, inputs), min(outputs, inputs), found)


def spectrum(matrix: Tensor) -> Tensor:
    """Squares of the singular values of a matrix, the largest first, in float64."""
    matrix = matrix.to(torch.float64)
    small = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    # a tenth of the time of a decomposition; what is lost is below 1e-16 of the largest
    squares: Tensor = torch.linalg.eigvalsh(small @ small.T)
    return squares.flip(0).clamp(min=0.0)


def product_spectrum(a: Tensor, b: Tensor) -> Tensor:
    """`spectrum` of b @ a, (o, rank) and (rank, i), without making the product."""
    _, inner_a = torch.linalg.qr(a.to(torch.float64).T)
    _, inner_b = torch.linalg.qr(b.to(torch.float64))
    return spectrum(inner_b @ inner_a.T)


def effective_ranks(squares: Tensor, energies: Sequence[float]) -> tuple[int, ...]:
    """How many of the squared singular values, the largest first, make each share of their sum."""
    total = squares.sum()
    if total == 0:
        return (0,) * len(energies)
    shares = squares.cumsum(0) / total
    # rounding must not ask for a value more
    return tuple(int((shares < energy - 1e-12).sum()) + 1 for energy in energies)


def attention_entropy(model: GPT, tokens_BT: Tensor) -> tuple[Head, ...]:
    """Entropy of every head's attention, of a model in evaluation mode.

    The first position, which can look at itself only, does not count.
    """
    found: list[Head] = []

    def watch(layer: int, heads: Any, inputs: tuple[Any, ...]) -> None:
        q_BTHC, k_BTKC, _ = heads(inputs[0], inputs[1])
        nats_H, share_H = _entropies(q_BTHC, k_BTKC)
        pairs = zip(nats_H.tolist(), share_H.tolist(), strict=True)
        found.extend(Head(layer, head, *pair) for head, pair in enumerate(pairs))

    handles = [
        model.get_submodule(f"blocks.{layer}.attn").register_forward_pre_hook(
            lambda module, inputs, layer=layer: watch(layer, module.heads, inputs)
        )
        for layer in range(model.arch.n_layer)
    ]
    try:
        with torch.no_grad():
            model(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)


def _entropies(q_BTHC: Tensor, k_BTKC: Tensor) -> tuple[Tensor, Tensor]:
    """Mean entropy in nats, and as a share of log(position), per head."""
    T, H, C = q_BTHC.shape[1:]
    k_BTHC = k_BTKC.repeat_interleave(H // k_BTKC.shape[2], 2)
    scores_BHTT = torch.einsum("bthc,bshc->bhts", q_BTHC.float(), k_BTHC.float()) / math.sqrt(C)
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BTHC.device).triu(1)
    shares_BHTT = scores_BHTT.masked_fill(future_TT, -torch.inf).softmax(-1)
    nats_BHT = torch.special.entr(shares_BHTT).sum(-1)[..., 1:]
    most_T = torch.arange(2, T + 1, device=nats_BHT.device).log()
    return nats_BHT.mean((0, 2)), (nats_BHT / most_T).mean((0, 2))


def relative_changes(
    now: Mapping[str, Tensor], before: Mapping[str, Tensor], steps: int | None
) -> Iterator[Change]:
    """Of every parameter that had the same shape before."""
    for name, new in now.items():
        old = before.get(name)
        if old is None or old.shape != new.shape or not old.any():
            continue
        old = old.to(new.device, torch.float64)
        relative = ((new.to(torch.float64) - old).norm() / old.norm()).item()
        yield Change(name, relative, relative / steps if steps else None)


def table_drift(now_VD: Tensor, before_VD: Tensor | None) -> Drift | None:
    """Of the rows that were there before; None where their width is another."""
    if before_VD is None or before_VD.shape[1] != now_VD.shape[1]:
        return None
    rows = min(len(now_VD), len(before_VD))
    old_VD = before_VD[:rows].to(now_VD.device, torch.float64)
    new_VD = now_VD[:rows].to(torch.float64)
    moved_V = (new_VD - old_VD).norm(dim=1)
    return Drift(
        rows,
        torch.cosine_similarity(new_VD, old_VD).mean().item(),
        int((moved_V <= STILL * old_VD.norm(dim=1)).sum()),
    )


def suggestions(ranks: Sequence[Rank], heads: Sequence[Head]) -> Iterator[str]:
    """What the figures may mean, in words. None of it is certain: the loss decides."""
    for rank in ranks:
        if rank.adapter:
            yield from _of_adapter(rank)
    mlps: dict[str, list[Rank]] = {}
    for rank in ranks:
        block, _, part = rank.name.rpartition(".mlp.")
        if part and not rank.adapter:
            mlps.setdefault(block, []).append(rank)
    full = [
        block.rpartition(".")[2]
        for block, parts in mlps.items()
        if all(part.effective[-1] >= FULL * part.full for part in parts)
    ]
    if full:
        yield (
            f"the MLPs of layers {', '.join(full)} use all their directions, as matrices of random "
            "numbers do: where the loss has stopped falling, widen_mlp gives them more"
        )
    for head in heads:
        if head.share < COLLAPSED:
            yield (
                f"layer {head.layer}, head {head.head} looks at one token only (entropy "
                f"{head.entropy_nats:.2f} nats): before add_heads, see whether it comes back"
            )


def _of_adapter(rank: Rank) -> Iterator[str]:
    used = rank.effective[-1]
    if used == 0:
        yield f"{rank.name}: its adapter is still zero"
    elif used == rank.full:
        yield (
            f"{rank.name}: its adapter of rank {rank.full} is used up; set_lora_rank gives it more"
        )
    elif 2 * used <= rank.full:
        yield (
            f"{rank.name}: of its adapter of rank {rank.full}, {rank.full - used} lie idle; "
            f"{used} would do"
        )
