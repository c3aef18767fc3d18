"""When operations fire, foretold, is when a run's loop would make them fire."""

from __future__ import annotations

import dataclasses
from typing import Any

import figures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sized import spec_for_tokens

from instar.config.budget import parse_budget
from instar.config.language import LanguageConfig
from instar.config.sections import Operation
from instar.data.source import windows_of
from instar.models.architecture import resolve_architecture
from instar.models.cost import flops_per_token
from instar.schedule.forecast import ScheduleError, forecast
from instar.schedule.operations import Change, History, carried_out, initial_state
from instar.schedule.timeline import Clock, Pace
from instar.schedule.triggers import (
    Moment,
    due,
    evaluates_at_start,
    last_step,
    next_entry,
    schedule_entries,
)

TOKENS = 4001
VOCABULARY = 64
SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 8, "context": 10}


def config(schedule: list[dict[str, Any]], **changes: Any) -> LanguageConfig:
    sections = {
        "model": SMALL,
        "schedule": schedule,
        "train": {"until": ["300it"], "batch_size": 4},
        "eval": {"eval_interval": 20},
    }
    return LanguageConfig.model_validate(sections | changes)


def foretold(run: LanguageConfig) -> tuple[list[int | None], list[int | None]]:
    """First and last steps of the operations."""
    stages = forecast(run, spec_for_tokens(run, TOKENS, VOCABULARY), world_size=1).stages[1:]
    return [stage.first_step for stage in stages], [stage.latest_step for stage in stages]


def simulated_steps(run: LanguageConfig, *, hopeful: bool) -> list[int | None]:
    """The steps of a loop that asks between all of them, as a trainer does."""
    schedule, budgets = schedule_entries(run), [parse_budget(text) for text in run.train.until]
    state = initial_state(run, resolve_architecture(run.model, VOCABULARY))
    history: History = ()
    spot, losses = Clock(), []
    has_evaluation = evaluates_at_start(run)
    while True:
        context = state.settings.context
        pace = Pace(
            state.settings.global_batch,
            context,
            windows_of(TOKENS, context),
            flops_per_token(state.architecture, context),
        )
        share = spot.used(pace, budgets)
        if share is not None and share >= 1:
            break
        # what is hoped for is below any bound and flat; what is feared is above and falls
        loss = -1e9 if hopeful else 1e9 - 1e6 * spot.step
        if has_evaluation:
            losses.append((spot.step, loss))
        mask = state.architecture.mask
        if mask is not None and spot.step >= mask.end:
            state = carried_out(state, Operation("fold_masks"), spot.step)
        while (entry := next_entry(schedule, history)) is not None:
            last = last_step(history)
            used = [_used(spot, pace, budget.kind) / budget.amount for budget in budgets]
            now = Moment(
                counters=spot,
                fraction=max(used),
                since_last=spot.step - (last or 0),
                loss=loss if has_evaluation else None,
                losses=tuple(losses),
                flops_per_step=pace.flops_per_step,
                has_changed=last == spot.step,
                noise=1e9 if hopeful else 0.0,
            )
            if due(entry, now, state) is None:
                break
            evaluated_context = state.settings.context
            state = carried_out(state, entry.operation, spot.step)
            history = (*history, Change(entry.operation, spot.step, 0, entry.number))
            # losses of samples of another length are not compared with a bound
            still_holds = has_evaluation and state.settings.context == evaluated_context
            has_evaluation = still_holds or entry.reevaluate
        if state.settings.context != context:
            spot = spot.new_order(pace)
            pace = dataclasses.replace(
                pace,
                weight=state.settings.context,
                samples_per_epoch=windows_of(TOKENS, state.settings.context),
            )
        pace = dataclasses.replace(pace, global_batch=state.settings.global_batch)
        spot = spot.after(pace, 1)
        has_evaluation = spot.step % state.settings.eval_interval == 0
    steps = [change.step for change in history]
    return [*steps, *([None] * (len(schedule) - len(steps)))]


