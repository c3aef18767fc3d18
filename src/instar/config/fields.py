"""The config classes of tasks, and their schema as a table: sections, keys, allowed values, and
when they may change.

The config class (`root`) of a built-in task is named here and knows no torch. A custom task,
`module:class`, defines its `model` and `data` sections itself, so its module is imported. To only
read a config, which may belong to another user, use `plain_root_of`, which imports no user code.

A dotted key such as `model.n_head` names a value; the parts before the last dot name sections.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from instar.config.document import KeyPath
from instar.config.errors import ConfigError, nearest_hint
from instar.config.schema import Direction, FeedConfig, RunConfig, SamplesConfig, extend_section
from instar.config.sections import (
    CurveSection,
    NoiseTrigger,
    PlainSection,
    PlateauTrigger,
    ScheduledOperation,
    Section,
    SlopeTrigger,
    When,
    subsection,
    with_from,
)
from instar.config.user_code.named import load_named
from instar.extensions import (
    entry_points,
    find_task,
    how_to_install,
    load_target,
    tasks,
    third_party,
)

FORMER = frozenset({"compile_ahead"})
"""Keys of earlier versions without any effect: configs that have them still load."""

Root = type[BaseModel]
"""The model of a whole file: of a run's config, or of another one."""
C = TypeVar("C", bound=RunConfig)

LANGUAGE = "language"
CAUSAL_LM = "causal_lm"
_CORE_TASKS: Mapping[str, str] = {
    LANGUAGE: "instar.config.language:LanguageConfig",
    CAUSAL_LM: "instar.config.language:CausalLMConfig",
}


def known_tasks() -> dict[str, str]:
    """Return the tasks that a config may name, with the targets of their config classes."""
    return {**_CORE_TASKS, **{name: task.config for name, task in tasks().items()}}


class CustomTaskConfig(RunConfig):
    """A whole run of a task of the user's own."""

    @property
    def metrics(self) -> dict[str, Direction]:
        return {"loss": "min", **getattr(custom_task_class(self.task), "better", {})}


class PlainFeedConfig(FeedConfig, PlainSection):
    """The `data` section of a package's task, which is not imported."""


class PlainSamplesConfig(SamplesConfig, PlainFeedConfig):
    """The `data` section of a task whose class is not imported."""


class PlainRunConfig(RunConfig):
    """A whole run of a task of a package, which is not imported."""

    model: PlainSection = subsection(PlainSection, "the model's shape")
    data: PlainFeedConfig = subsection(PlainFeedConfig, "samples and their order")

    @property
    def metrics(self) -> dict[str, Direction]:
        """`loss` and the metrics that the config requests; only the class knows all of them."""
        return {"loss": "min", **dict.fromkeys(self.requested_metrics.values(), "min")}


class PlainConfig(PlainRunConfig):
    """A whole run of a task whose class is not imported."""

    data: PlainSamplesConfig = subsection(PlainSamplesConfig, "samples and their order")


def plain_root_of(task: str) -> type[RunConfig]:
    """Return the same as `root_of`, without importing a task `module:class`.

    Raises:
        ConfigError: there is no such task.
    """
    if ":" in task:
        return PlainConfig
    is_of_package = task not in known_tasks() and task in entry_points()
    return PlainRunConfig if is_of_package else root_of(task)


def task_config_class(task: str, names: Iterable[str], *, plain: bool = False) -> type[RunConfig]:
    """Return the config class of a task with the sections of other packages' extensions that a config names.

    Args:
        names: keys or sections of the config.
        plain: import neither a task `module:class` nor a package: their sections are plain data.

    Raises:
        ConfigError: there is no such task, it is not valid, or a package cannot be imported; says why.
    """
    root = plain_root_of(task) if plain else root_of(task)
    unknown = {name.partition(".")[0] for name in names} - root.model_fields.keys() - FORMER
    extension_sections = sorted(unknown & entry_points().keys()) if unknown else ()
    return _with_packages(root, tuple(extension_sections), plain) if extension_sections else root


