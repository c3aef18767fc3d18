"""Proofs: what holds and what does not, and whose gradients are whose."""

from __future__ import annotations

import json
import math

import pytest
import torch
from growing import operation
from shapes import gpt2

from instar.growth.operators import plan
from instar.growth.plan import Edit, Grown, GrowthPlan, Label, New, Old
from instar.growth.proof import Probe, compare_outputs
from instar.run.state.gradient_stats import split_grad_norms

LOGITS = torch.tensor([[2.0, -4.0], [1.0, 3.0]], dtype=torch.float64)
BEFORE = Probe(LOGITS, 1.0)


def plan_of(label: Label, bound: float | None = None) -> GrowthPlan:
    return GrowthPlan({}, label, bound)


@pytest.mark.parametrize(
    ("dtype", "shift", "holds"),
    [
        (torch.float64, 3.9e-10, True),
        (torch.float64, 4.1e-10, False),
        (torch.float32, 3.9e-5, True),
        (torch.float32, 4.1e-5, False),
        (torch.bfloat16, 0.19, True),
        (torch.bfloat16, 0.21, False),
    ],
)
def test_an_exact_one_may_move_logits_by_rounding_alone(
    dtype: torch.dtype, shift: float, holds: bool
) -> None:
    after = Probe(LOGITS + torch.tensor([0.0, shift]), 1.0)
    proof = compare_outputs(plan_of("exact"), BEFORE, after, dtype)
    assert proof.holds is holds
    assert proof.max_logit_diff == pytest.approx(shift, rel=1e-4)
    assert proof.max_logit_diff_relative == pytest.approx(shift / 4, rel=1e-4)


def test_an_exact_one_may_not_move_the_loss() -> None:
    assert not compare_outputs(plan_of("exact"), BEFORE, Probe(LOGITS, 1.001)).holds


@pytest.mark.parametrize(("loss", "holds"), [(1.09, True), (0.1, True), (1.11, False)])
def test_a_bounded_one_may_raise_the_loss_by_its_bound(loss: float, holds: bool) -> None:
    wider = torch.cat((LOGITS, torch.full((2, 3), 9.0)), 1)
    proof = compare_outputs(plan_of("bounded", 0.1), BEFORE, Probe(wider, loss))
    assert proof.holds is holds
    assert proof.max_logit_diff == 0.0
    assert proof.delta_loss == pytest.approx(loss - 1.0)


@pytest.mark.parametrize("label", ["exact", "bounded", "lossy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_holds(label: Label, bad: float) -> None:
    assert not compare_outputs(plan_of(label, 9.0), BEFORE, Probe(LOGITS * bad, 1.0)).holds
    assert not compare_outputs(plan_of(label, 9.0), BEFORE, Probe(LOGITS, bad)).holds


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(("value", "holds"), [(1.0, True), (1.1, False), (math.nan, False)])
def test_every_row_of_many_logits_is_compared(row: int, value: float, holds: bool) -> None:
    ones = torch.ones(1, 2, 1 << 20)  # more than are compared at once
    after = ones.clone()
    after[0, row, -1] = value
    proof = compare_outputs(plan_of("exact"), Probe(ones, 1.0), Probe(after, 1.0))
    assert proof.holds is holds
    if math.isfinite(value):
        assert proof.max_logit_diff == pytest.approx(value - 1.0, abs=1e-7)


def test_a_lossy_one_may_do_anything_else() -> None:
    proof = compare_outputs(plan_of("lossy"), BEFORE, Probe(-LOGITS, 7.0))
    assert proof.holds
    assert json.loads(json.dumps(proof.to_dict()))["max_logit_diff"] == 8.0


def test_gradients_are_split_into_those_of_old_and_of_new_elements() -> None:
    edits = (
        Edit(0, (Old(0, 2), New(1, "normal", 0.02))),
        Edit(1, (Old(0, 1), New(1, "zero"), Old(0, 1, is_copy=True))),
    )
    growth_plan = GrowthPlan({"w": Grown("w", edits)}, "exact")
    gradient = torch.tensor([[3.0, 1.0, 1.0], [4.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert split_grad_norms(growth_plan, {"w": gradient}) == pytest.approx((5.0, math.sqrt(7.0)))
    old_alone = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert split_grad_norms(growth_plan, {"w": old_alone}) == (5.0, 0.0)


def test_whole_tensors_are_old_or_new() -> None:
    _, growth_plan = plan(gpt2(), operation("insert_layers", 1))
    ones = {name: torch.ones(1, 1) for name in growth_plan.tensors}
    n_old = sum(not name.startswith("blocks.2.") for name in ones)
    assert split_grad_norms(growth_plan, ones) == pytest.approx(
        (math.sqrt(n_old), math.sqrt(len(ones) - n_old))
    )
