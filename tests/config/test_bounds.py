"""Every number in a config has a largest value, told as any other mistake is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from instar.config.budget import parse_budget
from instar.config.errors import ConfigError
from instar.config.fields import choices, json_schema, known_tasks, root_of, schema_keys
from instar.config.load import load_config
from instar.config.sections import LARGEST

BEYOND = 10**15
"""more than any bound but that of the seed"""


def numbers(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number that a JSON Schema describes."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from numbers(item, f"{path}[{index}]")
    elif isinstance(node, dict):
        if node.get("type") in ("integer", "number") and "enum" not in node:
            yield path, node
        for name, inner in node.items():
            if name != "default":
                yield from numbers(inner, f"{path}.{name}")


@pytest.mark.parametrize("task", known_tasks())
def test_every_number_has_both_bounds(task: str) -> None:
    nodes = dict(numbers(json_schema(root_of(task))))
    assert len(nodes) > 60
    missing = [
        path
        for path, node in nodes.items()
        if not ({"maximum", "exclusiveMaximum"} & node.keys())
        or not ({"minimum", "exclusiveMinimum"} & node.keys())
    ]
    assert missing == []


def numeric_keys() -> list[tuple[str, str]]:
    keys = []
    for task in known_tasks():
        root = root_of(task)
        for key in schema_keys(root):
            kinds = [choice.get("type") for choice in choices(root, tuple(key.split(".")))]
            if {"integer", "number"} & set(kinds) and key not in ("seed", "data.seed"):
                keys.append((task, key))
    return keys


@pytest.mark.parametrize(("task", "key"), numeric_keys())
def test_a_number_beyond_its_bound_is_a_mistake_that_names_key_and_bound(
    task: str, key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"task={task}", f"{key}={BEYOND}"])
    (problem,) = (candidate for candidate in error.value.problems if candidate.key == key)
    assert str(BEYOND) in problem.message
    assert "at most" in problem.message or "less than" in problem.message


@pytest.mark.parametrize(
    "override",
    [
        "model.n_layer=1000000",
        "data.workers=1000000",
        "record.sample_tokens=2147483648",
        "early_stopping.rules=[{patience: 1000000000000000}]",
        "schedule=[{name: change_lr, value: 2, max_wait_iters: 1000000000000000}]",
        "schedule=[{name: change_lr, value: 2, when: {at_step: 1000000000000000}}]",
        "data.mixture=[{source: stdlib, weight: 1.0e300}]",
    ],
)
def test_what_no_machine_can_do_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert "at most" in str(error.value)


@pytest.mark.parametrize("text", ["1e999999999it", "1e300s", "9" * 400 + "tok", "loss<1e40"])
def test_budgets_are_bounded_too(text: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        parse_budget(text)


def test_the_largest_number_is_accepted() -> None:
    assert load_config(None, [f"eval.eval_interval={LARGEST}"]).config.eval.eval_interval == LARGEST
