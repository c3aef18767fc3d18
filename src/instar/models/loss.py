"""Cross entropy of a linear head, without ever holding all logits when they are many."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from instar.models.memory import chunk_rows

IGNORED = -1
"""Target of a position that has no loss."""


def head_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of −log softmax(x Wᵀ)[target] over the targets that are not −1.

    A scalar in nats, float32 (float64 for float64 inputs) whatever autocast says.
    """
    rows = chunk_rows(x_ND.shape[0], weight_VD.shape[0], x_ND.device.type)
    if rows is not None:
        return chunked_cross_entropy(x_ND, weight_VD, targets_N, rows)
    logits_NV = _wide(F.linear(x_ND, weight_VD))
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, rows: int) -> Tensor:
    """As `head_cross_entropy`, over `rows` tokens at a time.

    The gradients are made in the forward pass, chunk by chunk, so that at no time more than one
    chunk of logits exists (Liger kernel, arXiv 2410.10989, section 3.2). Not twice differentiable.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    loss: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_VD, targets_N, rows, dtype, torch.is_grad_enabled()
    )
    return loss


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        rows: int,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        ctx.needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:2]]
        low_ND, low_VD = x_ND.to(dtype), weight_VD.to(dtype)
        grad_ND = torch.empty_like(x_ND) if ctx.needs[0] else None
        grad_VD = torch.zeros_like(weight_VD) if ctx.needs[1] else None
        loss = _wide(low_ND.new_zeros(()))
        for start in range(0, x_ND.shape[0], rows):
            part = slice(start, start + rows)
            ignored_N1 = (targets_N[part] == IGNORED)[:, None]
            index_N1 = targets_N[part, None].clamp_min(0)
            logits_NV = _wide(F.linear(low_ND[part], low_VD))
            normaliser_N1 = logits_NV.logsumexp(1, keepdim=True)
            nll_N1 = normaliser_N1 - logits_NV.gather(1, index_N1)
            loss = loss + nll_N1.masked_fill_(ignored_N1, 0.0).sum()
            if not any(ctx.needs):
                continue
            # d nll / d logits = softmax − one-hot
            slope_NV = logits_NV.sub_(normaliser_N1).exp_()
            slope_NV.scatter_add_(1, index_N1, torch.full_like(normaliser_N1, -1.0))
            slope_NV = slope_NV.masked_fill_(ignored_N1, 0.0).to(dtype)
            if grad_ND is not None:
                grad_ND[part] = slope_NV @ low_VD
            if grad_VD is not None and grad_VD.dtype == dtype:
                grad_VD.addmm_(slope_NV.t(), low_ND[part])
            elif grad_VD is not None:
                grad_VD += slope_NV.t() @ low_ND[part]
        ctx.save_for_backward(grad_ND, grad_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if grad is None else (grad * grad_outputs[0]).to(grad.dtype)
            for grad in ctx.saved_tensors
        )
        return (*scaled, None, None, None, None)
