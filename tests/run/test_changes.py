"""A run changes while it runs: its schedule, carried out on the live model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live import change_if_due, restore

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.distributed.failure import PeerLost, RunFailed, UserCodeFailed
from instar.growth.proof import TOLERANCE
from instar.record.events import (
    AnalysisEvent,
    Eval,
    NewGradients,
    OperationEvent,
    Saved,
    Train,
    Warn,
    read_events,
)
from instar.run.changes import scheduled
from instar.run.changes.live_growth import PROBE_WEIGHT, probe, probe_samples
from instar.run.components import Components
from instar.run.optimizer import group_parameters, optimizer_tensors
from instar.run.start.preflight import Prepared
from instar.run.state.run_state import RunState
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]
Entry = Mapping[str, Any]

LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.positions=rope"]
LLAMA += ["model.bias=false", "model.tied=false", "model.n_kv_head=1"]
STYLES = {"gpt2": [], "llama": LLAMA}
QUICK = Path(__file__).parents[2] / "configs" / "test_scaling_schedule.yaml"


def schedule(*entries: Entry) -> str:
    """Entries as a `--set` text."""
    return f"schedule={json.dumps(entries)}"


def at(step: int, name: str, value: Any = None, **more: Any) -> Entry:
    options = {} if value is None else {"value": value}
    return {"name": name, **options, "when": {"at_step": step}, **more}


def events(path: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_events(path) if isinstance(event, kind)]


GROWN = [
    at(4, "insert_layers", 1),
    at(6, "widen_mlp", 192, reevaluate=True),
    at(8, "widen_hidden", 48, reevaluate=True),
    at(10, "add_heads", 2),
]


@pytest.mark.parametrize("more", [[], ["model.num_experts=2"]])
def test_a_probe_is_one_pass_over_a_few_samples(make_grown: Make, more: Sequence[str]) -> None:
    run = make_grown(*more)
    held_out, task, device = run.parts.validation, run.parts.task, run.parts.world.device
    context = run.state.settings.context
    samples = probe_samples(held_out, device)
    assert samples.weight == min(8, -(-PROBE_WEIGHT // context)) * context
    model, calls = run.parts.stepper.unwrapped_model, list[Any]()
    with model.register_forward_hook(lambda *hook_arguments: calls.append(hook_arguments)):
        outputs = probe(task, model, samples)
    assert len(calls) == 1
    with torch.no_grad():
        loss = task.loss_sum(model, samples.batch).item() / samples.weight
        assert torch.equal(outputs.logits, task.outputs(model, samples.batch))
    assert outputs.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_a_model_grows_and_computes_what_it_did(
    make_grown: Make, style: str, tmp_path: Path
) -> None:
    run = make_grown(*STYLES[style], schedule(*GROWN))
    outcome = run.train()
    assert outcome.progress.step == 14
    shape = run.state.in_force.architecture
    assert (shape.n_layer, shape.n_mlp, shape.n_embd, shape.n_head) == (3, 192, 48, 4)
    operations = events(tmp_path / "events.jsonl", OperationEvent)
    assert [(operation.name, operation.step) for operation in operations] == [
        ("insert_layers", 4),
        ("widen_mlp", 6),
        ("widen_hidden", 8),
        ("add_heads", 10),
    ]
    for operation in operations:
        assert (operation.verb, operation.preserves) == ("GROW", "exact")
        assert operation.proof["max_logit_diff"] < 1e-4
        assert operation.proof["parameters_after"] > operation.proof["parameters_before"]
    evals = {event.step: event.loss for event in events(tmp_path / "events.jsonl", Eval)}
    assert evals.keys() >= {6, 8}


def test_the_loss_on_held_out_samples_is_what_it_was(make_grown: Make) -> None:
    run = make_grown(schedule(*(replace_reevaluate(entry, False) for entry in GROWN)))
    before, after = [], []
    original = run.evaluate

    while run.state.progress.step < 12:
        run.step()
        original()
        before.append(run.state.evaluated_metrics["loss"])
        n_changes = len(run.state.history)
        change_if_due(run)
        if len(run.state.history) > n_changes:
            original()
            after.append((before[-1], run.state.evaluated_metrics["loss"]))
    assert len(after) == 4
    for was, now in after:
        assert now == pytest.approx(was, abs=1e-5)


def replace_reevaluate(entry: Entry, reevaluate: bool) -> Entry:
    return {**entry, "reevaluate": reevaluate}


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_everything_is_that_of_the_new_model(make_grown: Make, optimizer: str) -> None:
    """Names, shapes, tying, the optimizer's groups, memory and moving average."""
    name = f"optimizer.name={optimizer}"
    run = make_grown(schedule(*GROWN), "train.ema=0.9", name, "model.qk_norm=true")
    run.train()
    table = run.state.in_force.architecture.parameters()
    shapes = {name: tuple(p.shape) for name, p in run.parts.stepper.parameters.items()}
    assert shapes == {name: entry.shape for name, entry in table.items()}
    assert run.parts.stepper.ema is not None
    assert {name: tuple(t.shape) for name, t in run.parts.stepper.ema.items()} == shapes
    dimensions = {name: p.ndim for name, p in run.parts.stepper.parameters.items()}
    expected_groups = group_parameters(dimensions, run.parts.config.optimizer)
    groups = [group for part in run.parts.stepper.optimizers for group in part.param_groups]
    assert sorted(len(group["params"]) for group in groups) == sorted(
        len(group.names) for group in expected_groups
    )
    memory = optimizer_tensors(run.parts.stepper.optimizers, run.parts.stepper.parameters)
    for name, tensor in memory.items():
        if tensor.ndim:
            assert tensor.shape == run.parts.stepper.parameters[name.rpartition("/")[0]].shape
    assert {name.rpartition("/")[0] for name in memory} == set(shapes)


