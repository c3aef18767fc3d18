"""The folder that a run was started in, which its relative paths begin in, wherever it is resumed from.

`start.json` in the run's folder names it twice: as it was, and from the run's folder, for when both are moved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from instar.config.errors import InstarError
from instar.config.fields import values
from instar.config.files import read_regular
from instar.config.load import load
from instar.record.atomic import replace_file
from instar.record.rundir import RunDir

START_FILE = "start.json"
_PATHS = (
    *("data.path", "data.source", "data.val_source", "data.tokenizer", "data.chat_template"),
    *("data.val", "data.test", "schedule", "model.from"),
)


class StartFolder(msgspec.Struct, frozen=True):
    """start.json: the folder, the same from the run's folder, and a `data.path` given since, if any."""

    folder: str
    relative: str
    data_path: str | None = None


def note_start(run: RunDir) -> None:
    """Record the current folder, unless one is recorded. A folder that cannot be written is left alone."""
    if not (run.path / START_FILE).exists():
        here = Path.cwd()
        _write(run, StartFolder(str(here), os.path.relpath(here, run.path)))


def remember_data(run: RunDir, path: str) -> None:
    """Record where the run's data are now."""
    known = read_start(run) or StartFolder(str(Path.cwd()), os.path.relpath(Path.cwd(), run.path))
    _write(run, msgspec.structs.replace(known, data_path=str(Path(path).absolute())))


def read_start(run: RunDir) -> StartFolder | None:
    """Return what is recorded; None if nothing is, or nothing that can be read."""
    try:
        return msgspec.json.decode(read_regular(run.path / START_FILE), type=StartFolder)
    except (OSError, ValueError):
        return None


def base_of(run: RunDir, paths: Mapping[str, Any]) -> Path:
    """Return the folder in which the run's relative paths lead somewhere: where it was started, wherever
    that is now, or the current folder.

    Args:
        paths: values of the run's config by key.
    """
    here, known = Path.cwd(), read_start(run)
    marks = [*_relative(paths.get(key) for key in _PATHS), *_modules(paths)]
    if known is None or not marks:
        return here
    beside = Path(os.path.normpath(run.path.absolute() / known.relative))
    recorded = Path(known.folder)

    def count(place: Path) -> int:
        return sum(_is_there(place / mark) for mark in marks)

    # a copy of a project has files of its own, and never takes those of the original
    start = beside if count(beside) else recorded
    return start if 0 < count(start) >= count(here) else here


def absolute(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return `--set` texts whose paths do not depend on the current folder."""
    found = []
    for text in overrides:
        key, equals, value = text.partition("=")
        is_path = equals and key.strip() in _PATHS and _is_there(Path(value))
        found.append(f"{key}={Path(value).absolute()}" if is_path else text)
    return tuple(found)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a schedule in JSON is too long for a path
        return False


def _relative(values: Iterable[Any]) -> list[str]:
    texts = (value for value in values if isinstance(value, str) and value)
    return [text for text in texts if not Path(text).is_absolute() and ":" not in text]


def _modules(paths: Mapping[str, Any]) -> list[str]:
    """Return the files of modules that the config names."""
    named = (paths.get(key) for key in ("task", "data.transform", "data.source"))
    names = [text.partition(":")[0] for text in named if isinstance(text, str) and ":" in text]
    return [f"{name.replace('.', '/')}.py" for name in names]


def _write(run: RunDir, start: StartFolder) -> None:
    with suppress(OSError):
        replace_file(run.path / START_FILE, msgspec.json.encode(start) + b"\n")


def begun_in(
    run: RunDir, overrides: Sequence[str], say: Callable[[str], None]
) -> tuple[RunDir, Path, tuple[str, ...]]:
    """Return a run, the folder in which its relative paths begin, and `--set` texts that hold there.

    A `data.path` that is given is remembered, and used by later starts if the run's own is gone.
    """
    run, overrides = RunDir(run.path.absolute()), absolute(overrides)
    try:
        known = values(load(str(run.config), checks=(), import_task=False).config)
    except InstarError:  # said when it is loaded again
        return run, Path.cwd(), overrides
    base, start, key = base_of(run, known), read_start(run), "data.path"
    paths = [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")]
    own = known.get(key)
    if paths and _is_there(Path(paths[-1])):
        remember_data(run, paths[-1])
    elif start and start.data_path and isinstance(own, str) and not _is_there(base / own):
        say(f"{key}: {start.data_path}, as given before")
        overrides = (*overrides, f"{key}={start.data_path}")
    return run, base, overrides
