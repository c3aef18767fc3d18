"""A fleet's folder: what was started there, found again by name, and which processes have outlived their launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile

import msgspec
import psutil
from pydantic import ValidationError

from instar.config.document import Document, parse
from instar.config.errors import ConfigError, SourceLocation, nearest, printable_text
from instar.config.files import make_folder, of_bounded_depth, read_regular
from instar.config.user_code import (
    FLAG,
    TRUST_VARIABLE,
    Untrusted,
    check_trusted,
    foreign_owner,
    is_trusted,
)
from instar.extensions.fleet.instance import FLEET_VARIABLE, INSTANCE_VARIABLE, PART_VARIABLE
from instar.extensions.fleet.load import LoadedFleet, resolve_beside
from instar.extensions.fleet.lock import may_have_launcher
from instar.extensions.fleet.spec import FleetSpec
from instar.extensions.fleet.state import FLEETS, JOBS, SLURM, STATE_FILE
from instar.processes import shim
from instar.record.atomic import replace_file

FORMAT = "instar-fleet/1"
_FILE = "fleet.json"


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
        ConfigError: a fleet of this name was started before, or the folder cannot be written.
        Untrusted: a run config names code of another user.
    """
    spec = loaded_config.spec
    path = FLEETS / spec.name
    if (path / STATE_FILE).exists() or (path / _FILE).exists():
        raise ConfigError.of(
            f"fleet '{spec.name}' exists",
            where=str(path),
            hint=f"`instar fleet resume {spec.name}` goes on with it; for a new one, --set name=…",
        )
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
    similar = nearest(text, names)
    hint = f"did you mean '{similar}'?" if similar else f"there are {', '.join(names) or 'none'}"
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
    """Return whether a shim still watches it, and so its launcher: its folder was moved, or is another host's or
    container's."""
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
