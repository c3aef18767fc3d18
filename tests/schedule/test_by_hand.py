"""Schedules of the kind that earlier orchestrators ran, against tables calculated by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from instar.config.load import load
from instar.models.architecture import resolve
from instar.schedule.entries import due, entries, last_step, next_entry
from instar.schedule.operations import Change, History, carried_out, fold
from instar.schedule.triggers import Moment

LONG = """[
{name: change_lr, value: 2.0, trigger_loss: 6.0, max_wait_iters: 50000, reevaluate: false},
{name: change_batch_size, value: 1.5, trigger_loss: 5.5, max_wait_iters: 75000, reevaluate: false},
{name: change_eval_interval, value: 2.0, trigger_loss: 5.0, max_wait_iters: 100000, reevaluate: false},
{name: change_eval_iters, value: 1.5, trigger_loss: 4.5, max_wait_iters: 125000, reevaluate: true},
{name: change_warmup_iters, value: 0.8, trigger_loss: 4.0, max_wait_iters: 150000, reevaluate: false}]"""

NAMES = ("lr", "batch_size", "eval_interval", "eval_iters", "warmup_iters")


def never(_step: int, _again: int) -> float:
    return 7.0


def falling(step: int, _again: int) -> float:
    """8 at the start, 0.1 less every 1,000 steps."""
    return (80_000 - step) / 10_000


def dropping(step: int, _again: int) -> float:
    return 3.0 if step >= 10_000 else 7.0


def worse_when_looked_at_again(step: int, again: int) -> float:
    """The second evaluation of one step comes out above what the last operation waits for."""
    return 4.2 if again and step == 10_000 else dropping(step, again)


@pytest.mark.parametrize(
    ("curve", "steps"),
    [
        # waits alone: each counts from the one before, and evaluations come every 1,000 steps,
        # from 225,000 on every 2,000
        (never, (50_000, 125_000, 225_000, 350_000, 500_000)),
        # 6.0 is reached at 20,000, but only less than 6.0 fires: 21,000; so too 26,000, 31,000; then
        # every 2,000 steps: less than 4.5 at 36,000, less than 4.0 (reached at 40,000) at 42,000
        (falling, (21_000, 26_000, 31_000, 36_000, 42_000)),
        # one evaluation below all thresholds: all five at once, on the same loss
        (dropping, (10_000,) * 5),
        # the fourth looks again, and sees 4.2: the fifth waits for the next evaluation, which the
        # third has moved to the next multiple of 2,000
        (worse_when_looked_at_again, (10_000,) * 4 + (12_000,)),
    ],
)
def test_operations_fire_where_a_hand_says(
    curve: Callable[[int, int], float], steps: tuple[int, ...]
) -> None:
    assert fired(curve) == [(f"change_{name}", s) for name, s in zip(NAMES, steps, strict=True)]


def fired(curve: Callable[[int, int], float]) -> list[tuple[str, int]]:
    """Names and steps, where every evaluation gives what the curve says."""
    config = load(
        None,
        [
            f"schedule={LONG}",
            "eval.eval_interval=1000",
            "eval.eval_iters=20",
            "train.until=[600kit]",
        ],
    ).config
    schedule = entries(config)
    state = fold(config, resolve(config.model, 256), ())
    history: History = ()
    for step in range(1, 600_001):
        if step % state.settings.eval_interval:
            continue
        again, loss = 0, curve(step, 0)
        while (entry := next_entry(schedule, history)) is not None:
            now = Moment(step, step * 128, None, step - last_step(history), loss, ())
            if due(entry, now, state) is None:
                break
            state = carried_out(state, entry.operation, step)
            history = (*history, Change(entry.operation, step, 0, entry.number))
            if entry.reevaluate:
                again += 1
                loss = curve(step, again)
    return [(change.operation.name, change.step) for change in history]


def test_what_the_operations_come_to() -> None:
    """The settings after all five, each as multiplied by hand."""
    config = load(
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
    state = fold(config, resolve(config.model, 256), ())
    for entry in entries(config):
        state = carried_out(state, entry.operation, 1000)
    settings = state.settings
    assert settings.lr == pytest.approx(6e-4)
    assert settings.batch_size == 12
    assert (settings.eval_interval, settings.eval_iters) == (2000, 30)
    assert (settings.warmup_iters, settings.lr_decay_iters) == (1600, 480_000)
