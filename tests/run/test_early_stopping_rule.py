from __future__ import annotations

import json
import math
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.schema import Direction, PlateauConfig, Watch
from instar.run.state.early_stopping import (
    RuleState,
    is_on_plateau,
    lower,
    plateau_text,
    stop_reason,
    update_rule,
    with_direction,
)

NAN, INF = math.nan, math.inf
LOSS = Watch(metric="loss", direction="min", patience=3)

# few values, so that ties and differences of exactly delta are common; all are sums of powers of two
VALUES = st.one_of(st.sampled_from([NAN, INF, -INF]), st.integers(-6, 6).map(lambda n: n / 4))
SEEN = st.lists(VALUES, max_size=30)
RULES = st.builds(
    Watch,
    metric=st.just("score"),
    direction=st.sampled_from(["min", "max"]),
    delta=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    patience=st.integers(1, 5),
    grace=st.integers(0, 6),
    start=st.none() | st.integers(-6, 6).map(lambda n: n / 4),
)


def after(rule: Watch, values: list[float], state: RuleState | None = None) -> RuleState:
    """The state when these values were seen, at steps 10, 20 …"""
    state = state or RuleState()
    for value in values:
        state = update_rule(rule, state, value, 10 * (state.seen + 1))
    return state


def betters(rule: Watch, values: list[float]) -> list[int]:
    """The places of better values: the definition, over a whole list."""

    @cache
    def better(place: int) -> bool:
        value = values[place]
        if math.isnan(value) or math.isinf(value):
            return False
        earlier = [values[p] for p in range(place) if better(p)]
        to_beat = earlier[-1] if earlier else rule.start
        if to_beat is None:
            return True
        if rule.direction == "min":
            return value < to_beat - rule.delta
        return value > to_beat + rule.delta

    return [place for place in range(len(values)) if better(place)]


def is_still(rule: Watch, values: list[float]) -> bool:
    """Whether the last `patience` values, all after the first `grace`, were not better."""
    first = len(values) - rule.patience
    return first >= rule.grace and not any(place >= first for place in betters(rule, values))


@settings(max_examples=500)
@given(rule=RULES, values=SEEN)
def test_after_every_evaluation_it_is_as_the_definition_says(
    rule: Watch, values: list[float]
) -> None:
    for count in range(len(values) + 1):
        prefix = values[:count]
        state, places = after(rule, prefix), betters(rule, prefix)
        assert is_on_plateau(rule, state) == is_still(rule, prefix)
        assert state.seen == count
        assert state.best == (prefix[places[-1]] if places else None)
        assert state.best_step == (10 * (places[-1] + 1) if places else None)


@given(
    rule=RULES.map(lambda rule: rule.model_copy(update={"delta": 0.0, "start": None})), values=SEEN
)
def test_without_a_delta_the_best_is_the_first_of_the_best_values(
    rule: Watch, values: list[float]
) -> None:
    finite = [value for value in values if math.isfinite(value)]
    best = (min if rule.direction == "min" else max)(finite, default=None)
    state = after(rule, values)
    assert state.best == best
    if best is not None:
        assert state.best_step == 10 * (values.index(best) + 1)


@given(rule=RULES, values=SEEN, cut=st.integers(0, 30))
def test_a_state_goes_on_from_json_as_if_nothing_had_been(
    rule: Watch, values: list[float], cut: int
) -> None:
    state = after(rule, values[:cut])
    text = json.dumps(msgspec.to_builtins(state), allow_nan=False)
    parsed_state = msgspec.convert(json.loads(text), RuleState)
    assert parsed_state == state
    assert after(rule, values[cut:], parsed_state) == after(rule, values)


@given(
    pairs=st.lists(st.tuples(RULES, st.lists(VALUES, min_size=12, max_size=12)), max_size=4),
    mode=st.sampled_from(["any", "all"]),
)
def test_several_rules_end_a_run_together_or_each_alone(
    pairs: list[tuple[Watch, list[float]]], mode: Literal["any", "all"]
) -> None:
    for count in range(13):
        rules = [rule for rule, _ in pairs]
        states = [after(rule, values[:count]) for rule, values in pairs]
        verdicts = [is_still(rule, values[:count]) for rule, values in pairs]
        expected = any(verdicts) if mode == "any" else bool(verdicts) and all(verdicts)
        reason = stop_reason(rules, states, mode)
        assert (reason is not None) == expected
        if reason is not None:
            texts = [plateau_text(*pair) for pair, at in zip(zip(rules, states, strict=True), verdicts, strict=True) if at]  # fmt: skip
            assert reason == " and ".join(texts)


def test_two_that_stand_still_at_different_times_are_not_all_at_once() -> None:
    first, second = [1.0, 2, 2, 2, 0, 0], [3.0, 2, 1, 1, 1, 1]
    states = [[after(LOSS, values[:count]) for values in (first, second)] for count in range(1, 7)]
    assert [stop_reason([LOSS, LOSS], pair, "any") is not None for pair in states] == [
        False, False, False, True, False, True,
    ]  # fmt: skip
    assert all(stop_reason([LOSS, LOSS], pair, "all") is None for pair in states)


@given(
    rule=RULES.map(lambda rule: rule.model_copy(update={"start": None})),
    value=VALUES,
    extra=st.integers(0, 5),
)
def test_a_metric_that_never_improves_ends_it_after_grace_and_patience(
    rule: Watch, value: float, extra: int
) -> None:
    best = math.isfinite(value)
    last = rule.patience + max(rule.grace, 1 if best else 0)
    assert not is_on_plateau(rule, after(rule, [value] * (last - 1)))
    assert is_on_plateau(rule, after(rule, [value] * (last + extra)))


