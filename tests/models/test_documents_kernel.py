"""Documents whose attention torch's kernel for GPUs computes have the losses and gradients that they have alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import parametrize_first
from flash import Flash, flash_on_cpu
from packed_documents import (
    ARCHITECTURES,
    check,
    gpt,
    packed_batch,
    pretrained_model,
    sizes_of_documents,
)
from torch import Tensor, nn

from instar.models import documents
from instar.models.documents import Attention, PackedDocuments, kernel_fault
from instar.models.hf.families import BUILT_IN

CPU = torch.device("cpu")
BF16 = Attention(torch.bfloat16, 4, 2, 16)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    """The kernel, on the CPU; also of float32, so that what it is asked can be held to 1e-6."""
    monkeypatch.setattr(documents, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(documents, "KERNEL_TYPES", (torch.bfloat16, torch.float32))
    documents._trial_fault.cache_clear()
    with flash_on_cpu() as kernel:
        yield kernel
    documents._trial_fault.cache_clear()


class WithSizes(nn.Module):
    """Hands a model the sizes of documents wherever it is told their positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, **options: Tensor) -> Tensor:
        if "positions_BT" in options:
            options["sizes_J"] = sizes_of_documents()
        result: Tensor = self.model(inputs, targets, **options)
        return result


@parametrize_first("checkpointing", [False, True], ids=["", "checkpointed"], first=7)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_documents_of_a_gpt_are_computed_by_the_kernel(
    kind: str, checkpointing: bool, flash: Flash
) -> None:
    check(WithSizes(gpt(ARCHITECTURES[kind], gradient_checkpointing=checkpointing)), 1e-6)
    assert flash.calls > 3


@parametrize_first("kind", sorted(BUILT_IN), first=6)
def test_documents_of_models_of_transformers_are_computed_by_the_kernel(
    kind: str, flash: Flash
) -> None:
    model = pretrained_model(kind)
    check(WithSizes(model), 2e-6)
    # Gemma 2 caps its scores, which the kernel cannot
    assert (flash.calls > 3) == (kind != "gemma2")
    tokens, *_ = packed_batch()
    with torch.no_grad():  # and a sample that is one document is what it was
        torch.testing.assert_close(model(tokens), pretrained_model(kind)(tokens), rtol=0, atol=0)


def test_a_compiled_model_calls_the_kernel(flash: Flash) -> None:
    model = gpt(ARCHITECTURES["windows"])
    compiled = torch.compile(WithSizes(model), backend="eager")
    tokens, targets, positions = packed_batch()
    with torch.no_grad():
        eager = WithSizes(model)(tokens, targets, positions_BT=positions)
        calls = flash.calls
        torch.testing.assert_close(compiled(tokens, targets, positions_BT=positions), eager)
    assert flash.calls > calls


def test_no_mask_is_made_where_the_kernel_computes(flash: Flash) -> None:
    *_, positions = packed_batch()
    packed_documents = PackedDocuments.at(positions, sizes_of_documents(), [BF16])
    assert flash.calls == 1
    assert packed_documents.mask is None
    assert packed_documents.ends is not None
    assert packed_documents.ends.tolist()[-1] == positions.numel()
    for attention in (BF16._replace(dtype=torch.float64), BF16._replace(dropout=0.1)):
        assert PackedDocuments.at(positions, sizes_of_documents(), [BF16, attention]).ends is None
    assert PackedDocuments.at(positions, None, [BF16]).mask is not None


DAMAGES = {
    "sees_others": "outputs are off by",
    "nan_gradient": "gradients of k are off by nan",
    "missing": "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_kernel_that_computes_something_else_is_not_used(damage: str, flash: Flash) -> None:
    setattr(flash, damage, True)
    assert DAMAGES[damage] in kernel_fault(BF16, CPU)
    check(WithSizes(gpt(ARCHITECTURES["llama"])), 1e-6)


@pytest.mark.parametrize("window", [None, 1, 5, 90, 4096])
def test_the_trial_of_the_kernel_passes(window: int | None, flash: Flash) -> None:
    assert kernel_fault(BF16._replace(window=window), CPU) == ""
    assert flash.calls == 1


def test_cpus_have_no_kernel() -> None:
    assert "cuda alone" in kernel_fault(BF16, CPU)
    model = WithSizes(gpt(ARCHITECTURES["llama"]))
    check(model, 1e-6)
