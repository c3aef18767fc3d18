"""Settings are a fold over config and history; a user's config is never changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.schema import RunConfig
from instar.schedule.operations import (
    OPERATIONS,
    Change,
    Operation,
    apply_operation,
    fold,
)
from instar.schedule.settings import initial_settings, learning_rate

CONFIG = RunConfig.model_validate(
    {
        "optimizer": {"lr": 0.001},
        "learning_rate": {"warmup_iters": 100, "lr_decay_iters": 1000},
        "train": {"batch_size": 16, "gradient_accumulation_steps": 4},
        "eval": {"eval_iters": 20, "eval_interval": 50},
    }
)


def after(*operations: tuple[str, float | None], step: int = 7):  # type: ignore[no-untyped-def]
    history = tuple(Change(Operation(name, value), step, 0) for name, value in operations)
    return fold(CONFIG, history)


def test_an_empty_history_gives_the_config() -> None:
    assert fold(CONFIG, ()) == initial_settings(CONFIG)


@pytest.mark.parametrize(
    ("operation", "field", "expected"),
    [
        (("change_lr", 2.0), "lr", 0.002),
        (("set_lr", 0.01), "lr", 0.01),
        (("change_batch_size", 1.5), "batch_size", 24),
        (("set_batch_size", 5.0), "batch_size", 5),
        (("change_grad_accum", 0.5), "grad_accum", 2),
        (("set_grad_accum", 3.0), "grad_accum", 3),
        (("change_warmup_iters", 0.8), "warmup_iters", 80),
        (("change_warmup_iters", 0.8), "lr_decay_iters", 800),
        (("set_warmup_iters", 50.0), "lr_decay_iters", 500),
        (("change_eval_iters", 1.5), "eval_iters", 30),
        (("set_eval_iters", 7.0), "eval_iters", 7),
        (("change_eval_interval", 2.0), "eval_interval", 100),
        (("set_eval_interval", 9.0), "eval_interval", 9),
        (("reset_lr_schedule", None), "lr_start", 7),
    ],
)
def test_each_operation_has_its_effect(
    operation: tuple[str, float | None], field: str, expected: float
) -> None:
    assert getattr(after(operation), field) == expected


def test_counts_never_fall_below_one() -> None:
    assert after(("change_batch_size", 1e-9)).batch_size == 1


def test_products_round_to_the_nearest_not_down() -> None:
    # 100 × 0.29 is 28.999999999999996 in floating point
    assert after(("set_batch_size", 100.0), ("change_batch_size", 0.29)).batch_size == 29


def test_a_whole_validation_set_stays_whole() -> None:
    whole = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"eval_iters": None})})
    settings = initial_settings(whole)
    assert apply_operation(settings, Operation("change_eval_iters", 2.0), 0).eval_iters is None


def test_resetting_the_schedule_warms_up_again() -> None:
    settings = after(("reset_lr_schedule", None), step=500)
    assert learning_rate(settings, 500) == pytest.approx(0.001 / 100)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("change_speed", 2.0, "unknown operation 'change_speed'"),
        ("change_lr", 0.0, "needs a positive number"),
        ("change_lr", float("nan"), "needs a positive number"),
        ("change_lr", None, "needs a number"),
        ("change_lr", True, "needs a number"),
        ("set_batch_size", 2.5, "needs a whole number"),
    ],
)
def test_bad_operations_are_refused(name: str, value: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after((name, value))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(name for name in OPERATIONS if name.startswith("change_"))),
            st.floats(0.1, 10.0),
            st.integers(0, 1000),
        ),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_folding_may_stop_anywhere_and_go_on(
    operations: list[tuple[str, float, int]], cut: int
) -> None:
    """Resuming is folding again: the history alone gives what a live run had."""
    history = tuple(Change(Operation(name, value), step, 0) for name, value, step in operations)
    live = fold(CONFIG, history[:cut])
    for change in history[cut:]:
        live = apply_operation(live, change.operation, change.step)
    assert live == fold(CONFIG, history)
    assert initial_settings(CONFIG).batch_size == 16