@pytest.mark.parametrize(
    ("step", "options", "warns"),
    [
        (3, {"how": "split"}, False),
        (3, {"how": "split", "moments": "mapped"}, True),
        (0, {"how": "split"}, True),
        (0, {"how": "zero"}, False),
    ],
)
def test_copies_that_stay_equal_are_warned_of(
    make_grown: Make, step: int, options: Mapping[str, str], warns: bool, tmp_path: Path
) -> None:
    run = make_grown(schedule(at(step, "widen_mlp", "x2", **options)))
    while run.state.progress.step < 4:
        change_if_due(run)
        run.step()
    messages = [event.message for event in events(tmp_path / "events.jsonl", Warn)]
    assert any("copies that widen_mlp made" in message for message in messages) == warns


def test_what_the_optimizer_knew_is_kept(make_grown: Make) -> None:
    run = make_grown(schedule(at(4, "widen_mlp", 192)))
    while run.state.progress.step < 4:
        run.step()
    name = "blocks.0.mlp.up.weight"
    before = optimizer_tensors(run.parts.stepper.optimizers, run.parts.stepper.parameters)
    states_before = {key: tensor.clone() for key, tensor in before.items() if key.startswith(name)}

    change_if_due(run)
    after = optimizer_tensors(run.parts.stepper.optimizers, run.parts.stepper.parameters)
    assert states_before[f"{name}/exp_avg"].count_nonzero()
    for field in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[f"{name}/{field}"][:128], states_before[f"{name}/{field}"])
    assert after[f"{name}/step"] == 4


def test_gradients_reach_what_is_new_and_it_is_recorded(make_grown: Make, tmp_path: Path) -> None:
    make_grown(schedule(at(4, "widen_mlp", 192))).train()
    gradient_events = events(tmp_path / "events.jsonl", NewGradients)
    assert [event.step for event in gradient_events] == [5, 6, 7]
    assert all(event.grad_norm_new > 0 for event in gradient_events)
    assert not events(tmp_path / "events.jsonl", Warn)


def test_settings_change_at_the_next_step(make_grown: Make, tmp_path: Path) -> None:
    run = make_grown(
        schedule(
            at(3, "change_lr", 0.5),
            at(3, "set_batch_size", 2),
            at(5, "set_grad_accum", 3),
            at(7, "set_eval_interval", 2),
        ),
        "learning_rate.shape=constant",
        "learning_rate.warmup_iters=0",
        "optimizer.lr=4e-3",
    )
    run.train()
    train = events(tmp_path / "events.jsonl", Train)
    rates = {event.step: event.lr for event in train}
    assert (rates[3], rates[4]) == (pytest.approx(4e-3), pytest.approx(2e-3))
    samples = [event.samples for event in train]
    sizes = [after - before for before, after in zip([0, *samples], samples, strict=False)]
    assert sizes == [8] * 3 + [4] * 2 + [6] * 9
    assert [event.step for event in events(tmp_path / "events.jsonl", Eval)] == [8, 10, 12, 14]


