"""Cross entropy of a linear head, in chunks of tokens if there are many logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from instar.models.cost import chunk_rows

IGNORED = -1
"""Target of a position without loss."""


def head_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the sum of −log softmax(x Wᵀ)[target] over targets that are not −1.

    Returns:
        a scalar in nats, float32 (float64 for float64 inputs) also under autocast.
    """
    compiled = torch.compiler.is_compiling()
    rows = chunk_rows(x_ND.shape[0], weight_VD.shape[0], x_ND.device.type, compiled=compiled)
    if rows is not None:
        return chunked_cross_entropy(x_ND, weight_VD, targets_N, rows)
    return cross_entropy_sum(F.linear(x_ND, weight_VD), targets_N)


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the sum of −log softmax(logits)[target] over targets that are not −1."""
    logits_NV = at_least_float32(logits_NV)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, rows: int) -> Tensor:
    """Same as `head_cross_entropy`, for `rows` tokens at a time.

    Gradients are computed in the forward pass, so that only one chunk of logits exists at a time
    (Liger kernel, arXiv 2410.10989, section 3.2). In float16 they are computed in the backward pass
    from recomputed logits, because small gradients would underflow without the loss scale, which is
    only known there. Not twice differentiable.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_VD, targets_N, rows, dtype, torch.is_grad_enabled()
    )
    return loss


@torch.no_grad()
def each_cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return −log softmax(x Wᵀ)[target] of each target, 0 where it is −1, without gradients.

    Dtype and chunks are those of `head_cross_entropy`.
    """
    device = x_ND.device.type
    rows = chunk_rows(x_ND.shape[0], weight_VD.shape[0], device) or max(1, x_ND.shape[0])
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    low_VD = weight_VD.to(dtype)
    parts = [
        F.cross_entropy(
            at_least_float32(F.linear(part_ND.to(dtype), low_VD)),
            part_N,
            ignore_index=IGNORED,
            reduction="none",
        )
        for part_ND, part_N in zip(
            torch.split(x_ND, rows), torch.split(targets_N, rows), strict=True
        )
    ]
    return torch.cat(parts)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in a 16-bit dtype."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _ChunkedCrossEntropy(torch.autograd.Function):
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
        ctx.needs = [grad_enabled and needs_grad for needs_grad in ctx.needs_input_grad[:2]]
        ctx.rows, ctx.dtype = rows, dtype
        ctx.late = dtype == torch.float16
        needs = [False, False] if ctx.late else ctx.needs
        loss, grad_ND, grad_VD = _loss_and_gradients(x_ND, weight_VD, targets_N, rows, dtype, needs)
        if ctx.late:
            ctx.save_for_backward(x_ND, weight_VD, targets_N)
        else:
            ctx.save_for_backward(grad_ND, grad_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.late:
            x_ND, weight_VD, targets_N = ctx.saved_tensors
            _, grad_ND, grad_VD = _loss_and_gradients(
                x_ND, weight_VD, targets_N, ctx.rows, ctx.dtype, ctx.needs, grad_outputs[0]
            )
            return (grad_ND, grad_VD, None, None, None, None)
        gradients = (
            None if grad is None else (grad * grad_outputs[0]).to(grad.dtype)
            for grad in ctx.saved_tensors
        )
        return (*gradients, None, None, None, None)


def _loss_and_gradients(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    rows: int,
    dtype: torch.dtype,
    needs: Sequence[bool],
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss, and the needed gradients times `scale`."""
    low_ND, low_VD = x_ND.to(dtype), weight_VD.to(dtype)
    grad_ND = torch.empty_like(x_ND) if needs[0] else None
    grad_VD = torch.zeros_like(weight_VD) if needs[1] else None
    loss = at_least_float32(low_ND.new_zeros(()))
    for start in range(0, low_ND.shape[0], rows):
        part = slice(start, start + rows)
        ignored_N1 = (targets_N[part] == IGNORED)[:, None]
        index_N1 = targets_N[part, None].clamp_min(0)
        logits_NV = at_least_float32(F.linear(low_ND[part], low_VD))
        normaliser_N1 = logits_NV.logsumexp(1, keepdim=True)
        nll_N1 = normaliser_N1 - logits_NV.gather(1, index_N1)
        loss = loss + nll_N1.masked_fill_(ignored_N1, 0.0).sum()
        if grad_ND is None and grad_VD is None:
            continue
        # d nll / d logits = softmax − one-hot
        slope_NV = logits_NV.sub_(normaliser_N1).exp_()
        slope_NV.scatter_add_(1, index_N1, torch.full_like(normaliser_N1, -1.0))
        slope_NV = slope_NV.masked_fill_(ignored_N1, 0.0)
        if scale is not None:
            slope_NV = slope_NV.mul_(scale)
        slope_NV = slope_NV.to(dtype)
        if grad_ND is not None:
            grad_ND[part] = slope_NV @ low_VD
        if grad_VD is not None and grad_VD.dtype == dtype:
            grad_VD.addmm_(slope_NV.t(), low_ND[part])
        elif grad_VD is not None:
            grad_VD += slope_NV.t() @ low_ND[part]
    return loss, grad_ND, grad_VD
