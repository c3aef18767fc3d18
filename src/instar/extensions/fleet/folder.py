"""A fleet's folder: what was started there, found again by name; its one launcher, who may write its state; and
which processes have outlived it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile

import msgspec
import psutil
from pydantic import ValidationError

from instar.config.document import Document, parse
from instar.config.errors import ConfigError, SourceLocation, nearest_hint, printable_text
from instar.config.files import check_inside, make_folder, of_bounded_depth, read_regular
from instar.config.user_code.trust import (
    FLAG,
    TRUST_VARIABLE,
    Untrusted,
    check_trusted,
    foreign_owner,
    is_trusted,
)
from instar.extensions.fleet.engines import shim
from instar.extensions.fleet.instance import FLEET_VARIABLE, INSTANCE_VARIABLE, PART_VARIABLE
from instar.extensions.fleet.plan import (
    LoadedFleet,
    combinations_of,
    instances_from,
    resolve_beside,
    variables_in,
)
from instar.extensions.fleet.spec import FleetSpec
from instar.extensions.fleet.state import (
    FLEETS,
    FOLDERS,
    JOBS,
    SLURM,
    STATE_FILE,
    boot_id,
    fold_events,
    part_name,
    read_fleet_events,
)
from instar.processes.identity import SAME_PROCESS_S, NotHolder
from instar.record.atomic import replace_file
from instar.record.lock import (
    NO_LOCKS,
    lock_owner,
    lock_readable,
    named_holder,
    open_lock,
    signal_owner,
    try_flock,
    write_holder,
)
from instar.record.rundir import RunDir

FORMAT = "instar-fleet/1"
_FILE = "fleet.json"
_LOCK_FILE = "lock"
_TREES_FILE = "trees"
_WAIT_S = 0.05
_QUIET_S = 600.0
"""age of a record that nobody writes any more"""


class _Kept(msgspec.Struct, frozen=True):
    format: str
    spec: dict[str, object]
    configs: dict[str, str]
    gpus: str | None
    cwd: str


@dataclass(frozen=True)
class FleetFolder:
    """A fleet that was started: its file, resolved, and how."""

    path: Path
    loaded_config: LoadedFleet
    configs: Mapping[str, str]
    """the copy of the run config of each job with `run`"""
    gpus: str | None
    cwd: Path


def as_test(loaded_config: LoadedFleet, max_steps: int) -> LoadedFleet:
    """Return the fleet as a quick test: few steps, and names and folders of its own.

    Runs end after `max_steps` steps; commands read the variable `${max_steps}`.
    """
    spec = loaded_config.spec
    name, number = f"{spec.name}-test", 1
    while (FLEETS / name).exists():
        number += 1
        name = f"{spec.name}-test-{number}"
    jobs = {
        key: job.model_copy(update={"set": {**job.set, "train.until": f"{max_steps}it"}})
        if job.run is not None
        else job
        for key, job in spec.jobs.items()
    }
    mark = "test" if number == 1 else f"test{number}"
    has_own_output = "${run_name}" in spec.output_dir
    changes = {
        "name": name,
        "vars": {**spec.vars, "max_steps": max_steps},
        "run_name": f"{mark}_{spec.run_name}",
        "output_dir": spec.output_dir if has_own_output else f"{spec.output_dir}-{mark}",
        "jobs": jobs,
    }
    return replace(loaded_config, spec=spec.model_copy(update=changes))


def create_fleet_folder(loaded_config: LoadedFleet, gpus: str | None) -> FleetFolder:
    """Create the folder of a new fleet; run configs are copied, so that a later edit changes none of
    its instances.

    Raises:
        ConfigError: a fleet of this name was started before, an instance's folder has a run of something
            else, which it would continue or take for its own, or the folder cannot be written.
        Untrusted: a run config names code of another user.
    """
    spec = loaded_config.spec
    path = FLEETS / spec.name
    if (path / STATE_FILE).exists() or (path / _FILE).exists():
        hint = f"`instar fleet resume {spec.name}` goes on with it; for a new one, --set name=…"
        raise ConfigError.of(f"fleet '{spec.name}' exists", str(path), hint)
    _check_no_runs(loaded_config)
    try:
        make_folder(path / "configs")
        configs = {}
        for name, job in spec.jobs.items():
            if job.run is not None:
                file = resolve_beside(loaded_config, ("jobs", name, "run"), job.run)
                _check_run_trusted(file)
                configs[name] = _copy_of(path, name)
                copyfile(file, configs[name])
        saved_fleet = _Kept(FORMAT, spec.model_dump(mode="json"), configs, gpus, str(Path.cwd()))
        replace_file(path / _FILE, json.dumps(msgspec.to_builtins(saved_fleet), indent=2).encode())
    except OSError as error:
        raise ConfigError.of(f"cannot be written: {error.strerror}", where=str(path)) from None
    return FleetFolder(path, loaded_config, configs, gpus, Path.cwd())


def _check_no_runs(loaded_config: LoadedFleet) -> None:
    spec = loaded_config.spec
    if not any(job.run is not None for job in spec.jobs.values()):
        return
    runs = [RunDir(instance.output_dir) for instance in instances_from(spec, combinations_of(spec))]
    if occupied := [run.path for run in runs if run.holds_run() and not run.awaits_start()]:
        variables = {*variables_in(spec.run_name), *variables_in(spec.output_dir)}
        rename = (
            "--set name=…" if "name" in variables else "write ${name} in run_name or output_dir"
        )
        message = f"{len(occupied)} of {len(runs)} instances have folders with other runs, the first is {occupied[0]}"
        hint = f"move them elsewhere, or {rename}"
        raise ConfigError(loaded_config.problem(("output_dir",), message, hint))


def _check_run_trusted(file: Path) -> None:
    document, _ = parse(read_regular(file, follow=True).decode(), str(file))
    check_trusted(str(file), [document.data] if document else [])


def fleet_names() -> list[str]:
    """Return the names of the fleets that were started in this project."""
    with suppress(OSError):
        return sorted(path.name for path in FLEETS.iterdir())
    return []


def find_fleet(text: str) -> Path:
    """Return the folder of a fleet, named by path or by name.

    Raises:
        ConfigError: there is none.
    """
    for path in (FLEETS / text, Path(text)):
        if (path / STATE_FILE).exists() or (path / _FILE).exists():
            return path
    names = fleet_names()
    hint = nearest_hint(text, names, f"there are {', '.join(names) or 'none'}")
    raise ConfigError.of(f"no fleet '{text}'", where=str(FLEETS), hint=hint)


def reopen_fleet(path: Path) -> FleetFolder:
    """Read what was started in a folder, to run it again.

    Raises:
        ConfigError: the file is damaged, or the folder belongs to another user: it names commands.
    """
    saved_fleet, spec = _read(path)
    file = path / _FILE
    check_own(path)
    location = SourceLocation(str(file))
    cwd = _cwd_of(path, saved_fleet)
    if cwd != Path.cwd():
        path = path.absolute()
    # what was copied is run, and so it is what is checked
    configs = {name: _copy_of(path, name) for name, job in spec.jobs.items() if job.run is not None}
    jobs = {
        name: job.model_copy(update={"run": configs[name]}) if name in configs else job
        for name, job in spec.jobs.items()
    }
    spec = spec.model_copy(update={"jobs": jobs})
    loaded_config = LoadedFleet(spec, (Document(saved_fleet.spec, {(): (location, location)}),))
    return FleetFolder(path, loaded_config, configs, saved_fleet.gpus, cwd)


def _copy_of(path: Path, job: str) -> str:
    """Return the copy of a job's run config in a fleet's folder, which its process finds from any folder."""
    return str((path / "configs" / f"{job}.yaml").absolute())


def _cwd_of(path: Path, saved_fleet: _Kept) -> Path:
    """Return the folder in which a fleet's relative paths begin: where it was started, wherever that is now."""
    saved_cwd = Path(saved_fleet.cwd)
    with suppress(OSError):
        if (saved_cwd / FLEETS / path.name).samefile(path):
            return saved_cwd
    return path.absolute().parent.parent  # the project was moved or copied