@cache
def _with_packages(root: type[C], names: tuple[str, ...], plain: bool) -> type[C]:
    """Return a config class with the sections of packages; of one that adds none, as it is."""
    if plain:
        return extend_section(root, dict.fromkeys(names, (PlainSection, "of another package")))
    sections_by_name = {
        name: (load_target(spec.target), spec.description)
        for name in names
        if (extension := third_party(name)) and (spec := extension.sections.get(name))
    }
    config = extend_section(root, sections_by_name)
    config.extension_names = tuple(sections_by_name)
    return config


def root_of(task: str) -> type[RunConfig]:
    """Return the config class of a task.

    Raises:
        ConfigError: the task does not exist, or is not a valid task class; says why.
    """
    task_names = known_tasks()
    target = task_names.get(task)
    if target is None and ":" not in task and (names := find_task(task)) is not None:
        target = names.config
    if target is not None:
        root: type[RunConfig] = load_target(target)
        return root
    if ":" not in task:
        if remedy := how_to_install("tasks", task):
            raise ConfigError.at("task", f"the extension of task '{task}' is not installed", remedy)
        custom_task = _own_class(task) or "or name your own as module:class"
        raise ConfigError.at(
            "task",
            f"unknown task '{task}'; known are {', '.join(task_names)}",
            nearest_hint(task, task_names, custom_task),
        )
    return _custom_root(task, custom_task_class(task))  # type: ignore[arg-type] # of a class


@cache
def _custom_root(task: str, task_class: Hashable) -> type[RunConfig]:
    """Return the config class of a user's task; a notebook may define another class by the same name."""
    model, data = getattr(task_class, "Model", Section), getattr(task_class, "Data", SamplesConfig)
    for name, section, base in (("Model", model, Section), ("Data", data, SamplesConfig)):
        if not (isinstance(section, type) and issubclass(section, base)):
            raise ConfigError.at(
                "task", f"{task}: {name} must be a subclass of {base.__module__}.{base.__name__}"
            )
    model = with_from(model)
    fields: Mapping[str, Any] = {
        "task": (str, Field(task, description="what is trained")),
        "model": (model, subsection(model, "the model's shape")),
        "data": (data, subsection(data, "samples and their order")),
    }
    config_class: type[RunConfig] = create_model(
        "CustomTaskConfig", __base__=CustomTaskConfig, **fields
    )
    return config_class


def custom_task_class(task: str) -> type[Any]:
    """Import a user's class from `module:class`.

    Raises:
        ConfigError: it cannot be imported, or is not a class.
    """
    task_class = load_named(task, key="task")
    if not isinstance(task_class, type):
        raise ConfigError.at("task", f"{task} is not a class")
    return task_class


def _own_class(task: str) -> str:
    """Return a hint for a task without a colon that names a file here, or a class in one."""
    module, _, name = task.removesuffix(".py").rpartition(".")
    if module and Path(*module.split(".")).with_suffix(".py").is_file():
        return f"write {module}:{name}"
    return f"write {name}:CLASS" if not module and Path(f"{name}.py").is_file() else ""


@cache
def section_types(root: Root) -> dict[str, type[BaseModel]]:
    """Return every section by its dotted name, in the schema's order; "" is the top level."""
    sections_by_name: dict[str, type[BaseModel]] = {"": root}
    for name, field in root.model_fields.items():
        _add_sections(sections_by_name, name, field.annotation)
    return sections_by_name


def _add_sections(sections_by_name: dict[str, type[BaseModel]], name: str, annotation: Any) -> None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        sections_by_name[name] = annotation
        for inner, field in annotation.model_fields.items():
            _add_sections(sections_by_name, f"{name}.{inner}", field.annotation)


@cache
def schema_keys(root: Root) -> dict[str, FieldInfo]:
    """Return every dotted key that holds a value, in the order of the schema."""
    every = {
        f"{section}.{name}" if section else name: field
        for section, model in section_types(root).items()
        for name, field in model.model_fields.items()
    }
    return {key: field for key, field in every.items() if key not in section_types(root)}


_SCHEDULE_SECTIONS: Mapping[KeyPath, type[BaseModel]] = {
    (): ScheduledOperation,
    ("when",): When,
    ("when", "plateau"): PlateauTrigger,
    ("when", "noise_scale"): NoiseTrigger,
    ("when", "slope_below"): SlopeTrigger,
    ("when", "slope_below", "curve"): CurveSection,
}
"""A scheduled operation and the sections within it, by their paths."""


