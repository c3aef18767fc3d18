"""Schedules of the kind that earlier orchestrators ran, against tables calculated by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from instar.config.budget import Counters
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.models.architecture import resolve_architecture
from instar.run.output.operation_text import changed_text, differences
from instar.schedule.operations import Change, History, carried_out, initial_state
from instar.schedule.triggers import Moment, due, last_step, next_entry, schedule_entries

LONG = """[
{name: change_lr, value: 2.0, trigger_loss: 6.0, max_wait_iters: 50000, reevaluate: false},
{name: change_batch_size, value: 1.5, trigger_loss: 5.5, max_wait_iters: 75000, reevaluate: false},
{name: change_eval_interval, value: 2.0, trigger_loss: 5.0, max_wait_iters: 100000, reevaluate: false},
{name: change_eval_iters, value: 1.5, trigger_loss: 4.5, max_wait_iters: 125000, reevaluate: true},
{name: change_warmup_iters, value: 0.8, trigger_loss: 4.0, max_wait_iters: 150000, reevaluate: false}]"""

AGAIN = "reevaluate: true"
WHEN = re.sub(
    r"trigger_loss: ([\d.]+), max_wait_iters: (\d+)",
    r"when: {any: [{loss_below: \1}, {waited: \2}]}",
    LONG,
)

NAMES = ("lr", "batch_size", "eval_interval", "eval_iters", "warmup_iters")


def never(_step: int, _attempt: int) -> float:
    return 7.0


def falling(step: int, _attempt: int) -> float:
    """8 at the start, 0.1 less every 1,000 steps."""
    return (80_000 - step) / 10_000


def dropping(step: int, _attempt: int) -> float:
    return 3.0 if step >= 10_000 else 7.0


def worse_when_looked_at_again(step: int, attempt: int) -> float:
    """The second evaluation of one step comes out above what the last operation waits for."""
    return 4.2 if attempt and step == 10_000 else dropping(step, attempt)


@pytest.mark.parametrize(
    ("curve", "steps"),
    [
        # waits alone: each counts from the one before, and evaluations come every 1,000 steps,
        # from 225,000 on every 2,000
        (never, (50_000, 125_000, 225_000, 350_000, 500_000)),
        # 6.0 is reached at 20,000, but only less than 6.0 fires: 21,000; so too 26,000, 31,000; then
        # every 2,000 steps: less than 4.5 at 36,000, less than 4.0 (reached at 40,000) at 42,000
        (falling, (21_000, 26_000, 31_000, 36_000, 42_000)),
        # all evaluations below all thresholds from 10,000 on: one operation at each, the third of
        # which moves the next one to a multiple of 2,000; the fourth evaluates again, which does not
        # count as another evaluation
        (dropping, (10_000, 11_000, 12_000, 14_000, 16_000)),
    ],
)
def test_operations_fire_where_a_hand_says(
    curve: Callable[[int, int], float], steps: tuple[int, ...]
) -> None:
    assert firings(curve, LONG) == [
        (f"change_{name}", s) for name, s in zip(NAMES, steps, strict=True)
    ]


def test_without_trigger_loss_all_that_is_due_fires_at_once() -> None:
    schedule_text = WHEN.replace(AGAIN, "reevaluate: false")
    assert [step for _, step in firings(dropping, schedule_text)] == [10_000] * 5
    # the fourth evaluates again, and 4.2 is not below 4.0: the fifth waits for the next
    # evaluation, which the third has moved to a multiple of 2,000
    assert [step for _, step in firings(worse_when_looked_at_again, WHEN)] == [10_000] * 4 + [
        12_000
    ]


def test_entries_with_a_trigger_loss_wait_for_the_evaluation_after_another_operation() -> None:
    below = "{name: change_lr, value: 1.0, trigger_loss: 6.0, max_wait_iters: 50000}"
    when = "{name: change_lr, value: 1.0, when: {loss_below: 6.0}}"
    schedule_text = f"[{when}, {below}, {when}, {when}, {below}]"
    # the second waits although the first did not take its time; the third and fourth do not wait
    assert [step for _, step in firings(dropping, schedule_text)] == [10_000] + [11_000] * 3 + [
        12_000
    ]


def firings(curve: Callable[[int, int], float], schedule_text: str) -> list[tuple[str, int]]:
    """Names and steps, where every evaluation gives what the curve says."""
    config = load_config(
        None,
        [
            f"schedule={schedule_text}",
            "eval.eval_interval=1000",
            "eval.eval_iters=20",
            "train.until=[600kit]",
        ],
    ).config
    schedule = schedule_entries(config)
    state = initial_state(config, resolve_architecture(config.model, 256))
    history: History = ()
    for step in range(1, 600_001):
        if step % state.settings.eval_interval:
            continue
        attempt, loss = 0, curve(step, 0)
        while (entry := next_entry(schedule, history)) is not None:
            last = last_step(history)
            counters = Counters(step, tokens=step * 128)
            now = Moment(counters, None, step - (last or 0), loss, has_changed=last == step)
            if due(entry, now, state) is None:
                break
            state = carried_out(state, entry.operation, step)
            history = (*history, Change(entry.operation, step, 0, entry.number))
            if entry.reevaluate:
                attempt += 1
                loss = curve(step, attempt)
    return [(change.operation.name, change.step) for change in history]


def test_what_the_operations_come_to() -> None:
    """The settings after all five, each as multiplied by hand."""
    config = load_config(
        None,
        [
            f"schedule={LONG}",
            "optimizer.lr=3e-4",
            "train.batch_size=8",
            "eval.eval_interval=1000",
            "eval.eval_iters=20",
            "learning_rate.warmup_iters=2000",
            "learning_rate.lr_decay_iters=600000",
        ],
    ).config
    state = initial_state(config, resolve_architecture(config.model, 256))
    for entry in schedule_entries(config):
        state = carried_out(state, entry.operation, 1000)
    settings = state.settings
    assert settings.lr == pytest.approx(6e-4)
    assert settings.batch_size == 12
    assert (settings.eval_interval, settings.eval_iters) == (2000, 30)
    assert (settings.warmup_iters, settings.lr_decay_iters) == (1600, 480_000)


@pytest.mark.parametrize(
    ("warmup", "end", "factors", "expected"),
    [
        (5, 40, (0.5,), (2, 20)),
        (1, 40, (0.5,), (0, 20)),
        (0, 40, (0.5,), (0, 20)),
        (0, 40, (1.5,), (0, 60)),
        (7, 41, (0.5,), (3, 20)),
        # the counts that the run began with are multiplied by the product of all factors
        (5, 41, (0.5, 2.0), (5, 41)),
        (3, 100, (0.5, 0.5, 0.5), (0, 12)),
    ],
)
def test_a_warm_up_and_the_decay_s_end_are_multiplied_by_the_factor(
    warmup: int, end: int, factors: tuple[float, ...], expected: tuple[int, int]
) -> None:
    """By hand: each count times the product of the factors, rounded down."""
    shape = [f"learning_rate.warmup_iters={warmup}", f"learning_rate.lr_decay_iters={end}"]
    config = load_config(None, shape).config
    state = initial_state(config, resolve_architecture(config.model, 256))
    for factor in factors:
        state = carried_out(state, Operation("change_warmup_iters", factor), 3)
    settings = state.settings
    assert (settings.warmup_iters, settings.lr_decay_iters) == expected


CONFIG_5_40 = load_config(
    None, ["learning_rate.warmup_iters=5", "learning_rate.lr_decay_iters=40"]
).config


def test_a_warm_up_that_was_set_is_what_later_factors_multiply() -> None:
    config = CONFIG_5_40
    state = initial_state(config, resolve_architecture(config.model, 256))
    for name, value in [("change_warmup_iters", 0.5), ("set_warmup_iters", 4)]:
        state = carried_out(state, Operation(name, value), 3)
    assert (state.settings.warmup_iters, state.settings.lr_decay_iters) == (4, 40)
    state = carried_out(state, Operation("change_warmup_iters", 0.5), 3)
    assert (state.settings.warmup_iters, state.settings.lr_decay_iters) == (2, 20)


def test_counts_that_were_set_beside_operations_are_what_later_factors_multiply() -> None:
    state = initial_state(CONFIG_5_40, resolve_architecture(CONFIG_5_40.model, 256))
    state = carried_out(state, Operation("change_warmup_iters", 0.5), 3)
    settings = replace(state.settings, lr_decay_iters=100)
    state = carried_out(replace(state, settings=settings), Operation("change_warmup_iters", 3.0), 4)
    assert (state.settings.warmup_iters, state.settings.lr_decay_iters) == (6, 300)


def test_an_operation_shows_what_it_changed_and_not_how_that_is_computed() -> None:
    before = initial_state(CONFIG_5_40, resolve_architecture(CONFIG_5_40.model, 256))
    after = carried_out(before, Operation("change_warmup_iters", 2.0), 3)
    assert changed_text(differences(before, after)) == "warmup_iters 5→10, lr_decay_iters 40→80"


def test_factors_of_the_warm_up_end_before_floating_point_does() -> None:
    config = load_config(
        None, ["learning_rate.warmup_iters=0", "learning_rate.shape=constant"]
    ).config
    state = initial_state(config, resolve_architecture(config.model, 256))
    state = carried_out(state, Operation("change_warmup_iters", 1e12), 3)
    with pytest.raises(ValueError, match="product of all factors"):
        carried_out(state, Operation("change_warmup_iters", 2.0), 3)