def check_own(path: Path) -> None:
    """Check that a fleet's folder and the files that say what it runs are this user's or root's, or
    that other users' code is trusted.

    Raises:
        Untrusted: they belong to another user.
    """
    _check_owned(path, path / _FILE, path / SLURM, path / SLURM / JOBS)


def check_own_file(file: Path) -> None:
    """Check that a fleet file and its folder are this user's or root's, or that other users' code is
    trusted.

    Raises:
        Untrusted: they belong to another user.
    """
    _check_owned(file, file.absolute().parent)


def _check_owned(*paths: Path) -> None:
    if is_trusted():
        return
    for path in paths:
        if owner := foreign_owner(path):
            raise Untrusted.of(
                f"this fleet runs commands and names jobs, and it belongs to another user, {owner}",
                where=str(path),
                hint=f"{FLAG}, or {TRUST_VARIABLE}=1, runs them as you",
            )


def describe_fleet(path: Path) -> tuple[FleetSpec, Path]:
    """Return the spec of a fleet that was started, and in which folder: to show it, whosever it is.

    Raises:
        ConfigError: the file is damaged.
    """
    saved_fleet, spec = _read(path)
    return spec, _cwd_of(path, saved_fleet)


def _read(path: Path) -> tuple[_Kept, FleetSpec]:
    file = path / _FILE
    try:
        saved_fleet = msgspec.json.decode(of_bounded_depth(read_regular(file)), type=_Kept)
        return saved_fleet, FleetSpec.model_validate_json(json.dumps(saved_fleet.spec))
    except (OSError, ValueError, msgspec.MsgspecError, ValidationError) as error:
        raise ConfigError.of(f"not a fleet that was started: {error}", where=str(file)) from None


