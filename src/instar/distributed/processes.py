"""What can be known of processes and threads from outside them."""

from __future__ import annotations

import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import psutil

GONE = "gone"
STOPPED = psutil.STATUS_STOPPED


def this_host() -> str:
    """This host as its processes see it: in another container a process has another id."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def process_state(pid: int) -> str:
    """The state of a process on this host, as psutil calls it, or GONE if it has ended."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return GONE
    except psutil.Error:
        return ""
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


def line_of(thread: int) -> tuple[str, bool]:
    """The innermost line of Python that a thread of this process is at; whether it is torch's."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    in_torch = torch is not None and file.is_relative_to(Path(torch).parent)
    return f"{file.name}:{frame.f_lineno} in {function}", in_torch


def stack_of(thread: int) -> str:
    """All lines of Python that a thread of this process is at, outermost first."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "?"
