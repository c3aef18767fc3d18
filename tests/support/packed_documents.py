"""Models, and samples of several documents, whose losses and gradients are held to those of the documents alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_models import CHANGES, SIZES
from torch import Tensor, nn
from transformers import AutoConfig

from instar.config.language import ModelConfig
from instar.data.source import IGNORED
from instar.models.architecture import Architecture, resolve_architecture
from instar.models.gpt import GPT
from instar.models.hf.config import complete_config
from instar.models.hf.module import PretrainedModel
from instar.models.hf.pretrained import LoraShape
from instar.models.lora import Lora
from instar.models.shape import Loop

GPT2 = resolve_architecture(ModelConfig(n_layer=3, n_head=4, n_embd=32, context=64), 80)
LLAMA = replace(
    GPT2, n_kv_head=2, norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=False
)
ARCHITECTURES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "convolutions, norms of queries": replace(LLAMA, qk_norm=True, conv_size=4),
    "experts": replace(LLAMA, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.01),
    "windows": replace(LLAMA, windows=(4, None, 9)),
    "adapters": replace(GPT2, lora=(Lora("all", 4, 8.0),)),
    "a loop": replace(GPT2, loop=Loop(first=1, last=2, times=2)),
}
SIZES_OF_DOCUMENTS = ([1, 9, 3, 12, 2, 8, 7, 6], [20, 1, 1, 26], [48])
"""tokens of the documents of each sample"""


def packed_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions of samples that documents fill."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (len(SIZES_OF_DOCUMENTS), 48), generator=generator)
    targets = tokens.roll(-1, 1)
    positions = torch.empty_like(tokens)
    for row, sizes in enumerate(SIZES_OF_DOCUMENTS):
        at = 0
        for size in sizes:
            positions[row, at : at + size] = torch.arange(size)
            targets[row, at + size - 1] = IGNORED
            at += size
    return tokens, targets, positions


def sizes_of_documents() -> Tensor:
    return torch.tensor([size for sizes in SIZES_OF_DOCUMENTS for size in sizes])


def document_losses(model: nn.Module) -> list[Tensor]:
    """The sum of the losses of each sample, of which every document is computed by itself."""
    tokens, targets, _ = packed_batch()
    sums = []
    for row, sizes in enumerate(SIZES_OF_DOCUMENTS):
        losses, at = [], 0
        for size in sizes:
            part = slice(at, at + size)
            losses.append(model(tokens[row : row + 1, part], targets[row : row + 1, part]))
            at += size
        sums.append(torch.stack(losses).sum())
    return sums


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check(model: nn.Module, limit: float) -> None:
    tokens, targets, positions = packed_batch()
    separate = document_losses(model)
    with torch.no_grad():
        packed_losses = model(tokens, targets, per_sample=True, positions_BT=positions)
        unmasked_losses = model(tokens, targets, per_sample=True)
    expected = torch.stack([loss.detach().double() for loss in separate])
    torch.testing.assert_close(packed_losses, expected, rtol=limit, atol=0)
    assert ((unmasked_losses - expected).abs() / expected)[:2].min() > 100 * limit, (
        "no document is masked"
    )
    torch.testing.assert_close(unmasked_losses[2], expected[2], rtol=limit, atol=0)
    expected_gradients = gradients(model, torch.stack(document_losses(model)).sum())
    actual_gradients = gradients(model, model(tokens, targets, positions_BT=positions))
    assert actual_gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in actual_gradients.items():
        # that of a bias of keys is rounding: it changes no output
        scale = max(float(expected_gradients[name].abs().max()), 1e-3 * largest)
        torch.testing.assert_close(
            gradient / scale, expected_gradients[name] / scale, rtol=0, atol=1e-4
        )


def gpt(arch: Architecture, **options: bool) -> GPT:
    model = GPT(arch, **options)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            )
    return model


def pretrained_model(kind: str) -> PretrainedModel:
    sizes = {} if kind == "gpt2" else {**SIZES, "max_position_embeddings": 64}
    changes = {key: value for key, value in CHANGES.get(kind, {}).items() if key != "n_positions"}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "gpt2" else {}
    config = AutoConfig.for_model(kind, **{**sizes, "vocab_size": 64, **changes, **dropout})
    torch.manual_seed(0)
    model = PretrainedModel(LoraShape(complete_config(config.to_dict())), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