def _used(spot: Clock, pace: Pace, kind: str) -> float:
    counters = {"steps": spot.step, "tokens": spot.tokens, "samples": spot.samples}
    return float(counters.get(kind, spot.epochs(pace)))


SEEDS = [
    {"name": "change_lr", "value": 2.0, "trigger_loss": 6.0, "max_wait_iters": 50_000},
    {"name": "change_batch_size", "value": 1.5, "trigger_loss": 5.5, "max_wait_iters": 75_000},
    {"name": "change_eval_interval", "value": 2.0, "trigger_loss": 5.0, "max_wait_iters": 100_000},
    {
        "name": "change_eval_iters",
        "value": 1.5,
        "trigger_loss": 4.5,
        "max_wait_iters": 125_000,
        "reevaluate": True,
    },
    {"name": "change_warmup_iters", "value": 0.8, "trigger_loss": 4.0, "max_wait_iters": 150_000},
]


@pytest.mark.parametrize(
    ("interval", "at_start", "early", "late"),
    [
        # waits add up: 50, 125, 225, 350 and 500 thousand steps
        (
            250,
            False,
            [250, 500, 750, 1000, 1500],
            [50_000, 125_000, 225_000, 350_000, 500_000],
        ),
        # an evaluation before the first step counts
        (250, True, [0, 250, 500, 1000, 1500], [50_000, 125_000, 225_000, 350_000, 500_000]),
        (250, None, [0, 250, 500, 1000, 1500], [50_000, 125_000, 225_000, 350_000, 500_000]),
        # 50,000 is no multiple of 2,000 × 3: the next evaluation is asked; from the third operation
        # on every 12,000 steps: 54,000 + 75,000 → 132,000, + 100,000 → 234,000 …
        (
            6000,
            False,
            [6000, 12_000, 18_000, 24_000, 36_000],
            [54_000, 132_000, 234_000, 360_000, 516_000],
        ),
    ],
)
def test_the_seed_s_schedule_fires_where_a_hand_calculation_says(
    interval: int, at_start: bool | None, early: list[int], late: list[int]
) -> None:
    run = config(
        SEEDS,
        train={"until": ["600kit"], "batch_size": 4},
        eval={"eval_interval": interval, "at_start": at_start},
    )
    assert foretold(run) == (early, late)


