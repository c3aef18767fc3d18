"""Growth of a run whose candidate, or whose written file, is damaged: nothing of it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import science
import states
import torch
from live import carry_out
from spoilt import DAMAGES, damage_in_turn
from torch import Tensor

from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.growth.engine import ProvedGrowth, prepare_candidate
from instar.growth.plan import GrowthError
from instar.growth.proof import TOLERANCE
from instar.run.changes import live_growth
from instar.run.changes.live_growth import Candidate, RunGrowth, grow_run
from instar.run.step.stepper import Stepper
from instar.run.trainer import Trainer
from instar.schedule.operations import plan_operation

Make = Callable[..., Trainer]
WIDEN = Operation("widen_hidden", 48)


def growth_of(run: Trainer, operation: Operation) -> RunGrowth:
    after, plan = plan_operation(run.state.in_force, operation, run.state.step)
    assert plan is not None
    return grow_run(run.state, run.parts, operation, after, plan)


def prepare_growth(run: Trainer, operation: Operation) -> ProvedGrowth[Candidate]:
    growth = growth_of(run, operation)
    return prepare_candidate(growth, growth.step.plan, growth.peers)


def trainee(growth: ProvedGrowth[Candidate]) -> tuple[Callable[[], None], Stepper]:
    """What checks the stepper of a candidate again, and that stepper."""
    (part,) = growth.parts
    check = cast("partial[None]", part.verify)
    peers = cast(RunGrowth, check.func.__self__).peers  # type: ignore[attr-defined]
    return lambda: part.verify(peers), check.args[1]


def of_stepper(stepper: Stepper) -> dict[str, Tensor]:
    averages = {f"{name} (average)": tensor for name, tensor in (stepper.ema or {}).items()}
    return {**stepper.parameters, **stepper.states(), **averages}


@pytest.mark.parametrize(
    "operation",
    [
        WIDEN,
        Operation("widen_mlp", 192, {"how": "split"}),
        Operation("insert_layers", 1),
        Operation("resize_vocab", 300),
        Operation("upcycle", 2, {"num_experts_per_tok": 1, "noise": 0.01}),
    ],
    ids=lambda operation: operation.name,
)
def test_every_tensor_that_will_train_is_compared_with_the_plan(
    trainer: Make, operation: Operation
) -> None:
    run = trainer("train.ema=0.9", "optimizer.name=adamw", "model.n_layer=1")
    for _ in range(2):
        run.step()
    check, stepper = trainee(prepare_growth(run, operation))
    # what does not change is the same tensor in both
    old = {tensor.data_ptr() for tensor in of_stepper(run.parts.stepper).values()}
    new = {n: tensor for n, tensor in of_stepper(stepper).items() if tensor.data_ptr() not in old}
    misses = []
    for damage in damage_in_turn(new, ways=4 if operation is WIDEN else 1):
        try:
            check()
        except GrowthError:
            continue
        misses.append(damage)
    assert misses == []
    assert len(new) > len(stepper.parameters)
    check()  # mended


def test_every_tensor_that_float64_stood_for_is_compared_with_it(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        TOLERANCE, torch.float32, 0.0
    )  # rounding exceeds it, so that float64 decides
    run = trainer("model.n_layer=1")
    run.step()
    growth = growth_of(run, WIDEN)
    candidate = growth.build()
    monkeypatch.setattr(RunGrowth, "build", lambda _: candidate)
    monkeypatch.setattr(RunGrowth, "parts", lambda *_: ())  # whose checks would see it too

    def prove() -> bool:
        proof = prepare_candidate(growth, growth.step.plan, growth.peers, allow_inexact=True).proof
        return proof is not None and proof.holds

    misses = []
    for damage in damage_in_turn(candidate.model.parameters, ways=2):
        try:
            if prove():
                misses.append(damage)
        except GrowthError:
            continue
    assert misses == []
    assert prove()


@pytest.mark.parametrize("float64_decides", [False, True])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_candidate_leaves_the_run_as_it_was(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, kind: str, float64_decides: bool
) -> None:
    build = RunGrowth.build

    def build_damaged(growth: RunGrowth) -> Candidate:
        candidate = build(growth)
        data = candidate.model.parameters["blocks.1.mlp.up.weight"].data
        data.copy_(DAMAGES[kind](data))
        return candidate

    if float64_decides:
        monkeypatch.setitem(TOLERANCE, torch.float32, 0.0)
    monkeypatch.setattr(RunGrowth, "build", build_damaged)
    run = trainer()
    run.step()
    before = {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}
    with pytest.raises(RunFailed, match=r"not finite|not what the plan makes|more than its label"):
        carry_out(run, WIDEN)
    assert run.state.history == ()
    after = run.parts.stepper.parameters
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_buffers_are_compared_with_the_plan_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(states.CONFIG)
    operation = Operation("widen", {"axis": "hidden", "size": 9}, {"how": "split"})
    with science.trainer(tmp_path / "run", "model.kind=batch norm") as run:
        for _ in range(2):
            run.step()
        check, stepper = trainee(prepare_growth(run, operation))
        buffers = dict(stepper.unwrapped_model.named_buffers())
        assert len(buffers) > 2
        for _ in damage_in_turn(buffers):
            with pytest.raises(GrowthError, match=r"middle.* is not what the plan makes"):
                check()


def test_ranks_go_the_same_way_if_one_alone_misses_the_tolerance(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank's own proof holds, and it compares in float64 with the rank whose proof does not."""
    run = trainer()
    run.step()
    # a new model to compare with, its outputs, whether they are finite, whether float64 is refused, and the outputs in it
    answers = iter([[True, True], [True, False], [True, True], [True, True], [True, True]])
    monkeypatch.setattr(live_growth, "gather", lambda *_: next(answers))
    float64_calls = []
    strategy = type(run.parts.stepper.strategy)
    real = strategy.in_double
    monkeypatch.setattr(
        strategy, "in_double", lambda *arguments: float64_calls.append(1) or real(*arguments)
    )
    proof = prepare_growth(run, WIDEN).proof
    assert proof is not None
    assert proof.holds
    assert len(float64_calls) == 1
    for last in ([[True, True], [True, False]], [[True, False], [True, False]]):
        answers = iter([[True, True], [True, False], [True, True], *last])
        with pytest.raises(live_growth.LabelBroken):
            prepare_growth(run, WIDEN)
