"""Documents that are packed into a sample, and masked, have the losses and gradients that they have alone."""

from __future__ import annotations

import pytest
import torch
from cases import parametrize_first
from packed_documents import (
    ARCHITECTURES,
    LLAMA,
    check,
    document_losses,
    gpt,
    packed_batch,
    pretrained_model,
)

from instar.models.hf.families import BUILT_IN


@parametrize_first("kind", ARCHITECTURES, first=7)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
def test_documents_of_a_gpt_do_not_see_each_other(kind: str, checkpointing: bool) -> None:
    check(gpt(ARCHITECTURES[kind], gradient_checkpointing=checkpointing), 1e-6)


def test_documents_with_16_bits_do_not_see_each_other() -> None:
    """On CPUs that materialize scores: to the rounding of bfloat16, far from what other documents change."""
    model = gpt(LLAMA)
    tokens, targets, positions = packed_batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.stack(document_losses(model)).double()
        losses = model(tokens, targets, per_sample=True, positions_BT=positions)
        without_masks = model(tokens, targets, per_sample=True)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert ((without_masks - expected).abs() / expected)[:2].min() > 4e-3


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_documents_of_models_of_transformers_do_not_see_each_other(kind: str) -> None:
    check(pretrained_model(kind), 2e-6)
