"""The folder of a run: its files, its lock, its creation, and how runs are found."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from instar.config.errors import ConfigError, InstarError, nearest_hint
from instar.config.files import (
    RUN_FOLDERS,
    check_inside,
    check_path,
    make_folder,
    open_regular,
    read_regular,
    sync_name,
)
from instar.processes.child import STATUS_STOPPED, process_state
from instar.processes.identity import ProcessName
from instar.record.atomic import TMP
from instar.record.lock import (
    NO_LOCKS,
    lock_owner,
    named_holder,
    open_lock,
    try_flock,
    write_holder,
)

LETTERS = "abcdefghjkmnpqrstuvwxyz"
"""Characters of run ids, without those that look alike (i, l, 1, o, 0)."""
LETTERS_AND_DIGITS = LETTERS + "23456789"
LOCK_WAIT_S = 0.1
"""How long to wait for a lock that another process may hold just to read who trains there."""
_CHECKPOINT = re.compile(r"step-[0-9.]+")
_ID = re.compile(rf"[{LETTERS}][{LETTERS_AND_DIGITS}]{{4}}")


class Destination(Protocol):
    """Where a new run goes: these keys of the section `record` of its config."""

    @property
    def out_dir(self) -> str: ...
    @property
    def run_dir(self) -> str | None: ...


@dataclass(frozen=True)
class RunDir:
    """Paths of a run's files, whether or not they exist."""

    path: Path

    @property
    def shell_word(self) -> str:
        """Its path as a word of a command that is printed to be pasted."""
        return shlex.quote(str(self.path))

    @property
    def id(self) -> str:
        """`r7f3a` of `grow-r7f3a`; the whole name if the user chose the folder."""
        last = self.path.name.rpartition("-")[2]
        return last if _ID.fullmatch(last) else self.path.name

    @property
    def name(self) -> str:
        """`grow` of `grow-r7f3a`; the whole name if the user chose the folder."""
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

    def latest_checkpoint(self) -> Path | None:
        """Return the checkpoint that `checkpoints/latest` names, whether or not it is there; None: it names none."""
        try:
            name = read_regular(self.checkpoints / "latest").decode("utf-8", "replace").strip()
        except OSError:
            return None
        return self.checkpoints / name if _CHECKPOINT.fullmatch(name) else None

    def profile(self, rank: int) -> Path:
        """Return the trace of `--profile`, for https://ui.perfetto.dev."""
        return self.path / "profile" / f"rank_{rank}.json.gz"

    @property
    def control(self) -> Path:
        """The folder of the requests of `instar control`."""
        return self.path / "control"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def holds_run(self) -> bool:
        return self.config.exists() or self.events.exists()

    def awaits_start(self) -> bool:
        """Return whether it is the run of an imported or grown model in which nothing has been trained yet."""
        with suppress(OSError):
            return self.events.stat().st_size == 0 and not self.lock.exists()
        return False

    def await_start(self) -> None:
        """Make the record, empty, and the folder of logs of a run that nothing has been trained in yet."""
        self.logs.mkdir()
        self.events.touch()

    def holds_parts(self) -> bool:
        """Return whether there are files that only a run writes, more than its config."""
        return any(path.exists() for path in (self.events, self.logs, self.checkpoints))


class RunDirBusy(InstarError):  # noqa: N818
    """Another process is training in this folder."""

    exit_code = 3


