"""When alerts are raised, and when not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.sections import AlertsConfig
from instar.record.alerts import MIN_RECORDS, SLOW_RECORDS, SMOOTHING_WINDOW, Rules
from instar.record.events import Alert, Event, OperationEvent, RunStarted, Skip, Train
from instar.schedule.operations import keeps_training_loss_comparable

WIDEN = OperationEvent(step=0, name="widen_mlp", verb="GROW")
CONTEXT = OperationEvent(step=0, name="set_context")
VOCABULARY = OperationEvent(step=0, name="widen", value={"axis": "vocab", "size": 512})
WIDEN_MLP = OperationEvent(step=0, name="widen", value={"axis": "mlp", "size": 512})

# recorded by runs of the demo with a line every 10 steps, a batch change at 50 and
# growth at 100 and 150, and of a causal-set network
GROWN = [
    *(7.6575, 7.5889, 7.2582, 6.7338, 6.3173, 5.9931, 5.6201, 5.2973, 5.136, 4.9518, 4.6922),
    *(4.5448, 4.4739, 4.4456, 4.1987, 4.2948, 4.325, 4.1054, 3.9603, 4.0922, 4.0769),
]
GROWN_SPEEDS = [
    *(18130, 22181, 22295, 22402, 21482, 22473, 21828, 23415, 23378, 22957, 22465),
    *(18852, 19773, 19292, 19166, 19224, 10974, 11383, 11589, 11513, 11529),
]
CAUSAL = [
    *(2.451, 1.6724, 1.3782, 1.2426, 0.9385, 0.5634, 0.539, 0.3577, 0.2413, 0.2189, 0.1979),
    *(0.1344, 0.1142, 0.1537, 0.0903, 0.1049, 0.1154, 0.1078, 0.0979, 0.0765, 0.0636, 0.0602),
    *(0.0501, 0.0718, 0.0686, 0.0365, 0.0391, 0.0337, 0.0309),
]
CAUSAL_SPEEDS = [423, *[1080] * 20, 893, 288, *[950] * 6]


def alerts_of(events: Iterable[Event], config: AlertsConfig | None = None) -> list[Alert]:
    rules = Rules(config or AlertsConfig(), keeps_training_loss_comparable)
    return [alert for event in events for alert in rules.update(event)]


def curve(losses: Iterable[float], start: int = 1) -> list[Event]:
    return [
        Train(step=step, loss=loss, tokens=10 * step) for step, loss in enumerate(losses, start)
    ]


def speeds(values: Iterable[float]) -> list[Event]:
    return [Train(step=step, loss=1.0, tokens_per_s=v) for step, v in enumerate(values, 1)]


def noisy(level: Iterable[float], noise: float, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [value + noise * chance.gauss(0, 1) for value in level]


def falling(start: float, end: float, count: int) -> list[float]:
    return [end + (start - end) * math.exp(-5 * n / count) for n in range(count)]


def test_recorded_runs_that_grew_and_were_well_raise_nothing() -> None:
    events = [
        Train(step=max(1, 10 * n), loss=loss, tokens_per_s=speed)
        for n, (loss, speed) in enumerate(zip(GROWN, GROWN_SPEEDS, strict=True))
    ]
    with_operations: list[Event] = list(events)
    for before, operation in (
        (16, WIDEN),
        (11, WIDEN),
        (6, OperationEvent(step=50, name="set_lr")),
    ):
        with_operations.insert(before, operation)
    assert alerts_of(with_operations) == []
    assert alerts_of(curve(CAUSAL)) == []
    assert alerts_of(speeds(CAUSAL_SPEEDS)) == []


shapes = {
    "scale": st.floats(1e-6, 1e6),
    "offset": st.floats(-1e3, 1e3),
    "noise": st.floats(0.0, 0.3),
    "seed": st.integers(0, 10_000),
}


@settings(deadline=None)
@given(**shapes)
def test_noise_about_a_falling_loss_raises_nothing(
    scale: float, offset: float, noise: float, seed: int
) -> None:
    losses = noisy(falling(10.0, 3.0, 600), noise, seed)
    assert alerts_of(curve(scale * (loss + offset) for loss in losses)) == []


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["normal", "laplace", "uniform"]))
def test_noise_about_a_loss_that_never_falls_raises_nothing(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    draw = {
        "normal": lambda: chance.gauss(0, 1),
        "laplace": lambda: chance.expovariate(1) - chance.expovariate(1),
        "uniform": chance.random,
    }[kind]
    assert alerts_of(curve(3.0 + draw() for _ in range(1000))) == []


@settings(deadline=None)
@given(**shapes)
def test_a_loss_that_gives_back_half_of_its_fall_alerts_once_and_soon(
    scale: float, offset: float, noise: float, seed: int
) -> None:
    level = [*falling(10.0, 3.0, 300), *[6.5] * 100]
    losses = noisy(level, min(noise, 0.2), seed)
    (alert,) = alerts_of(curve(scale * (loss + offset) for loss in losses))
    assert alert.name == "divergence"
    assert 300 < alert.step <= 300 + SMOOTHING_WINDOW
    assert alert.tokens == 10 * alert.step
    assert "at its lowest" in alert.message


@given(
    shift=st.floats(-100, 100),
    spike=st.floats(10, 1e9),
    width=st.integers(1, SMOOTHING_WINDOW // 2),
)
def test_a_short_spike_is_no_divergence(shift: float, spike: float, width: int) -> None:
    level = falling(10.0, 3.0, 200)
    level[120 : 120 + width] = [spike] * width
    assert alerts_of(curve(loss + shift for loss in level)) == []


def test_it_alerts_again_only_after_a_recovery() -> None:
    down, up = falling(10.0, 3.0, 100), [7.0] * 30
    assert len(alerts_of(curve([*down, *up, *up]))) == 1
    assert len(alerts_of(curve([*down, *up, *[3.0] * 30, *up]))) == 2


def test_a_loss_that_is_no_number_is_a_divergence() -> None:
    (alert,) = alerts_of(curve([*falling(10.0, 3.0, 50), *[math.nan] * 10]))
    assert "not finite" in alert.message
    (alert,) = alerts_of(curve([math.nan] * 30))
    assert alert.step == MIN_RECORDS + 1


def test_a_rise_after_an_operation_has_time_to_pass() -> None:
    before = curve(falling(8.0, 3.0, 100))
    passing = curve([*falling(6.0, 3.0, MIN_RECORDS), *[3.0] * 30], 101)
    staying = curve([6.0] * 40, 101)
    assert alerts_of([*before, WIDEN, *passing]) == []
    assert len(alerts_of([*before, *staying])) == 1
    (alert,) = alerts_of([*before, WIDEN, *staying])
    assert alert.step == 101 + MIN_RECORDS


@pytest.mark.parametrize("change", [CONTEXT, VOCABULARY])
def test_after_a_change_of_what_the_loss_is_of_it_is_compared_with_itself_alone(
    change: OperationEvent,
) -> None:
    before, after = curve(falling(8.0, 3.0, 100)), curve(noisy([5.0] * 60, 0.02, 1), 101)
    assert alerts_of([*before, change, *after]) == []
    assert len(alerts_of([*before, change, *after, *curve([9.0] * 20, 161)])) == 1
    assert alerts_of([*before, WIDEN_MLP, *after])


def test_a_run_that_goes_on_from_a_checkpoint_begins_anew() -> None:
    before, after = curve(falling(8.0, 3.0, 100)), curve([6.0] * 40, 21)
    assert alerts_of([*before, RunStarted(run_id="ab3cd", step=20), *after]) == []


def test_a_stall_is_told_once_until_it_is_over() -> None:
    slow = [100.0] * SLOW_RECORDS
    (alert,) = alerts_of(speeds([1000.0] * 20 + slow * 3))
    assert (alert.name, alert.step) == ("stall", 20 + SLOW_RECORDS)
    assert "10%" in alert.message
    assert len(alerts_of(speeds([1000.0] * 20 + slow + [1000.0] + slow))) == 2
    assert alerts_of(speeds([1000.0] * 20 + slow[1:] + [1000.0] * 20 + slow[1:])) == []


@given(st.lists(st.floats(301, 3000), min_size=1, max_size=200))
def test_speeds_within_the_share_of_each_other_are_no_stall(values: list[float]) -> None:
    assert alerts_of(speeds([min(v, 1000.0) for v in values])) == []


def test_a_larger_model_is_slower_without_a_stall() -> None:
    assert alerts_of([*speeds([1000.0] * 50), WIDEN, *speeds([100.0] * 50)]) == []


def test_skips_in_a_row_are_told_once() -> None:
    skips: list[Event] = [Skip(step=step, consecutive=step) for step in range(1, 8)]
    (alert,) = alerts_of(skips)
    assert (alert.name, alert.step) == ("nan_skips", 3)
    # the words of docs/troubleshooting.md
    assert "3 steps in a row were skipped: their gradients were not finite" in alert.message
    assert len(alerts_of([*skips, *skips])) == 2


def test_single_skips_are_told_each_where_one_is_enough() -> None:
    skips: list[Event] = [Skip(step=step, consecutive=1) for step in (5, 35, 45)]
    alerts = alerts_of(skips, AlertsConfig(nan_skips=1))
    assert [alert.message for alert in alerts] == [
        f"step {step}: a step was skipped: its gradients were not finite" for step in (5, 35, 45)
    ]


@pytest.mark.parametrize("rule", ["divergence", "stall", "nan_skips"])
def test_a_rule_that_is_switched_off_says_nothing(rule: str) -> None:
    events = [
        *curve([*falling(10.0, 3.0, 100), *[9.0] * 30]),
        *speeds([1000.0] * 20 + [10.0] * 20),
        *(Skip(step=step, consecutive=step) for step in range(1, 8)),
    ]
    assert {alert.name for alert in alerts_of(events)} == {"divergence", "stall", "nan_skips"}
    alerts = alerts_of(events, AlertsConfig.model_validate({rule: None}))
    assert {alert.name for alert in alerts} == {"divergence", "stall", "nan_skips"} - {rule}
