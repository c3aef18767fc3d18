"""The run's own folder: made, checked, found again."""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from instar.config.errors import ConfigError, InstarError

if TYPE_CHECKING:
    from instar.config.record import RecordConfig

LETTERS = "abcdefghjkmnpqrstuvwxyz"
"""What ids are made of: nothing that looks like something else (i, l, 1, o, 0)."""
LETTERS_AND_DIGITS = LETTERS + "23456789"
ASKING_S = 0.1
"""Whoever only asks who trains in a folder has its lock for a moment, but never so long."""
_ID = re.compile(rf"[{LETTERS}][{LETTERS_AND_DIGITS}]{{4}}")


@dataclass(frozen=True)
class RunDir:
    """Where a run keeps its things; nothing is said about whether they are there."""

    path: Path

    @property
    def id(self) -> str:
        """`r7f3a` of `grow-r7f3a`; the whole name of a folder that was named by hand."""
        last = self.path.name.rpartition("-")[2]
        return last if _ID.fullmatch(last) else self.path.name

    @property
    def name(self) -> str:
        """`grow` of `grow-r7f3a`; the whole name of a folder that was named by hand."""
        return self.path.name.removesuffix(f"-{self.id}")

    @property
    def config(self) -> Path:
        return self.path / "run.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        """Where `instar control` puts its requests."""
        return self.path / "control"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def holds_run(self) -> bool:
        return self.config.exists() or self.events.exists()


class RunDirBusy(InstarError):  # noqa: N818
    """Somebody else is training in this folder."""

    exit_code = 3


@contextmanager
def hold(run: RunDir) -> Iterator[None]:
    """Be the one process that writes into a run's folder; the kernel lets go when it dies.

    Raises:
        RunDirBusy: another one is.
    """
    with run.lock.open("a+") as file:
        deadline = time.monotonic() + ASKING_S
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                file.seek(0)
                raise RunDirBusy(
                    f"{run.path}: process {file.read().strip() or '?'} is training there; wait for "
                    f"it, or end it with: instar control {run.path} stop"
                )
            time.sleep(ASKING_S / 20)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def holder(run: RunDir) -> int | None:
    """The process that is training in a run's folder, or None."""
    try:
        with run.lock.open() as file:
            if not _lock(file, fcntl.LOCK_SH):
                text = file.read().strip()
                return int(text) if text.isdecimal() else 0
    except OSError:
        pass
    return None


def _lock(file: TextIO, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create_run_dir(record: RecordConfig, name: str) -> RunDir:
    """Make the folder of a new run, with `logs/` and `checkpoints/` in it.

    It is `<out_dir>/<name>-<id>`, or `run_dir` where that is given. Of two processes that want
    the same one, one gets it.

    Raises:
        ConfigError: it holds another run or foreign files, or cannot be made or written.
    """
    check_run_dir(record, name)
    try:
        run = _claim(Path(record.run_dir)) if record.run_dir else _claim_new(record, name)
        run.checkpoints.mkdir()
    except OSError as error:
        raise ConfigError.one(
            f"cannot make the run's folder: {error.filename}: {error.strerror}",
            where=_key(record),
            hint="choose a folder that can be written to",
        ) from error
    return run


def check_run_dir(record: RecordConfig, name: str) -> None:
    """Raise what `create_run_dir` would raise, and make nothing.

    Raises:
        ConfigError: see `create_run_dir`.
    """
    path = Path(record.run_dir or record.out_dir)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            (path if record.run_dir else path / f"{name}-{LETTERS[:5]}").stat()  # a name too long
        if record.run_dir:
            _check_empty(path)
        _check_writable(path, _key(record))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError.one(f"cannot use the folder {path}: {reason}", _key(record)) from error


def find_run(text: str, out_dir: Path = Path("runs")) -> RunDir:
    """The run that `text` means: its folder, its id, its name, or `latest`.

    A path comes first, then an id or a whole folder name under `out_dir`, then a name if only one
    run bears it. `latest` is the run that was written to last.

    Raises:
        ConfigError: there is none, or there are several; names them.
    """
    path = Path(text)
    if RunDir(path).holds_run():
        return RunDir(path)
    runs = runs_in(out_dir)
    if not runs:
        raise ConfigError.one(f"no run in {out_dir}", hint="start one with instar train")
    if text == "latest":
        return runs[-1]
    for run in reversed(runs):
        if text in (run.path.name, run.id):
            return run
    named = [run for run in runs if run.name == text]
    if len(named) == 1:
        return named[0]
    if named:
        several = ", ".join(str(run.path) for run in reversed(named[-8:]))
        raise ConfigError.one(f"{len(named)} runs are named {text!r}", hint=f"say which: {several}")
    if text and path.is_dir():
        raise ConfigError.one(f"{path} is not a run: it has no run.yaml")
    names = [name for run in runs for name in (run.path.name, run.id)]
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the latest is {runs[-1].path.name!r}"
    raise ConfigError.one(f"no run {text!r} in {out_dir}", hint=hint)


def _claim(path: Path) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    run = RunDir(path)
    run.logs.mkdir()  # fails for all but one of those who found the folder empty
    return run


def _claim_new(record: RecordConfig, name: str) -> RunDir:
    out_dir = Path(record.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    while True:
        letters = [secrets.choice(LETTERS), *(secrets.choice(LETTERS_AND_DIGITS) for _ in range(4))]
        run = RunDir(out_dir / f"{name}-{''.join(letters)}")
        try:
            run.path.mkdir()
        except FileExistsError:
            continue
        run.logs.mkdir()
        return run


def _check_empty(path: Path) -> None:
    if RunDir(path).holds_run():
        raise ConfigError.one(
            f"{path} holds another run",
            where="record.run_dir",
            hint=f"choose another folder, or go on with that run: instar resume {path}",
        )
    if path.is_dir() and (first := next(path.iterdir(), None)):
        raise ConfigError.one(
            f"{path} is not empty: it holds {first.name}",
            where="record.run_dir",
            hint="choose a new folder",
        )


def _check_writable(path: Path, key: str) -> None:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError.one(f"{there} is a file, not a folder", where=key)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError.one(
            f"cannot write to {there}: permission denied",
            where=key,
            hint="choose a folder that can be written to",
        )


def runs_in(folder: Path) -> list[RunDir]:
    """The runs in a folder, the one that was written to last at the end; none if it is no folder."""
    try:
        found = [RunDir(path) for path in folder.iterdir()]
    except OSError:
        return []
    times = {run: time for run in found if (time := _written_at(run)) is not None}
    return sorted(times, key=lambda run: (times[run], run.path.name))


def _written_at(run: RunDir) -> int | None:
    for path in (run.events, run.config):
        try:
            return path.stat().st_mtime_ns
        except OSError:
            continue
    return None


def _key(record: RecordConfig) -> str:
    return "record.run_dir" if record.run_dir else "record.out_dir"
