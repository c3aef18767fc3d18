"""Loads the config of a run, with what comes with its starting weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instar.config.load import Brought, Loaded
from instar.record.rundir import RunDir
from instar.schedule.checks import load_checked


def load_run_config(
    path: str | None,
    overrides: Sequence[str] = (),
    *,
    import_task: bool = True,
    resuming: bool = False,
) -> Loaded:
    """Load and check a config; the keys that come with `model.from` are filled in.

    Args:
        import_task: see `config.load.load`.
        resuming: the run has weights already, so those that it started from are not looked for.

    Raises:
        ConfigError: with all problems.
    """
    file = Path(path or "")
    is_of_run = file == RunDir(file.parent).config and RunDir(file.parent).holds_parts()
    brings = _completed_values if resuming else _values_with_weights
    weights = None if is_of_run else brings
    return load_checked(path, overrides, import_task=import_task, weights=weights)


def _completed_values(config_values: Mapping[str, Any]) -> Brought:
    from instar.run.init_weights import completed_values  # as below

    return completed_values(config_values)


def _values_with_weights(config_values: Mapping[str, Any]) -> Brought:
    # takes a while, and few runs need it
    from instar.run.init_weights import values_with_weights

    return values_with_weights(config_values)
