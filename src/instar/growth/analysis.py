"""Weight analysis: effective ranks of matrices, entropy of attention, relative change of weights.

The *effective rank at energy* e of a matrix is the smallest number of its singular values whose
squares add up to the fraction e of the sum of all squares. The model is not modified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from instar.models.shape import Parameter, layer_of

ENERGIES = (0.9, 0.99)
TOKEN_TABLE = "token_embedding.weight"
NO_ATTENTION = "the model has no causal attention"


@dataclass(frozen=True)
class MatrixRank:
    """Effective ranks of a matrix, or of an adapter's product B A."""

    name: str
    shape: tuple[int, int]
    full: int
    """largest possible rank: the smaller dimension, or the adapter's rank"""
    effective: tuple[int, ...]
    """one for each energy; 0 for a matrix of zeros"""
    adapter: bool = False


@dataclass(frozen=True)
class HeadEntropy:
    """Entropy of a head's attention over held-out tokens."""

    layer: int
    head: int
    entropy_nats: float
    """mean over positions"""
    share: float
    """fraction of the largest possible entropy: 0 attends to one token, 1 to all alike"""


@dataclass(frozen=True)
class WeightChange:
    """Change of a parameter since an earlier checkpoint."""

    name: str
    relative: float
    """‖new − old‖ / ‖old‖"""
    relative_per_step: float | None
    """`relative` over the steps between: the relative size of an update"""


@dataclass(frozen=True)
class TableChange:
    """Change of the rows of the token table since an earlier checkpoint."""

    rows: int
    cosine: float
    """mean cosine similarity of the rows to the earlier ones"""
    still: int
    """rows whose relative change is at most `UNCHANGED`"""


@dataclass(frozen=True)
class WeightAnalysis:
    """The results, and which parts were left out, with reasons."""

    energies: tuple[float, ...]
    ranks: tuple[MatrixRank, ...]
    heads: tuple[HeadEntropy, ...]
    changes: tuple[WeightChange, ...]
    drift: TableChange | None
    left_out: tuple[str, ...]
    suggestions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


UNCHANGED = 1e-3
COLLAPSED = 0.05
"""fraction of the possible entropy below which a head attends to one token only"""
FULL = 0.95
"""fraction of its directions that a matrix of full rank uses at least"""


@torch.no_grad()
def analyze(
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, Parameter],
    *,
    heads: Sequence[HeadEntropy] = (),
    no_heads: str = NO_ATTENTION,
    before: Mapping[str, Tensor] | None = None,
    steps: int | None = None,
) -> WeightAnalysis:
    """Analyze the weights of a model of any task.

    Args:
        weights: parameters by name.
        parameters: the model's table of parameters; only weights in it are analyzed.
        heads: the result of `attention_entropy`.
        no_heads: the reason why `heads` is empty.
        before: weights of an earlier checkpoint; None: no change is reported.
        steps: between that checkpoint and this one.
    """
    weights = {name: weights[name].detach() for name in parameters}
    layers = 1 + max(
        (layer for name in weights if (layer := layer_of(name)) is not None), default=0
    )
    ranks = tuple(matrix_ranks(parameters, weights))
    changes: tuple[WeightChange, ...] = ()
    drift = None
    left_out = []
    if not heads:
        left_out.append(f"attention: {no_heads}")
    if before is None:
        left_out.append("change: there is no earlier state to compare with")
    else:
        comparable = _comparable(before, layers)
        if len(comparable) < len(before):
            left_out.append("change of the blocks: their number and so their names differ")
        changes = tuple(relative_changes(weights, comparable, steps))
        if TOKEN_TABLE in weights:
            drift = table_change(weights[TOKEN_TABLE], before.get(TOKEN_TABLE))
        names_left_out = {
            name for name in weights if name in comparable or len(comparable) == len(before)
        }
        if names_left_out := names_left_out - {change.name for change in changes}:
            left_out.append(
                f"change of {len(names_left_out)} tensors: they were zero, missing, or of another shape"
            )
    return WeightAnalysis(
        ENERGIES,
        ranks,
        tuple(heads),
        changes,
        drift,
        tuple(left_out),
        tuple(suggestions(ranks, heads)),
    )


def _comparable(before: Mapping[str, Tensor], layers: int) -> Mapping[str, Tensor]:
    """Drop the blocks if their number has changed: inserting a block renames others."""
    if 1 + max((layer_of(name) or 0 for name in before), default=0) == layers:
        return before
    return {name: tensor for name, tensor in before.items() if layer_of(name) is None}


def matrix_ranks(
    parameters: Mapping[str, Parameter], weights: Mapping[str, Tensor]
) -> Iterator[MatrixRank]:
    """Yield the ranks of every matrix and adapter; a convolution's kernel is flattened to
    (outputs, all else)."""
    for name, entry in parameters.items():
        weight, _, kind = name.rpartition(".")
        if kind == "lora_a":
            a, b = weights[name], weights[f"{weight}.lora_b"]
            ranks = effective_ranks(product_spectrum(a, b), ENERGIES)
            yield MatrixRank(weight, (b.shape[0], a.shape[1]), a.shape[0], ranks, adapter=True)
        elif kind != "lora_b" and entry.kind == "matrix" and weights[name].numel():
            matrix = weights[name].flatten(1)
            outputs, inputs = matrix.shape
            ranks = effective_ranks(spectrum(matrix), ENERGIES)
            yield MatrixRank(
                name.removesuffix(".weight"), (outputs, inputs), min(outputs, inputs), ranks
            )


def spectrum(matrix: Tensor) -> Tensor:
    """Return the squared singular values of a matrix in descending order, float64."""
    matrix = matrix.to(torch.float64)
    small = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    # takes a tenth of the time of svdvals; the error is below 1e-16 of the largest value
    squares: Tensor = torch.linalg.eigvalsh(small @ small.T)
    return squares.flip(0).clamp(min=0.0)