class FolderBusy(ConfigError):  # noqa: N818
    """Another launcher works in this folder."""


class FolderLock:
    """The right to write a fleet's state and to start its processes; it ends with this process.

    Processes that an earlier, killed launcher has started are waited for: each holds a share of
    `trees` until it has ended and its result is written.

    Raises:
        FolderBusy: another launcher has it, or such processes do not end in `patience_s` seconds.
        ConfigError: a folder in it is a symbolic link, its file system has no locks, or its locks
            cannot be opened.
    """

    def __init__(self, folder: Path, patience_s: float, part: int | None = None) -> None:
        """`part`: the instance, if this host runs only that one; it has locks of its own."""
        try:
            check_inside(folder, FOLDERS)
        except OSError as error:
            raise ConfigError.of(str(error.strerror), where=str(error.filename)) from None
        self._descriptor = _open_lock(folder / part_name(_LOCK_FILE, part))
        deadline = time.monotonic() + patience_s
        # the host of a part may have lost touch with its engine, and is then ending
        if not _try_lock(folder, self._descriptor, 0.0 if part is None else deadline):
            holder = named_holder(self._descriptor)
            os.close(self._descriptor)
            message = f"this fleet is running (launcher {holder.pid if holder else 'unknown'})"
            raise FolderBusy.of(message, str(folder), f"see `instar fleet status {folder.name}`")
        write_holder(self._descriptor)
        self.trees = _open_lock(folder / part_name(_TREES_FILE, part))
        """descriptor that every process tree of the fleet inherits"""
        if not _try_lock(folder, self.trees, deadline):
            self.close()
            message = "processes of an earlier launcher do not end"
            raise FolderBusy.of(message, str(folder), "`instar fleet reap` kills them")
        fcntl.flock(self.trees, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self.trees)