@cache
def schedule_keys() -> dict[KeyPath, FieldInfo]:
    """Return the keys of a scheduled operation, by their paths in the first one."""
    return {
        ("schedule", 0, *path, name): field
        for path, section in _SCHEDULE_SECTIONS.items()
        for name, field in section.model_fields.items()
    }


def default(field: FieldInfo) -> Any:
    """Return a key's default as a JSON value; None for a required key."""
    if field.is_required():
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True))


def is_section(root: Root, path: KeyPath) -> bool:
    return "." not in str(path[-1]) and ".".join(map(str, path)) in section_types(root)


def flatten_config(
    root: Root, tree: Mapping[str, Any], path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value in nested data with its path, a section's own before its subsections'.

    A non-mapping in place of a section is yielded as a value.
    """
    inner = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and is_section(root, (*path, name)):
            inner.append(name)
        else:
            yield (*path, name), value
    for name in inner:
        yield from flatten_config(root, tree[name], (*path, name))


def emptied_sections(root: Root, tree: Mapping[str, Any], *, null: bool) -> Iterator[KeyPath]:
    """Yield the paths of sections that nested data gives no values: {}, or also None with `null`."""
    pending = list[tuple[KeyPath, Any]]([((), tree)])
    while pending:
        path, value = pending.pop()
        if path and (value == {} or (null and value is None)):
            yield path
        elif isinstance(value, Mapping):
            inner = (((*path, name), child) for name, child in value.items())
            pending += [(p, child) for p, child in inner if is_section(root, p)]


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Nest values by their paths; inverse of `flatten_config`."""
    tree: dict[str, Any] = {}
    for (*outer, last), value in values.items():
        inside = tree
        for name in outer:
            inside = inside.setdefault(str(name), {})
        inside[str(last)] = value
    return tree


def values(config: RunConfig) -> dict[str, Any]:
    """Return every dotted key of a config with its value, defaults included, as JSON values."""
    tree = config.model_dump(mode="json")
    return {".".join(map(str, path)): value for path, value in flatten_config(type(config), tree)}


def checkpoint_values(config: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint keeps of its run's initial config: all but `record`."""
    return {key: value for key, value in values(config).items() if not key.startswith("record.")}


def with_values(config: C, changes: Mapping[str, Any]) -> C:
    """Return the config with other values of some dotted keys.

    Raises:
        ValueError: a key does not exist or a value is invalid.
    """
    return from_values(type(config), values(config) | dict(changes))


def from_values(root: type[C], values: Mapping[str, Any]) -> C:
    """Return the config with these values of dotted keys, and defaults elsewhere.

    Raises:
        ValueError: a key does not exist or a value is invalid.
    """
    current = {key: value for key, value in values.items() if key not in FORMER}
    tree = nested({tuple(key.split(".")): value for key, value in current.items()})
    return root.model_validate_json(json.dumps(tree))


def differing_keys(configs: Sequence[Mapping[str, Any] | None]) -> dict[str, tuple[Any, ...]]:
    """Return the keys whose values differ, with the value in each mapping; None if it lacks the key.

    A mapping that is None is unknown and differs from nothing.
    """
    known_configs = [config for config in configs if config is not None]
    differences: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(key for config in known_configs for key in config):
        if any(config.get(key) != known_configs[0].get(key) for config in known_configs):
            differences[key] = tuple(None if c is None else c.get(key) for c in configs)
    return differences


# Changing a key when a run is resumed. Launch-only keys say where a run is and how one process executes it; their
# values apply to that process and are not part of the run. Fixed keys cannot change, because everything saved
# depends on them. A new value of any other key becomes an operation in the run's history, from that step on.

PLACES = ("name", "preset", "resume", "data.path", "record.run_dir", "record.out_dir")
"""Launch-only keys that say where a run is; their changes are not reported."""

LAUNCH = (
    *PLACES,
    "device",
    "tf32",
    "compile_stages",
    "data.if_changed",
    "data.strategy",
    "data.workers",
    "data.prefetch",
    "parallel.strategy",
    "parallel.world_size",
    "parallel.devices",
    "parallel.master_address",
    "parallel.master_port",
    "parallel.backend",
    "parallel.timeout_s",
    "parallel.silence_s",
)
LAUNCH_SECTIONS = ("record.", "parallel.ddp.", "parallel.fsdp.")
FIXED = (
    *("seed", "task", "reproducible", "parallel.elastic.", "model.", "data."),
    *("optimizer.name", "train.ema"),
)
FREE = ("data.drop_last",)
"""Exceptions from `FIXED`: the order of samples and the cursor do not depend on them."""
FREE_UNTRAINED = ("data.", "train.ema")
"""Fixed keys that have no effect before the first step."""
ALLOWED = {
    "architecture": ("model.",),
    "data": ("data.",),
    "tokenizer": ("data.tokenizer", "data.vocab_size"),
}
"""Fixed keys that may change if the user allows it by name."""
SPELLED = ("data.source", "data.val_source", "data.tokenizer")
"""Fixed keys that are paths: equivalent spellings (relative, absolute, symlink) are no change."""
PRIVATE = ("record.trackers.", "record.alerts.")
"""Sections that may hold URLs with secrets: never copied."""


def is_launch_only(key: str) -> bool:
    """Return whether a key configures one process and not the run."""
    return key in LAUNCH or key.startswith(LAUNCH_SECTIONS)


def is_fixed(key: str, allow: Collection[str] = (), *, untrained: bool = False) -> bool:
    """Return whether a key cannot change when a run is resumed.

    Args:
        allow: names from `ALLOWED`.
        untrained: whether the model is imported and has not been trained by any step.
    """
    fixed = key.startswith(FIXED) and key not in FREE and not is_launch_only(key)
    fixed = fixed and not (untrained and key.startswith(FREE_UNTRAINED))
    return fixed and not any(key.startswith(ALLOWED[name]) for name in allow)


@cache
def json_schema(root: Root) -> dict[str, Any]:
    """Return the JSON Schema of a config file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root.model_json_schema()}


def editor_schema(root: Root, name: str = "") -> dict[str, Any]:
    """Return `json_schema`, or that of one section or key, extended by what the loader also
    accepts: empty sections, one text for a list of texts, and a path for the schedule."""
    schema = json_schema(root)
    if not name or name in section_types(root):
        node = section_types(root)[name].model_json_schema() if name else schema
    else:
        node = schema
        for step in name.split("."):
            node = alternatives(root, node)[0]["properties"][step]
        if name == "schedule":
            names = [section.__name__ for section in _SCHEDULE_SECTIONS.values()]
            node = {**node, "$defs": {name: schema["$defs"][name] for name in names}}
    wider_schema: dict[str, Any] = _widen(node)
    return wider_schema


def _widen(node: Any) -> Any:
    if isinstance(node, list):
        return [_widen(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "array":
        operations = {"$ref": f"#/$defs/{ScheduledOperation.__name__}"}
        if node.get("items") not in ({"type": "string"}, operations):
            return node
        types = [{"type": "array", "items": node["items"]}, {"type": "string"}]
        return {"anyOf": types, **{k: v for k, v in node.items() if k not in ("type", "items")}}
    node = {name: _widen(inner) for name, inner in node.items()}
    if "$ref" in node:
        return {"anyOf": [{"$ref": node.pop("$ref")}, {"type": "null"}], **node}
    return node


def choices(root: Root, path: KeyPath) -> list[dict[str, Any]]:
    """Return the alternative JSON Schemas, without references, of the value at a path of keys and
    list indices; empty if there is no such path."""
    nodes: list[dict[str, Any]] = [json_schema(root)]
    for step in path:
        inner = (_inside(node, step) for node in nodes)
        nodes = [choice for node in inner if node for choice in alternatives(root, node)]
    return nodes


def _inside(node: Mapping[str, Any], step: str | int) -> Any:
    """Return the JSON Schema of what a key or an index leads to; None: nothing."""
    if isinstance(step, int):
        return node.get("items")
    children = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
    return node.get("properties", {}).get(step, children[0])


def alternatives(root: Root, node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON Schemas that `node` refers to or chooses from."""
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        node = json_schema(root)["$defs"][name] | node
    if "anyOf" in node:
        return [choice for option in node["anyOf"] for choice in alternatives(root, option)]
    return [node]
