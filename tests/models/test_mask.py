"""Masks: what is new enters between not being there and being there in full."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import pytest
import torch
from cases import parametrize_first
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from instar.models.architecture import Architecture
from instar.models.gpt import GPT, named_generator
from instar.models.lora import Lora
from instar.models.shape import ArchitectureError, Mask, MaskedAxis, layer_of

BEGIN, STEPS = 100, 8
NEW: dict[MaskedAxis, tuple[tuple[int, int], ...]] = {
    "layers": ((0, 1), (2, 3)),
    "mlp": ((3, 7), (50, 64)),
    "heads": ((4, 6),),
    "embed": ((1, 2), (20, 36)),
}
SHAPE = {"n_layer": 3, "n_head": 6, "n_embd": 36, "n_mlp": 64, "vocab_size": 40}
GPT2, LLAMA = gpt2(**SHAPE), replace(llama(**SHAPE), n_kv_head=3)
MIXED = replace(
    GPT2,
    activation="relu2",
    positions="rope",
    qk_norm=True,
    bias=False,
    conv_size=4,
    embedding_multiplier=3.0,
)
STYLES = pytest.mark.parametrize("arch", [GPT2, LLAMA, MIXED], ids=["gpt2", "llama", "mixed"])
AXES = pytest.mark.parametrize("axis", list(NEW))


def masked(arch: Architecture, axis: MaskedAxis) -> Architecture:
    return replace(arch, mask=Mask(axis, NEW[axis], BEGIN, STEPS))


def random_values(arch: Architecture) -> dict[str, Tensor]:
    return {
        name: torch.empty(entry.shape, dtype=torch.float64).normal_(
            1.0 if entry.kind == "norm" else 0.0, 0.3, generator=named_generator(name)
        )
        for name, entry in arch.parameters().items()
    }


def at(arch: Architecture, step: int, values: dict[str, Tensor], **options: bool) -> GPT:
    """The model as it is after so many steps."""
    model = GPT(arch, **options).double()
    model.load_state_dict(values)
    model.set_step(step)
    return model


def tokens(arch: Architecture) -> Tensor:
    return torch.randint(arch.vocab_size, (2, arch.context), generator=named_generator("tokens"))


def new_indices(axis: MaskedAxis) -> list[int]:
    return [index for start, stop in NEW[axis] for index in range(start, stop)]


def without_new(
    arch: Architecture, axis: MaskedAxis, values: dict[str, Tensor]
) -> tuple[Architecture, dict[str, Tensor]]:
    """The model that has none of what is new: its slices are cut out of every tensor."""
    new = new_indices(axis)
    if axis == "layers":
        kept_indices = [layer for layer in range(arch.n_layer) if layer not in new]
        prefixes = {
            f"blocks.{old}.": f"blocks.{number}." for number, old in enumerate(kept_indices)
        }
        tensors = {}
        for name, value in values.items():
            if layer_of(name) in new:
                continue
            for old, number in prefixes.items():
                if name.startswith(old):
                    name = name.replace(old, number)
                    break
            tensors[name] = value
        return arch.resized(layers=len(kept_indices)), tensors
    sizes = {axis: arch.sizes()[axis] - len(new)}
    cut: dict[str, list[int]] = {axis: new}
    if axis == "heads":
        # whole groups are new, so their keys and values go too
        per_group = arch.n_head // arch.n_kv_head
        cut["kv_heads"] = sorted({head // per_group for head in new})
        sizes["kv_heads"] = arch.n_kv_head - len(cut["kv_heads"])
    tensors = {}
    for name, entry in arch.parameters().items():
        value = values[name]
        for dim, axes in enumerate(entry.axes):
            first, *factors = axes.split("*")
            if first in cut:
                inner = arch.head_dim if factors else 1
                kept_indices = [n for n in range(arch.sizes()[first]) if n not in cut[first]]
                value = value.unflatten(dim, (-1, inner)).index_select(
                    dim, torch.tensor(kept_indices)
                )
                value = value.flatten(dim, dim + 1)
        tensors[name] = value
    return arch.resized(**sizes), tensors


@STYLES
@AXES
def test_closed_it_computes_what_a_model_without_the_new_computes(
    arch: Architecture, axis: MaskedAxis
) -> None:
    values = random_values(arch)
    small, cut = without_new(arch, axis, values)
    plain = GPT(small).double()
    plain.load_state_dict(cut)
    for step in (0, BEGIN):
        closed_model = at(masked(arch, axis), step, values)
        torch.testing.assert_close(
            closed_model(tokens(arch)), plain(tokens(arch)), rtol=1e-11, atol=1e-11
        )


@STYLES
@AXES
def test_open_it_computes_what_a_model_without_a_mask_computes(
    arch: Architecture, axis: MaskedAxis
) -> None:
    values = random_values(arch)
    plain = at(arch, 0, values)
    for step in (BEGIN + STEPS, BEGIN + 1000):
        open_model = at(masked(arch, axis), step, values)
        # a masked norm is not torch's own, so it rounds otherwise
        slack = 1e-12 if axis == "embed" else 0.0
        torch.testing.assert_close(
            open_model(tokens(arch)), plain(tokens(arch)), rtol=slack, atol=slack
        )


@given(
    st.sampled_from([GPT2, LLAMA, MIXED]),
    st.sampled_from(["layers", "mlp", "heads"]),
    st.integers(BEGIN, BEGIN + STEPS),
)
@settings(max_examples=30, deadline=None)
def test_between_it_is_as_if_what_is_new_were_read_by_so_much_less(
    arch: Architecture, axis: MaskedAxis, step: int
) -> None:
    values = random_values(arch)
    opening = (step - BEGIN) / STEPS
    scaled_values = dict(values)
    for name, value in values.items():
        part = name.split(".", 2)[-1]
        if axis == "layers":
            if layer_of(name) in new_indices(axis) and part.startswith(("attn.output", "mlp.down")):
                scaled_values[name] = value * opening
            continue
        inner = arch.head_dim if axis == "heads" else 1
        if part == {"mlp": "mlp.down.weight", "heads": "attn.output.weight"}[axis]:
            columns = value.unflatten(1, (-1, inner)).clone()
            columns[:, new_indices(axis)] *= opening
            scaled_values[name] = columns.flatten(1)
    between = at(masked(arch, axis), step, values)
    torch.testing.assert_close(
        between(tokens(arch)), at(arch, 0, scaled_values)(tokens(arch)), rtol=1e-11, atol=1e-11
    )


@STYLES
@AXES
def test_gradients_reach_what_is_new_as_soon_as_it_opens(
    arch: Architecture, axis: MaskedAxis
) -> None:
    values = random_values(arch)

    def of_new(step: int) -> list[float]:
        model = at(masked(arch, axis), step, values)
        model(tokens(arch), tokens(arch).roll(-1, 1)).backward()
        maxima = []
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if name.endswith("key.bias") and not arch.qk_norm:
                continue  # a shift of all keys moves no attention weight
            if axis == "layers":
                if layer_of(name) in new_indices(axis):
                    maxima.append(parameter.grad.abs().max().item())
                continue
            for dim, axes in enumerate(arch.parameters()[name].axes):
                if axes.split("*")[0] == axis:
                    inner = arch.head_dim if "*" in axes else 1
                    slices = parameter.grad.unflatten(dim, (-1, inner))
                    new_slices = slices.index_select(dim, torch.tensor(new_indices(axis)))
                    maxima.append(new_slices.abs().max().item())
        return maxima

    assert max(of_new(BEGIN)) == 0.0
    assert min(of_new(BEGIN + 1)) > 0.0


@AXES
def test_gradient_checkpointing_changes_no_gradient(axis: MaskedAxis) -> None:
    arch = masked(LLAMA, axis)
    values = random_values(arch)
    plain = at(arch, BEGIN + 3, values)
    frugal = at(arch, BEGIN + 3, values, gradient_checkpointing=True)
    for model in (plain, frugal):
        model(tokens(arch), tokens(arch)).backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


@STYLES
@AXES
def test_autocast_leaves_the_loss_what_it_is(arch: Architecture, axis: MaskedAxis) -> None:
    model = at(masked(arch, axis), BEGIN + 3, random_values(arch)).float()
    exact = model(tokens(arch), tokens(arch))
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = model(tokens(arch), tokens(arch)), model(tokens(arch))
    loss.backward()
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, exact, rtol=0.03, atol=0.0)


@parametrize_first("axis", [*NEW, None], first=1)
def test_a_compiled_graph_holds_while_the_mask_opens(axis: MaskedAxis | None) -> None:
    lora_arch = replace(LLAMA, lora=(Lora("all", 2, 4.0),))
    arch = masked(lora_arch, axis) if axis else lora_arch
    values = random_values(arch)
    model = at(arch, BEGIN, values)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = cast(nn.Module, torch.compile(model, backend=counter))
    for step in range(BEGIN, BEGIN + STEPS + 2):
        model.set_step(step)
        expected = at(arch, step, values)(tokens(arch))
        torch.testing.assert_close(compiled(tokens(arch)), expected)
    assert counter.frame_count == 1


def test_a_mask_is_closed_until_it_is_told_the_step() -> None:
    arch = masked(LLAMA, "mlp")
    model = GPT(arch)
    model.init_weights(0)
    assert model.openings.tolist() == [float(n not in new_indices("mlp")) for n in range(64)]
    with torch.device("meta"):
        meta_model = GPT(arch)
    meta_model.set_step(BEGIN + STEPS)
    meta_model.to_empty(device="cpu").reset_buffers()
    assert torch.equal(meta_model.openings, model.openings)


def test_a_mask_is_not_part_of_what_is_saved() -> None:
    assert GPT(masked(GPT2, "embed")).state_dict().keys() == GPT2.parameters().keys()


def test_a_model_without_a_mask_may_be_told_the_step() -> None:
    model = at(GPT2, 3, random_values(GPT2))
    assert not dict(model.named_buffers())


@AXES
def test_a_shape_survives_json(axis: MaskedAxis) -> None:
    arch = masked(GPT2, axis)
    fields = json.loads(json.dumps(arch.to_dict()))
    assert fields == arch.to_dict()
    assert Architecture.from_dict(fields) == arch


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask("vocab", ((0, 1),), 0, 1), "'vocab' cannot be masked .one of layers, mlp"),  # type: ignore[arg-type]
        (Mask("mlp", ((0, 65),), 0, 1), "0 … 64 is not a range of 64 mlp"),
        (Mask("mlp", ((8, 9), (3, 5)), 0, 1), "3 … 4 is not a range of 64 mlp after 9"),
        (Mask("mlp", ((0, 64),), 0, 1), "some of the 64 mlp must be new, and some old"),
        (Mask("layers", (), 0, 1), "some of the 3 layers must be new, and some old"),
        (Mask("heads", ((0, 1),), 0, 0), "steps above 0"),
        (Mask("heads", ((0, 1),), -1, 1), "begin, steps and ranges must be whole numbers"),
    ],
)
def test_impossible_masks_are_refused(mask: Mask, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        replace(GPT2, mask=mask)


def test_masks_from_json_are_checked() -> None:
    fields = masked(GPT2, "mlp").to_dict()
    for wrong in ({"new": [[1]]}, {"steps": "4"}, {"ends": 3}, {"new": None}):
        with pytest.raises(ArchitectureError, match=r"model\.mask"):
            Architecture.from_dict(fields | {"mask": fields["mask"] | wrong})
