"""The table of growth operations, and `check_growth` and `plan`, which use it.

A planner is a pure function from a shape and an operation to the grown shape and the plan of its
tensors. Its error messages do not name the operation; `check_growth` and `plan` prefix the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar

from instar.config.errors import ConfigError, nearest_hint
from instar.config.sections import Operation
from instar.extensions import load_target, third_party
from instar.growth import values
from instar.growth.axes import fold_masks, refuse_if_masked
from instar.growth.plan import Grown, GrowthError, GrowthPlan
from instar.growth.planners.depth import insert_layers, stack_layers, upcycle
from instar.growth.planners.lora import (
    Adaptable,
    change_lora_alpha,
    change_lora_rank,
    merge_lora,
    set_lora_alpha,
    set_lora_rank,
)
from instar.growth.planners.sharing import loop_layers, unloop, untie_embeddings
from instar.growth.planners.width import (
    add_heads,
    extend_context,
    grow_head_dim,
    resize_vocab,
    split_kv_heads,
    widen,
    widen_hidden,
    widen_mlp,
)
from instar.growth.planners.windows import change_window, is_window, set_window
from instar.growth.values import Check
from instar.models.architecture import Architecture
from instar.models.shape import ArchitectureError, Growable, TransformerShape

G = TypeVar("G", bound=Growable)

Planner = Callable[[Any, Any, Mapping[str, Any], int], tuple[Any, GrowthPlan]]
"""(shape, value, options, step) → (grown shape, plan)."""


@dataclass(frozen=True)
class Operator:
    """One operation: its planner, and the checks of its value and of its own options."""

    plan: Planner
    value: Check
    options: Mapping[str, Check] = field(default_factory=dict)
    models: Literal["all", "transformers", "adaptable", "gpt"] = "transformers"
    """applies to every `Growable` model, to those with a `TransformerShape`, to those with low-rank adapters of
    ours, or to Instar's GPT only"""

    def fits(self, arch: Growable) -> bool:
        return self.models == "all" or isinstance(arch, _KINDS[self.models])


def plan(arch: G, operation: Operation, *, step: int = 0) -> tuple[G, GrowthPlan]:
    """Return the grown shape and the plan of every tensor.

    Args:
        step: step of the run, at which masks begin.

    Raises:
        GrowthError: the operation is not possible for this model; the message says what would be.
    """
    operator = check_growth(operation)
    with _naming_errors(operation.name):
        if not operator.fits(arch):
            fitting = ", ".join(name for name, other in OPERATORS.items() if other.fits(arch))
            raise GrowthError(
                f"applies to {_MODELS[operator.models]} only; for this model: {fitting}"
            )
        if isinstance(arch, TransformerShape) and (reason := arch.refusals().get(operation.name)):
            raise GrowthError(reason)
        if "mask" in operation.options and not isinstance(arch, Architecture):
            raise GrowthError("only a GPT supports masks: leave mask out")
        if isinstance(arch, Architecture) and operator.plan is not fold_masks:
            refuse_if_masked(arch)
            if arch.loop is not None and operator.plan in _CHANGE_DEPTH:
                raise GrowthError("layers are looped: unloop first")
        larger, growth_plan = operator.plan(arch, operation.value, operation.options, step)
    return larger, growth_plan


def check_growth(operation: Operation) -> Operator:
    """Return what carries out an operation.

    Raises:
        GrowthError: it is unknown, or its value or an option is not valid.
    """
    operator = operator_of(operation.name)
    if operator is None:
        hint = nearest_hint(operation.name, OPERATORS, f"there are {', '.join(OPERATORS)}")
        raise GrowthError(f"no growth operation is called {operation.name!r}; {hint}")
    with _naming_errors(operation.name):
        operator.value(operation.value)
        values.check_each(operation.options, {**operator.options, **_COMMON_OPTIONS})
    return operator


def is_growth(name: str) -> bool:
    """Return whether an operation of this name changes the model's shape."""
    return operator_of(name) is not None


def operator_of(name: str) -> Operator | None:
    """Return the operation of a name, `PACKAGE.NAME` of another package's extension; None if there is none.

    Raises:
        ConfigError: the package cannot be imported.
    """
    return OPERATORS.get(name) or (_operator_of_package(name) if "." in name else None)


@cache
def _operator_of_package(name: str) -> Operator | None:
    extension = third_party(name.partition(".")[0])
    if extension is None or name not in extension.operations:
        return None
    operator = load_target(extension.operations[name])
    if not isinstance(operator, Operator):
        raise ConfigError.of(f"{extension.operations[name]} is no Operator", where=name)
    return operator


@contextmanager
def _naming_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except GrowthError as error:
        raise GrowthError(f"{operation}: {error}") from None
    except ArchitectureError as error:
        messages = (f"{m.message}; {m.hint}" if m.hint else m.message for m in error.problems)
        raise GrowthError(f"{operation}: {'. '.join(messages)}") from None


def _widen(
    arch: Any, value: Mapping[str, Any], options: Mapping[str, Any], step: int
) -> tuple[Any, GrowthPlan]:
    """Widen an axis; those of a transformer by the operations that account for norms, groups and
    RoPE."""
    if not isinstance(arch, TransformerShape):
        return widen(arch, value, options, step)
    axis = value["axis"]
    if axis not in _OPERATION_OF_AXIS:
        raise GrowthError(
            f"a GPT has no axis {axis!r} to widen; there are {', '.join(_OPERATION_OF_AXIS)}, and add_heads, "
            "split_kv_heads, insert_layers for the others"
        )
    return plan(arch, Operation(_OPERATION_OF_AXIS[axis], value["size"], options), step=step)


