"""Growth on a schedule in others' loops: what fires it, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from grown_loops import SCHEDULE, fresh, of_trainer
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

from instar.config.errors import ConfigError
from instar.growth import GrowthError
from instar.growth.live.grow import LiveGrowth
from instar.loops import GrowthSchedule, TrainerGrowth, resume_across_growth
from instar.loops.schedule import schedule_text

AT_A_LOSS = [{"name": "insert_layers", "value": 1, "when": {"loss_below": 100.0}}]


class OwnEvaluation(TrainerCallback):
    """Evaluates in between, under other names than the training does."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, _args: Any, state: Any, *_: Any, **_live: Any) -> None:
        if state.global_step == 2:
            self.trainer.evaluate(metric_key_prefix="test")


def test_trainer_grows_at_a_validation_loss_before_the_next_step(tmp_path: Path) -> None:
    """The checkpoint of the step is of the model that was evaluated, and a run that ends there grows when it goes on."""
    growth = TrainerGrowth(AT_A_LOSS, seed=3)
    trainer = of_trainer(fresh(), tmp_path, growth, eval_strategy="steps", eval_steps=4)
    trainer.add_callback(OwnEvaluation(trainer))
    trainer.train()
    (change,) = growth.schedule.history
    assert (change.step, change.reason[:4]) == (4, "val ")
    assert len(trainer.model.model.layers) == 4
    saved_model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert saved_model.config.num_hidden_layers == 3
    resume_growth = TrainerGrowth(AT_A_LOSS, seed=3)
    trainer = of_trainer(saved_model, tmp_path, resume_growth, eval_strategy="steps", eval_steps=9)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resume_growth.schedule.history == growth.schedule.history


def test_each_model_of_a_search_grows_and_a_grown_model_does_not_grow_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`hyperparameter_search` trains a new model each time; `auto_find_batch_size` restarts with the same one."""
    growth = TrainerGrowth(SCHEDULE)
    trainer = of_trainer(fresh(), tmp_path, growth)
    trainer.train()
    trainer.train()
    assert len(trainer.model.model.layers) == 4
    assert "its schedule anew" not in caplog.text
    trainer.model = trainer.model_wrapped = fresh()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    assert len(trainer.model.model.layers) == 4
    assert len(growth.schedule.history) == 2
    assert "after 2 operations the model had" in caplog.text
    assert "another model's training begins, and its schedule anew" in caplog.text


def test_what_was_set_by_hand_stays_under_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    trainer = of_trainer(model, tmp_path, TrainerGrowth(SCHEDULE))
    trainer.train()
    layers = trainer.model.model.layers
    assert [layer.self_attn.attention_dropout for layer in layers] == [0.25] * 4
    assert layers[0].mlp.up_proj.out_features == 96
    assert "by hand" not in caplog.text  # also not of what Trainer set


def test_a_loss_that_no_evaluation_has_is_refused_at_the_first(tmp_path: Path) -> None:
    growth = TrainerGrowth(AT_A_LOSS, metric="los")
    trainer = of_trainer(fresh(), tmp_path, growth, eval_strategy="steps", eval_steps=2)
    with pytest.raises(GrowthError, match=r"insert_layers waits for eval_los, and .* eval_loss"):
        trainer.train()
    named_growth = TrainerGrowth(AT_A_LOSS, metric="a_loss")
    trainer = of_trainer(
        fresh(), tmp_path / "named", named_growth, eval_strategy="steps", eval_steps=4
    )
    trainer.eval_dataset = dict.fromkeys("ab", trainer.eval_dataset)
    trainer.train()
    assert len(named_growth.schedule.history) == 1


def test_a_loss_without_evaluations_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    either = [{"name": "insert_layers", "value": 1, "trigger_loss": 3.0, "max_wait_iters": 2}]
    for schedule, strategy in (
        (AT_A_LOSS, "no"),
        (either, "no"),
        (AT_A_LOSS, "steps"),
        (SCHEDULE, "no"),
    ):
        caplog.clear()
        growth = TrainerGrowth(schedule)
        of_trainer(fresh(), tmp_path, growth, eval_strategy=strategy, eval_steps=4).train()
        is_silent = schedule is SCHEDULE or strategy == "steps"
        assert ("insert_layers waits for eval_loss, and eval_strategy is 'no'" in caplog.text) is (
            not is_silent
        )


def test_a_schedule_is_named_by_any_path(tmp_path: Path) -> None:
    """Also one with a character that begins a comment in YAML; a state has it as text."""
    folder = tmp_path / "my #1: schedules"
    folder.mkdir()
    file = folder / "grow.yaml"
    file.write_text("[{name: insert_layers, value: 1, when: {at_step: 4}}]")
    for path in (file, str(file)):
        growth = TrainerGrowth(path)
        assert [entry.operation.name for entry in growth.schedule.entries] == ["insert_layers"]
        assert growth.state()["args"]["schedule"] == str(file)
    vocabulary = {"name": "resize_vocab", "value": 9, "tokenizer": tmp_path, "when": {"at_step": 1}}
    assert json.loads(schedule_text([vocabulary]))[0]["tokenizer"] == str(tmp_path)
    with pytest.raises(GrowthError, match="JSON values"):
        GrowthSchedule([{"name": "insert_layers", "value": {1}, "when": {"at_step": 4}}])


def test_an_evaluation_after_training_does_not_grow_the_model(tmp_path: Path) -> None:
    growth = TrainerGrowth(AT_A_LOSS)
    trainer = of_trainer(fresh(), tmp_path, growth)
    trainer.train()
    trainer.evaluate()
    assert growth.schedule.pending is None
    assert growth.schedule.history == ()


def test_the_best_model_at_the_end_is_one_model(tmp_path: Path) -> None:
    """The best checkpoint is that of step 1, of a smaller model, of which the larger one could load a part."""
    grows = [{"name": "insert_layers", "value": 1, "where": "start", "when": {"at_step": 4}}]
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    best_checkpoints = []

    class Losses(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            del args, control
            # a loss that only rises
            live["metrics"]["eval_loss"] = float(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            del args, control, live
            best_checkpoints.append(state.best_model_checkpoint)

    trainer = of_trainer(fresh(), tmp_path, TrainerGrowth(grows), Losses(), **best)
    trainer.train()
    assert best_checkpoints[1].endswith("checkpoint-1")
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4").state_dict()
    actual = trainer.model.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_smaller_state_of_accelerate_is_refused_and_the_history_stays(tmp_path: Path) -> None:
    accelerator, schedule, model = Accelerator(cpu=True), GrowthSchedule(SCHEDULE), fresh()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    resume_across_growth(accelerator, schedule, optimizer)
    schedule.step(model, 1)
    accelerator.save_state(str(tmp_path / "small"))
    for step in range(2, 5):
        schedule.step(model, step, optimizer=optimizer)
    before = schedule.state_dict()
    assert len(before["history"]) == 2
    with pytest.raises(GrowthError, match="models do not shrink; build it as for a new run"):
        accelerator.load_state(str(tmp_path / "small"))
    assert schedule.state_dict() == before
    schedule.check(model)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), MemoryError(), ValueError("x")]
)
def test_what_fails_is_skipped_as_in_a_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(LiveGrowth, "build", fails)
    entry = {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}}
    with pytest.raises(type(error)):
        GrowthSchedule([entry]).step(fresh(), 1)
    (change,) = GrowthSchedule([{**entry, "on_failure": "skip"}]).step(fresh(), 1)
    assert change.skipped == (str(error) or "MemoryError")


def test_what_needs_another_class_is_skipped_as_in_a_run() -> None:
    """A Llama becomes no Mixtral in place."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    entry = {"name": "upcycle", "value": 4, "num_experts_per_tok": 2, "when": {"at_step": 1}}
    with pytest.raises(GrowthError, match="LlamaForCausalLM cannot become a MixtralForCausalLM"):
        GrowthSchedule([entry]).step(model, 1)
    (change,) = GrowthSchedule([{**entry, "on_failure": "skip"}]).step(model, 1)
    assert "cannot become" in change.skipped