def product_spectrum(a: Tensor, b: Tensor) -> Tensor:
    """Return the `spectrum` of b (o, rank) @ a (rank, i) without computing the product."""
    _, inner_a = torch.linalg.qr(a.to(torch.float64).T)
    _, inner_b = torch.linalg.qr(b.to(torch.float64))
    return spectrum(inner_b @ inner_a.T)


def effective_ranks(squares: Tensor, energies: Sequence[float]) -> tuple[int, ...]:
    """Return the effective rank at each energy, of squared singular values in descending order."""
    total = squares.sum()
    if total == 0:
        return (0,) * len(energies)
    shares = squares.cumsum(0) / total
    # the tolerance keeps rounding from adding a value
    return tuple(int((shares < energy - 1e-12).sum()) + 1 for energy in energies)


@runtime_checkable
class CausalAttention(Protocol):
    """A model with causal attention that exposes its queries and keys, such as `GPT`."""

    def queries_and_keys(self, tokens_BT: Tensor) -> Iterator[tuple[Tensor, Tensor, int | None]]:
        """Yield queries (B, T, H, C), keys (B, T, K, C) and the window of each layer, if it has one."""
        ...


def attention_entropy(model: CausalAttention, tokens_BT: Tensor) -> tuple[HeadEntropy, ...]:
    """Return the attention entropy of every head of a model in evaluation mode.

    The first position is excluded: it can only attend to itself.
    """
    heads: list[HeadEntropy] = []
    for layer, (q_BTHC, k_BTKC, window) in enumerate(model.queries_and_keys(tokens_BT)):
        nats_H, share_H = _entropies(q_BTHC, k_BTKC, window)
        pairs = zip(nats_H.tolist(), share_H.tolist(), strict=True)
        heads.extend(HeadEntropy(layer, head, *pair) for head, pair in enumerate(pairs))
    return tuple(heads)


def _entropies(q_BTHC: Tensor, k_BTKC: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean entropy per head, in nats and as a fraction of log(tokens that a position attends to)."""
    T, H, C = q_BTHC.shape[1:]
    k_BTHC = k_BTKC.repeat_interleave(H // k_BTKC.shape[2], 2)
    scores_BHTT = torch.einsum("bthc,bshc->bhts", q_BTHC.float(), k_BTHC.float()) / math.sqrt(C)
    seen_TT = (
        torch.ones(T, T, dtype=torch.bool, device=q_BTHC.device).tril().triu(1 - (window or T))
    )
    shares_BHTT = scores_BHTT.masked_fill(~seen_TT, -torch.inf).softmax(-1)
    nats_BHT = torch.special.entr(shares_BHTT).sum(-1)[..., 1:]
    most_T = seen_TT.sum(-1)[1:].log()
    return nats_BHT.mean((0, 2)), (nats_BHT / most_T).nan_to_num(0.0).mean((0, 2))


def relative_changes(
    now: Mapping[str, Tensor], before: Mapping[str, Tensor], steps: int | None
) -> Iterator[WeightChange]:
    """Yield the change of every parameter whose shape is the same."""
    for name, new in now.items():
        old = before.get(name)
        if old is None or old.shape != new.shape or not old.any():
            continue
        old = old.to(new.device, torch.float64)
        relative = ((new.to(torch.float64) - old).norm() / old.norm()).item()
        yield WeightChange(name, relative, relative / steps if steps else None)


def table_change(now_VD: Tensor, before_VD: Tensor | None) -> TableChange | None:
    """Return the change of the rows that both tables have; None if their widths differ."""
    if before_VD is None or before_VD.shape[1] != now_VD.shape[1]:
        return None
    rows = min(len(now_VD), len(before_VD))
    old_VD = before_VD[:rows].to(now_VD.device, torch.float64)
    new_VD = now_VD[:rows].to(torch.float64)
    moved_V = (new_VD - old_VD).norm(dim=1)
    return TableChange(
        rows,
        torch.cosine_similarity(new_VD, old_VD).mean().item(),
        int((moved_V <= UNCHANGED * old_VD.norm(dim=1)).sum()),
    )


def suggestions(ranks: Sequence[MatrixRank], heads: Sequence[HeadEntropy]) -> Iterator[str]:
    """Yield possible conclusions from the results, as text."""
    for rank in ranks:
        if rank.adapter:
            yield from _of_adapter(rank)
    mlps: dict[str, list[MatrixRank]] = {}
    for rank in ranks:
        block, within, _ = rank.name.rpartition(".mlp.")
        if within and not rank.adapter:
            mlps.setdefault(block, []).append(rank)
    full = [
        block.rpartition(".")[2]
        for block, parts in mlps.items()
        if all(part.effective[-1] >= FULL * part.full for part in parts)
    ]
    if full:
        yield (
            f"the MLPs of layers {', '.join(full)} have full effective rank, like random matrices: if "
            "the loss has stopped falling, consider widen_mlp"
        )
    for head in heads:
        if head.share < COLLAPSED:
            yield (
                f"layer {head.layer}, head {head.head} attends to one token only (entropy "
                f"{head.entropy_nats:.2f} nats): before add_heads, check whether it recovers"
            )


def _of_adapter(rank: MatrixRank) -> Iterator[str]:
    used = rank.effective[-1]
    if used == 0:
        yield f"{rank.name}: its adapter is still zero"
    elif used == rank.full:
        yield (
            f"{rank.name}: its adapter of rank {rank.full} is used fully; consider set_lora_rank"
        )
    elif 2 * used <= rank.full:
        yield (
            f"{rank.name}: its adapter of rank {rank.full} uses only {used}; a rank of {used} suffices"
        )