def _set_dropout(
    arch: Architecture, value: float, _options: Mapping[str, Any], _step: int
) -> tuple[Architecture, GrowthPlan]:
    """Set the dropout probability; no tensor changes, and without dropout, as in evaluations, nothing does."""
    if value == arch.dropout:
        raise GrowthError(f"the dropout is {value:g} already")
    changed = replace(arch, dropout=float(value))
    return changed, GrowthPlan({name: Grown(name) for name in arch.parameters()}, "exact")


def _change_dropout(
    arch: Architecture, value: Any, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    dropout = arch.dropout * values.without_x(value)
    if not 0 < dropout < 1:
        raise GrowthError(
            f"the result would be {dropout:g}, which is not between 0 and 1; set_dropout"
        )
    return _set_dropout(arch, dropout, options, step)


_CHANGE_DEPTH = (stack_layers, insert_layers)

_KINDS: Mapping[str, type | UnionType] = {
    "transformers": TransformerShape,
    "adaptable": Adaptable,
    "gpt": Architecture,
}
_MODELS = {
    "transformers": "decoder-only transformers",
    "adaptable": "Instar's GPT and models of task causal_lm",
    "gpt": "Instar's GPT",
}

_OPERATION_OF_AXIS = {
    "mlp": "widen_mlp",
    "embed": "widen_hidden",
    "head_dim": "grow_head_dim",
    "vocab": "resize_vocab",
    "context": "extend_context",
}

_COMMON_OPTIONS: Mapping[str, Check] = {
    "lr": values.is_lr,
    "moments": values.one_of("asymmetric", "mapped", "reset"),
}
"""Options of every operation: the learning rate afterwards, and how optimizer states grow."""

_MASK: Mapping[str, Check] = {"mask": values.is_count}

_RANK: Mapping[str, Check] = {"hold": values.is_flag, "merge": values.is_flag}
_ADAPTER: Mapping[str, Check] = {
    "alpha": values.is_positive,
    "rank_stabilized": values.is_flag,
    **_RANK,
}

OPERATORS: Mapping[str, Operator] = {
    "stack_layers": Operator(
        stack_layers,
        values.is_layer_map,
        {
            "how": values.one_of("stack", "interleave", "overlap", "interpolate"),
            "drop": values.is_count,
        },
        models="all",
    ),
    "insert_layers": Operator(
        insert_layers,
        values.is_count,
        {
            "where": values.is_positions,
            "from": values.one_of("neighbour", "normal", "copy", "average"),
            **_MASK,
        },
        models="all",
    ),
    "widen_mlp": Operator(
        widen_mlp,
        values.is_size,
        {"how": values.one_of("zero", "split"), "share": values.is_share, **_MASK},
    ),
    "widen_hidden": Operator(
        widen_hidden,
        values.is_size,
        {"how": values.one_of("zero", "average", "duplicate"), **_MASK},
    ),
    "add_heads": Operator(
        add_heads, values.is_count, {"where": values.one_of("groups", "inside"), **_MASK}
    ),
    "split_kv_heads": Operator(split_kv_heads, values.is_multiple),
    "grow_head_dim": Operator(grow_head_dim, values.is_size),
    "upcycle": Operator(
        upcycle,
        values.are_experts,
        {
            "num_experts_per_tok": values.is_count,
            "router_aux_loss_coef": values.is_not_negative,
            "noise": values.is_positive,
        },
    ),
    "resize_vocab": Operator(resize_vocab, values.is_vocabulary),
    "extend_context": Operator(
        extend_context, values.is_size, {"rope": values.one_of("linear", "dynamic", "yarn")}
    ),
    "set_lora_rank": Operator(
        set_lora_rank,
        values.has(target=values.is_text, rank=values.is_rank),
        _ADAPTER,
        models="adaptable",
    ),
    "change_lora_rank": Operator(
        change_lora_rank,
        values.has(target=values.is_text, factor=values.is_factor),
        _RANK,
        models="adaptable",
    ),
    "set_lora_alpha": Operator(
        set_lora_alpha,
        values.has(target=values.is_text, alpha=values.is_positive),
        models="adaptable",
    ),
    "change_lora_alpha": Operator(
        change_lora_alpha,
        values.either(values.is_factor, values.has(target=values.is_text, factor=values.is_factor)),
        models="adaptable",
    ),
    "merge_lora": Operator(merge_lora, values.is_text_or_nothing, models="adaptable"),
    "untie_embeddings": Operator(untie_embeddings, values.is_true),
    "loop_layers": Operator(
        loop_layers,
        values.has(**{"from": values.is_index, "to": values.is_index, "times": values.is_multiple}),
        models="gpt",
    ),
    "unloop": Operator(unloop, values.is_true, models="gpt"),
    "set_dropout": Operator(_set_dropout, values.is_probability, models="gpt"),
    "change_dropout": Operator(_change_dropout, values.is_factor, models="gpt"),
    "set_window": Operator(set_window, is_window, models="gpt"),
    "change_window": Operator(change_window, values.is_factor, models="gpt"),
    "widen": Operator(
        _widen,
        values.has(axis=values.is_text, size=values.is_size),
        {"how": values.is_text, "share": values.is_share, **_MASK},
        models="all",
    ),
    "fold_masks": Operator(fold_masks, values.is_nothing, models="gpt"),
}
