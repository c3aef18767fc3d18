"""The layers that a GPT is made of: norms, and linear maps and embeddings with low-rank adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from instar.models.architecture import Activation, Architecture
from instar.models.lora import Lora, adapter_of
from instar.models.loss import at_least_float32
from instar.models.shape import MaskedAxis, Parameter


class Norm(nn.Module):
    """LayerNorm, with or without bias, or RMSNorm, over the residual stream."""

    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.eps, self.rms = arch.norm_eps, arch.norm == "rmsnorm"
        self.masked = is_masked(arch, "embed")
        self.weight = nn.Parameter(torch.empty(table[f"{name}.weight"].shape))
        shift = table.get(f"{name}.bias")
        self.bias = nn.Parameter(torch.empty(shift.shape)) if shift else None

    def forward(self, x: Tensor, openings_D: Tensor | None) -> Tensor:
        kind = x.device.type
        if self.masked and openings_D is not None:
            x = masked_norm(
                x, openings_D, self.weight, self.bias, self.eps, is_centered=not self.rms
            )
        elif self.rms:
            x = rms_norm(x, self.weight, self.eps)
        else:
            x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        # autocast would cast and save a copy for each linear layer that reads this
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class HeadNorm(nn.Module):
    """RMSNorm of the queries or keys of each head (arXiv 2302.05442, section 2.1)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.eps = arch.qk_norm_eps
        self.weight = nn.Parameter(torch.empty(arch.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ShortConv(nn.Module):
    """x[t] + Σ w[k] x[t − k], k = 1 … K − 1, of each channel on its own: a causal depthwise convolution
    with a residual connection (Canon layers, arXiv 2512.17351).

    The weight has the shape (D, 1, K − 1) of a depthwise `nn.Conv1d`.
    """

    def __init__(self, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(table[f"{name}.weight"].shape))

    @property
    def lags(self) -> int:
        """Tokens before the last one that it sees."""
        return self.weight.shape[-1]

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """`documents_BT`: number of each token's document, which sees no token of another; None: there is one."""
        weight_KD = self.weight[:, 0].mT.to(x_BTD.dtype).contiguous()
        if x_BTD.is_cpu and documents_BT is None and not torch.compiler.is_compiling():
            # in torch, the sum below takes more than twice as long here, and conv1d too
            output: Tensor = _CpuShortConv.apply(x_BTD, weight_KD)  # type: ignore[no-untyped-call]
            return output
        count = x_BTD.shape[1]
        padded_x = F.pad(x_BTD, (0, 0, self.lags, 0))
        for lag, weight_D in enumerate(weight_KD, 1):
            earlier_BTD = padded_x.narrow(1, self.lags - lag, count)
            if documents_BT is not None:
                before_BT = F.pad(documents_BT, (lag, 0))[:, :count]
                earlier_BTD = earlier_BTD * (before_BT == documents_BT)[..., None]
            x_BTD = x_BTD + weight_D * earlier_BTD
        return x_BTD


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis (arXiv 1910.07467, equation 4).

    Computed in float32 at least. Not twice differentiable on a CPU.
    """
    x = at_least_float32(x)
    if x.is_cpu and not torch.compiler.is_compiling():
        # torch has no fused kernel here, and its composite takes three times as long
        output: Tensor = _CpuRMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    else:
        output = F.rms_norm(x, weight.shape, weight, eps)
    return output


def masked_norm(
    x: Tensor,
    openings_D: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_centered: bool,
) -> Tensor:
    """LayerNorm (`is_centered`) or RMSNorm in which channel d has weight `openings_D[d]` in the mean,
    the variance and the output (arXiv 2305.02869, section 3.2).

    With weights 0 and 1 it is the norm over the channels with weight 1. At least in float32.
    """
    x = at_least_float32(x)
    share_D = openings_D / openings_D.sum()
    if is_centered:
        x = x - (x * share_D).sum(-1, keepdim=True)
    output = x * ((x * x * share_D).sum(-1, keepdim=True) + eps).rsqrt() * weight
    return (output if bias is None else output + bias) * openings_D


class _CpuRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        output: Tensor = unit * weight
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad_unit = grad * weight
        projection = torch.linalg.vecdot(grad_unit, unit).div_(unit.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad_unit, unit, projection, value=-1).mul_(scale)
        return grad_x, grad_weight, None


class _CpuShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_KD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_KD)
        y_BTD = x_BTD.clone()
        for lag, weight_D in enumerate(weight_KD, 1):
            y_BTD[:, lag:].addcmul_(x_BTD[:, :-lag], weight_D)
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        x_BTD, weight_KD = ctx.saved_tensors
        (grad_BTD,) = grad_outputs
        grad_x, grad_weight = grad_BTD.clone(), torch.empty_like(weight_KD)
        for lag, weight_D in enumerate(weight_KD, 1):
            late = grad_BTD[:, lag:]
            grad_x[:, :-lag].addcmul_(late, weight_D)
            torch.sum(late * x_BTD[:, :-lag], (0, 1), out=grad_weight[lag - 1])
        return grad_x, grad_weight


class _Adapted(nn.Module):
    """A weight with an optional adapter."""

    weight: Tensor
    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    scale: float

    def reset_parameters(self) -> None:
        """Do nothing: `GPT.init_weights` sets the values."""

    def adapt(self, table: Mapping[str, Parameter], name: str, adapter: Lora | None) -> None:
        """Add the factors of an adapter."""
        self.lora_a = self.lora_b = None
        if adapter is not None:
            self.lora_a = nn.Parameter(torch.empty(table[f"{name}.lora_a"].shape))
            self.lora_b = nn.Parameter(torch.empty(table[f"{name}.lora_b"].shape))
            self.scale = adapter.scale

    def effective(self) -> Tensor:
        """Return W + scale · B A in the dtype of W."""
        if self.lora_a is None or self.lora_b is None:
            return self.weight
        return self.weight + self.lora_b @ (self.scale * self.lora_a)


class Linear(_Adapted, nn.Linear):
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


class Embedding(_Adapted, nn.Embedding):
    """Rows of W + scale · B A."""

    def forward(self, rows: Tensor) -> Tensor:
        x = F.embedding(rows, self.weight)
        if self.lora_a is None or self.lora_b is None:
            return x
        return x + F.embedding(rows, self.lora_b) @ (self.scale * self.lora_a)


def embedding(table: Mapping[str, Parameter], name: str, adapter: Lora | None) -> Embedding:
    rows, width = table[f"{name}.weight"].shape
    layer = Embedding(rows, width)
    layer.adapt(table, name, adapter)
    return layer


def make_linear(arch: Architecture, table: Mapping[str, Parameter], name: str) -> Linear:
    outputs, inputs = table[f"{name}.weight"].shape
    layer = Linear(inputs, outputs, bias=f"{name}.bias" in table)
    layer.adapt(table, name, adapter_of(arch.lora, name))
    return layer


def activate(activation: Activation, up: Tensor, gate: Tensor | None) -> Tensor:
    """Return gelu(up), relu(up)² (arXiv 2109.08668) or silu(gate) · up (arXiv 2002.05202)."""
    if gate is not None:
        return F.silu(gate) * up
    if activation == "relu2":
        up = F.relu(up)
        return up * up  # the derivative of square() is three times as slow on a CPU
    return F.gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_masked(arch: Architecture, axis: MaskedAxis) -> bool:
    return arch.mask is not None and arch.mask.axis == axis
