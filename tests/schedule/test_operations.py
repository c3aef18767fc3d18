"""What is in force is a fold over config and history; a user's config is never changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import gpt2

from instar.config.language import LanguageConfig
from instar.config.sections import Operation
from instar.growth.plan import GrowthError
from instar.schedule.operations import (
    SETTINGS,
    Change,
    OperationError,
    State,
    carried_out,
    fold_history,
    initial_state,
    operation_names,
    plan_operation,
)
from instar.schedule.settings import (
    Settings,
    initial_settings,
    is_frozen,
    learning_rate,
    patterns_of,
)

CONFIG = LanguageConfig.model_validate(
    {
        "optimizer": {"lr": 0.001},
        "learning_rate": {"warmup_iters": 100, "lr_decay_iters": 1000},
        "train": {"batch_size": 16, "gradient_accumulation_steps": 4},
        "eval": {"eval_iters": 20, "eval_interval": 50},
    }
)


ARCHITECTURE = gpt2(context=128)


def state_after(*operations: tuple[Any, ...], step: int = 7) -> State:
    """The state after operations given as (name, value) or (name, value, options)."""
    history = tuple(Change(Operation(*operation), step, 0) for operation in operations)
    return fold_history(initial_state(CONFIG, ARCHITECTURE), history)


def after(*operations: tuple[Any, ...], step: int = 7) -> Settings:
    return state_after(*operations, step=step).settings


def test_an_empty_history_gives_the_config() -> None:
    assert fold_history(initial_state(CONFIG, ARCHITECTURE), ()) == State(
        initial_settings(CONFIG), ARCHITECTURE, CONFIG
    )


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
        (("reset_lr_schedule", 1.0), "lr_start", 7),
        (("set_context", 64), "context", 64),
        (("change_context", 0.25), "context", 32),
        (("set_context", 64, {"tokens": "keep"}), "batch_size", 32),
        (("change_batch_size", 4, {"lr": "sqrt"}), "lr", 0.002),
        (("set_grad_accum", 2, {"lr": "linear"}), "lr", 0.0005),
        (("change_batch_size", 4, {"lr": "keep"}), "lr", 0.001),
        (("change_batch_size", 4, {"lr": {"exponent": 0.6}}), "lr", 0.001 * 4**0.6),
        (("change_batch_size", "x1.5"), "batch_size", 24),
        (("change_lr", "x2"), "lr", 0.002),
        (("change_warmup_iters", "x0.8"), "warmup_iters", 80),
        (("adjust_batch_size", 0.8), "batch_size", 16),
        (("adjust_batch_size", 0.8, {"batch_size": 48}), "batch_size", 48),
        (("adjust_batch_size", 0.8, {"batch_size": 48, "max": 32}), "batch_size", 32),
        (("freeze", "blocks.*"), "frozen", ("blocks.*",)),
        (("freeze", ["blocks.0.*", "token*"]), "frozen", ("blocks.0.*", "token*")),
    ],
)
def test_each_operation_has_its_effect(
    operation: tuple[Any, ...], field: str, expected: float
) -> None:
    assert getattr(after(operation), field) == expected


def test_counts_never_fall_below_one() -> None:
    assert after(("change_batch_size", 1e-9)).batch_size == 1


def test_products_round_to_the_nearest_not_down() -> None:
    # 100 × 0.29 is 28.999999999999996 in floating point
    assert after(("set_batch_size", 100.0), ("change_batch_size", 0.29)).batch_size == 29


def test_a_whole_validation_set_stays_whole() -> None:
    whole_set = CONFIG.model_copy(
        update={"eval": CONFIG.eval.model_copy(update={"eval_iters": None})}
    )
    state = fold_history(
        initial_state(whole_set, ARCHITECTURE), (Change(Operation("change_eval_iters", 2.0), 0, 0),)
    )
    assert state.settings.eval_iters is None


def test_resetting_the_schedule_warms_up_again() -> None:
    settings = after(("reset_lr_schedule", None), step=500)
    assert learning_rate(settings, 500) == pytest.approx(0.001 / 100)


def test_growth_changes_the_architecture_and_says_how() -> None:
    before = fold_history(initial_state(CONFIG, ARCHITECTURE), ())
    after, plan = plan_operation(before, Operation("insert_layers", 1), 7)
    assert (before.architecture.n_layer, after.architecture.n_layer) == (2, 3)
    assert after.settings == before.settings
    assert plan is not None
    assert plan.tensors.keys() == after.architecture.parameters().keys()
    assert plan_operation(before, Operation("change_lr", 2.0), 7)[1] is None


def test_a_model_that_grows_may_have_its_rate_rise_again() -> None:
    keep = after(("widen_mlp", "x2", {"lr": "keep"}), step=500)
    reset = after(("widen_mlp", "x2", {"lr": "reset"}), step=500)
    rewarm = after(("widen_mlp", "x2", {"lr": {"rewarm": 10}}), step=500)
    course = initial_settings(CONFIG)
    assert keep == course
    assert reset == after(("reset_lr_schedule", None), step=500)
    assert learning_rate(rewarm, 500) == pytest.approx(learning_rate(course, 500) / 10)
    assert learning_rate(rewarm, 510) == learning_rate(course, 510)


def births(*operations: tuple[Any, ...]) -> list[tuple[int, set[str]]]:
    """Steps of births, and the modules of which they have parameters; operations are 10 steps apart."""
    state = initial_state(CONFIG, ARCHITECTURE)
    for number, (name, value, *options) in enumerate(operations):
        state = carried_out(state, Operation(name, value, *options), 10 * number)
    return [
        (birth.step, {".".join(name.split(".")[:2]) for name in birth.names})
        for birth in state.settings.new_param_warmups
    ]


NEW = {"lr": {"rewarm_new": 25}}


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([("insert_layers", 1, NEW)], [(0, {"blocks.2"})]),
        (
            [("insert_layers", 1, NEW), ("insert_layers", 1, {"where": "start", **NEW})],
            [(0, {"blocks.3"}), (10, {"blocks.0"})],
        ),
        # of a tensor that grows again only the last birth counts
        (
            [("insert_layers", 1, NEW), ("widen_mlp", "x2", NEW)],
            [(0, {"blocks.2"}), (10, {f"blocks.{layer}" for layer in range(3)})],
        ),
        # copies of what is new are not of its birth, and what is over is forgotten
        ([("insert_layers", 1, NEW), ("stack_layers", 2)], [(0, {"blocks.2"})]),
        ([("insert_layers", 1, NEW), *[("widen_mlp", "x2")] * 3], []),
        ([("set_lr", 1.0), ("insert_layers", 1, {"lr": {"rewarm": 25}})], []),
    ],
)
def test_births_follow_what_was_born(
    operations: list[tuple[Any, ...]], expected: list[tuple[int, set[str]]]
) -> None:
    assert births(*operations) == expected


def test_what_is_at_least_half_new_is_new() -> None:
    names = after(("widen_mlp", "x2", NEW)).new_param_warmups[0].names
    assert {name.partition("mlp.")[2] for name in names} == {
        "up.weight",
        "up.bias",
        "down.weight",
    }
    with pytest.raises(ValueError, match="widen_mlp: lr: rewarm_new is for parameters of which"):
        after(("widen_mlp", "x1.5", NEW))


def test_a_skipped_operation_changes_nothing() -> None:
    change = Change(Operation("widen_mlp", "x2"), 7, 0, entry=0, skipped="no memory")
    assert fold_history(initial_state(CONFIG, ARCHITECTURE), (change,)) == fold_history(
        initial_state(CONFIG, ARCHITECTURE), ()
    )


def test_a_mask_is_folded_by_an_operation_of_its_own() -> None:
    grow = Change(Operation("insert_layers", 1, {"mask": 20}), 7, 0, entry=0)
    fold_it = Change(Operation("fold_masks"), 27, 0)
    open_ = fold_history(initial_state(CONFIG, ARCHITECTURE), (grow,)).architecture
    assert open_.mask is not None
    assert open_.mask.end == 27
    architecture = fold_history(initial_state(CONFIG, ARCHITECTURE), (grow, fold_it)).architecture
    assert architecture == state_after(("insert_layers", 1)).architecture


@pytest.mark.parametrize(
    ("operations", "frozen"),
    [
        ([("freeze", "*.mlp.*")], {"blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"}),
        ([("freeze", "blocks.*"), ("unfreeze", "blocks.1.*")], {"blocks.0.mlp.up.weight"}),
        ([("freeze", "blocks.*"), ("unfreeze", "blocks.*")], set()),
        ([("freeze", ["blocks.*", "token*"]), ("unfreeze", "*")], set()),
        (
            [("freeze", "blocks.*"), ("unfreeze", "blocks.1.*"), ("freeze", "blocks.1.mlp.*")],
            {"blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"},
        ),
    ],
)
def test_the_last_pattern_that_matches_decides(
    operations: list[tuple[Any, ...]], frozen: set[str]
) -> None:
    looked_at = ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "final_norm.weight")
    settings = after(*operations)
    assert {name for name in looked_at if is_frozen(settings.frozen, name)} == frozen


def test_what_is_thawed_leaves_no_trace() -> None:
    assert after(("freeze", "blocks.*"), ("unfreeze", "blocks.*")).frozen == ()
    assert after(("unfreeze", "blocks.*")).frozen == ()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (("change_speed", 2.0), "unknown operation 'change_speed'"),
        (("widen_mpl", 2.0), "did you mean 'widen_mlp'"),
        (("change_lr", 0.0), "must be a positive number, got 0"),
        (("change_lr", float("nan")), "must be a positive number"),
        (("change_lr", 1e13), "must be at most 1e\\+12"),
        (("change_lr", None), "must be a positive number, got null"),
        (("change_lr", True), "must be a positive number, got true"),
        (("set_batch_size", 2.5), "must be a whole number, got 2.5"),
        (("set_batch_size", "two"), 'must be a positive whole number, got "two"'),
        (("reset_lr_schedule", "now"), "must be left out"),
        (("change_lr", 2.0, {"how": "zero"}), "how is not an option of change_lr"),
        (("set_context", 129), "context has 128 tokens; extend_context first"),
        (("freeze", []), "must be a pattern"),
        (("freeze", "!blocks.*"), "must be a pattern"),
        (("freeze", "block.0.mlp.up.weight"), "did you mean 'blocks.0.mlp.up.weight'"),
        (("freeze", ["blocks.*", "lm_head"]), "no parameter matches 'lm_head'"),
        (("freeze", "*"), "nothing would be left to train"),
        (("unfreeze", "zzz"), "no parameter matches 'zzz'"),
    ],
)
def test_bad_operations_are_refused(operation: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(operation)


def test_growth_that_cannot_be_is_refused_in_growth_s_own_words() -> None:
    with pytest.raises(GrowthError, match="only grows"):
        after(("widen_mlp", 16))
    with pytest.raises(GrowthError, match="widen_mlp"):
        after(("widen_mlp", "two"))


def test_factors_upon_factors_end_before_floating_point_does() -> None:
    for factor in (1e-12, 1e12):
        with pytest.raises(ValueError, match="out of range"):
            after(*[("change_lr", factor)] * 40)
    with pytest.raises(ValueError, match="out of range"):
        after(*[("change_batch_size", 1e9)] * 2)


def test_a_mistake_of_form_says_in_which_part() -> None:
    with pytest.raises(OperationError) as caught:
        after(("change_lr", 2.0, {"how": 1}))
    assert caught.value.part == "how"


def test_all_operations_have_names_of_the_field() -> None:
    assert {"change_lr", "freeze", "widen_mlp", "merge_lora"} <= set(operation_names())
    assert len(operation_names()) == len(set(operation_names()))


@given(
    st.lists(
        st.tuples(
            # the model limits the context
            st.sampled_from(
                sorted({n for n in SETTINGS if n[:7] == "change_"} - {"change_context"})
            ),
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
    live = fold_history(initial_state(CONFIG, ARCHITECTURE), history[:cut])
    for change in history[cut:]:
        live = carried_out(live, change.operation, change.step)
    assert live == fold_history(initial_state(CONFIG, ARCHITECTURE), history)
    assert initial_settings(CONFIG).batch_size == 16


FIRST = sorted(name for name in ARCHITECTURE.parameters() if name.startswith("blocks.0."))


@pytest.mark.parametrize(
    ("operations", "patterns", "new_layers"),
    [
        # the block that was first stays frozen, wherever it is
        (
            [("freeze", "blocks.0.*"), ("insert_layers", 1, {"where": "start"})],
            ("blocks.1.*",),
            {0: 1},
        ),
        (
            [("freeze", "blocks.0.*"), ("insert_layers", 2, {"where": "end"})],
            ("blocks.0.*",),
            {0: 0},
        ),
        (
            [
                ("freeze", "*.0.*"),
                ("insert_layers", 1, {"where": [0]}),
                ("insert_layers", 1, {"where": [1]}),
            ],
            ("blocks.2.*",),
            {0: 2},
        ),
        # copies are new, and train
        ([("freeze", "blocks.0.*"), ("stack_layers", 2)], ("blocks.0.*",), {0: 0}),
        ([("freeze", "blocks.0.*"), ("stack_layers", [1, 0, 0])], ("blocks.1.*",), {0: 1}),
        ([("freeze", "blocks.0.*"), ("widen_mlp", "x2")], ("blocks.0.*",), {0: 0}),
    ],
)
def test_freezing_follows_what_it_froze(
    operations: list[tuple[Any, ...]], patterns: tuple[str, ...], new_layers: dict[int, int]
) -> None:
    state = state_after(*operations)
    frozen = {n for n in state.architecture.parameters() if is_frozen(state.settings.frozen, n)}
    assert state.settings.frozen == patterns
    assert frozen == {name.replace("blocks.0.", f"blocks.{new_layers[0]}.", 1) for name in FIRST}


def test_what_growth_makes_new_among_frozen_blocks_trains() -> None:
    """Also adapters, which could never learn otherwise."""
    operations = ("freeze", "blocks.*"), ("insert_layers", 1, {"where": "start"})
    blocks = ARCHITECTURE.n_layer
    assert after(*operations).frozen == tuple(f"blocks.{n}.*" for n in range(1, blocks + 1))
    state = state_after(("freeze", "*.weight"), ("set_lora_rank", {"target": "attn", "rank": 2}))
    adapters = [name for name in state.architecture.parameters() if ".lora_" in name]
    assert adapters
    assert not any(is_frozen(state.settings.frozen, name) for name in adapters)
    assert is_frozen(state.settings.frozen, "blocks.0.attn.query.weight")


def test_thawing_goes_by_the_names_of_now() -> None:
    operations = ("freeze", "blocks.0.*"), ("insert_layers", 1, {"where": "start"})
    assert after(*operations, ("unfreeze", "blocks.1.*")).frozen == ()
    assert is_frozen(after(*operations, ("unfreeze", "blocks.0.*")).frozen, "blocks.1.norm.weight")


def test_patterns_say_what_is_frozen_and_nothing_else() -> None:
    names = ["a.b.c", "a.b.d", "a.e", "f[0].g", "f[0].h", "i", "blocks.1.w", "blocks.10.w"]
    frozen = {"a.b.c", "a.b.d", "f[0].g", "i", "blocks.1.w"}
    patterns = patterns_of(frozen, names)
    assert patterns == ("a.b.*", "f[[]0].g", "i", "blocks.1.*")
    assert {name for name in names if is_frozen(patterns, name)} == frozen
