"""Plans carried out: whole or one by one, the same values from the same key, nothing copied in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import KEY, operation, random_gpt, values
from shapes import gpt2, llama

from instar.checkpoint.tensor_file import Outline
from instar.config.sections import Operation
from instar.growth.apply import GrowthStep, TensorReader, apply, apply_one, grow_parameters
from instar.growth.operators import plan
from instar.growth.states import Role
from instar.models.architecture import Architecture
from instar.models.lora import Lora
from instar.models.shape import count_parameters

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2 = gpt2(**SIZES)
LLAMA = llama(**SIZES)
ADAPTED = replace(LLAMA, lora=(Lora("all", 2, 3.0),))
OPERATIONS = [
    operation("stack_layers", 2),
    operation("insert_layers", 1, **{"from": "normal"}),
    operation("widen_mlp", 19),
    operation("widen_mlp", 19, how="split"),
    operation("widen_hidden", 24),
    operation("add_heads", 2),
    operation("grow_head_dim", 6),
    operation("resize_vocab", 14),
    operation("extend_context", 8),
    operation("set_lora_rank", {"target": "all", "rank": 3}),
    operation("set_lora_rank", {"target": "all", "rank": 1}),
    operation("merge_lora"),
]
EVERY = [
    pytest.param(arch, op, id=f"{style}: {op.name} {op.value} {dict(op.options)}")
    for style, arch in {"gpt2": replace(GPT2, lora=ADAPTED.lora), "llama": ADAPTED}.items()
    for op in OPERATIONS
]


@pytest.mark.parametrize(("arch", "op"), EVERY)
def test_the_new_tensors_are_those_of_the_new_architecture(
    arch: Architecture, op: Operation
) -> None:
    new, growth_plan = plan(arch, op)
    tensors = apply(growth_plan, values(random_gpt(arch)), Role.PARAMETER, KEY)
    table = {name: entry.shape for name, entry in new.parameters().items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == table
    assert list(tensors) == list(table)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(new).total
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}


@pytest.mark.parametrize(("arch", "op"), EVERY)
@pytest.mark.parametrize("role", Role)
def test_one_by_one_equals_all_at_once(arch: Architecture, op: Operation, role: Role) -> None:
    _, growth_plan = plan(arch, op)
    old = values(random_gpt(arch).float())
    expected = apply(growth_plan, old, role, KEY)
    one_by_one = {
        name: apply_one(growth_plan, name, old.__getitem__, role, KEY)
        for name in growth_plan.tensors
    }
    tensors = {name: tensor for name, tensor in one_by_one.items() if tensor is not None}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("arch", "op"), EVERY)
def test_the_same_key_gives_the_same_values(arch: Architecture, op: Operation) -> None:
    _, growth_plan = plan(arch, op)
    old = values(random_gpt(arch))
    torch.manual_seed(1)
    first = apply(growth_plan, old, Role.PARAMETER, KEY)
    torch.manual_seed(2)
    second = apply(growth_plan, old, Role.PARAMETER, KEY)
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


@pytest.mark.parametrize("key", [(7, 1), (8, 0)], ids=["operation", "seed"])
def test_another_key_gives_other_values(key: tuple[int, int]) -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    old = values(random_gpt(GPT2))
    first, other = (apply(growth_plan, old, Role.PARAMETER, k) for k in (KEY, key))
    name = "blocks.0.mlp.up.weight"
    assert torch.equal(first[name][:12], other[name][:12])
    assert not torch.isclose(first[name][12:], other[name][12:]).any()
    # and other tensors draw other values
    assert not torch.isclose(first[name][12:], first["blocks.1.mlp.up.weight"][12:]).any()


def test_new_values_do_not_depend_on_the_type() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    exact = values(random_gpt(GPT2))
    low = {name: tensor.bfloat16() for name, tensor in exact.items()}
    name = "blocks.0.mlp.up.weight"
    first, other = (apply(growth_plan, old, Role.PARAMETER, KEY)[name][12:] for old in (exact, low))
    assert torch.equal(first.bfloat16(), other)


@pytest.mark.parametrize(
    "op",
    [
        operation("insert_layers", 1, **{"from": "normal"}),
        operation("set_lora_rank", {"target": "attn", "rank": 2}),
    ],
    ids=lambda op: op.name,
)
def test_a_new_tensor_has_the_type_of_its_neighbours(op: Operation) -> None:
    """Those of the same name in other blocks; of an adapter, its matrix."""

    def of(name: str) -> torch.dtype:
        return (
            torch.float64 if "norm" in name else torch.bfloat16 if ".attn." in name else torch.half
        )

    new, growth_plan = plan(LLAMA, op)
    old = {name: tensor.to(of(name)) for name, tensor in values(random_gpt(LLAMA)).items()}
    tensors = apply(growth_plan, old, Role.PARAMETER, KEY)
    assert tensors.keys() > old.keys() or op.name == "insert_layers"
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: of(n) for n in tensors}
    outlines = {name: Outline(tensor.dtype, tuple(tensor.shape)) for name, tensor in old.items()}
    steps = [GrowthStep(growth_plan, new.parameters(), KEY)]
    one_by_one = grow_parameters(steps, TensorReader(outlines, old.__getitem__))
    for name, outline in one_by_one.outlines.items():
        assert one_by_one.read(name).dtype == outline.dtype == of(name), name


def test_new_values_have_the_spread_of_a_new_model() -> None:
    arch = gpt2(n_embd=64, n_mlp=64)
    _, growth_plan = plan(arch, operation("widen_mlp", 512))
    rows = apply(growth_plan, values(random_gpt(arch)), Role.PARAMETER, KEY)[
        "blocks.0.mlp.up.weight"
    ][64:]
    assert rows.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(rows.mean().item()) < 1e-3


def test_what_does_not_change_is_handed_on_and_not_copied() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    old = values(random_gpt(GPT2))
    new = apply(growth_plan, old, Role.PARAMETER, KEY)
    same_tensors = {name for name, tensor in new.items() if tensor is old[name]}
    assert new.keys() - same_tensors == {
        name for name in new if ".mlp." in name and "down.bias" not in name
    }


@pytest.mark.parametrize("role", Role)
def test_copies_of_blocks_share_no_memory(role: Role) -> None:
    _, growth_plan = plan(GPT2, operation("stack_layers", 3))
    new = apply(growth_plan, values(random_gpt(GPT2)), role, KEY, "mapped")
    assert len({tensor.data_ptr() for tensor in new.values()}) == len(new)


def test_a_moving_average_grows_as_the_parameters_do() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    model, average = values(random_gpt(GPT2, 0)), values(random_gpt(GPT2, 1))
    name = "blocks.0.mlp.up.weight"
    parameters, averages = (
        apply(growth_plan, old, Role.PARAMETER, KEY)[name] for old in (model, average)
    )
    assert torch.equal(averages[:12], average[name])
    assert torch.equal(averages[12:], parameters[12:])


def test_a_parameter_that_is_missing_is_named() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    old = values(random_gpt(GPT2))
    del old["final_norm.bias"]
    with pytest.raises(KeyError, match=r"final_norm\.bias"):
        apply(growth_plan, old, Role.PARAMETER, KEY)


def test_gradients_are_not_recorded() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    new = apply(growth_plan, dict(random_gpt(GPT2).named_parameters()), Role.PARAMETER, KEY)
    assert new["blocks.0.mlp.up.weight"].grad_fn is None
