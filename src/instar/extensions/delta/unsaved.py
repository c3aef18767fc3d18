"""Which deltas of a run's latest checkpoint were never saved."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from instar.checkpoint.listing import pointer_target
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.checkpoint.store import LATEST
from instar.config.errors import ConfigError
from instar.extensions.delta.config import delta_config
from instar.extensions.delta.format.folder import missing_steps
from instar.record.rundir import RunDir
from instar.run.resume import began_with
from instar.schedule.operations import effective, history_from_json


def unsaved_deltas(root: Path, last: int) -> tuple[tuple[int, int], str] | None:
    """Return the steps up to a run's latest checkpoint whose deltas were due and are not in its chain,
    and the checkpoint's name; None: there are none, or the folder is no run's.

    Args:
        last: step of the chain's last state.
    """
    path = pointer_target(root, LATEST)
    if path is None:
        return None
    with suppress(CheckpointError, ConfigError, LookupError, TypeError, ValueError):
        manifest = read_manifest(path)
        config, _ = effective(
            began_with(RunDir(root), manifest), history_from_json(manifest.history)
        )
        every = delta_config(config).every
        missing = None if every is None else missing_steps(last, manifest.step + 1, every)
        return None if missing is None else (missing, path.name)
    return None