def test_a_state_holds_what_was_done_before_an_operation_failed() -> None:
    entries = [{"name": "widen_mlp", "value": value, "when": {"at_step": 2}} for value in ("x2", 8)]
    schedule, model = GrowthSchedule(entries), fresh()
    schedule.step(model, 1, loss=torch.tensor(4.0))
    with pytest.raises(GrowthError, match="only grows"):
        schedule.step(model, 2)
    new_schedule, new_model = GrowthSchedule(entries), fresh()
    new_schedule.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    new_schedule.replay(new_model)
    new_model.load_state_dict(model.state_dict())


def test_a_replay_says_nothing_of_copies_whose_states_are_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule, model = GrowthSchedule(SCHEDULE), fresh()
    schedule.step(model, 2)
    assert "the copies that widen_mlp made have" in caplog.text
    caplog.clear()
    new_schedule = GrowthSchedule(SCHEDULE)
    new_schedule.load_state_dict(schedule.state_dict())
    new_schedule.replay(fresh())
    assert caplog.text == ""


def test_a_model_that_did_not_grow_is_refused() -> None:
    schedule, model = GrowthSchedule(SCHEDULE), fresh()
    for step in range(1, 5):
        schedule.step(model, step)
    new_schedule = GrowthSchedule(SCHEDULE)
    new_schedule.load_state_dict(schedule.state_dict())
    with pytest.raises(GrowthError, match=r"after 2 operations the model had .* parameters"):
        new_schedule.check(fresh())


ROPE = {"name": "extend_context", "value": "x2", "rope": "linear"}
TWICE = [
    {**ROPE, "when": {"at_step": 1}},
    {"name": "widen_mlp", "value": "x2", "when": {"at_step": 3}},
]


