"""Causal attention by whichever road is the quickest on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from instar.models.memory import materialised


def causal_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, dropout: float) -> Tensor:
    """softmax(q kᵀ / √C + causal mask) v, (B, H, T, C); K divides H (arXiv 2305.13245)."""
    grouped = k_BKTC.shape[1] < q_BHTC.shape[1]
    low = q_BHTC.dtype == torch.bfloat16
    scores_held = materialised(q_BHTC.shape[-2], low, q_BHTC.device.type)
    if not scores_held or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKTC, v_BKTC, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    if grouped:
        times = q_BHTC.shape[1] // k_BKTC.shape[1]
        k_BKTC, v_BKTC = (x.repeat_interleave(times, 1) for x in (k_BKTC, v_BKTC))
    q_NTC, k_NTC, v_NTC = (x.flatten(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
    T, C = q_NTC.shape[-2:]
    mask_TT = torch.full((T, T), -torch.inf, dtype=q_NTC.dtype).triu(1)
    scores_NTT = torch.baddbmm(mask_TT, q_NTC, k_NTC.mT, alpha=C**-0.5)
    shares_NTT = F.dropout(scores_NTT.softmax(-1), dropout) if dropout else scores_NTT.softmax(-1)
    return torch.bmm(shares_NTT, v_NTC).view(q_BHTC.shape)
