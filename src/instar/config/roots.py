"""Which config a task has: the root of its sections.

A task of Instar's own names its root here, without importing torch. A user's own, `module:class`,
says what its `model` and `data` sections hold, and its module is imported for that.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field, create_model

from instar.config.errors import ConfigError
from instar.config.explain import nearest
from instar.config.named import load_named
from instar.config.samples import SamplesConfig
from instar.config.schema import Direction, RunConfig
from instar.config.section import Section

LANGUAGE = "language"
ROOTS: Mapping[str, str] = {
    LANGUAGE: "instar.config.language:LanguageConfig",
    "graph": "instar.config.graph:GraphConfig",
}


class OwnConfig(RunConfig):
    """A whole run of a task of the user's own."""

    @property
    def metrics(self) -> dict[str, Direction]:
        return {"loss": "min", **getattr(own_task(self.task), "better", {})}


@cache
def root_of(task: str) -> type[RunConfig]:
    """The config of runs of this task.

    Raises:
        ConfigError: there is no such task, or it is not one; says why.
    """
    if task in ROOTS:
        module, _, name = ROOTS[task].partition(":")
        root: type[RunConfig] = getattr(importlib.import_module(module), name)
        return root
    if ":" not in task:
        meant = nearest(task, ROOTS)
        hint = f"did you mean '{meant}'?" if meant else "or name your own as module:class"
        raise _wrong(f"there is no task '{task}'; there are {', '.join(ROOTS)}", hint)
    own = own_task(task)
    model, data = getattr(own, "Model", Section), getattr(own, "Data", SamplesConfig)
    for name, section, base in (("Model", model, Section), ("Data", data, SamplesConfig)):
        if not (isinstance(section, type) and issubclass(section, base)):
            raise _wrong(f"{task}: {name} must be a subclass of {base.__module__}.{base.__name__}")
    fields: Mapping[str, Any] = {
        "task": (str, Field(task, description="what is trained")),
        "model": (model, Field(default_factory=model, description="the model's shape")),
        "data": (data, Field(default_factory=data, description="samples and their order")),
    }
    made: type[RunConfig] = create_model("OwnConfig", __base__=OwnConfig, **fields)
    return made


def own_task(task: str) -> type[Any]:
    """A user's class, from `module:class`.

    Raises:
        ConfigError: it cannot be imported, or is no class.
    """
    found = load_named(task, key="task")
    if not isinstance(found, type):
        raise _wrong(f"{task} is no class")
    return found


def _wrong(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="task", hint=hint, key="task")
