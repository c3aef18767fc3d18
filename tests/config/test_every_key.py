"""Every key and section of every task's config set to null, {}, its default and a wrong
type: the value is applied, gives the default, or is refused by name. Nothing is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.fields import (
    choices,
    default,
    known_tasks,
    root_of,
    schema_keys,
    section_types,
    values,
)
from instar.config.load import Loaded, load_config
from instar.config.origins import SET, in_yaml, lines_of, yaml_of
from instar.config.schema import RunConfig

OWN = """
from instar.custom import CustomTask, SamplesConfig, Section

class Task(CustomTask):
    class Model(Section):
        width: int = 8
    class Data(SamplesConfig):
        noise: float = 0.5
"""
OTHER: Mapping[str, Any] = {
    "preset": ["plain"],
    "device": "cpu",
    "schedule": [{"name": "change_lr", "value": 2}],
    "train.until": ["7it"],
    "optimizer.options": {"amsgrad": True},
    "learning_rate.options": {"step_size": 3},
    "record.alerts.webhook": "https://example.org/",
    "early_stopping.rules": [{"patience": 2}],
    "model.heads": [{"name": "y", "kind": "regression"}],
    "data.mixture": [{"source": "stdlib"}],
    "eval.sets": [{"name": "other", "source": "stdlib"}],
}
"""Values that differ from the default, where the type alone does not tell one."""


@pytest.fixture(scope="module", params=[*known_tasks(), "task.py:Task"])
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> type[RunConfig]:
    """The config class of each task, also of one of a user's own."""
    if request.param in known_tasks():
        return root_of(request.param)
    path = tmp_path_factory.mktemp("own") / "every_key_task.py"
    path.write_text(OWN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        return root_of(f"{path.stem}:Task")


def other(root: type[RunConfig], key: str) -> Any:
    """A valid value of a key that is not its default."""
    if key in OTHER:
        return OTHER[key]
    usual = default(schema_keys(root)[key])
    for node in choices(root, tuple(key.split("."))):
        low = node.get("minimum", node.get("exclusiveMinimum", 0))
        item = node.get("items", {})
        candidates: dict[str | None, list[Any]] = {
            "boolean": [True, False],
            "integer": [max(1, low + 1), max(1, low + 2)],
            "number": [max(low, 0) + 0.25, max(low, 0) + 0.5],
            "string": ["other"],
            "array": [item.get("enum", [1 if item.get("type") == "integer" else "other"])[-1:]],
            "object": [{}],
        }
        for value in node.get("enum", candidates.get(node.get("type"), [])):
            if value != usual:
                return value
    raise AssertionError(f"{key} needs a value in OTHER")


def loaded(root: type[RunConfig], path: Path | None, *overrides: str) -> Loaded:
    named = [task for task in known_tasks() if root_of(task) is root]
    task = named[0] if named else root.model_fields["task"].default
    return load_config(path and str(path), [f"task={task}", *overrides], checks=())


def outcome(root: type[RunConfig], override: str) -> Loaded | list[ConfigProblem]:
    try:
        return loaded(root, None, override)
    except ConfigError as error:
        return list(error.problems)


def origin_in_run_yaml(config: Loaded, key: str) -> str:
    """The origin that run.yaml shows of a key; a list of mappings has it on its first line."""
    name = f"{'  ' * key.count('.')}{key.rpartition('.')[2]}:"
    lines = lines_of(config.to_yaml())
    return next(
        (
            line.origin
            for line in lines
            if line.key == key and not line.text.lstrip().startswith("-")
        ),
        next((line.origin for line in lines if line.text == name), ""),
    )


def holds(applied: Any, value: Any) -> bool:
    """Whether a value is another, with more keys in its mappings at most."""
    if isinstance(applied, dict) and isinstance(value, dict):
        return all(holds(applied.get(key), inner) for key, inner in value.items())
    if isinstance(applied, list) and isinstance(value, list):
        return len(applied) == len(value) and all(map(holds, applied, value))
    return bool(applied == value)


def wrong(root: type[RunConfig], key: str) -> Any:
    """A value of a type that the key does not take."""
    kinds = {node.get("type") for node in choices(root, tuple(key.split(".")))}
    return True if kinds & {"array", "object"} else [["no", "list"]]


def test_a_key_is_applied_or_refused_whatever_it_is_set_to(root: type[RunConfig]) -> None:
    for key, field in schema_keys(root).items():
        if key == "task":
            continue
        usual, kinds = default(field), {n.get("type") for n in choices(root, tuple(key.split(".")))}
        usual_is_valid = not field.is_required()
        tries = [
            (None, "null" in kinds),
            ({}, "object" in kinds),
            (usual, usual_is_valid),
            (other(root, key), True),
            (wrong(root, key), False),
        ]
        for value, valid in tries:
            config = outcome(root, f"{key}={in_yaml(value)}")
            if isinstance(config, list):
                named = {problem.key for problem in config}
                assert named == {key} or key == "preset", (key, value)  # whose keys are a GPT's
                assert not valid or (value and key in ("sizes", "preset")), (key, value)
                continue
            assert valid, (key, value)
            applied = values(config.config)[key]
            assert holds(applied, value), (key, value)
            assert config.origins[key] == origin_in_run_yaml(config, key) == SET


@parametrize_first("empty", ["null", "{}", ""], first=1)
def test_an_emptied_section_has_its_defaults_whatever_the_file_says(
    root: type[RunConfig], empty: str, tmp_path: Path
) -> None:
    path = tmp_path / "all.yaml"
    given = {
        key: other(root, key) for key in schema_keys(root) if key not in ("task", "preset", "sizes")
    }
    path.write_text(yaml_of(given), encoding="utf-8")
    before = values(loaded(root, path).config)
    assert all(holds(before[key], value) for key, value in given.items())
    for section in filter(None, section_types(root)):
        config = loaded(root, path, f"{section}={empty}")
        for key, value in values(config.config).items():
            if key.startswith(f"{section}."):
                assert value == default(schema_keys(root)[key]), (section, key)
                assert origin_in_run_yaml(config, key) == SET
            else:
                assert value == before[key], (section, key)


def test_a_section_given_anything_else_is_refused_by_name(root: type[RunConfig]) -> None:
    for section in filter(None, section_types(root)):
        for value in ("3", "word", "[1]", "true"):
            with pytest.raises(ConfigError, match=f"{section} is a section of 'key: value' lines"):
                loaded(root, None, f"{section}={value}")


def test_braces_empty_a_section_also_over_a_preset_and_a_section_without_lines_does_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("preset: plain\noptimizer: {}\nlearning_rate:\n", encoding="utf-8")
    config = load_config(str(path))
    assert config.config.optimizer.lr == 1e-3
    assert config.origins["optimizer.lr"] == f"{path}:2:1"
    assert config.origins["learning_rate.shape"] == "preset plain"
    assert (
        load_config(str(path), ["preset=plain", "learning_rate={}"]).origins["learning_rate.shape"]
        == SET
    )
    set_again = load_config(str(path), ["optimizer=null", "optimizer.lr=3e-4"])
    assert (set_again.config.optimizer.lr, set_again.config.optimizer.beta2) == (3e-4, 0.95)


def test_a_key_inside_a_section_that_may_be_left_out_keeps_those_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "record: {trackers: {wandb: {project: mine, mode: online}}}\n", encoding="utf-8"
    )

    def wandb(*overrides: str) -> Any:
        return load_config(str(path), overrides).config.record.trackers.wandb

    inside = wandb("record.trackers.wandb.mode=offline")
    assert (inside.project, inside.mode) == ("mine", "offline")
    assert wandb("record.trackers.wandb={tags: [a]}").project == "mine"
    assert wandb("record.trackers.wandb={}").project == "instar"
    assert wandb("record.trackers.wandb=null") is None
    assert wandb("record.trackers=null") is None
