"""Mixture of experts: MLPs of which a router chooses some for each token.

Every token reaches all experts that it is routed to: none is dropped, and none is padded. The rows of a batch are
sorted by expert, so that each expert multiplies its rows at once, and are put back by the inverse permutation; no sum
depends on the order in which threads add.

Suffixes of tensor names: N tokens, E experts, K experts per token, S = N · K rows sorted by expert, D embed, M mlp,
I inputs, O outputs, L layers, B samples, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from instar.models.architecture import Architecture
from instar.models.layers import activate, is_masked
from instar.models.loss import IGNORED
from instar.models.shape import Parameter


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert."""

    experts: Tensor
    """(S,), the expert of each row"""
    ends: Tensor
    """int32 (E,); the row after the last of each expert"""

    def sizes(self) -> list[int]:
        """Return the number of rows of each expert. Waits for the device."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()


class ExpertLinear(nn.Module):
    """x Wᵀ + bias, with weight (E, O, I) and bias (E, O) of the expert of each row."""

    _each_linear: ClassVar[Callable[..., Tensor]]

    def __init__(self, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        if not hasattr(ExpertLinear, "_each_linear"):
            # sizes differ in every batch: each would be compiled anew. Not done at import, as it
            # imports torch._dynamo, which takes a second
            disabled = torch.compiler.disable(each_linear)  # type: ignore[no-untyped-call]
            ExpertLinear._each_linear = staticmethod(disabled)
        self.weight = nn.Parameter(torch.empty(table[f"{name}.weight"].shape))
        bias = table.get(f"{name}.bias")
        self.bias = nn.Parameter(torch.empty(bias.shape)) if bias else None

    def forward(self, x_SI: Tensor, groups: Groups) -> Tensor:
        weight_EOI = self.weight.to(x_SI.dtype)
        bias_EO = None if self.bias is None else self.bias.to(x_SI.dtype)
        if _has_kernel(x_SI, weight_EOI):
            return grouped_linear(x_SI, weight_EOI, bias_EO, groups)
        return self._each_linear(x_SI, weight_EOI, bias_EO, groups)


class ExpertMLP(nn.Module):
    """Σ over the K experts of a token of gate · expert(x) (arXiv 2101.03961, equation 2); gates add up to 1."""

    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        assert arch.num_experts_per_tok is not None
        self.per_token, self.activation = arch.num_experts_per_tok, arch.activation
        self.masked = is_masked(arch, "mlp")
        self.router = _Router(table, f"{name}.router")
        self.gate = ExpertLinear(table, f"{name}.gate") if arch.activation == "swiglu" else None
        self.up = ExpertLinear(table, f"{name}.up")
        self.down = ExpertLinear(table, f"{name}.down")

    def forward(self, x_BTD: Tensor, openings_M: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, D) and the router's logits (B, T, E)."""
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        gate_NK, expert_NK = route(logits_NE, self.per_token)
        expert_S, order_S = expert_NK.flatten().sort(stable=True)
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        each_E = torch.arange(logits_NE.shape[1], device=expert_S.device)
        end_E = torch.searchsorted(expert_S, each_E, right=True, out_int32=True)
        groups = Groups(expert_S, end_E)
        rows_SD = x_ND[:, None].expand(-1, self.per_token, -1).flatten(0, 1)
        rows_SD = permute_rows(rows_SD, order_S, place_S)
        h_SM = self.up(rows_SD, groups)
        h_SM = activate(
            self.activation, h_SM, None if self.gate is None else self.gate(rows_SD, groups)
        )
        if self.masked and openings_M is not None:
            h_SM = h_SM * openings_M.to(h_SM.dtype)
        y_SD = permute_rows(self.down(h_SM, groups), place_S, order_S)
        y_NKD = y_SD.view(*gate_NK.shape, -1)
        y_ND = (y_NKD * gate_NK[..., None]).sum(1)
        return y_ND.view(x_BTD.shape), logits_NE.view(*x_BTD.shape[:2], -1)


