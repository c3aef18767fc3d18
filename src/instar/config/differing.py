"""In which keys configs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instar.config.fields import keys, value_of
from instar.config.schema import RunConfig


def values(config: RunConfig) -> dict[str, Any]:
    """Every key of a config and its value, defaults included, as plain data."""
    return {key: value_of(config, key) for key in keys(type(config))}


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The keys that are not alike in all, with the value of each; None where there is no such key."""
    every = {key: None for config in configs for key in config}
    found = {key: tuple(config.get(key) for config in configs) for key in every}
    return {key: each for key, each in found.items() if any(one != each[0] for one in each)}
