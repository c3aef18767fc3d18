"""Documents of packed samples in models of transformers, whose attention a GPU computes by document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instar.models.documents import (
    Attention,
    attend_by_document,
    computed_type,
    ends_of,
    kernel_fault,
)
from instar.models.hf.cost import attention_dropout
from instar.models.hf.pretrained import LoraShape

_NAME = "instar_documents"
"""of the attention below among those that transformers knows"""


def of_documents(
    inner: Any, shape: LoraShape, positions_BT: Tensor, sizes_J: Tensor | None
) -> dict[str, Tensor]:
    """Return the arguments of a model by which documents do not see each other.

    Args:
        inner: a causal language model of transformers, of a built-in family.
        positions_BT: of each token in its document.
        sizes_J: tokens of each document, sample by sample; None: transformers makes a mask.
    """
    # transformers masks documents of each other where positions begin anew
    arguments = {"position_ids": positions_BT}
    implementation = inner.config._attn_implementation
    if sizes_J is None or implementation not in ("sdpa", _NAME):
        return arguments
    dtype = computed_type(inner.get_input_embeddings().weight)
    kinds = attention_kinds(shape, dtype, training=inner.training)
    if any(kernel_fault(attention, positions_BT.device) for attention in kinds):
        return arguments
    if implementation != _NAME:
        _register()
        inner.set_attn_implementation(_NAME)
    # four axes: those of a mask that transformers takes as it is
    return {**arguments, "attention_mask": ends_of(sizes_J)[None, None, None]}


def attention_kinds(shape: LoraShape, dtype: torch.dtype, *, training: bool) -> list[Attention]:
    """Return the attention of layers with and without a window, whichever of them there are."""
    sizes, config = shape.sizes(), shape.config
    first = Attention(
        dtype,
        sizes["heads"],
        sizes["kv_heads"],
        sizes["head_dim"],
        dropout=attention_dropout(shape) if training else 0.0,
        softcap=config.get("attn_logit_softcapping"),
    )
    return [first._replace(window=window) for window in {None, config.get("sliding_window")}]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    attend_to_all, mask_of_all = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.dtype != torch.int32:
            done: tuple[Tensor, None] = attend_to_all(
                module, query, key, value, attention_mask, scaling=scaling, **options
            )
            return done
        low = computed_type(value)
        q_BHTC, k_BKTC, v_BKTC = (x.to(low) for x in (query, key, value))
        ends_J = attention_mask.flatten()
        y_BHTC = attend_by_document(q_BHTC, k_BKTC, v_BKTC, ends_J, sliding_window, scaling)
        return y_BHTC.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask_of_all)
