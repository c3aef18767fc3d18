"""Tags, notes and the archive of runs, kept beside them in `.instar/labels.json`.

Nothing in a run's folder changes. Commands write the file; lists and pages only read it.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from instar.config.errors import ConfigError
from instar.config.files import make_folder, own_regular, read_regular
from instar.record.atomic import replace_file
from instar.record.format import encodable
from instar.record.rundir import RunDir

MAX_BYTES = 1 << 24
MAX_NOTE = 2000
_TAG = re.compile(r"[\w.:/+=-]{1,40}")


class RunLabels(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a person has said of a run."""

    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False


NONE = RunLabels()


class _File(msgspec.Struct, frozen=True):
    version: int = 1
    runs: dict[str, RunLabels] = {}


def labels_file(folder: Path) -> Path:
    """Return the file with the labels of the runs in a folder."""
    return folder / ".instar" / "labels.json"


def read_labels(folder: Path) -> dict[str, RunLabels]:
    """Return the labels of the runs in a folder by the names of their folders; empty if the file is
    missing or cannot be read."""
    try:
        return _read(labels_file(folder))
    except (OSError, msgspec.MsgspecError):
        return {}


def labels_of(runs: Iterable[RunDir]) -> list[RunLabels]:
    """Return the labels of each run."""
    by_folder: dict[Path, dict[str, RunLabels]] = {}
    labels = []
    for run in runs:
        path = run.path.absolute()
        if path.parent not in by_folder:
            by_folder[path.parent] = read_labels(path.parent)
        labels.append(by_folder[path.parent].get(path.name, NONE))
    return labels


def change_labels(runs: Iterable[RunDir], change: Callable[[RunLabels], RunLabels]) -> None:
    """Change the labels of runs; of two commands at a time, one waits for the other.

    Raises:
        ConfigError: a tag or note is invalid, or the file cannot be read or written.
    """
    by_folder: dict[Path, list[str]] = {}
    for run in runs:
        path = run.path.absolute()
        by_folder.setdefault(path.parent, []).append(path.name)
    for folder, names in by_folder.items():
        path = labels_file(folder)
        try:
            _change(path, names, change)
        except OSError as error:
            raise ConfigError.of(f"cannot write {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            hint = "correct the file, or delete it to start anew"
            raise ConfigError.of(f"{path} is not valid: {error}", hint=hint) from error


def _change(path: Path, names: Iterable[str], change: Callable[[RunLabels], RunLabels]) -> None:
    if path.parent.is_symlink():
        raise ConfigError.of(f"{path.parent} is a symbolic link, which is not followed")
    make_folder(path.parent)
    with os.fdopen(own_regular(path.with_suffix(".lock"), mode=0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        by_name = _read(path) if path.exists() else {}
        for name in names:
            by_name[name] = _check_labels(change(by_name.get(name, NONE)))
        new_labels = {name: labels for name, labels in sorted(by_name.items()) if labels != NONE}
        content = msgspec.json.format(msgspec.json.encode(_File(runs=new_labels)), indent=1)
        replace_file(path, content + b"\n")


def _read(path: Path) -> dict[str, RunLabels]:
    try:
        return msgspec.json.decode(read_regular(path, MAX_BYTES), type=_File).runs
    except FileNotFoundError:
        return {}


def _check_labels(labels: RunLabels) -> RunLabels:
    for tag in labels.tags:
        if not _TAG.fullmatch(tag):
            hint = "up to 40 letters, digits and any of . : / + = - _"
            raise ConfigError.of(f"invalid tag {tag!r}", where="--add", hint=hint)
    if encodable(labels.note) != labels.note:
        raise ConfigError.of("the note is not text in UTF-8", where="-m")
    if len(labels.note) > MAX_NOTE:
        raise ConfigError.of(
            f"the note has {len(labels.note):,} characters, more than {MAX_NOTE:,}", where="-m"
        )
    return labels