def test_the_log_has_the_block_that_tools_look_for(
    make_grown: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make_grown(schedule(at(3, "change_lr", 0.5), at(4, "widen_mlp", 192))).train()
    blocks = [r.getMessage() for r in caplog.records if "SCALING OPERATION" in r.getMessage()]
    assert len(blocks) == 2
    for block, name in zip(blocks, ("change_lr", "widen_mlp"), strict=True):
        lines = block.splitlines()
        assert lines[0] == "=== SCALING OPERATION TRIGGERED ==="
        assert lines[-1] == "=== SCALING OPERATION COMPLETE ==="
        assert f"Operation: {name}" in lines[1]
        assert any(line.startswith("Trigger reason: ") for line in lines)


def test_frozen_parameters_stand_still_and_go_on_later(make_grown: Make) -> None:
    run = make_grown(
        schedule(at(3, "freeze", "blocks.0.*"), at(6, "unfreeze", "blocks.0.*")),
        "train.ema=0.9",
    )

    weights_at = {}
    while run.state.progress.step < 8:
        weights_at[run.state.progress.step] = {
            name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()
        }
        run.step()
        change_if_due(run)
    name, other = "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"
    assert not torch.equal(weights_at[2][name], weights_at[3][name])
    assert torch.equal(weights_at[3][name], weights_at[6][name])
    assert not torch.equal(weights_at[3][other], weights_at[6][other])
    assert not torch.equal(weights_at[6][name], weights_at[7][name])


def test_samples_get_another_length_and_the_cursor_goes_on(
    make_grown: Make, tmp_path: Path
) -> None:
    run = make_grown(
        schedule(at(3, "set_context", 8), at(6, "set_context", 16)), "train.until=[2ep]"
    )
    first = run.state.phase.samples_per_epoch
    outcome = run.train()
    assert run.state.phase.number == 2
    assert outcome.progress.samples >= 2 * first
    train = events(tmp_path / "events.jsonl", Train)
    tokens = [event.tokens for event in train]
    assert tokens[3] - tokens[2] == 8 * 8
    assert tokens[6] - tokens[5] == 8 * 16
    epochs = [event.epoch for event in train]
    assert epochs == sorted(epochs)
    assert epochs[-1] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(
    "longer", [at(2, "extend_context", 32), at(2, "widen", {"axis": "context", "size": 32})]
)
def test_positions_that_no_sample_reaches_yet_are_not_called_dead(
    make_grown: Make, tmp_path: Path, longer: Entry
) -> None:
    run = make_grown(schedule(longer))
    run.train()
    assert run.state.in_force.architecture.sizes()["context"] == 32
    assert not events(tmp_path / "events.jsonl", Warn)


def test_a_mask_opens_and_is_folded_away(make_grown: Make, tmp_path: Path) -> None:
    run = make_grown(
        schedule(at(2, "widen_mlp", 192, mask=4), at(3, "insert_layers", 1)),
    )
    run.train()
    operations = events(tmp_path / "events.jsonl", OperationEvent)
    assert [(operation.name, operation.step) for operation in operations] == [
        ("widen_mlp", 2),
        ("fold_masks", 6),
        ("insert_layers", 6),
    ]
    assert run.state.in_force.architecture.mask is None
    assert all(operation.preserves == "exact" for operation in operations)


def test_an_operation_that_fails_leaves_the_run_as_it_was(make_grown: Make, tmp_path: Path) -> None:
    """Mended in the middle of a run, as no forecast could have seen it."""
    run = make_grown(schedule(at(3, "widen_mlp", 192)))
    shrinking = replace(
        run.parts.entries[0], operation=replace(run.parts.entries[0].operation, value=16)
    )
    run.parts.entries = (shrinking,)
    with pytest.raises(RunFailed, match="widen_mlp after step 3 failed"):
        run.train()
    assert run.state.history == ()
    assert load_checkpoint(latest_checkpoint(tmp_path / "events")).manifest.step == 3
    assert not events(tmp_path / "events.jsonl", OperationEvent)


def test_an_operation_that_fails_may_be_passed_over(make_grown: Make, tmp_path: Path) -> None:
    run = make_grown(schedule(at(3, "widen_mlp", 192, on_failure="skip"), at(5, "change_lr", 0.5)))
    shrinking = replace(
        run.parts.entries[0], operation=replace(run.parts.entries[0].operation, value=16)
    )
    run.parts.entries = (shrinking, *run.parts.entries[1:])
    run.train()
    assert [bool(change.skipped) for change in run.state.history] == [True, False]
    (warning,) = events(tmp_path / "events.jsonl", Warn)
    assert "skipped, the run is unchanged" in warning.message
    assert [event.name for event in events(tmp_path / "events.jsonl", OperationEvent)] == [
        "change_lr"
    ]


@pytest.mark.parametrize("kind", [IndexError, UserCodeFailed])
def test_a_growth_that_fails_in_any_way_may_be_passed_over(
    make_grown: Make, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise kind("of the user's model")

    monkeypatch.setattr(scheduled, "grow_run", fail)
    run = make_grown(schedule(at(3, "widen_mlp", 192, on_failure="skip"), at(4, "widen_mlp", 256)))
    with pytest.raises(RunFailed, match="widen_mlp after step 4 failed: of the user's model"):
        run.train()
    (change,) = run.state.history
    assert change.skipped.endswith("of the user's model")


def test_a_growth_during_which_a_rank_is_lost_is_not_passed_over(
    make_grown: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PeerLost("rank 1 is gone")

    monkeypatch.setattr(scheduled, "grow_run", fail)
    run = make_grown(schedule(at(3, "widen_mlp", 192, on_failure="skip")))
    with pytest.raises(PeerLost):
        run.train()


def test_an_evaluation_that_a_stop_cuts_short_is_made_at_the_resume(
    make_grown: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = at(3, "change_lr", 0.5, reevaluate=True), at(3, "change_lr", 0.5)
    keys = schedule(entries[0], {**entries[1], "when": {"loss_below": 50}}), "train.until=[5it]"

    def stop(state: RunState, parts: Components, **_: bool) -> RunState:
        parts.sync.failing = lambda: "the disk is full"
        parts.sync.sync()
        return state

    full_run, cut, continuation = (
        make_grown(*keys, name=name) for name in ("whole", "cut", "resumed")
    )
    with monkeypatch.context() as patch:
        patch.setattr(scheduled, "evaluate_validation", stop)
        cut.train()
    cut.save("now", wait=True)
    restore(continuation, load_checkpoint(latest_checkpoint(cut.parts.saver.root)))
    for run in (full_run, continuation):
        run.train()
        assert [change.step for change in run.state.history] == [3, 3]
        assert run.state.reevaluates_at == -1
    assert continuation.state.evaluated_metrics == full_run.state.evaluated_metrics


def test_a_checkpoint_follows_growth(make_grown: Make, tmp_path: Path) -> None:
    make_grown(schedule(at(4, "widen_mlp", 192)), "checkpoint.asynchronous=false").train()
    saves = events(tmp_path / "events.jsonl", Saved)
    assert [(event.step, event.reason) for event in saves] == [(4, "after growth")]


def test_what_only_rounding_moves_is_proved_without_rounding(
    make_grown: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a deep model, where float32 rounds by more than is allowed."""
    monkeypatch.setitem(TOLERANCE, torch.float32, 0.0)
    make_grown(schedule(at(4, "widen_hidden", 48))).train()
    (operation,) = events(tmp_path / "events.jsonl", OperationEvent)
    assert 0.0 < operation.proof["max_logit_diff_relative"] < 1e-10


def test_a_model_that_is_not_what_it_was_meant_to_be_is_not_used(
    make_grown: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (torch.float32, torch.float64):
        monkeypatch.setitem(TOLERANCE, kind, 0.0)
    run = make_grown(schedule(at(4, "widen_hidden", 48)))
    with pytest.raises(RunFailed, match="changed more than its label allows"):
        run.train()
    assert run.state.in_force.architecture.n_embd == 32
    monkeypatch.undo()
    tolerant = make_grown(schedule(at(4, "widen_hidden", 48, allow_inexact=True)), name="tolerant")
    tolerant.train()
    assert tolerant.state.in_force.architecture.n_embd == 48


def test_a_lossy_operation_says_what_it_did(make_grown: Make, tmp_path: Path) -> None:
    make_grown(schedule(at(4, "stack_layers", 2)), "optimizer.lr=1e-2").train()
    (operation,) = events(tmp_path / "events.jsonl", OperationEvent)
    assert operation.preserves == "lossy"
    assert operation.proof["max_logit_diff"] > 1e-3


@pytest.fixture
def make_grown(trainer: Make) -> Make:
    def make(*overrides: str, **options: Any) -> Trainer:
        common: Sequence[str] = ("train.until=[14it]", "checkpoint.every_minutes=null")
        return trainer(*common, *overrides, **options)

    return make


def test_the_optimizer_remembers_what_the_forecast_says(
    trainer: Make, prepare_run: Callable[..., Prepared]
) -> None:
    freezes = schedule(
        at(0, "freeze", "*_embedding.*"),
        at(0, "freeze", "final_norm.*"),
        at(3, "freeze", "blocks.0.*"),
        at(6, "unfreeze", "final_norm.*"),
    )
    run = trainer(freezes)
    run.train()
    forecast_bytes = prepare_run(freezes).forecast.stages[-1].memory_bytes
    states = optimizer_tensors(run.parts.stepper.optimizers, run.parts.stepper.parameters)
    assert forecast_bytes["optimizer"] == sum(
        tensor.nbytes for tensor in states.values() if tensor.dim()
    )
    training = (tensor for tensor in run.parts.stepper.parameters.values() if tensor.requires_grad)
    assert forecast_bytes["gradients"] == sum(tensor.nbytes for tensor in training)


def test_a_schedule_for_earlier_orchestrators_runs_as_it_stands(
    make_grown: Make, tmp_path: Path
) -> None:
    """Every evaluation is below its thresholds: one operation at each, from step 0 on; the third
    evaluates again, and the fourth still waits for the next evaluation."""
    run = make_grown(f"schedule={QUICK}", "eval.eval_interval=3")
    before = run.state.settings
    run.train()
    operations = events(tmp_path / "events.jsonl", OperationEvent)
    names = ["change_lr", "change_batch_size", "change_grad_accum", "reset_lr_schedule"]
    assert [(operation.name, operation.step) for operation in operations] == list(
        zip(names, (0, 3, 6, 9), strict=True)
    )
    after = run.state.settings
    assert after.lr == pytest.approx(0.5 * before.lr)
    assert (after.batch_size, after.grad_accum) == (2 * before.batch_size, 2 * before.grad_accum)
    assert after.lr_start == 9
    eval_steps = [event.step for event in events(tmp_path / "events.jsonl", Eval)]
    assert eval_steps == [0, 3, 6, 6, 9, 12, 14]


def test_an_analysis_runs_beside_training(make_grown: Make, tmp_path: Path) -> None:
    make_grown("record.analyze_every=5", schedule(at(7, "widen_mlp", 192))).train()
    analyses = events(tmp_path / "events.jsonl", AnalysisEvent)
    assert [analysis.step for analysis in analyses] == [5, 10]
    first, second = (analysis.findings for analysis in analyses)
    assert {"ranks", "heads", "changes"} <= first.keys()
    assert not first["changes"]
    names = {change["name"] for change in second["changes"]}
    # the widened tensors have nothing to be compared with
    assert "blocks.0.attn.query.weight" in names
    assert "blocks.0.mlp.up.weight" not in names


def test_a_model_that_would_be_too_large_is_not_made(make_grown: Make, tmp_path: Path) -> None:
    entry = at(3, "widen_mlp", 4096, max_params=50_000, on_failure="skip")
    run = make_grown(schedule(entry))
    run.train()
    assert run.state.in_force.architecture.n_mlp == 128
    (warning,) = events(tmp_path / "events.jsonl", Warn)
    assert "more than max_params 50.0k" in warning.message


def test_a_run_does_not_grow_at_its_end(make_grown: Make) -> None:
    """What nobody would train any more; a run that goes on does it then."""
    run = make_grown(schedule(at(14, "widen_mlp", 192)))
    run.train()
    assert run.state.history == ()


def test_an_evaluation_interval_changed_at_a_step_does_not_reach_back_to_it(
    make_grown: Make, tmp_path: Path
) -> None:
    """A run that goes on from the step must not evaluate where the undisturbed one did not."""
    entries = schedule(at(6, "set_eval_interval", 3), at(7, "change_lr", 0.5))
    run = make_grown(entries, "eval.eval_interval=5", "checkpoint.every_steps=6")
    run.train()
    eval_steps = [event.step for event in events(tmp_path / "events.jsonl", Eval)]
    assert eval_steps == [5, 9, 12, 14]
    continuation = make_grown(entries, "eval.eval_interval=5", name="again")
    assert not restore(
        continuation, load_checkpoint(tmp_path / "events" / "checkpoints" / "step-6")
    )
    continuation.train()
    eval_steps = [event.step for event in events(tmp_path / "again.jsonl", Eval)]
    assert eval_steps == [9, 12, 14]


def test_the_best_model_is_saved_before_a_lossy_operation(make_grown: Make, tmp_path: Path) -> None:
    run = make_grown(
        schedule(at(5, "stack_layers", 2)),
        "eval.eval_interval=5",
        "checkpoint.on_best=true",
        "checkpoint.keep_last=9",
        "optimizer.lr=1e-2",
    )
    run.train()
    saves = events(tmp_path / "events.jsonl", Saved)
    assert [(event.step, event.reason) for event in saves[:2]] == [
        (5, "best so far"),
        (5, "after growth"),
    ]
    layers = [
        load_checkpoint(Path(event.path)).manifest.architecture["n_layer"] for event in saves[:2]
    ]
    losses = [load_checkpoint(Path(event.path)).manifest.loss for event in saves[:2]]
    assert layers == [2, 4]
    assert losses[0] is not None
    assert losses[1] is None


def test_no_more_losses_are_remembered_than_the_schedule_asks_for(make_grown: Make) -> None:
    flat = {"plateau": {"window": 3, "slope": 0.0, "patience": 2}}
    run = make_grown(
        schedule({"name": "change_lr", "value": 0.5, "when": flat}), "eval.eval_interval=1"
    )
    run.train()
    assert len(run.state.losses) <= 4


def test_a_slope_per_flop_is_decided_alike_after_a_resume(make_grown: Make, tmp_path: Path) -> None:
    """The losses since the last operation are those of the checkpoint and those after it."""
    slow = {"slope_below": {"window": 3, "slope": 1e12}}
    settings = (
        schedule({"name": "insert_layers", "value": 1, "when": slow}),
        "eval.eval_interval=2",
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=9",
    )
    make_grown(*settings).train()
    (expected,) = events(tmp_path / "events.jsonl", OperationEvent)
    assert expected.step == 6
    assert "per 1e15 FLOPs over 3 evaluations" in expected.reason
    continuation = make_grown(*settings, name="again")
    assert not restore(
        continuation, load_checkpoint(tmp_path / "events" / "checkpoints" / "step-4")
    )
    continuation.train()
    (actual,) = events(tmp_path / "again.jsonl", OperationEvent)
    assert (actual.step, actual.reason) == (expected.step, expected.reason)


def test_without_an_evaluation_at_the_start_they_begin_with_the_first(
    make_grown: Make, tmp_path: Path
) -> None:
    make_grown(f"schedule={QUICK}", "eval.eval_interval=3", "eval.at_start=false").train()
    operations = events(tmp_path / "events.jsonl", OperationEvent)
    assert [operation.step for operation in operations] == [3, 6, 9, 12]


def test_without_trigger_loss_all_that_is_due_fires_at_one_evaluation(
    make_grown: Make, tmp_path: Path
) -> None:
    below = {"name": "change_lr", "value": 0.9, "when": {"loss_below": 99.0}}
    make_grown(schedule(*[below] * 3), "eval.eval_interval=3").train()
    assert [event.step for event in events(tmp_path / "events.jsonl", OperationEvent)] == [3, 3, 3]


def test_adapters_that_cannot_learn_are_told_of_at_a_resume(
    make_grown: Make, tmp_path: Path
) -> None:
    adapt = schedule(at(4, "set_lora_rank", {"target": "mlp", "rank": 3}))
    run = make_grown(adapt, "checkpoint.every_steps=12", "checkpoint.asynchronous=false")
    while run.state.progress.step < 4:
        run.step()
    change_if_due(run)
    with torch.no_grad():
        run.parts.stepper.parameters["blocks.0.mlp.up.lora_a"][1:] = 0.0
    run.train()
    # the alarm has noticed the part that no gradient reached
    (warning,) = events(tmp_path / "events.jsonl", Warn)
    assert "2 of blocks.0.mlp.up.lora_a, 2 of blocks.0.mlp.up.lora_b" in warning.message
    checkpoint = load_checkpoint(tmp_path / "events" / "checkpoints" / "step-12")
    (restore_warning,) = restore(make_grown(adapt, name="again"), checkpoint)
    assert "2 ranks of adapters (blocks.0.mlp.up) are zero in both factors" in restore_warning