@contextmanager
def hold(run: RunDir, warn: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold the lock of a run's folder, which the kernel releases when the process ends.

    On a file system without locks it calls `warn` and locks nothing.

    Raises:
        RunDirBusy: another process holds the lock.
        ConfigError: see `check_folders`.
    """
    check_folders(run)
    descriptor = open_lock(run.lock)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _lock_or_warn(descriptor, run, warn):
            if time.monotonic() > deadline:
                raise RunDirBusy(_busy(run, named_holder(descriptor)))
            time.sleep(LOCK_WAIT_S / 20)
        write_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def check_folders(run: RunDir) -> None:
    """Check that the folders of a run are its own, before anything is written or deleted in them.

    Raises:
        ConfigError: one is a symbolic link, or no folder.
    """
    try:
        check_inside(run.path, RUN_FOLDERS)
    except OSError as error:
        raise ConfigError.of(
            str(error.strerror),
            where=str(error.filename),
            hint="what a run keeps is in its folder; for another disk, put the whole run there: "
            "record.out_dir",
        ) from None


def _lock_or_warn(descriptor: int, run: RunDir, warn: Callable[[str], None]) -> bool:
    try:
        return try_flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn(
            f"the file system of {run.path} has no locks ({error.strerror}): nothing keeps a second "
            "process from training in this folder; start only one"
        )
        return True


def _busy(run: RunDir, holder: ProcessName | None) -> str:
    process = holder.pid if holder else "?"
    if holder and holder.runs and process_state(holder.pid) == STATUS_STOPPED:
        return (
            f"{run.path}: process {process} is training there, but it is stopped (SIGSTOP) and reads no "
            f"requests; let it go on: kill -CONT {process}, or end it: kill -KILL {process}"
        )
    return (
        f"{run.path}: process {process} is training there; wait for it, or end it with: "
        f"instar control {run.shell_word} stop"
    )


def create_run_dir(
    record: Destination, name: str, fill: Callable[[RunDir], None] = lambda _: None
) -> RunDir:
    """Create the folder of a new run with `logs/` and `checkpoints/`, and call `fill`.

    It is `<out_dir>/<name>-<id>`, or `run_dir` if given. If two processes request the same folder,
    one of them succeeds.

    Raises:
        ConfigError: the folder has another run or other files, or cannot be created or written.
    """
    check_run_dir(record, name)
    try:
        if record.run_dir:
            return _claim(Path(record.run_dir), fill)
        run = _claim_new(record, name)
        run.checkpoints.mkdir()
    except OSError as error:
        raise ConfigError.of(
            f"cannot make the run's folder: {error.filename}: {error.strerror}",
            where=folder_key(record),
            hint="choose a folder that can be written to",
        ) from error
    fill(run)
    return run


def check_run_dir(record: Destination, name: str) -> None:
    """Check whether `create_run_dir` can create the folder, and create nothing.

    Raises:
        ConfigError: see `create_run_dir`.
    """
    path = Path(record.run_dir or record.out_dir)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            (path if record.run_dir else path / f"{name}-{LETTERS[:5]}").stat()  # a name too long
        if record.run_dir:
            _check_empty(path)
        _check_writable(path, folder_key(record))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError.of(
            f"cannot use the folder {path}: {reason}", folder_key(record)
        ) from error


def find_run(text: str, out_dir: Path = Path("runs")) -> RunDir:
    """Return the run with a folder, id or name, or the `latest`, which was written to last.

    A path has precedence over an id or a folder name in `out_dir`, and these over a name, which
    must be unique.

    Raises:
        ConfigError: there is no such run, or there are several; the message lists them.
    """
    check_path(text, "RUN")
    path = Path(text)
    if RunDir(path).holds_run():
        return RunDir(path)
    if path.parent != Path() and not path.exists() and not (out_dir / path).exists():
        raise ConfigError.of(f"no folder {text}", hint=_near_folder(path))
    runs = runs_in(out_dir)
    if not runs:
        raise ConfigError.of(f"no run in {out_dir}", hint="start one with instar train")
    if text == "latest":
        return runs[-1]
    for run in reversed(runs):
        if text in (run.path.name, run.id):
            return run
    matches = [run for run in runs if run.name == text]
    if len(matches) == 1:
        return matches[0]
    if matches:
        run_list = ", ".join(str(run.path) for run in reversed(matches[-8:]))
        raise ConfigError.of(
            f"{len(matches)} runs are named {text!r}", hint=f"say which: {run_list}"
        )
    if text and path.is_dir():
        raise ConfigError.of(f"{path} is not a run: it has no run.yaml")
    names = [name for run in runs for name in (run.path.name, run.id)]
    hint = nearest_hint(text, names, f"the latest is {runs[-1].path.name!r}")
    raise ConfigError.of(f"no run {text!r} in {out_dir}", hint=hint)


def _near_folder(path: Path) -> str:
    """Return a hint at the runs in the folder of a path that does not exist."""
    names = [run.path.name for run in runs_in(path.parent)]
    if not names:
        return f"{path.parent} has no run" if path.parent.is_dir() else ""
    return nearest_hint(path.name, names, f"the latest in {path.parent} is {names[-1]!r}")


def _claim(path: Path, fill: Callable[[RunDir], None]) -> RunDir:
    """Make an empty folder that of a run; if several processes try, one succeeds."""
    make_folder(path)
    run = RunDir(path)
    try:
        with hold(run):
            _check_unused(path)
            run.logs.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
            fill(run)
    except RunDirBusy:
        raise _taken_error(path, _starter(run)) from None
    return run


def _starter(run: RunDir) -> int | None:
    """Return the process that trains in a folder or is about to; None if none is known."""
    if (training := lock_owner(run.lock)) is not None:
        return training
    if run.events.exists():
        return None
    with suppress(OSError), open_regular(run.lock) as file:
        starter = named_holder(file.fileno())
        if starter is not None and starter.pid != os.getpid() and starter.runs:
            return starter.pid
    return None


def _taken_error(path: Path, pid: int | None) -> ConfigError:
    owner = f"process {pid}" if pid else "another process"
    return ConfigError.of(
        f"{path}: {owner} has started a run there",
        where="record.run_dir",
        hint="choose another folder, or wait for it and resume",
    )


def new_id() -> str:
    """Return a random id, which the folder of a run ends with."""
    return "".join(secrets.choice(kind) for kind in (LETTERS, *[LETTERS_AND_DIGITS] * 4))


def _claim_new(record: Destination, name: str) -> RunDir:
    out_dir = Path(record.out_dir)
    make_folder(out_dir)
    while True:
        run = RunDir(out_dir / f"{name}-{new_id()}")
        try:
            run.path.mkdir()
        except FileExistsError:
            continue
        run.logs.mkdir()
        sync_name(run.path)
        return run


def _check_empty(path: Path) -> None:
    if (pid := _starter(RunDir(path))) is not None:
        raise _taken_error(path, pid)
    _check_unused(path)


def _check_unused(path: Path) -> None:
    # first, so that files which another start creates meanwhile are reported as its run
    first = next(_foreign(path), None) if path.is_dir() else None
    if RunDir(path).holds_run():
        raise ConfigError.of(
            f"{path} holds another run",
            where="record.run_dir",
            hint=f"choose another folder, or resume that run: instar resume {RunDir(path).shell_word}",
        )
    if first is not None:
        raise ConfigError.of(
            f"{path} is not empty: it holds {first.name}",
            where="record.run_dir",
            hint="choose a new folder",
        )


def _foreign(path: Path) -> Iterator[Path]:
    """Yield the files of a folder, except those of a start that failed before its config."""
    run = RunDir(path)
    for entry in path.iterdir():
        empty = entry in (run.logs, run.checkpoints) and entry.is_dir() and not any(entry.iterdir())
        if not (empty or entry == run.lock or entry.name.startswith(TMP)):
            yield entry


def _check_writable(path: Path, key: str) -> None:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError.of(f"{existing} is a file, not a folder", where=key)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError.of(
            f"cannot write to {existing}: permission denied",
            where=key,
            hint="choose a folder that can be written to",
        )


def runs_in(folder: Path) -> list[RunDir]:
    """Return the runs in a folder, sorted by the time of their last write."""
    times = {run: time for run in _entries_of(folder) if (time := _written_at(run)) is not None}
    return sorted(times, key=lambda run: (times[run], run.path.name))


def holds_runs(folder: Path) -> bool:
    """Return whether there is a run in a folder."""
    return any(_written_at(run) is not None for run in _entries_of(folder))


def _entries_of(folder: Path) -> Iterator[RunDir]:
    with suppress(OSError):
        yield from (RunDir(path) for path in folder.iterdir() if not path.name.startswith(TMP))


def _written_at(run: RunDir) -> int | None:
    for path in (run.events, run.config):
        try:
            return path.stat().st_mtime_ns
        except OSError:
            continue
    return None


def folder_key(record: Destination) -> str:
    return "record.run_dir" if record.run_dir else "record.out_dir"
