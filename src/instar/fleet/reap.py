"""Finding processes of fleets whose launcher is gone."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from instar.fleet.folder import launcher_pid
from instar.fleet.instance import FLEET_VARIABLE, INSTANCE_VARIABLE, PART_VARIABLE


@dataclass(frozen=True)
class Leftover:
    """A process of a fleet without a launcher."""

    pid: int
    fleet: str
    instance: str
    command: str


def leftovers() -> list[Leftover]:
    """Return this user's processes that carry the mark of a fleet whose launcher does not run.

    The mark is an environment variable, so a process that clears its environment is not found.
    """
    found = []
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
                pid = launcher_pid(Path(folder), int(part) if part.isdecimal() else None)
                running[folder, part] = pid is not None
            if not running[folder, part]:
                command = " ".join(process.cmdline())[:200]
                found.append(
                    Leftover(
                        process.pid,
                        Path(folder).name,
                        env.get(INSTANCE_VARIABLE, ""),
                        command,
                    )
                )
    return found
