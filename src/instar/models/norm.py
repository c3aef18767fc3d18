"""RMSNorm that is as quick in eager mode on a CPU as torch's fused LayerNorm, and norms of channels
that are still entering."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis (arXiv 1910.07467, equation 4).

    At least in float32, whatever the type of `x`. Not twice differentiable on a CPU.
    """
    x = _wide(x)
    if x.is_cpu and not torch.compiler.is_compiling():
        # torch has no fused kernel here: its composite takes three times as long
        normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    else:
        normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed


def masked_norm(
    x: Tensor,
    openings_D: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
) -> Tensor:
    """LayerNorm (`centred`) or RMSNorm in which channel d counts `openings_D[d]`, in the mean, the
    variance and the output (arXiv 2305.02869, section 3.2).

    With openings 0 and 1 it is the norm of those at 1, the others being 0. At least in float32.
    """
    x = _wide(x)
    share_D = openings_D / openings_D.sum()
    if centred:
        x = x - (x * share_D).sum(-1, keepdim=True)
    normed = x * ((x * x * share_D).sum(-1, keepdim=True) + eps).rsqrt() * weight
    return (normed if bias is None else normed + bias) * openings_D


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        normed: Tensor = unit * weight
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad_unit = grad * weight
        along = torch.linalg.vecdot(grad_unit, unit).div_(unit.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad_unit, unit, along, value=-1).mul_(scale)
        return grad_x, grad_weight, None
