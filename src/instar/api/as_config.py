"""Configs as Python has them: paths, dictionaries, config objects and classes become what the command line takes."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TypeAlias

from pydantic import BaseModel

from instar.config.document import SCHEMA_KEY
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.origins import in_yaml
from instar.config.user_code.definitions import code_name


class Dataclass(Protocol):
    """An object of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Config: TypeAlias = (
    str
    | os.PathLike[str]
    | Mapping[str, Any]
    | BaseModel
    | Dataclass
    | Loaded
    | Namespace
    | SimpleNamespace
    | None
)
"""path of a config file, or its content: sections and keys, as dictionaries, dataclasses, pydantic models or
namespaces; None: the default config"""
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""texts such as "train.until=100it", as after `--set`, or values by key"""


def as_arguments(config: Config, overrides: Overrides = ()) -> tuple[str | None, list[str]]:
    """Return a config's path, if it has one, and what lies over it: its content is given as `--set` is.

    Raises:
        ConfigError: the overrides are one text, or the content is not what YAML can hold.
    """
    if isinstance(overrides, str):
        raise ConfigError.of(
            "overrides must be a list", where="instar", hint=f'write ["{overrides}"]'
        )
    texts = _texts(overrides) if isinstance(overrides, Mapping) else list(overrides)
    if config is None or isinstance(config, str | os.PathLike):
        return None if config is None else os.fspath(config), texts
    content = config.data if isinstance(config, Loaded) else plain_data(config, "")
    if not isinstance(content, Mapping):
        raise ConfigError.of(
            f"a config is a path, or keys with their values, not a {type(config).__name__}",
            where="instar",
        )
    return None, [*_texts(content), *texts]


def _texts(content: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={in_yaml(plain_data(value, str(key)))}"
        for key, value in content.items()
        if key != SCHEMA_KEY
    ]


def plain_data(value: Any, key: str) -> Any:
    """Return a value as numbers, texts, lists and dictionaries; of a class or function, its name.

    Args:
        key: dotted, for errors.

    Raises:
        ConfigError: it is none that YAML can hold, such as a tensor.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain_data(value.value, key)
    if isinstance(value, Real):  # also NumPy's
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return code_name(value)
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in value.model_fields_set}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {
            str(name): plain_data(item, f"{key}.{name}".strip(".")) for name, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_data(item, f"{key}[{index}]") for index, item in enumerate(value)]
    raise ConfigError.of(
        f"the config is not made of plain data: {key} is a {type(value).__name__}",
        where="instar",
        hint="write numbers, texts, lists and dictionaries",
    )
