"""From a config's schedule to entries, and when one of them is due."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from shapes import gpt2

from instar.config.budget import Counters
from instar.config.language import LanguageConfig
from instar.config.sections import Operation
from instar.schedule.operations import Change, State, carried_out
from instar.schedule.settings import initial_settings
from instar.schedule.triggers import (
    AllOf,
    AnyOf,
    AtFraction,
    AtStep,
    AtTokens,
    Entry,
    LossBelow,
    Moment,
    NoiseAbove,
    Plateau,
    SlopeBelow,
    Trigger,
    Waited,
    due,
    last_step,
    next_entry,
    remaining,
    schedule_entries,
    too_large,
)

STATE = State(initial_settings(LanguageConfig()), gpt2(), LanguageConfig())
GROW = Operation("widen_mlp", "x2")


def entry(**keys: Any) -> Entry:
    (result,) = schedule_entries(
        LanguageConfig.model_validate({"schedule": [{"name": "change_lr", **keys}]})
    )
    return result


def at(step: int, since_last: int) -> Moment:
    return Moment(Counters(step), None, since_last, loss=None)


def test_a_seed_s_entry_fires_on_the_loss_or_the_wait() -> None:
    schedule_entry = entry(value=2.0, trigger_loss=6.0, max_wait_iters=50_000, reevaluate=True)
    assert schedule_entry.operation == Operation("change_lr", 2.0)
    assert schedule_entry.trigger == AnyOf((LossBelow(6.0), Waited(50_000)))
    assert schedule_entry.reevaluate
    assert schedule_entry.place == "schedule[0]"


@pytest.mark.parametrize(
    ("keys", "trigger"),
    [
        ({"trigger_loss": 6}, LossBelow(6.0)),
        ({"max_wait_iters": 7}, Waited(7)),
        ({"when": {"at_step": 0}}, AtStep(0)),
        ({"when": {"at_tokens": 1000}}, AtTokens(1000)),
        ({"when": {"at_tokens": "1.5Mtok"}}, AtTokens(1_500_000)),
        ({"when": {"at_fraction": 0.25}}, AtFraction(0.25)),
        ({"when": {"plateau": {"window": 4, "slope": 0.1}}}, Plateau(4, 0.1, 1)),
        ({"when": {"noise_scale": {"above": 2}}}, NoiseAbove(2.0)),
        ({"when": {"slope_below": {"window": 4, "slope": 7}}}, SlopeBelow(4, 7.0, 1)),
        ({"when": {"waited": 3, "loss_below": 2}}, AllOf((LossBelow(2.0), Waited(3)))),
        (
            {"when": {"any": [{"waited": 3}, {"all": [{"at_step": 1}, {"at_fraction": 0.5}]}]}},
            AnyOf((Waited(3), AllOf((AtStep(1), AtFraction(0.5))))),
        ),
    ],
)
def test_a_trigger_is_read_as_it_is_written(keys: dict[str, Any], trigger: Trigger) -> None:
    assert entry(**keys).trigger == trigger


def test_other_keys_are_the_operation_s_options() -> None:
    schedule_entry = entry(value=2, how="zero", lr={"rewarm": 5}, max_wait_iters=3, min_steps=2)
    assert schedule_entry.operation.options == {"how": "zero", "lr": {"rewarm": 5}}
    assert schedule_entry.min_steps == 2


def test_entries_come_one_after_the_other_and_the_run_s_own_changes_do_not_count() -> None:
    schedule = tuple(Entry(n, Operation("change_lr", 2.0), Waited(1)) for n in range(2))
    own_change = Change(Operation("fold_masks"), 90, 0)
    entry_change = Change(schedule[0].operation, 40, 0, entry=0)
    skipped_change = Change(schedule[1].operation, 60, 0, entry=1, skipped="too large")
    assert next_entry(schedule, ()) == schedule[0]
    assert next_entry(schedule, (entry_change, own_change)) == schedule[1]
    assert next_entry(schedule, (entry_change, own_change, skipped_change)) is None
    assert last_step(()) is None
    assert last_step((own_change,)) is None
    assert last_step((entry_change, own_change)) == 40
    assert last_step((entry_change, own_change, skipped_change)) == 60


def test_a_repeated_entry_is_carried_out_as_often_and_keeps_its_place() -> None:
    entries = [{"name": "change_lr", "value": 2, "max_wait_iters": 3}] * 2
    config = LanguageConfig.model_validate({"schedule": [{**entries[0], "repeat": 2}, entries[1]]})
    schedule = schedule_entries(config)
    assert [entry.place for entry in schedule] == ["schedule[0]", "schedule[0]", "schedule[1]"]
    changes = tuple(Change(entry.operation, 3, 0, entry=entry.number) for entry in schedule[:2])
    assert remaining(schedule, changes) == schedule[2:]


def test_a_guard_holds_an_entry_back() -> None:
    guarded_entry = Entry(0, Operation("change_lr", 2.0), AtStep(5), min_steps=100)
    assert due(guarded_entry, at(500, since_last=99), STATE) is None
    assert due(guarded_entry, at(500, since_last=100), STATE) == "step 5"


def test_growth_waits_while_a_mask_is_open_and_settings_do_not() -> None:
    masked = carried_out(STATE, dataclasses.replace(GROW, options={"mask": 50}), step=10)
    assert due(Entry(0, GROW, AtStep(1)), at(20, 10), STATE) is not None
    assert due(Entry(0, GROW, AtStep(1)), at(20, 10), masked) is None
    assert due(Entry(0, Operation("change_lr", 2.0), AtStep(1)), at(20, 10), masked) is not None
    folded_state = carried_out(masked, Operation("fold_masks"), step=60)
    assert due(Entry(0, GROW, AtStep(1)), at(60, 50), folded_state) is not None


def test_a_limit_on_the_parameters_says_by_how_much_it_is_exceeded() -> None:
    larger_shape = carried_out(STATE, GROW, 0).architecture
    limited_entry = Entry(0, GROW, AtStep(1), max_params=30_000)
    assert too_large(limited_entry, STATE.architecture) == ""
    assert too_large(limited_entry, larger_shape) == "44.2k parameters, more than max_params 30.0k"
    assert too_large(dataclasses.replace(limited_entry, max_params=None), larger_shape) == ""