@pytest.mark.parametrize(
    ("rule", "values", "at"),
    [
        (LOSS, [3, 2, 2, 2, 2], 5),
        (LOSS, [3, 2, 3, 3, 1, 1, 1, 1], 8),
        (LOSS, [NAN, NAN, NAN], 3),
        (LOSS, [INF, 1, -INF, NAN, 2], 5),
        (LOSS.model_copy(update={"direction": "max"}), [3, 2, 2, 2], 4),
        (LOSS.model_copy(update={"patience": 1}), [3, 3], 2),
        # the best may be set within the grace period, and is then to be beaten
        (LOSS.model_copy(update={"grace": 4}), [1, 2, 2, 2, 2, 2, 2], 7),
        (LOSS.model_copy(update={"grace": 4}), [1, 2, 2, 2, 2, 0, 2, 2, 2], 9),
        # 0.5 less is no more than delta, 1.0 less in two goes is
        (LOSS.model_copy(update={"delta": 0.5}), [3, 2.5, 2, 2, 1.5, 1.5], 6),
        (LOSS.model_copy(update={"delta": 0.5}), [3, 2.75, 2.5, 2.25, 2.25, 2.25, 2.25], 7),
        # below a start nothing counts as better, not even what gets better
        (LOSS.model_copy(update={"start": 1.0}), [3, 2, 1.5], 3),
        (LOSS.model_copy(update={"start": 2.5}), [3, 2, 2, 2, 2], 5),
    ],
)
def test_by_hand(rule: Watch, values: list[float], at: int) -> None:
    first = next(n for n in range(len(values) + 1) if is_on_plateau(rule, after(rule, values[:n])))
    assert first == at == len(values)


@pytest.mark.parametrize(
    ("rule", "values", "message"),
    [
        (
            Watch(metric="accuracy", direction="max"),
            [0.5, 0.9121, 0.9, 0.9],
            "accuracy has not been better than 0.9121 (step 20) for 2 evaluations",
        ),
        (
            Watch(metric="loss", direction="min", delta=0.01),
            [3.0, 2.995],
            "loss has not been better by more than 0.01 than 3 (step 10) for 1 evaluation",
        ),
        (
            Watch(metric="loss", direction="min", start=1.5),
            [3.0, 2.0, 2.0],
            "loss has not been better than 1.5 (the start) for 3 evaluations",
        ),
        (LOSS, [NAN, INF], "loss has not been finite for 2 evaluations"),
    ],
)
def test_why_is_told_in_words(rule: Watch, values: list[float], message: str) -> None:
    assert plateau_text(rule, after(rule, values)) == message


def test_a_rule_is_what_the_config_says() -> None:
    fields: dict[str, Any] = {"metric": "accuracy", "delta": 0.1, "patience": 2, "grace": 3, "start": 0.5}  # fmt: skip
    assert with_direction(Watch(**fields), {"loss": "max", "accuracy": "max"}) == Watch(
        direction="max", **fields
    )
    assert with_direction(Watch(direction="min"), {"loss": "max"}).direction == "min"
    assert with_direction(Watch(), {"loss": "min"}) == Watch(metric="loss", direction="min")


def peaks_of(
    rule: Watch, values: list[float], plateau: PlateauConfig, lr: float = 1.0
) -> list[float]:
    """The peak after each evaluation."""
    rates, state, first = [], RuleState(), lr
    for value in values:
        state, lower_rate = lower(rule, after(rule, [value], state), plateau, lr, first)
        lr = lr if lower_rate is None else lower_rate
        rates.append(lr)
    return rates


def test_the_rate_falls_again_after_as_many_evaluations_and_the_best_stays() -> None:
    plateau = PlateauConfig(factor=0.5, min_lr_ratio=0.2)
    values = [1, 2, 2, 2, 2, 2, 2, 0.5, 1, 1, 1, 1, 1, 1]
    halves = [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2]
    assert peaks_of(LOSS, values, plateau) == halves
    state, _ = lower(LOSS, after(LOSS, [1, 2, 2, 2]), plateau, 1.0, 1.0)
    assert state == RuleState(best=1, best_step=10, seen=4, since=0)


def test_without_a_factor_the_rate_never_falls() -> None:
    state = after(LOSS, [1, 2, 2, 2])
    assert lower(LOSS, state, PlateauConfig(), 1.0, 1.0) == (state, None)


def test_a_rate_below_the_floor_is_not_raised() -> None:
    plateau = PlateauConfig(factor=0.5, min_lr_ratio=0.2)
    state, lower_rate = lower(LOSS, after(LOSS, [1, 2, 2, 2]), plateau, 0.1, 1.0)
    assert lower_rate is None
    assert state.since == 0


@settings(deadline=None, max_examples=150)
@given(
    direction=st.sampled_from(["min", "max"]),
    delta=st.sampled_from([0.0, 0.25, 1.0]),
    patience=st.integers(1, 4),
    lowest=st.sampled_from([0.0, 0.125, 0.3]),
    values=st.lists(st.integers(-6, 6).map(lambda n: n / 4) | st.just(NAN), max_size=30),
)
def test_the_rate_falls_where_that_of_torch_does(
    direction: Direction, delta: float, patience: int, lowest: float, values: list[float]
) -> None:
    """torch.optim's waits for one bad evaluation more than its patience."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, direction, 0.5, patience - 1, delta, "abs", min_lr=lowest, eps=0.0
    )
    rates = []
    for value in values:
        reference.step(value)
        rates.append(optimizer.param_groups[0]["lr"])
    rule = Watch(metric="loss", direction=direction, delta=delta, patience=patience)
    plateau = PlateauConfig(factor=0.5, min_lr_ratio=lowest)
    assert peaks_of(rule, values, plateau) == rates
    assert rates == list(accumulate(rates, min))
