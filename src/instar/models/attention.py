"""Causal attention: torch's fused kernels, windows in blocks, and matrices of scores where those are faster.

Suffixes of tensor names are those of `instar.models.gpt`; S: keys, or tokens of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from instar.models.cost import materializes_scores, repeats_keys, window_block
from instar.models.documents import PackedDocuments, added_to_scores, attend_by_document


def causal_attention(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    dropout: float,
    window: int | None = None,
    documents: PackedDocuments | None = None,
) -> Tensor:
    """softmax(q kᵀ / √C + causal mask) v, (B, H, T, C); K divides H (arXiv 2305.13245).

    A single query, with any number of keys, is that of the last token.

    Args:
        window: tokens that a token attends to, itself included, as in Mistral (arXiv 2310.06825); None: all. A
            single query attends to all keys.
        documents: which do not see each other; None: a sample is one.
    """
    if documents is not None:
        if documents.ends is not None:
            return attend_by_document(q_BHTC, k_BKTC, v_BKTC, documents.ends, window)
        mask_B1TT = documents.mask
        assert mask_B1TT is not None
        if window is not None:
            last_TT = _last_keys(q_BHTC, k_BKTC.shape[2], window)
            mask_B1TT = mask_B1TT.masked_fill(~last_TT, -torch.inf)
        return _masked_attention(q_BHTC, k_BKTC, v_BKTC, dropout, mask_B1TT)
    is_grouped = k_BKTC.shape[1] < q_BHTC.shape[1]
    if q_BHTC.shape[2] == 1:
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKTC, v_BKTC, dropout_p=dropout, enable_gqa=is_grouped
        )
    if window is not None and window < q_BHTC.shape[2]:
        return _windowed_attention(q_BHTC, k_BKTC, v_BKTC, dropout, window)
    low = q_BHTC.dtype == torch.bfloat16
    device = q_BHTC.device.type
    scores_held = materializes_scores(q_BHTC.shape[-2], low, device)
    use_fused = not scores_held or torch.compiler.is_compiling()
    if is_grouped and (not use_fused or repeats_keys(q_BHTC.dtype.itemsize < 4, device)):
        k_BKTC, v_BKTC = _repeated(q_BHTC, k_BKTC, v_BKTC)
        is_grouped = False
    if use_fused:
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKTC, v_BKTC, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped
        )
    T = q_BHTC.shape[2]
    mask_TT = torch.full((T, T), -torch.inf, dtype=q_BHTC.dtype).triu(1)
    return _materialized_attention(q_BHTC, k_BKTC, v_BKTC, dropout, mask_TT)


def _windowed_attention(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, dropout: float, window: int
) -> Tensor:
    """`causal_attention` in blocks of at least `window` queries, each of which attends to keys of its own block and
    of the one before, so that the work grows with T · window rather than T²."""
    T = q_BHTC.shape[2]
    S = window_block(window, T)
    q_BHSC, k_BKSC, v_BKSC = (x[:, :, :S] for x in (q_BHTC, k_BKTC, v_BKTC))
    first_BHSC = _masked_attention(q_BHSC, k_BKSC, v_BKSC, dropout, _last_keys(q_BHSC, S, window))
    if S == T:
        return first_BHSC
    B, padding = q_BHTC.shape[0], -T % S
    q_BHTC, k_BKTC, v_BKTC = (F.pad(x, (0, 0, 0, padding)) for x in (q_BHTC, k_BKTC, v_BKTC))
    blocks = (q_BHTC[:, :, S:].unfold(2, S, S), *(x.unfold(2, 2 * S, S) for x in (k_BKTC, v_BKTC)))
    q_NHSC, k_NKSC, v_NKSC = (x.mT.transpose(1, 2).flatten(0, 1) for x in blocks)
    seen_SS = _last_keys(q_NHSC, 2 * S, window)
    y_NHSC = _masked_attention(q_NHSC, k_NKSC, v_NKSC, dropout, seen_SS)
    y_BHTC = y_NHSC.view(B, -1, *y_NHSC.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first_BHSC, y_BHTC[:, :, : T - S]), 2)


def _last_keys(q_BHTC: Tensor, keys: int, window: int) -> Tensor:
    """Return which of S keys each query sees: `window` of them, the last query the last ones; (T, S)."""
    T, S = q_BHTC.shape[2], keys
    seen_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTC.device)
    return seen_TS.tril(S - T).triu(S - T - window + 1)


def _masked_attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, dropout: float, mask_TS: Tensor
) -> Tensor:
    """Attention of each query to the keys that it sees.

    Args:
        mask_TS: whether it sees them, or what is added to their scores; may begin with B and 1.
    """
    T = q_BHTC.shape[2]
    low, device = q_BHTC.dtype == torch.bfloat16, q_BHTC.device
    use_fused = not materializes_scores(T, low, device.type) or torch.compiler.is_compiling()
    is_grouped = k_BKSC.shape[1] < q_BHTC.shape[1]
    # on a GPU the kernel that takes a mask reads no groups
    if is_grouped and not (use_fused and device.type == "cpu"):
        k_BKSC, v_BKSC = _repeated(q_BHTC, k_BKSC, v_BKSC)
        is_grouped = False
    if use_fused:
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, mask_TS, dropout_p=dropout, enable_gqa=is_grouped
        )
    if mask_TS.dtype == torch.bool:
        mask_TS = added_to_scores(mask_TS, q_BHTC.dtype)
    return _materialized_attention(q_BHTC, k_BKSC, v_BKSC, dropout, mask_TS)


def _repeated(q_BHTC: Tensor, *pair_BKTC: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values (B, H, T, C), one for each query head."""
    times = q_BHTC.shape[1] // pair_BKTC[0].shape[1]
    return tuple(x.repeat_interleave(times, 1) for x in pair_BKTC)


def _materialized_attention(
    q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, dropout: float, mask_TS: Tensor
) -> Tensor:
    """softmax(q kᵀ / √C + mask) v, by a matrix of scores per head; the mask may begin with B and 1."""
    q_NTC, k_NSC, v_NSC = (x.flatten(0, 1) for x in (q_BHTC, k_BHSC, v_BHSC))
    scale = q_NTC.shape[-1] ** -0.5
    if mask_TS.ndim == 2:
        scores_NTS = torch.baddbmm(mask_TS, q_NTC, k_NSC.mT, alpha=scale)
    else:
        scores_BHTS = torch.bmm(q_NTC * scale, k_NSC.mT).view(*q_BHTC.shape[:3], k_BHSC.shape[2])
        scores_NTS = (scores_BHTS + mask_TS).flatten(0, 1)
    shares_NTS = F.dropout(scores_NTS.softmax(-1), dropout) if dropout else scores_NTS.softmax(-1)
    return torch.bmm(shares_NTS, v_NSC).view(q_BHTC.shape)
