"""Root config classes: the sections of a config, by its task.

Roots of built-in tasks are named here without importing torch. A custom task, `module:class`,
defines its `model` and `data` sections itself, so its module is imported. To only read a config,
which may belong to another user, use `plain_root_of`, which imports no user code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field, create_model

from instar.config.errors import ConfigError
from instar.config.schema import Direction, RunConfig, SamplesConfig
from instar.config.sections import PlainSection, Section
from instar.config.suggestions import nearest
from instar.config.user_code import load_named

LANGUAGE = "language"
ROOTS: Mapping[str, str] = {
    LANGUAGE: "instar.config.language:LanguageConfig",
    "graph": "instar.config.graph:GraphConfig",
}


class CustomTaskConfig(RunConfig):
    """A whole run of a task of the user's own."""

    @property
    def metrics(self) -> dict[str, Direction]:
        return {"loss": "min", **getattr(custom_task_class(self.task), "better", {})}


class PlainSamplesConfig(SamplesConfig, PlainSection):
    """The `data` section of a task whose class is not imported."""


class PlainConfig(RunConfig):
    """A whole run of a task whose class is not imported."""

    model: PlainSection = Field(default_factory=PlainSection, description="the model's shape")
    data: PlainSamplesConfig = Field(
        default_factory=PlainSamplesConfig, description="samples and their order"
    )

    @property
    def metrics(self) -> dict[str, Direction]:
        """`loss` and the metrics that the config requests; only the class knows all of them."""
        required = [
            self.learning_rate.plateau.metric,
            *(rule.metric for rule in self.early_stopping.rules),
            *self.checkpoint.best_of,
        ]
        return {"loss": "min", **dict.fromkeys(required, "min")}


def plain_root_of(task: str) -> type[RunConfig]:
    """Return the same as `root_of`, without importing a task `module:class`.

    Raises:
        ConfigError: there is no such task.
    """
    return PlainConfig if ":" in task else root_of(task)


@cache
def root_of(task: str) -> type[RunConfig]:
    """Return the config class of a task.

    Raises:
        ConfigError: the task does not exist, or is not a valid task class; says why.
    """
    if task in ROOTS:
        module, _, name = ROOTS[task].partition(":")
        root: type[RunConfig] = getattr(importlib.import_module(module), name)
        return root
    if ":" not in task:
        meant = nearest(task, ROOTS)
        hint = f"did you mean '{meant}'?" if meant else "or name your own as module:class"
        raise _wrong(f"unknown task '{task}'; known are {', '.join(ROOTS)}", hint)
    task_class = custom_task_class(task)
    model, data = getattr(task_class, "Model", Section), getattr(task_class, "Data", SamplesConfig)
    for name, section, base in (("Model", model, Section), ("Data", data, SamplesConfig)):
        if not (isinstance(section, type) and issubclass(section, base)):
            raise _wrong(f"{task}: {name} must be a subclass of {base.__module__}.{base.__name__}")
    fields: Mapping[str, Any] = {
        "task": (str, Field(task, description="what is trained")),
        "model": (model, Field(default_factory=model, description="the model's shape")),
        "data": (data, Field(default_factory=data, description="samples and their order")),
    }
    made: type[RunConfig] = create_model("CustomTaskConfig", __base__=CustomTaskConfig, **fields)
    return made


def custom_task_class(task: str) -> type[Any]:
    """Import a user's class from `module:class`.

    Raises:
        ConfigError: it cannot be imported, or is not a class.
    """
    found = load_named(task, key="task")
    if not isinstance(found, type):
        raise _wrong(f"{task} is not a class")
    return found


def _wrong(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="task", hint=hint, key="task")
