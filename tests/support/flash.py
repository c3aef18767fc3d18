"""Torch's flash attention of documents, which only GPUs have, computed on the CPU by a loop over documents and heads.

`torch.nn.attention.varlen` calls it as it calls the kernel of a GPU: what is tried is all but that kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class Flash:
    """What the kernel was asked, and what is wrong with it."""

    calls: int = 0
    sees_others: bool = False
    """ignores where documents end"""
    nan_gradient: bool = False
    missing: bool = False


def _documents(ends: Tensor, total: int, flash: Flash) -> list[tuple[int, int]]:
    places = [0, total] if flash.sees_others else ends.tolist()
    assert places[0] == 0, places
    assert places[-1] == total, places
    assert ends.dtype == torch.int32
    return list(pairwise(places))


def _shares(q_TC: Tensor, k_TC: Tensor, scale: float, left: int, causal: bool) -> Tensor:
    T = q_TC.shape[0]
    seen_TT = torch.ones(T, T, dtype=torch.bool)
    if causal or left >= 0:
        seen_TT = seen_TT.tril()
    if left >= 0:
        seen_TT = seen_TT.triu(-left)
    return (scale * q_TC @ k_TC.mT).masked_fill(~seen_TT, -torch.inf).softmax(-1)


@contextmanager
def flash_on_cpu() -> Iterator[Flash]:
    """Context in which the CPU has the kernel."""
    flash = Flash()
    library = torch.library.Library("aten", "IMPL")

    def options(q: Tensor, scale: float | None) -> tuple[torch.dtype, float]:
        if flash.missing:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nAnd more.")
        return torch.promote_types(q.dtype, torch.float32), q.shape[
            -1
        ] ** -0.5 if scale is None else scale

    def forward(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, max_q: int, max_k: int,
        dropout: float, is_causal: bool, return_debug_mask: bool, *,
        scale: float | None = None, window_size_left: int = -1, window_size_right: int = -1,
        seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None, num_splits: int | None = None,
    ) -> Sequence[Tensor]:  # fmt: skip
        del return_debug_mask, seqused_k, alibi_slopes, block_table, num_splits
        flash.calls += 1
        wide, scale = options(q, scale)
        assert torch.equal(ends, ends_k)
        assert dropout == 0
        assert window_size_right == 0
        output = torch.empty_like(q)
        for begin, end in _documents(ends, len(q), flash):
            assert end - begin <= min(max_q, max_k) or flash.sees_others
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                rows = [x[begin:end].to(wide) for x in (q[:, h], k[:, g], v[:, g])]
                shares = _shares(rows[0], rows[1], scale, window_size_left, is_causal)
                output[begin:end, h] = (shares @ rows[2]).to(q.dtype)
        empty = torch.empty(0)
        return output, torch.empty(q.shape[1], len(q)), empty, empty, empty

    def backward(
        slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, ends: Tensor,
        ends_k: Tensor, max_q: int, max_k: int, dropout: float, is_causal: bool, seed: Tensor,
        offset: Tensor, *, scale: float | None = None, window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> Sequence[Tensor]:  # fmt: skip
        del out, logsumexp, ends_k, max_q, max_k, dropout, seed, offset, window_size_right
        wide, scale = options(q, scale)
        sums = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
        for begin, end in _documents(ends, len(q), flash):
            part = slice(begin, end)
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                q_TC, k_TC, v_TC, s_TC = (
                    x[part].to(wide) for x in (q[:, h], k[:, g], v[:, g], slope[:, h])
                )
                shares = _shares(q_TC, k_TC, scale, window_size_left, is_causal)
                of_shares = s_TC @ v_TC.mT
                of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
                sums[0][part, h] += scale * of_scores @ k_TC
                sums[1][part, g] += scale * of_scores.mT @ q_TC
                sums[2][part, g] += shares.mT @ s_TC
        if flash.nan_gradient:
            sums[1][-1] = torch.nan
        return [x.to(q.dtype) for x in sums]

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield flash
    finally:
        library._destroy()