@pytest.mark.parametrize(
    ("entries", "early", "late"),
    [
        ([{"when": {"at_step": 0}}], [0], [0]),
        ([{"when": {"at_step": 33}}], [33], [33]),
        ([{"when": {"at_step": 300}}], [None], [None]),  # the run ends there
        ([{"when": {"loss_below": 3}}], [20], [None]),
        ([{"when": {"loss_below": 3, "at_step": 33}}], [40], [None]),
        # with `trigger_loss`: one at each evaluation, the one at step 0 included
        ([{"trigger_loss": 3, "max_wait_iters": 33}], [0], [40]),
        ([{"trigger_loss": 3, "max_wait_iters": 33}] * 2, [0, 20], [40, 80]),
        ([{"trigger_loss": 3}, {"trigger_loss": 2}], [0, 20], [None, None]),
        # an evaluation made again is no other one
        ([{"trigger_loss": 3, "reevaluate": True}, {"trigger_loss": 2}], [0, 20], [None, None]),
        ([{"trigger_loss": 3}, {"trigger_loss": 2, "min_steps": 50}], [0, 60], [None, None]),
        # counts alone are asked after every step, and wait for no evaluation
        ([{"max_wait_iters": 33}, {"when": {"waited": 33}}], [33, 66], [33, 66]),
        # two at one evaluation, on the same loss
        ([{"when": {"loss_below": 3}}, {"when": {"loss_below": 2}}], [20, 20], [None, None]),
        # both kinds: what has `trigger_loss` waits for the evaluation after any other operation
        ([{"when": {"loss_below": 3}}, {"trigger_loss": 2}], [0, 20], [None, None]),
        ([{"trigger_loss": 3}, {"when": {"loss_below": 2}}], [0, 0], [None, None]),
        (
            [{"when": {"at_step": 0}}, {"trigger_loss": 3}, {"when": {"at_step": 0}}],
            [0, 20, 20],
            [0, None, None],
        ),
        # after a step without an evaluation the next one is waited for …
        ([{"when": {"waited": 33}}, {"when": {"loss_below": 3}}], [33, 40], [33, None]),
        ([{"when": {"waited": 33}}, {"trigger_loss": 3}], [33, 40], [33, None]),
        # … unless one is made at once, which `trigger_loss` does not take for one
        (
            [{"when": {"waited": 33}, "reevaluate": True}, {"when": {"loss_below": 3}}],
            [33, 33],
            [33, None],
        ),
        (
            [{"when": {"waited": 33}, "reevaluate": True}, {"trigger_loss": 3}],
            [33, 40],
            [33, None],
        ),
        ([{"when": {"plateau": {"window": 3, "slope": 0.1, "patience": 2}}}], [80], [None]),
        (
            [{"when": {"waited": 30}}, {"when": {"plateau": {"window": 3, "slope": 0.1}}}],
            [30, 80],
            [30, None],
        ),
        ([{"when": {"slope_below": {"window": 3, "slope": 1, "patience": 2}}}], [80], [None]),
        ([{"when": {"noise_scale": {"above": 1}}, "repeat": 2}], [20, 40], [None, None]),
        ([{"when": {"waited": 40}}, {"when": {"noise_scale": {"above": 1}}}], [40, 60], [40, None]),
        ([{"when": {"at_fraction": 0.5}}], [150], [150]),
        ([{"when": {"at_tokens": 4000}}], [100], [100]),
        ([{"when": {"at_tokens": 4001}}], [101], [101]),
        ([{"when": {"any": [{"at_step": 70}, {"waited": 50}]}}], [50], [50]),
    ],
)
def test_the_steps_of_a_schedule(
    entries: list[dict[str, Any]], early: list[int | None], late: list[int | None]
) -> None:
    run = config([{"name": "change_lr", "value": 1.0, **entry} for entry in entries])
    assert foretold(run) == (early, late)
    assert (simulated_steps(run, hopeful=True), simulated_steps(run, hopeful=False)) == (
        early,
        late,
    )


def test_another_model_s_curve_is_passed_at_once_or_never() -> None:
    slow = {"window": 2, "curve": {"floor": 2.0, "flops": 1e9, "exponent": 0.3}}
    run = config([{"name": "change_lr", "value": 1.0, "when": {"slope_below": slow}}])
    assert foretold(run) == ([40], [None])


def test_growth_waits_until_a_mask_is_open_in_full() -> None:
    trigger = {"when": {"waited": 10}}
    run = config(
        [
            {"name": "insert_layers", "value": 1, "mask": 100, **trigger},
            {"name": "change_lr", "value": 2.0, **trigger},
            {"name": "widen_mlp", "value": "x2", **trigger},
        ]
    )
    assert foretold(run)[0] == [10, 20, 110]


def test_a_larger_batch_brings_a_token_budget_s_end_nearer() -> None:
    schedule = [{"name": "change_batch_size", "value": 2, "when": {"at_fraction": 0.5}}]
    run = config(schedule, train={"until": ["3200tok"], "batch_size": 4})
    run_forecast = forecast(run, spec_for_tokens(run, TOKENS, VOCABULARY), world_size=1)
    assert run_forecast.stages[1].first_step == 40
    assert run_forecast.early is not None
    assert (run_forecast.early.steps, run_forecast.early.tokens) == (60, 3200)


