"""The config of a run from its `run.yaml`: line by line, and as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instar.config.errors import ConfigError
from instar.config.written import DERIVED, Line, lines_of
from instar.record.rundir import RunDir

MAX_BYTES = 1 << 20
"""as of any config"""


def config_lines(run: RunDir) -> list[Line]:
    """The lines of a run's config; none where it cannot be read."""
    try:
        with run.config.open("rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return lines_of(text)


def derived_keys(configs: Sequence[Sequence[Line]]) -> set[str]:
    """The keys whose values follow from others: derived in some of the configs, and nowhere given."""
    every = [line for lines in configs for line in lines if line.key]
    derived = {line.key for line in every if line.origin == DERIVED}
    return derived - {line.key for line in every if line.origin != DERIVED}


def config_values(runs: Sequence[RunDir]) -> tuple[list[dict[str, Any]], list[str]]:
    """Keys and values of each run, defaults included, without the derived keys; and what is wrong
    with configs: a run whose config cannot be read has none. No data or machine is looked at.
    """
    from instar.config.fields import values
    from instar.config.load import load

    derived = derived_keys([config_lines(run) for run in runs])
    found, faults = list[dict[str, Any]](), list[str]()
    for run in runs:
        try:
            every = values(load(str(run.config), checks=()).config)
            found.append({key: value for key, value in every.items() if key not in derived})
        except ConfigError as error:
            found.append({})
            faults.append(f"{run.config}: {error.problems[0].message}")
    return found, faults