def _open_lock(path: Path) -> int:
    try:
        return open_lock(path)
    except OSError as error:
        raise ConfigError.of(f"cannot be opened: {error.strerror}", where=str(path)) from None


def _try_lock(folder: Path, descriptor: int, deadline: float) -> bool:
    """Lock a file, if others let go of it in time."""
    try:
        while not try_flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_WAIT_S)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError.of(
            f"its file system has no locks ({error.strerror}), by which a fleet knows whether its "
            "processes run",
            where=str(folder),
            hint="start the fleet in a folder of another file system; `output_dir` may be on this one",
        ) from None
    return True


def launcher_pid(folder: Path) -> int | None:
    """Return the process id of the launcher that works in a folder, as its lock names it, 0 if unknown;
    None if none does, or if this user may not read the lock."""
    return lock_owner(folder / _LOCK_FILE)


def may_have_launcher(folder: Path, part: int | None = None) -> bool:
    """Return whether a launcher works in a folder, or on one of its parts, as far as this user can see."""
    lock = folder / part_name(_LOCK_FILE, part)
    return lock.exists() and not lock_readable(lock)


def seen_launcher(folder: Path) -> int | None:
    """Return the process id of a fleet's launcher to whoever looks, also to those who may not read
    its lock: then it is the process that the record names, if it runs on this machine, or, on another
    machine, if the record was written to lately (0).

    Raises:
        ConfigError: there is no fleet in this folder.
    """
    pid, lock = launcher_pid(folder), folder / _LOCK_FILE
    if pid is not None or not lock.exists() or os.access(lock, os.R_OK):
        return pid
    status = fold_events(read_fleet_events(folder))
    start = status.start
    if start is None or status.end is not None:
        return None
    if start.host != socket.gethostname():
        age_s = time.time() - (folder / STATE_FILE).stat().st_mtime
        return 0 if age_s < _QUIET_S else None
    with suppress(psutil.Error, ValueError, OverflowError):
        began = psutil.Process(start.pid).create_time()
        if start.boot == boot_id() and began < start.time + SAME_PROCESS_S:
            return start.pid
    return None


def signal_launcher(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the launcher that works in a folder.

    Raises:
        ConfigError: the process that the folder names is not its launcher, or that cannot be seen
            from here; nothing was sent.
    """
    try:
        signal_owner(folder / _LOCK_FILE, number)
    except NotHolder as error:
        message = f"its launcher is not known: {error}"
        hint = "end the launcher where it runs, as its user: Ctrl-C, or `instar fleet down`"
        raise ConfigError.of(message, str(folder / _LOCK_FILE), hint) from None


@dataclass(frozen=True)
class Leftover:
    """A process of a fleet without a launcher."""

    process: psutil.Process
    fleet: str
    instance: str
    command: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """Kill it, unless it has ended and its number is another process's by now."""
        with suppress(psutil.Error):
            self.process.kill()


def _has_shim(process: psutil.Process) -> bool:
    """Return whether a shim still watches it: its folder was moved, or is another host's or container's."""
    return any(shim.__file__ in parent.cmdline() for parent in process.parents())


def leftovers() -> list[Leftover]:
    """Return this user's processes that carry the mark of a fleet whose launcher does not run.

    The mark is an environment variable, so a process that clears its environment is not found.
    """
    processes = []
    running: dict[tuple[str, str], bool] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            env = process.environ()
            folder = env.get(FLEET_VARIABLE)
            if not folder:
                continue
            part = env.get(PART_VARIABLE, "")
            if (folder, part) not in running:
                running[folder, part] = may_have_launcher(
                    Path(folder), int(part) if part.isdecimal() else None
                )
            if not (running[folder, part] or _has_shim(process)):
                command = printable_text(" ".join(process.cmdline())[:200])
                processes.append(
                    Leftover(
                        process,
                        printable_text(Path(folder).name),
                        printable_text(env.get(INSTANCE_VARIABLE, "")),
                        command,
                    )
                )
    return processes
