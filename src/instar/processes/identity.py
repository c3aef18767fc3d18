"""Which process a number means: numbers are used again, and files can contain any.

A process is named by its id, its start time and its host. Files that others may write name processes
too, so a signal goes only to one of which the kernel says that it is meant (`signal_holder`).
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

SAME_PROCESS_S = 2.0
"""Start times of one process may differ by this much if the clock was set meanwhile."""
_MOST_PIDS = 1 << 22
"""largest process id of Linux"""


@dataclass(frozen=True)
class ProcessName:
    """A process that a file names; nothing of it is known to be true."""

    pid: int
    started: float
    """Unix seconds"""
    host: str

    @classmethod
    def of_this(cls) -> ProcessName:
        """Return the name of this process."""
        import psutil  # imported late: it is slow, and most commands need none of this

        return cls(os.getpid(), psutil.Process().create_time(), platform.node())

    @classmethod
    def from_text(cls, text: str) -> ProcessName | None:
        """Return the process named by `str` of one; None if the text names none."""
        match = re.fullmatch(r"(\d{1,9}) (\d{1,12}\.\d{1,9}) ([^\s]{0,255})\s*", text)
        if match is None:
            return None
        name = cls(int(match[1]), float(match[2]), match[3])
        return name if 1 < name.pid <= _MOST_PIDS else None

    def __str__(self) -> str:
        return f"{self.pid} {self.started:.6f} {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether its host is this one."""
        return self.host == platform.node()

    @property
    def runs(self) -> bool:
        """Whether it runs on this host; False if processes of other users are hidden."""
        if not self.is_here:
            return False
        import psutil

        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < SAME_PROCESS_S
        except psutil.Error:
            return False


def this_process() -> dict[str, str | int | float | None]:
    """Return the identity of this process for `running_process`; part of a record's `machine`."""
    name = ProcessName.of_this()
    return {"pid": name.pid, "pid_started": name.started}


def running_process(machine: Mapping[str, object]) -> int | None:
    """Return the process in a record's `machine` if it runs on this machine; None if it does not,
    or if processes of other users are hidden."""
    pid, start_time = machine.get("pid"), machine.get("pid_started")
    if not isinstance(start_time, int | float) or not isinstance(pid, int):
        return None
    if not 1 < pid <= _MOST_PIDS:
        return None
    return pid if ProcessName(pid, start_time, str(machine.get("host"))).runs else None


class NotHolder(Exception):  # noqa: N818
    """The process that a lock names is not the one that holds it, or this cannot be seen."""


def signal_holder(descriptor: int, name: ProcessName, number: signal.Signals) -> None:
    """Send a signal to the process that a lock names, if it is the process that holds it.

    Whoever may write a lock can name any process in it. The signal goes only to a process of this
    machine that started when the lock says, that belongs to the lock's owner or to this user, and
    that holds the lock exclusively, as the kernel reports (Linux).

    Args:
        descriptor: of the lock, an open file.

    Raises:
        NotHolder: it is another process, or that cannot be seen from here; nothing was sent.
    """
    if not name.is_here:
        raise NotHolder(f"process {name.pid} is on {name.host or 'another machine'}")
    if sys.platform != "linux":
        raise NotHolder("this system does not say which process holds a lock")
    try:
        process = os.pidfd_open(name.pid)  # its number cannot pass to another from here on
    except OSError as error:
        raise NotHolder(f"process {name.pid}: {error.strerror}") from None
    with closing(os.fdopen(process, "rb")):
        _check_holder(descriptor, name)
        try:
            signal.pidfd_send_signal(process, number)
        except OSError as error:
            raise NotHolder(f"process {name.pid}: {error.strerror}") from None


def _check_holder(descriptor: int, name: ProcessName) -> None:
    if not name.runs:
        raise NotHolder(f"there is no process {name.pid} that started then")
    lock = os.fstat(descriptor)
    home = Path(f"/proc/{name.pid}")
    lock_line = re.compile(rf"^lock:\s+\d+: FLOCK\s+ADVISORY\s+WRITE\s+{name.pid}\s", re.MULTILINE)
    try:
        # a second name could be that of a lock which belongs to something else
        if lock.st_nlink == 1 and home.stat().st_uid in (lock.st_uid, os.geteuid()):
            for entry in (home / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    same = os.path.samestat(entry.stat(), lock)
                    if same and lock_line.search((home / "fdinfo" / entry.name).read_text()):
                        return
    except OSError as error:
        raise NotHolder(f"what process {name.pid} holds cannot be seen: {error.strerror}") from None
    raise NotHolder(f"process {name.pid} does not hold it")


def kill_stopped_sibling(pid: int) -> None:
    """Kill a process if it is stopped (SIGSTOP) and is what this one is: it has the same user, parent
    and command line. Anything else is left alone."""
    import psutil

    with suppress(psutil.Error, ValueError, TypeError, OverflowError):
        process, current = psutil.Process(pid), psutil.Process()
        if (
            process.uids() == current.uids()
            and process.ppid() == current.ppid()
            and process.cmdline() == current.cmdline()
            and process.status() == psutil.STATUS_STOPPED
        ):
            process.kill()  # unless its number is another process's by now
