"""A fleet of one run config, its matrix given on the command line: `--matrix data.fold=0-4`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instar.config.document import Document, parse, parse_option, read_document
from instar.config.errors import ConfigError
from instar.extensions.fleet.placement import numbers_in
from instar.extensions.fleet.plan import LoadedFleet, load_fleet, load_fleet_document
from instar.extensions.fleet.spec import FleetSpec

OPTION = "--matrix"
_JOB = "train"
_OF_FLEETS = ("jobs", "services", "matrix", "search")
"""keys that a fleet file has, and a run config has not"""
_SPANS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def load_fleet_or_run(
    file: str, dimensions: Sequence[str], overrides: Sequence[str] = ()
) -> LoadedFleet:
    """Read a fleet file or, with dimensions of a matrix, a run config, which each instance trains with other values.

    Args:
        dimensions: such as "data.fold=0-4" or "optimizer.lr=1e-3,3e-3".
        overrides: `--set` texts: of the fleet, such as "max_parallel=2", or else of the run config.

    Raises:
        ConfigError: with all problems.
    """
    if not dimensions:
        return load_fleet(file, overrides)
    document, problems = read_document(file, "`instar init gpt` writes a config")
    if problems or document is None or not isinstance(document.data, dict):
        raise ConfigError(*problems) if problems else _error(f"{file} is no run config", "")
    if keys := [key for key in _OF_FLEETS if key in document.data]:
        hint = f"change its own, e.g. --set 'matrix={{seed: [1, 2]}}', or leave {OPTION} out"
        raise _error(f"{file} is a fleet file (it has {keys[0]})", hint)
    matrix = dict(_dimension(text) for text in dimensions)
    if len(matrix) < len(dimensions):
        raise _error("a key has two lists of values", "write them into one, e.g. seed=1,2")
    of_fleet = [text for text in overrides if _is_of_fleet(text)]
    values = dict(_value(text) for text in overrides if text not in of_fleet)
    data = {
        "name": str(document.data.get("name") or Path(file).stem),
        "matrix": matrix,
        "jobs": {_JOB: {"run": file, "set": values}},
    }
    return load_fleet_document(_as_document(data), of_fleet)


def _is_of_fleet(text: str) -> bool:
    return text.partition("=")[0].strip().partition(".")[0] in FleetSpec.model_fields


def _dimension(text: str) -> tuple[str, list[Any]]:
    """Return a key of the run config, and the values that instances have."""
    key, equals, values = (part.strip() for part in text.partition("="))
    if not key or not equals or not values:
        raise _error(f"expects KEY=VALUES, not {text!r}", "e.g. data.fold=0-4 or seed=1,2,3")
    if "-" in values and _SPANS.fullmatch(values):
        return key, numbers_in(values, OPTION)
    document, problems = parse(
        f"[{values.removeprefix('[').removesuffix(']')}]", f"{OPTION} {text}"
    )
    if document is None or problems:
        raise ConfigError(*problems)
    return key, document.data


def _value(text: str) -> tuple[str, Any]:
    """Return the dotted key and the value of a `--set` text."""
    document, problems = parse_option(text)
    if document is None or problems:
        raise ConfigError(*problems)
    key = text.partition("=")[0].strip()
    value = document.data
    for name in key.split("."):
        value = value[name]
    return key, value


def _as_document(data: Any) -> Document:
    document, _ = parse(json.dumps(data), OPTION)
    assert document is not None
    return document


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError.of(message, where=OPTION, hint=hint)
