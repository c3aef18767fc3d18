"""A run in one process: the loop, its laws, and its exact curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from live import carry_out

from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.record.events import Eval, Skip, Train, read_events
from instar.record.system import cpu_model
from instar.run.checkpointing import state_json
from instar.run.start.restore import restore_state
from instar.run.state.run_state import Decision
from instar.run.trainer import Trainer
from instar.schedule.settings import learning_rate

Make = Callable[..., Trainer]
Losses = Callable[[str], list[float]]
GOLDEN = Path(__file__).parent / "golden_curve.json"


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.parts.stepper.parameters.items()}


def equal(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensors[name], other[name]) for name in tensors)


def test_a_run_learns_and_counts_everything(trainer: Make, losses: Losses, tmp_path: Path) -> None:
    run = trainer("train.until=[40it]", "optimizer.lr=1e-2")
    outcome = run.train()
    progress = outcome.progress
    assert outcome.decision == Decision("reached 40it", is_interrupted=False)
    assert (progress.step, progress.samples) == (40, 40 * 8)
    assert progress.flops == run.parts.task.flops(progress.tokens)
    assert losses("events")[-1] < 0.7 * losses("events")[0]
    last = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Eval)][-1]
    held_out = run.parts.validation
    assert last.eval_tokens == held_out.weights(np.arange(len(held_out)))


def test_the_same_run_twice_is_the_same_bit_for_bit(trainer: Make) -> None:
    first, second = trainer(name="one"), trainer("data.prefetch=false", name="other")
    first.train()
    second.train()
    assert equal(weights(first), weights(second))


def test_another_seed_is_another_run(trainer: Make, losses: Losses) -> None:
    trainer(name="one").train()
    trainer("seed=7", name="other").train()
    assert losses("one") != losses("other")


def test_accumulation_does_not_change_the_gradient(trainer: Make, losses: Losses) -> None:
    """8 samples at once, 4 + 4, or 1 by 1: the same curve up to rounding."""
    shapes = {"at once": (8, 1), "in halves": (4, 2), "one by one": (1, 8)}
    for name, (batch, accumulation) in shapes.items():
        trainer(
            f"train.batch_size={batch}",
            f"train.gradient_accumulation_steps={accumulation}",
            name=name,
        ).train()
    assert losses("in halves") == pytest.approx(losses("at once"), rel=1e-5)
    assert losses("one by one") == pytest.approx(losses("at once"), rel=1e-5)


def test_the_last_partial_batch_of_an_epoch_is_used(trainer: Make) -> None:
    run = trainer("train.until=[1ep]", "train.batch_size=64")
    samples = run.state.phase.samples_per_epoch
    assert samples % run.state.settings.global_batch
    outcome = run.train()
    assert outcome.progress.samples == samples
    targets = run.parts.task.spec.dataset.train_tokens(run.state.settings.context) - 1  # type: ignore[attr-defined]
    assert outcome.progress.tokens == targets


def test_settings_change_between_steps_and_no_sample_is_lost(trainer: Make) -> None:
    run = trainer("train.until=[1ep]", "train.batch_size=16")
    samples: list[int] = []
    operations = [
        Operation("change_batch_size", 0.5),
        Operation("set_grad_accum", 3.0),
        Operation("change_lr", 0.1),
    ]
    order = run.parts.task.train_samples()[1]
    while run.decide() is None:
        before = run.state.progress.samples
        run.step()
        samples += order.indices(0, before, run.state.progress.samples).tolist()
        if operations and run.state.progress.step % 3 == 0:
            carry_out(run, operations.pop(0))
    assert sorted(samples) == list(range(run.state.phase.samples_per_epoch))
    assert len(run.state.history) == 3
    assert run.state.settings.batch_size == 8
    rate = run.parts.stepper.optimizers[0].param_groups[0]["lr"]
    assert rate == learning_rate(run.state.settings, run.state.progress.step - 1)


def test_a_non_finite_gradient_is_skipped_and_the_weights_are_kept(
    trainer: Make, tmp_path: Path
) -> None:
    run = trainer("train.max_skipped_steps=3")
    run.step()
    name = "blocks.0.mlp.up.weight"
    with torch.no_grad():
        run.parts.stepper.parameters[name][0, 0] = float("nan")
    before = weights(run)
    run.step()
    after = weights(run)
    assert all(torch.equal(before[n], after[n]) for n in before if n != name)
    with pytest.raises(RunFailed, match="not finite for 3 steps in a row"):
        run.train()
    skips = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Skip)]
    assert [skip.consecutive for skip in skips] == [1, 2, 3]


def test_clipping_bounds_the_update_and_records_the_norm_before_it(
    trainer: Make, tmp_path: Path
) -> None:
    """With plain descent steps the clipped gradient's norm shows in the weights."""
    run = trainer("train.clip=0.01")
    parameters = list(run.parts.stepper.parameters.values())
    run.parts.stepper.optimizers = [torch.optim.SGD(parameters, lr=0.0)]
    for group in run.parts.stepper.optimizers[0].param_groups:
        group["lr_ratio"] = 1.0
    before = weights(run)
    run.step()
    update_norm = torch.cat([(weights(run)[n] - before[n]).flatten() for n in before]).norm().item()
    event = next(e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Train))
    assert event.grad_norm is not None
    assert event.grad_norm > 0.1
    assert update_norm == pytest.approx(0.01 * learning_rate(run.state.settings, 0), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_follows_the_fp32_curve(
    trainer: Make, losses: Losses, precision: str
) -> None:
    trainer(name="fp32").train()
    trainer(f"precision={precision}", name="low").train()
    assert losses("low") == pytest.approx(losses("fp32"), rel=2e-2)


def test_fp16_goes_on_where_all_parameters_of_an_optimizer_are_frozen(
    trainer: Make, losses: Losses
) -> None:
    """Of Muon and AdamW, Muon has nothing to do from step 3 to step 5."""
    matrices = '["blocks.*.attn.*.weight", "blocks.*.mlp.*.weight"]'
    schedule = (
        f'schedule=[{{"name": "freeze", "value": {matrices}, "when": {{"at_step": 3}}}},'
        f' {{"name": "unfreeze", "value": {matrices}, "when": {{"at_step": 5}}}}]'
    )
    run = trainer("precision=fp16", "optimizer.name=muon", schedule, name="low")
    updates = []
    step = run.step

    def note_update() -> None:
        before = weights(run)
        step()
        updates.append("blocks.0.mlp.up.weight" in changed_names(before, weights(run)))

    run.step = note_update  # type: ignore[method-assign]
    run.train()
    assert updates == [True] * 3 + [False] * 2 + [True] * 3
    trainer("optimizer.name=muon", schedule, name="fp32").train()
    assert losses("low") == pytest.approx(losses("fp32"), rel=2e-2)


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(("was", "becomes"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp16", "fp16")])
def test_the_precision_may_change_at_a_resume(trainer: Make, was: str, becomes: str) -> None:
    first_run = trainer(f"precision={was}", name="begun")
    for _ in range(3):
        first_run.step()
    state = json.loads(json.dumps(state_json(first_run.state, first_run.parts)))
    second_run = trainer(f"precision={becomes}", name="goes-on")
    second_run.state = restore_state(second_run.state, second_run.parts, state, ())
    scaler = second_run.parts.stepper.scaler.state_dict()
    assert bool(scaler) == (becomes == "fp16")
    if was == becomes:
        assert scaler == first_run.parts.stepper.scaler.state_dict()
    second_run.step()
    assert second_run.state.progress.step == 4


def test_the_moving_average_is_what_is_evaluated(trainer: Make) -> None:
    run = trainer("train.ema=0.5", "optimizer.lr=1e-2")
    reference = weights(run)
    assert run.parts.stepper.ema is not None
    # a growth or a checkpoint may bring the averages in another order than the module's
    run.parts.stepper.ema = dict(reversed(run.parts.stepper.ema.items()))
    for _ in range(4):
        run.step()
        reference = {n: 0.5 * reference[n] + 0.5 * weights(run)[n] for n in reference}
    for name, average in run.parts.stepper.ema.items():
        torch.testing.assert_close(average, reference[name])
    live = weights(run)
    run.evaluate()
    average_metrics = run.state.evaluated_metrics
    run.parts.stepper.ema = None
    run.evaluate()
    assert equal(live, weights(run))
    assert average_metrics["loss"] != run.state.evaluated_metrics["loss"]


def test_a_loss_budget_ends_the_run_at_the_evaluation_that_meets_it(
    trainer: Make, tmp_path: Path
) -> None:
    run = trainer("train.until=[200it, loss<3.0]", "eval.eval_interval=5", "optimizer.lr=1e-2")
    outcome = run.train()
    assert outcome.decision.reason == "reached loss<3.0"
    last = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Eval)][-1]
    assert last.loss < 3.0
    assert last.step == outcome.progress.step < 200


def test_a_time_budget_ends_the_run(trainer: Make) -> None:
    run = trainer("train.until=[0.2s]", "learning_rate.shape=constant")
    outcome = run.train()
    assert outcome.decision == Decision("reached 0.2s", is_interrupted=False)
    assert outcome.progress.step > 0


def test_dropout_depends_on_the_step_alone(trainer: Make) -> None:
    first, second = (
        trainer("model.dropout=0.2", name="one"),
        trainer("model.dropout=0.2", name="other"),
    )
    first.train()
    torch.manual_seed(0)
    torch.rand(17)
    second.train()
    assert equal(weights(first), weights(second))


def test_muon_trains_the_matrices(trainer: Make, losses: Losses) -> None:
    trainer("optimizer.name=muon", "train.until=[60it]", "optimizer.lr=1e-2", name="muon").train()
    assert losses("muon")[-1] < 0.8 * losses("muon")[0]


@pytest.mark.parametrize("order", ["sequential", "random"])
def test_other_orders_train_too(trainer: Make, losses: Losses, order: str) -> None:
    trainer(f"data.order={order}", "optimizer.lr=1e-2", "train.until=[30it]", name=order).train()
    assert losses(order)[-1] < losses(order)[0]


def test_the_curve_is_the_golden_one(trainer: Make, losses: Losses) -> None:
    """Bit for bit on the build and processor that wrote it, to a tolerance elsewhere.

    A change that is meant to move the curve deletes the file and runs this test once to write
    the new one, and says so in the changelog.
    """
    trainer("train.until=[30it]", "optimizer.lr=3e-3", name="golden").train()
    curve = losses("golden")
    machine = [torch.__version__, torch.backends.cpu.get_cpu_capability(), cpu_model()]
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps({"where": machine, "losses": curve}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if golden["where"] == machine:
        assert curve == golden["losses"]
    else:
        assert curve == pytest.approx(golden["losses"], rel=1e-3)
