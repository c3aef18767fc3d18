"""What enters under a mask: nothing changes at once, all of it learns, nothing is left of the mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import batch, build_model, grow_model, operation, proof, random_gpt, values
from shapes import gpt2, llama

from instar.config.sections import Operation
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.models.architecture import Architecture
from instar.models.shape import Mask

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2, LLAMA = gpt2(**SIZES), llama(**SIZES)
STYLES = pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
STEP, STEPS = 30, 4
ENTERING = [
    operation("insert_layers", 2, where=[0, 1], mask=STEPS),
    operation("insert_layers", 1, mask=STEPS, **{"from": "normal"}),
    operation("widen_mlp", 20, mask=STEPS),
    operation("widen_hidden", 21, mask=STEPS),
    operation("add_heads", 2, mask=STEPS),
    operation("add_heads", 4, mask=STEPS, where="inside"),
    operation("insert_layers", 2, where=[1, 2], mask=STEPS, **{"from": "average"}),
]
OPERATIONS = pytest.mark.parametrize(
    "op",
    ENTERING,
    ids=lambda op: f"{op.name} {op.options.get('where', op.options.get('from', ''))}",
)
FOLD = operation("fold_masks")


@STYLES
@OPERATIONS
def test_at_first_nothing_changes(arch: Architecture, op: Operation) -> None:
    model = random_gpt(arch)
    new, growth_plan = grow_model(model, op, step=STEP)
    assert growth_plan.label == "exact"
    assert proof(model, new, growth_plan).holds
    assert new.arch.mask is not None
    assert (new.arch.mask.begin, new.arch.mask.end) == (STEP, STEP + STEPS)


@STYLES
@OPERATIONS
def test_all_that_is_new_has_values_and_learns_at_the_next_step(
    arch: Architecture, op: Operation
) -> None:
    new, _ = grow_model(random_gpt(arch), op, step=STEP)
    new.set_step(STEP + 1)
    inputs, targets = batch(arch)
    new(inputs, targets).backward()
    for name, parameter in new.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if name.endswith(("output.weight", "down.weight")):
            assert parameter.abs().min() > 0, name
        if name == "token_embedding.weight" and not arch.tied:
            gradient = gradient[inputs.unique()]
        if not name.endswith("key.bias"):  # a shift of all keys moves no attention weight
            assert gradient.abs().min() > 0, name


@STYLES
@OPERATIONS
def test_folded_it_is_a_model_that_was_born_so(arch: Architecture, op: Operation) -> None:
    open_model, _ = grow_model(random_gpt(arch), op, step=STEP)
    open_model.set_step(STEP + STEPS)
    folded_model, growth_plan = grow_model(open_model, FOLD, step=STEP + STEPS)
    assert growth_plan.label == "exact"
    assert proof(open_model, folded_model, growth_plan).holds
    assert folded_model.arch == arch.resized(
        **{axis: folded_model.arch.sizes()[axis] for axis in arch.sizes()}
    )
    assert all(
        torch.equal(tensor, values(open_model)[name])
        for name, tensor in values(folded_model).items()
    )
    born = build_model(folded_model.arch, values(folded_model))
    assert torch.equal(born(batch(arch)[0]), folded_model(batch(arch)[0]))
    assert not [name for name, _ in folded_model.named_buffers() if "rope" not in name]


@OPERATIONS
def test_nothing_else_grows_while_a_mask_is_open(op: Operation) -> None:
    open_arch, _ = plan(LLAMA, op, step=STEP)
    for other in (op, operation("resize_vocab", 20), operation("merge_lora")):
        with pytest.raises(GrowthError, match=f"are masked until step {STEP + STEPS}"):
            plan(open_arch, other, step=STEP + 1)


def test_a_mask_is_folded_when_it_is_open_and_not_before() -> None:
    open_arch, _ = plan(LLAMA, ENTERING[2], step=STEP)
    with pytest.raises(GrowthError, match="fully open at step 34, and this is step 33"):
        plan(open_arch, FOLD, step=STEP + STEPS - 1)
    folded_arch, _ = plan(open_arch, FOLD, step=STEP + STEPS)
    assert folded_arch == replace(LLAMA, n_mlp=20)
    with pytest.raises(GrowthError, match="has no mask to fold"):
        plan(folded_arch, FOLD, step=STEP + STEPS)


def test_masks_are_over_what_is_new() -> None:
    new = {}
    for op in ENTERING:
        grown_arch, _ = plan(LLAMA, op, step=STEP)
        mask = grown_arch.mask
        assert isinstance(mask, Mask)
        new.setdefault(mask.axis, []).append(mask.new)
    assert new == {
        "layers": [((0, 1), (2, 3)), ((2, 3),), ((1, 2), (3, 4))],
        "mlp": [((12, 20),)],
        "embed": [((16, 21),)],
        "heads": [((4, 6),), ((2, 4), (6, 8))],
    }


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", True])
def test_a_mask_opens_in_whole_steps(steps: object) -> None:
    with pytest.raises(GrowthError, match="widen_mlp: mask: "):
        plan(LLAMA, operation("widen_mlp", 20, mask=steps))