COUNTED = st.one_of(
    st.builds(lambda n: {"waited": n}, st.integers(1, 90)),
    st.builds(lambda n: {"at_step": n}, st.integers(0, 320)),
    st.builds(lambda n: {"at_tokens": n}, st.integers(1, 14_000)),
    st.builds(lambda n: {"at_fraction": n / 100}, st.integers(0, 99)),
)
LOSSES = st.one_of(
    st.just({"loss_below": 3.0}),
    st.builds(
        lambda w, p: {"plateau": {"window": w, "slope": 0.1, "patience": p}},
        st.integers(2, 4),
        st.integers(1, 3),
    ),
    st.just({"slope_below": {"window": 2, "slope": 1}}),
    st.just({"noise_scale": {"above": 2}}),
)
WHEN = st.recursive(
    COUNTED | LOSSES,
    lambda inner: st.builds(
        lambda kind, parts: {kind: parts},
        st.sampled_from(["any", "all"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
OPERATION = st.sampled_from(
    [
        {"name": "change_lr", "value": 1.1},
        {"name": "change_batch_size", "value": 1.5},
        {"name": "set_grad_accum", "value": 2},
        {"name": "set_eval_interval", "value": 7},
        {"name": "change_eval_interval", "value": 3.0},
        {"name": "set_context", "value": 5},
        {"name": "set_context", "value": 10},
        {"name": "insert_layers", "value": 1, "mask": 60},
        {"name": "widen_mlp", "value": "x1.5"},
    ]
)
SOURCE_FORM = st.one_of(
    st.just({"trigger_loss": 3.0}),
    st.builds(lambda n: {"max_wait_iters": n}, st.integers(1, 90)),
    st.builds(lambda n: {"trigger_loss": 3.0, "max_wait_iters": n}, st.integers(1, 90)),
)
ENTRY = st.builds(
    lambda operation, when, min_steps, reevaluate: {
        **operation,
        **when,
        "reevaluate": reevaluate,
        **({"min_steps": min_steps} if min_steps else {}),
    },
    OPERATION,
    st.builds(lambda when: {"when": when}, WHEN) | SOURCE_FORM,
    st.integers(0, 60),
    st.booleans(),
)
UNTIL = st.sampled_from([["300it"], ["9ktok"], ["3ep"], ["1100samples", "290it"]])


@settings(max_examples=figures.times(15, 2000), deadline=None)
@given(st.lists(ENTRY, min_size=1, max_size=5), UNTIL, st.none() | st.booleans())
def test_any_schedule_fires_where_a_loop_makes_it_fire(
    schedule: list[dict[str, Any]], until: list[str], at_start: bool | None
) -> None:
    run = config(
        schedule,
        train={"until": until, "batch_size": 4},
        eval={"eval_interval": 20, "at_start": at_start},
    )
    early, late = foretold(run)
    assert early == simulated_steps(run, hopeful=True)
    assert late == simulated_steps(run, hopeful=False)


BRANCH = {"name": "branch", "value": "early", "iters": 5, "when": {"at_step": 0}}


@settings(max_examples=figures.times(10, 1000), deadline=None)
@given(st.lists(ENTRY, max_size=3), st.integers(0, 3), UNTIL)
def test_a_branch_moves_no_operation_of_its_trunk(
    schedule: list[dict[str, Any]], place: int, until: list[str]
) -> None:
    how = {
        "train": {"until": until, "batch_size": 4},
        "eval": {"eval_interval": 20, "at_start": False},
    }
    place = min(place, len(schedule))
    run = config([*schedule[:place], BRANCH, *schedule[place:]], **how)
    steps = simulated_steps(run, hopeful=True)
    branch_step = steps.pop(place)
    assert steps == simulated_steps(config(schedule, **how), hopeful=True)
    if branch_step is None:
        with pytest.raises(ScheduleError, match="cannot begin: the run ends"):
            forecast(run, spec_for_tokens(run, TOKENS, VOCABULARY), world_size=1)
    else:
        early, _ = foretold(run)
        assert [early.pop(place), early] == [branch_step, steps]