def test_operations_that_keep_the_number_of_parameters_are_replayed_and_compared() -> None:
    schedule, model = GrowthSchedule(TWICE), fresh()
    states = []
    for step in range(1, 4):
        schedule.step(model, step)
        states.append(json.loads(json.dumps(schedule.state_dict())))
        if step == 1:
            ids = torch.arange(20)[None]
            weights, logits = copy.deepcopy(model.state_dict()), model(input_ids=ids).logits
    new_schedule, new_model = GrowthSchedule(TWICE), fresh()
    new_schedule.load_state_dict(states[0])
    with pytest.raises(
        GrowthError, match=r"had max_position_embeddings 64, .* has max_position_embeddings 32"
    ):
        new_schedule.check(new_model)
    new_schedule.replay(new_model)
    new_schedule.replay(new_model)  # it is grown already
    new_model.load_state_dict(weights)
    assert torch.equal(new_model(input_ids=ids).logits, logits)
    # the first of two operations is done, so that neither may follow
    new_schedule.load_state_dict(states[-1])
    with pytest.raises(GrowthError, match="models do not shrink"):
        new_schedule.replay(new_model)
    # a state from before the operation, for the model that has it
    new_schedule.load_state_dict({**states[0], "history": [], "sizes": {}})
    with pytest.raises(GrowthError, match="had max_position_embeddings 32"):
        new_schedule.replay(new_model)
    assert new_model.config.max_position_embeddings == 64
    older = {name: value for name, value in states[-1].items() if name != "sizes"}
    new_schedule.load_state_dict(older)
    other_model = fresh()
    new_schedule.replay(other_model)
    assert other_model.config.to_dict() == model.config.to_dict()


def test_a_new_tokenizer_with_as_many_rows_is_replayed(tmp_path: Path) -> None:
    """Only the rows differ, which adapters of peft leave out of a checkpoint."""
    for name, tokens in {"old": ["a", "b", "ab"], "new": ["b", "ab", "a"]}.items():
        vocabulary = {token: number for number, token in enumerate(tokens)}
        (tmp_path / name).mkdir()
        tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    value = {"tokenizer": str(tmp_path / "new"), "from": str(tmp_path / "old"), "rows": 64}
    entry = {"name": "resize_vocab", "value": value, "when": {"at_step": 1}}
    schedule, model = GrowthSchedule([entry]), fresh()
    schedule.step(model, 1)
    new_schedule, new_model = GrowthSchedule([entry]), fresh()
    new_schedule.load_state_dict(schedule.state_dict())
    new_schedule.replay(new_model)
    weights, new_weights = (m.get_input_embeddings().weight for m in (model, new_model))
    assert torch.equal(weights, new_weights)
    assert not torch.equal(new_weights, fresh().get_input_embeddings().weight)


def test_a_checkpoint_without_growth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"stateful_callbacks": {}}', "utf-8")
    with pytest.raises(GrowthError, match="holds no history of TrainerGrowth"):
        TrainerGrowth(SCHEDULE).replay(fresh(), tmp_path)


def test_guards_of_a_schedule_hold() -> None:
    skip = {"name": "add_heads", "value": 3, "when": {"at_step": 1}, "on_failure": "skip"}
    large = {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}, "max_params": 10}
    schedule = GrowthSchedule([skip, large])
    model = fresh()
    with pytest.raises(GrowthError, match=r"widen_mlp: .* more than max_params 10"):
        schedule.step(model, 1)
    assert [change.skipped[:10] for change in schedule.history] == ["add_heads:"]
    assert model.config.num_attention_heads == 4


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        ({"name": "change_lr", "value": 0.5, "when": {"at_step": 1}}, GrowthError, "no growth"),
        ({"name": "widen_mpl", "value": 2, "when": {"at_step": 1}}, ConfigError, "widen_mlp"),
        ({"name": "widen_mlp", "value": "x2"}, ConfigError, "could never fire"),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}, "lr": "reset"},
            GrowthError,
            "lr is the loop's",
        ),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}, "mask": 500},
            GrowthError,
            "masks open, .* by the steps of instar train, .*: leave mask out",
        ),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"noise_scale": {"above": 1}}},
            GrowthError,
            "noise_scale is measured by instar train",
        ),
        (
            {"name": "widen_mlp", "value": "x2", "when": {"at_fraction": 0.5}},
            GrowthError,
            "at_fraction needs the length",
        ),
        (
            {
                "name": "widen_mlp",
                "value": "x2",
                "when": {"slope_below": {"window": 2, "slope": 1}},
            },
            GrowthError,
            "needs the FLOPs of a step",
        ),
    ],
)
def test_mistakes_of_a_schedule_are_found_at_once(
    entry: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        GrowthSchedule([entry])


@pytest.mark.parametrize(
    ("when", "fires"),
    [({"at_fraction": 0.5}, 5), ({"at_tokens": 300}, 3), ({"loss_below": 2.0}, 8)],
)
def test_triggers_of_a_schedule_fire(when: dict[str, Any], fires: int) -> None:
    entry = {"name": "extend_context", "value": 48, "when": when}
    schedule, model = GrowthSchedule([entry], steps=10, tokens_per_step=100), fresh()
    losses = {4: 3.0, 8: 1.5}
    steps = [step for step in range(1, 11) if schedule.step(model, step, loss=losses.get(step))]
    assert steps == [fires]
