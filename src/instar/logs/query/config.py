"""The config of a run, as lines and as values: its `run.yaml`, and the overrides of its resumes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.config.errors import ConfigError
from instar.config.fields import values, with_values
from instar.config.files import check_regular, open_regular
from instar.config.load import load_config
from instar.config.origins import (
    DERIVED,
    ConfigLine,
    in_yaml,
    lines_of,
    redacted_lines,
    redacted_value,
)
from instar.record.imported import imported_start
from instar.record.rundir import RunDir

MAX_BYTES = 1 << 20
"""maximum size of a config file"""


def config_lines(run: RunDir) -> list[ConfigLine]:
    """Return the lines of the config in force at a run's latest checkpoint, secrets redacted; empty
    if run.yaml cannot be read."""
    try:
        with open_regular(run.config) as file:
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        values = _imported_values(run)
        lines = [ConfigLine(f"{k}: {in_yaml(v)}", "", k, in_yaml(v)) for k, v in values.items()]
        return redacted_lines(lines)
    changes = set_at_resumes(run)
    lines = [
        _changed_line(line, *changes[line.key])
        if line.key in changes and not line.text.lstrip().startswith("- ")
        else line
        for line in lines_of(text)
    ]
    return redacted_lines(lines)


def _imported_values(run: RunDir) -> dict[str, Any]:
    """Return the config that another tool recorded of an imported run; empty if there is none."""
    start = imported_start(run)
    return dict(start.imported_config or {}) if start else {}


def _changed_line(line: ConfigLine, value: Any, step: int) -> ConfigLine:
    text = in_yaml(value)
    name = line.text.partition(":")[0]
    return replace(line, text=f"{name}: {text}", value=text, origin=f"set at step {step}")


def set_at_resumes(run: RunDir) -> dict[str, tuple[Any, int]]:
    """Return the keys that resumes have set: value at the latest checkpoint, and step of the change."""
    changes: dict[str, tuple[Any, int]] = {}
    try:
        path = run.latest_checkpoint()
        entries = read_manifest(path).history if path else []
    except (CheckpointError, OSError, ValueError):
        return changes
    if not entries:
        return changes
    # brings all of growth, and most runs that are compared have no history
    from instar.schedule.operations import OVERRIDE, history_from_json

    with suppress(TypeError, ValueError):  # an edited manifest
        for change in history_from_json(entries):
            if change.operation.name == OVERRIDE:
                values = dict(change.operation.value)
                changes |= {key: (value, change.step) for key, value in values.items()}
    return changes


def derived_keys(configs: Sequence[Sequence[ConfigLine]]) -> set[str]:
    """Return the keys whose values follow from others: derived in some configs, given in none."""
    every = [line for lines in configs for line in lines if line.key]
    keys = {line.key for line in every if line.origin == DERIVED}
    return keys - {line.key for line in every if line.origin != DERIVED}


def config_values(runs: Sequence[RunDir]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return keys and values of each run, defaults included and derived keys excluded, and faults.

    A run whose config cannot be read has no keys, and an imported one has those of its tool if all are
    imported. Data and machine are not checked.
    """
    imported_runs = {run for run in runs if imported_start(run) is not None}
    if len(imported_runs) == len(runs):
        return [redacted_value("", _imported_values(run)) for run in runs], []
    keys_left_out = derived_keys([config_lines(run) for run in runs])
    configs, faults = list[dict[str, Any]](), list[str]()
    for run in runs:
        if run in imported_runs:
            configs.append({})
            continue
        try:
            check_regular(run.config)
            loaded_config = load_config(str(run.config), checks=(), import_task=False)
            config = loaded_config.config
            if new_values := {key: value for key, (value, _) in set_at_resumes(run).items()}:
                with suppress(ValueError):  # a key of a task that is not imported
                    config = with_values(config, new_values)
            every = values(config)
            configs.append(
                {
                    k: redacted_value(k, value)
                    for k, value in every.items()
                    if k not in keys_left_out
                }
            )
        except ConfigError as error:
            configs.append({})
            faults.append(f"{run.config}: {error.problems[0].message}")
        except OSError as error:
            configs.append({})
            faults.append(f"{run.config}: {error.strerror}")
    return configs, faults
