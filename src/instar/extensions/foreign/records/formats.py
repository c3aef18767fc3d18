"""The formats of records that are read, and which of them a file or folder has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from instar.config.errors import ConfigError, near_path
from instar.extensions.foreign.records import (
    forgather,
    lightning,
    nanogpt,
    tensorboard,
    trackio,
    transformers,
    wandb,
)
from instar.extensions.foreign.records.files import unreadable
from instar.extensions.foreign.records.table import RecordTable


class Format(NamedTuple):
    """A format of records."""

    text: str
    """what is named to read one"""
    find: Callable[[Path], Sequence[Path]]
    """the records at a path, as their contents say; empty: there are none of this format"""
    read: Callable[[Path], Iterator[RecordTable]]
    """reads the runs of a record"""


FORMATS = {
    "transformers": Format(
        "trainer_state.json of transformers, a checkpoint's folder or an output folder",
        transformers.find_states,
        transformers.read_state,
    ),
    "lightning": Format(
        "metrics.csv of Lightning's CSVLogger, or its folder version_N",
        lightning.find_tables,
        lightning.read_table,
    ),
    "tensorboard": Format(
        "an event file of TensorBoard, a folder of them, or a folder of such folders",
        tensorboard.find_event_logs,
        tensorboard.read_event_log,
    ),
    "wandb": Format(
        "a run-*.wandb of W&B, the run's folder, or the folder wandb",
        wandb.find_offline_runs,
        wandb.read_offline_run,
    ),
    "trackio": Format(
        "a project's .db of trackio, or the folder of them",
        trackio.find_projects,
        trackio.read_project,
    ),
    "nanogpt": Format(
        "what nanoGPT's train.py has printed, as a file",
        nanogpt.find_outputs,
        nanogpt.read_output,
    ),
    "forgather": Format(
        "trainer_logs.json of forgather, or its folder",
        forgather.find_trainer_logs,
        forgather.read_trainer_logs,
    ),
}


def find_records(path: Path, name: str | None = None) -> tuple[str, Sequence[Path]]:
    """Return the format of what is at a path, and its records there.

    Args:
        name: of the format, if it is not recognised.

    Raises:
        ConfigError: there is nothing, nothing of this format, or of none or several of `FORMATS`.
    """
    try:
        path = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError.of(f"no file or folder {path}", hint=near_path(str(path))) from error
    if not (path.is_file() or path.is_dir()):
        raise ConfigError.of(f"{path} is neither a file nor a folder")
    try:
        return _records_at(path, name)
    except OSError as error:
        raise unreadable(path, error) from error


def _records_at(path: Path, name: str | None) -> tuple[str, Sequence[Path]]:
    if name is not None:
        records = FORMATS[name].find(path) or ([path] if path.is_file() else [])
        if not records:
            raise ConfigError.of(f"nothing in {path} is {FORMATS[name].text}", "--from")
        return name, records
    matches = {name: records for name in FORMATS if (records := FORMATS[name].find(path))}
    if len(matches) == 1:
        return next(iter(matches.items()))
    if matches:
        raise ConfigError.of(
            f"{path} has records of {' and '.join(matches)}",
            hint=f"name the file, or say which: --from {next(iter(matches))}",
        )
    known_formats = "".join(f"\n  {name}: {row.text}" for name, row in FORMATS.items())
    raise ConfigError.of(
        f"{path} is no record of a format that is known",
        hint=f"say which it is with --from:{known_formats}",
    )
