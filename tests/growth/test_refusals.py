"""What cannot be done is refused by name, with what could be done instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from growing import operation
from shapes import gpt2, llama
from transformers import LlamaConfig

from instar.config.sections import Operation
from instar.growth.operators import OPERATORS, check_growth, is_growth, plan
from instar.growth.plan import GrowthError
from instar.models.architecture import Architecture
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import Mask

GPT2 = gpt2(n_embd=16, n_mlp=12)
LLAMA = llama(n_embd=16, n_mlp=12)
QK_NORM = replace(LLAMA, qk_norm=True)


def case(name: str, value: Any, message: str, **options: Any) -> Any:
    """An operation whose form is wrong, whatever the model."""
    return pytest.param(operation(name, value, **options), message, id=f"{name} {value} {options}")


SIZE = "a whole number above 0 or a factor such as 'x2'"


@pytest.mark.parametrize(
    ("op", "message"),
    [
        case("widen_mpl", 4, "called 'widen_mpl'; did you mean 'widen_mlp'?"),
        case("prune", 4, "called 'prune'; there are stack_layers, insert_layers, widen_mlp"),
        case("widen_mlp", None, f"widen_mlp: needs {SIZE}, not None"),
        case("widen_mlp", True, f"widen_mlp: needs {SIZE}, not True"),
        case("widen_mlp", 64.0, f"widen_mlp: needs {SIZE}, not 64.0"),
        case("widen_mlp", "2x", f"widen_mlp: needs {SIZE}, not '2x'"),
        case("widen_mlp", -3, f"widen_mlp: needs {SIZE}, not -3"),
        case("widen_hidden", "x1", "a model only grows, and 'x1' is not a factor above 1"),
        case("widen_hidden", "x0.5", "a model only grows, and 'x0.5' is not a factor above 1"),
        case("add_heads", "x2", "add_heads: needs a whole number above 0, not 'x2'"),
        case("split_kv_heads", 1, "needs a whole factor of at least 2, not 1"),
        case("stack_layers", 1.5, "needs a whole factor of at least 2, not 1.5"),
        case("stack_layers", [], "a layer map lists old layers, such as"),
        case("stack_layers", [0, "1"], "a layer map lists old layers, such as"),
        case("insert_layers", 0, "insert_layers: needs a whole number above 0, not 0"),
        case("widen", 8, "needs {axis: …, size: …}, not 8"),
        case("widen", {"axis": "mlp"}, "needs {axis: …, size: …}"),
        case("widen", {"axis": 3, "size": 4}, "axis: needs a name, not 3"),
        case("upcycle", 1, "needs a whole number of experts, at least 2, not 1"),
        case("upcycle", 4, "noise: must be a number above 0, not 0", noise=0),
        case(
            "upcycle", 4, "router_aux_loss_coef: must be a number from 0", router_aux_loss_coef=-1
        ),
        case("merge_lora", 3, "merge_lora: needs a name, not 3"),
        case("fold_masks", 3, "fold_masks: takes no value, not 3"),
        case("widen_mlp", 64, "has no option 'where'; there are how, lr, mask, moments", where=1),
        case("widen_mlp", 64, "how: must be zero or split, not 'copy'", how="copy"),
        case("widen_mlp", 64, "share: must be a number between 0 and 1, not 1.0", share=1.0),
        case("widen_mlp", 64, "mask: needs a whole number above 0, not 0", mask=0),
        case(
            "widen_mlp",
            64,
            "lr: must be keep, reset, {rewarm: steps}, or {rewarm_new: steps}, not 3",
            lr=3,
        ),
        case("widen_mlp", 64, "lr: rewarm: needs a whole number above 0", lr={"rewarm": 0}),
        case("widen_mlp", 64, "lr: rewarm_new: needs a whole", lr={"rewarm_new": "5"}),
        case("widen_mlp", 64, "lr: must be keep", lr={"rewarm": 5, "rewarm_new": 5}),
        case("widen_mlp", 64, "moments: must be asymmetric or mapped or reset", moments="keep"),
        case("insert_layers", 1, "from: must be neighbour or normal or copy", **{"from": "top"}),
        case("insert_layers", 1, "where: must be end, start, even, or a list", where="top"),
        case("insert_layers", 1, "where: must be end, start, even, or a list", where=[-1]),
        case("add_heads", 1, "where: must be groups or inside, not 'end'", where="end"),
        case("set_lora_alpha", {"target": "mlp", "alpha": 0}, "alpha: must be a number above 0"),
        case("grow_head_dim", 8, "has no option 'mask'", mask=8),
    ],
)
def test_a_wrong_form_is_refused_without_a_model(op: Operation, message: str) -> None:
    with pytest.raises(GrowthError) as error:
        check_growth(op)
    assert message in str(error.value)


def possible(arch: Architecture, name: str, value: Any, message: str, **options: Any) -> Any:
    op = operation(name, value, **options)
    return pytest.param(arch, op, message, id=f"{name} {value} {options}")


@pytest.mark.parametrize(
    ("arch", "op", "message"),
    [
        possible(GPT2, "widen_mlp", 12, "mlp is 12 already and only grows; choose more, or 'x2'"),
        possible(GPT2, "widen_mlp", 8, "widen_mlp: mlp is 12 already and only grows"),
        possible(GPT2, "widen_mlp", "x1.01", "mlp is 12 already and only grows"),
        possible(GPT2, "widen_mlp", 10**9, "1,000,000,000 is more than 1,024 times that"),
        possible(GPT2, "insert_layers", 10**9, "layers is 2, and 1,000,000,002 is more than"),
        possible(GPT2, "stack_layers", 10**9, "layers is 2, and 2,000,000,000 is more than"),
        possible(GPT2, "add_heads", 10**9, "heads is 4, and 1,000,000,004 is more than"),
        possible(GPT2, "widen_mlp", 24, "how and mask cannot be combined", how="split", mask=5),
        possible(
            GPT2,
            "widen_hidden",
            24,
            "would change the statistics of layernorm; for it there is average, or duplicate",
            how="zero",
        ),
        possible(LLAMA, "widen_hidden", 24, "for it there is zero, or duplicate", how="average"),
        possible(GPT2, "widen_hidden", 24, "choose a multiple of 16", how="duplicate"),
        possible(
            LLAMA,
            "add_heads",
            3,
            "3 query heads cannot be added to 2 groups of 2: whole groups need a multiple of 2, "
            "heads inside every group a multiple of 2",
        ),
        possible(
            replace(LLAMA, n_head=6),
            "add_heads",
            2,
            "whole groups need a multiple of 3",
            where="groups",
        ),
        possible(LLAMA, "split_kv_heads", 3, "cannot be split by 3; choose 2"),
        possible(GPT2, "split_kv_heads", 2, "each one already has its own"),
        possible(QK_NORM, "grow_head_dim", 8, "qk_norm divides queries and keys by"),
        possible(LLAMA, "grow_head_dim", 7, "RoPE rotates pairs of channels, and a head has 7"),
        possible(GPT2, "stack_layers", [0, 0, 2], "there is no layer 2: layers are 0 to 1"),
        possible(GPT2, "stack_layers", [0, 0, 0], "layer 1 would be lost"),
        possible(GPT2, "stack_layers", [1, 0], "layers is 2 already and only grows"),
        possible(GPT2, "insert_layers", 2, "1 positions for 2 new layers", where=[0]),
        possible(GPT2, "insert_layers", 1, "positions are 0 to 2", where=[3]),
        possible(GPT2, "widen", {"axis": "heads", "size": 8}, "add_heads, split_kv_heads"),
        possible(GPT2, "widen", {"axis": "mlp", "size": 24}, "no option 'where'", where="end"),
        possible(
            GPT2, "set_lora_rank", {"target": "mlp", "rank": 99}, "99 is more than blocks.0.mlp.up"
        ),
        possible(GPT2, "fold_masks", None, "has no mask to fold"),
    ],
)
def test_what_this_model_cannot_do_is_refused(
    arch: Architecture, op: Operation, message: str
) -> None:
    with pytest.raises(GrowthError) as error:
        plan(arch, op)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{op.name}: ")


def test_no_growth_is_possible_while_a_mask_is_open() -> None:
    entering = replace(GPT2, mask=Mask("mlp", ((10, 12),), begin=20, steps=30))
    for op in (operation("widen_mlp", 24), operation("merge_lora"), operation("insert_layers", 1)):
        with pytest.raises(GrowthError, match=f"{op.name}: new mlp are masked until step 50"):
            plan(entering, op, step=40)


def test_every_operation_is_known_by_its_name() -> None:
    assert all(map(is_growth, OPERATORS))
    assert not is_growth("change_lr")


def test_a_request_is_not_changed_by_planning() -> None:
    op = operation("insert_layers", 2, where=[0, 2])
    plan(GPT2, op)
    assert op == operation("insert_layers", 2, where=[0, 2])


def test_a_router_that_would_never_train_is_refused() -> None:
    upcycle = operation("upcycle", 4, num_experts_per_tok=1, router_aux_loss_coef=0.0)
    with pytest.raises(GrowthError, match=r"is 1 and router_aux_loss_coef is 0: .* 2 or more"):
        plan(GPT2, upcycle)
    plan(GPT2, operation("upcycle", 4, num_experts_per_tok=1))  # its balance trains the router
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    dense = PretrainedShape(LlamaConfig(**sizes).to_dict())
    with pytest.raises(GrowthError, match=r"num_experts_per_tok is 1: .* whatever the router says"):
        plan(dense, operation("upcycle", 4, num_experts_per_tok=1))
