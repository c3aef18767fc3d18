"""Documents that lie end to end in samples, and attention that keeps them apart.

On a GPU with 16-bit values torch's attention for sequences of different lengths computes each document by itself: no
mask is made, and no scores of other documents. Elsewhere, and where attention has dropout, a mask is added to scores.
The kernel is used after it has computed documents of its own right on the device at hand.

Suffixes of tensor names are those of `instar.models.gpt`; J: documents of a batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNEL_DEVICES = ("cuda",)
KERNEL_TYPES = (torch.bfloat16, torch.float16)

_SIZES = (37, 1, 90, 6, 122)
"""tokens of the documents by which the kernel is tried: within its blocks, and across them"""
_TOLERANCE = 0.02
"""of the largest value, or of 1: the rounding of 16 bits. Where documents see each other values differ by as much as they
are."""


class Attention(NamedTuple):
    """What decides whether the kernel computes the attention of a layer."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """tokens that a token attends to, itself included; None: all"""
    scale: float | None = None
    """of scores; None: 1 / √head_dim"""
    dropout: float = 0.0
    softcap: float | None = None
    """by which scores are capped (Gemma 2)"""


class PackedDocuments(NamedTuple):
    """The documents of samples in which several lie end to end."""

    numbers: Tensor
    """of each token's document in its sample, from 1 on, (B, T)"""
    mask: Tensor | None
    """added to scores: −∞ but for the keys of a query's own document that are not later, (B, 1, T, T); None: the kernel
    needs none"""
    ends: Tensor | None
    """0 and where each document ends in the samples laid end to end, (J + 1,) int32; None: the mask is used"""

    @classmethod
    def at(
        cls, positions_BT: Tensor, sizes_J: Tensor | None, attention: list[Attention]
    ) -> PackedDocuments:
        """Return the documents of tokens at these positions, of which each begins at 0.

        Args:
            sizes_J: tokens of each document, sample by sample; None: a mask is made.
            attention: of the layers, of one type.
        """
        numbers_BT = (positions_BT == 0).cumsum(1)
        if sizes_J is not None and not any(
            kernel_fault(layer, positions_BT.device) for layer in attention
        ):
            return cls(numbers_BT, None, ends_of(sizes_J))
        seen_BTT = (numbers_BT[:, :, None] == numbers_BT[:, None, :]).tril()
        # of the type of scores, so that no layer makes and keeps one of its own
        return cls(numbers_BT, added_to_scores(seen_BTT[:, None], attention[0].dtype), None)


def computed_type(x: Tensor) -> torch.dtype:
    """Return the type in which matrix products with `x` are computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def ends_of(sizes_J: Tensor) -> Tensor:
    """Return 0 and where each document ends, (J + 1,) int32, of documents of these sizes one after another."""
    return F.pad(sizes_J.cumsum(0), (1, 0)).to(torch.int32)


def added_to_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores so that keys which are not seen have no share."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)


def attend_by_document(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    ends_J: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the causal attention of each document by itself, (B, H, T, C); K divides H.

    Args:
        ends_J: see `PackedDocuments`. No document is longer than T.
    """
    # not before: it brings torch's compiler, which takes a third of the time to a first step
    from torch.nn.attention.varlen import varlen_attn

    T = q_BHTC.shape[2]
    q_NHC, k_NKC, v_NKC = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
    # torch 2.11 does not know groups, and has no such argument
    options: dict[str, Any] = {"enable_gqa": True} if k_NKC.shape[1] < q_NHC.shape[1] else {}
    options["window_size"] = (-1 if window is None else window - 1, 0)
    y_NHC = varlen_attn(q_NHC, k_NKC, v_NKC, ends_J, ends_J, T, T, scale=scale, **options)
    assert isinstance(y_NHC, Tensor)
    return y_NHC.view(-1, T, *y_NHC.shape[1:]).transpose(1, 2)


def kernel_fault(attention: Attention, device: torch.device) -> str:
    """Return why the kernel does not compute the attention of a layer on a device; empty: it does."""
    if device.type not in KERNEL_DEVICES:
        return f"it runs on {' and '.join(KERNEL_DEVICES)} alone"
    if attention.dtype not in KERNEL_TYPES:
        return "it computes with 16-bit values alone"
    if attention.dropout:
        return "it has no dropout"
    if attention.softcap is not None:
        return "it cannot cap scores"
    # of plain values, which a compiler takes as constants
    return _constant_fault(*attention, device)


def _constant_fault(*values: Any) -> str:
    return _trial_fault(Attention(*values[:-1]), values[-1])


# all that `torch.compiler.assume_constant_result` does, without the import of the compiler
_constant_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _trial_fault(attention: Attention, device: torch.device) -> str:
    """Return how the outputs and gradients of the kernel differ from those of a mask in float32; empty: they do not."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        generator = torch.Generator().manual_seed(0)
        total, H, K, C = sum(_SIZES), attention.heads, attention.kv_heads, attention.head_dim
        low = [
            torch.randn(1, heads, total, C, generator=generator).to(device, attention.dtype)
            for heads in (H, K, K, H)
        ]
        sizes_J = torch.tensor(_SIZES, device=device)
        numbers_T = torch.arange(len(_SIZES), device=device).repeat_interleave(sizes_J)
        seen_TT = (numbers_T[:, None] == numbers_T).tril()
        if attention.window is not None:
            seen_TT = seen_TT.triu(1 - attention.window)
        mask_TT = added_to_scores(seen_TT, torch.float32)

        def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, mask_TT, scale=attention.scale)

        def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_by_document(q, k, v, ends_of(sizes_J), attention.window, attention.scale)

        results = []
        try:
            for attend, dtype in ((by_mask, torch.float32), (by_kernel, attention.dtype)):
                *inputs, slope = (x.detach().to(dtype) for x in low)
                output = attend(*(x.requires_grad_() for x in inputs))
                results.append((output, *torch.autograd.grad(output, inputs, slope)))
        except Exception as error:  # whatever a build of torch or a device lacks
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        for name, right, computed in zip(("outputs", *"qkv"), *results, strict=True):
            largest = max(1.0, float(right.detach().abs().max()))
            difference = float((right - computed.float()).detach().abs().max()) / largest
            if not difference <= _TOLERANCE:
                what = name if name == "outputs" else f"gradients of {name}"
                return f"its {what} are off by {difference:.2g} of the largest"
    return ""


def mask_reasons(model: nn.Module) -> list[str]:
    """Return why documents are masked in a GPT or a model of transformers that is on a GPU, in the present autocast
    context; empty: they are not, or it is on a CPU."""
    weight = next(model.parameters())
    if weight.device.type == "cpu":
        return []
    kinds = cast("Any", model).attention_kinds(computed_type(weight))
    reasons = dict.fromkeys(kernel_fault(kind, weight.device) for kind in kinds)
    text = "attention makes masks of context × context for documents; torch's kernel is not used: "
    return [text + reason for reason in reasons if reason]