class _Router(nn.Module):
    """x Wᵀ, in float32 at least, also under autocast (arXiv 2101.03961, section 2.4)."""

    def __init__(self, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(table[f"{name}.weight"].shape))

    def forward(self, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            return F.linear(x_ND.to(self.weight.dtype), self.weight)


def expert_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose first dimension lists experts, each of which is a matrix or vector."""
    return frozenset(
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, ExpertLinear | _Router)
        for name, _ in module.named_parameters()
    )


def route(logits_NE: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """Return the gates and the experts (N, K) of each token: those with the largest logits.

    Gates are the softmax over the chosen logits, as in Mixtral (arXiv 2401.04088, section 2.1). A single gate is 1
    and has no derivative; it is given that of log p, where p is the expert's probability among all experts, so that
    the router learns whether an expert's output helps, as from Switch's gate p (arXiv 2101.03961, equation 2).
    """
    if per_token == 1:
        p_N1, expert_N1 = logits_NE.softmax(-1).max(-1, keepdim=True)
        return p_N1 / p_N1.detach(), expert_N1
    top_NK, expert_NK = logits_NE.topk(per_token)
    return top_NK.softmax(-1), expert_NK


def load_balancing_loss(logits_LBTE: Tensor, targets_BT: Tensor, per_token: int) -> Tensor:
    """Return Σ over layers and samples of (targets of the sample) · E · Σ f P, a scalar.

    f is the share of a sample's routings that an expert has, P its mean probability (arXiv 2101.03961, equations 4 to
    6, without α). Both are taken over one sample, not over a micro-batch: the gradient then depends neither on the
    number of ranks nor on gradient accumulation. The minimum of E · Σ f P under even routing is 1; positions without
    a target do not count.
    """
    counted_BT = targets_BT != IGNORED
    number_B = counted_BT.sum(1)
    share_BT1 = counted_BT[..., None].to(logits_LBTE.dtype) / number_B[:, None, None].clamp(min=1)
    experts = logits_LBTE.shape[-1]
    chosen_LBTE = _one_hot(logits_LBTE.topk(per_token).indices, experts).sum(-2)
    f_LBE = (chosen_LBTE * share_BT1).sum(2) / per_token
    p_LBE = (logits_LBTE.softmax(-1) * share_BT1).sum(2)
    loss: Tensor = experts * ((f_LBE * p_LBE).sum(-1) * number_B).sum()
    return loss


def each_linear(x_SI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups) -> Tensor:
    """Multiply the rows of one expert after the other. Experts without rows get gradients of 0."""
    weights = weight_EOI.unbind()
    biases = (None,) * len(weights) if bias_EO is None else bias_EO.unbind()
    rows = torch.split(x_SI, groups.sizes())
    return torch.cat([F.linear(*operands) for operands in zip(rows, weights, biases, strict=True)])


def grouped_linear(
    x_SI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups
) -> Tensor:
    """Same as `each_linear`, in one kernel, for which the host does not wait."""
    y_SO = F.grouped_mm(x_SI, weight_EOI.mT, offs=groups.ends)
    if bias_EO is None:
        return y_SO
    return y_SO + _one_hot(groups.experts, len(bias_EO)).to(bias_EO.dtype) @ bias_EO


def _one_hot(index: Tensor, experts: int) -> Tensor:
    """Return whether each index is that of an expert (…, E). Does not wait for the device, as `F.one_hot` may."""
    return index[..., None] == torch.arange(experts, device=index.device)


def _has_kernel(x_SI: Tensor, weight_EOI: Tensor) -> bool:
    """Return whether torch has a grouped kernel: bfloat16 on GPUs, rows of whole 16 bytes."""
    return (
        x_SI.is_cuda
        and x_SI.dtype == torch.bfloat16
        and not any(size % 8 for size in weight_EOI.shape[1:])
        and torch.cuda.get_device_capability(x_SI.device) >= (8, 0)
    )


def permute_rows(x: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
    """Return ``x[order_S]``, whose gradient is gathered and not added up; `place_S` is the inverse permutation."""
    if torch.compiler.is_compiling():
        return x[order_S]
    rows: Tensor = _Permutation.apply(x, order_S, place_S)  # type: ignore[no-untyped-call]
    return rows


class _Permutation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(place_S)
        return x[order_S]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (place_S,) = ctx.saved_tensors
        return grad_outputs[0][place_S], None, None
