"""Any schedule is a typed error with its line, or a forecast that holds; nothing else.

`INSTAR_TORTURE=full` tries 10,000.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import figures
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sized import spec_for_tokens

from instar.config.errors import ConfigError
from instar.schedule.checks import load_checked
from instar.schedule.forecast import Forecast, checked_forecast
from instar.schedule.operations import operation_names
from instar.schedule.render import render

EXAMPLES = figures.times(150, 10_000)

NUMBERS = (
    st.integers(-3, 300)
    | st.floats(0.01, 20.0)
    | st.sampled_from([0.0, -1.0, 1e-300, 1e300, 2.0**63, 10**9, 10**18, float("nan"), True])
)
TEXTS = st.sampled_from(
    [
        "x2",
        "x1.5",
        "x0.5",
        "x1000000",
        "x",
        "two",
        "blocks.*",
        "*",
        "attn",
        "head",
        "even",
        "start",
        "normal",
        "zero",
        "split",
        "groups",
        "inside",
        "reset",
        "keep",
        "50Mtok",
        "3it",
    ]
) | st.just("")
KEYS = st.sampled_from(
    ["target", "rank", "factor", "alpha", "axis", "size", "rewarm", "loss_below", "at_step", "x"]
)
JSON = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
LIKELY = st.sampled_from(
    [1, 2, 3, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 0.5, 1.5, "x2", "x1.5"]
)
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "stack_layers": st.sampled_from([2, 3, [0, 0, 1, 1], [0, 1, 0, 1], [0, 5], [1, 0]]),
    "freeze": st.sampled_from(["blocks.*", "*embedding*", "nothing", ["blocks.0.*", "*norm*"]]),
    "unfreeze": st.sampled_from(["blocks.*", "*", "nothing", ["blocks.0.*", "*norm*"]]),
    "reset_lr_schedule": st.none(),
    "merge_lora": st.sampled_from([None, "attn", "mlp", "blocks.0.mlp.up"]),
    **{
        f"{verb}_lora_{what}": st.fixed_dictionaries(
            {
                "target": st.sampled_from(
                    ["attn", "mlp", "embedding", "head", "all", "blocks.0.*"]
                ),
                key: st.sampled_from([0, 1, 2, 4, 8, 0.5, 2.0, -1]),
            }
        )
        for verb, what, key in (
            ("set", "rank", "rank"),
            ("change", "rank", "factor"),
            ("set", "alpha", "alpha"),
        )
    },
    "widen": st.fixed_dictionaries(
        {"axis": st.sampled_from(["mlp", "embed", "vocab", "heads", "layers", "x"]), "size": LIKELY}
    ),
}
WHEN = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"loss_below": NUMBERS}),
        st.fixed_dictionaries({"waited": st.integers(0, 300)}),
        st.fixed_dictionaries({"at_step": st.integers(-1, 300)}),
        st.fixed_dictionaries({"at_tokens": st.sampled_from([1, 4000, "5ktok", "3it", 0])}),
        st.fixed_dictionaries({"at_fraction": st.sampled_from([0.0, 0.3, 0.9, 1.0])}),
        st.fixed_dictionaries(
            {"plateau": st.fixed_dictionaries({"window": st.integers(1, 5), "slope": NUMBERS})}
        ),
        st.dictionaries(KEYS, JSON, max_size=2),
    ),
    lambda inner: st.builds(
        lambda kind, parts: {kind: parts},
        st.sampled_from(["any", "all"]),
        st.lists(inner, max_size=3),
    ),
    max_leaves=3,
)
TRIGGERS = st.one_of(
    st.fixed_dictionaries({"max_wait_iters": st.integers(1, 99)}),
    st.fixed_dictionaries({"trigger_loss": st.floats(0.5, 9.0), "max_wait_iters": st.just(40)}),
    st.fixed_dictionaries({"when": WHEN}),
    st.dictionaries(
        st.sampled_from(["trigger_loss", "max_wait_iters", "when", "trigger_los"]), JSON, max_size=2
    ),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "mask": st.sampled_from([10, 0, "x2"]),
        "how": st.sampled_from(["zero", "split", "average", "duplicate", "odd"]),
        "where": st.sampled_from(["start", "even", [0, 1], [9], "inside", "groups"]),
        "lr": st.sampled_from(["keep", "reset", {"rewarm": 5}, {"rewarm": 0}, 3]),
        "moments": st.sampled_from(["mapped", "reset", "none"]),
        "max_params": st.sampled_from([10**4, 10**9, -1]),
        "min_steps": st.integers(0, 50),
        "on_failure": st.sampled_from(["skip", "stop", "go"]),
        "reevaluate": st.booleans(),
        "unknown": JSON,
    },
)


def operations() -> st.SearchStrategy[dict[str, Any]]:
    """Entries most of which are sound: then what goes wrong lies in how they follow each other."""

    def entry(name: str) -> st.SearchStrategy[dict[str, Any]]:
        fitting = FITTING.get(name, LIKELY)
        value = st.sampled_from([fitting] * 9 + [JSON]).flatmap(lambda strategy: strategy)
        few = st.sampled_from([st.just({})] * 3 + [OPTIONS]).flatmap(lambda strategy: strategy)
        parts = st.tuples(value, TRIGGERS, few)
        return parts.map(lambda got: {"name": name, "value": got[0], **got[1], **got[2]})

    return st.sampled_from([*operation_names(), "widen_mpl"]).flatmap(entry)


SCHEDULES = st.lists(operations(), max_size=5) | JSON | st.lists(JSON, max_size=2)
SHAPES = st.sampled_from([["preset=gpt2"], ["preset=llama", "model.n_kv_head=2"]])
BUDGETS = st.sampled_from(["200it", "9ktok", "2ep", "10min"])
SMALL = ["model.n_layer=2", "model.n_head=4", "model.n_embd=16", "model.context=16"]


@pytest.mark.timeout(600)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(schedule=SCHEDULES, shape=SHAPES, until=BUDGETS, ranks=st.sampled_from([1, 1, 4, 64]))
def test_a_schedule_is_an_error_with_its_line_or_a_forecast(
    tmp_path: Path, schedule: Any, shape: list[str], until: str, ranks: int
) -> None:
    path = tmp_path / "grow.json"
    text = json.dumps(schedule, indent=1)
    path.write_text(text.replace("NaN", ".nan"), encoding="utf-8")
    options = [*shape, *SMALL, f"train.until={until}", "learning_rate.shape=constant"]
    try:
        loaded = load_checked(None, [*options, f"schedule={path}"])
        told = checked_forecast(loaded, spec_for_tokens(loaded.config, 4001, 64), ranks)
    except ConfigError as error:
        for problem in error.problems:
            assert re.fullmatch(rf"{path}(:\d+:\d+)?", problem.where), problem
            assert ":" in problem.where.removeprefix(str(path)) or text in ("null", '""'), problem
    else:
        _holds(told, len(schedule))


def _holds(told: Forecast, entries: int) -> None:
    """Whatever is foretold can be shown, and comes in order."""
    assert len(told.stages) == entries + 1
    for steps in (
        [stage.first_step for stage in told.stages],
        [stage.latest_step for stage in told.stages],
    ):
        known = [step for step in steps if step is not None]
        assert known == sorted(known)
        assert steps[: len(known)] == known
    for stage in told.stages:
        assert min(stage.memory_bytes["weights"], stage.flops_per_token, stage.batch_size) > 0
        if stage.latest_step is not None:
            assert stage.first_step is not None
    assert max(map(len, render(told).splitlines())) <= 80
    json.dumps(told.to_dict(), allow_nan=False)
