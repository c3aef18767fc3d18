"""The program between a launcher and each process tree that it starts; standard library only.

Run as `python -I -S shim.py FD`, it forks one *shim* per request that arrives on the socket FD, which
costs a millisecond and a megabyte instead of a new interpreter. A shim leads a session of its own,
adopts every descendant of its command (child subreaper), and ends the whole tree when it is asked
to, when the command has exited, or when its launcher is gone, even by SIGKILL. File descriptors
of locks that it was given stay open until then: a lock lives as long as the tree, and so does the
folder for temporary files that it makes for the command.

Messages are JSON in one packet each. To a shim: {"stop": signal, "grace": seconds}; from it: {"pid"},
{"error"} if the command cannot be started, {"status", "stopped", "cpu_s", "peak_bytes"} when it has
exited, and {"gone": true} when nothing of its tree is left.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FDS = 64
_LEFT_GRACE_S = 2.0
"""how long processes that the command leaves behind may take to end"""
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE)
"""handled by doing nothing: commands would inherit SIG_IGN"""


def serve_requests() -> None:
    """Serve requests until the launcher is gone and every shim has ended."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for number in _IGNORED:
        signal.signal(number, lambda *_: None)
    _adopt_descendants()
    child_ended = _wakeup()
    shims: dict[int, list[int]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(child_ended, select.POLLIN)
    is_connected = True
    while is_connected or shims:
        for descriptor, _ in poll.poll():
            if descriptor == child_ended:
                _drain(child_ended)
                _reap(shims)
                continue
            packet: bytes = b""
            fds: list[int] = []
            with suppress(ConnectionResetError):
                packet, fds, _, _ = socket.recv_fds(control, 1, _MOST_FDS)
            if not packet:
                is_connected = False
                poll.unregister(control)
                continue
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    control.close()
                    for shim in shims.values():
                        _close(shim)
                    _serve_tree(fds)
                    code = 0
                finally:
                    os._exit(code)
            # the locks stay open here too, until what a killed shim leaves behind is ended
            _close(fds[:3])
            shims[pid] = fds[3:]


def _reap(shims: dict[int, list[int]]) -> None:
    """Collect ended shims; kill the processes that a killed one has left, now children of this."""
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in shims:
                for orphan in _descendants(os.getpid(), but=shims.keys() - {pid}):
                    _kill(orphan, signal.SIGKILL)
                _close(shims.pop(pid))


def _serve_tree(fds: list[int]) -> None:
    """Run one command and supervise its tree. `fds`: the request, the link, the log, locks."""
    os.setsid()
    _adopt_descendants()
    child_ended = _wakeup()
    with os.fdopen(fds[0], "rb") as file:
        request = json.loads(file.read())
    link = socket.socket(fileno=fds[1])
    with suppress(OSError):  # a full disk
        os.write(fds[2], request["header"].encode())
    env = request["env"]
    scratch = _scratch(env.get("TMPDIR") or "/tmp") if request["scratch"] else ""
    env |= {"TMPDIR": scratch} if scratch else {}
    try:
        command = subprocess.Popen(
            request["argv"],
            env=env,
            cwd=request["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=fds[2],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _remove(scratch)
        _send(link, {"error": f"cannot start {request['argv'][0]}: {reason}"})
        return
    _close(fds[2:3])
    _send(link, {"pid": command.pid})
    _Tree(command.pid, link, child_ended, request).supervise()
    command.returncode = 0  # reaped already
    _remove(scratch)
    _send(link, {"gone": True})


class _Tree:
    """A running command with all its descendants."""

    def __init__(self, pid: int, link: socket.socket, child_ended: int, request: dict) -> None:  # type: ignore[type-arg]
        self.pid = pid
        self.link = link
        self.child_ended = child_ended
        self.request = request
        self.running = True
        self.was_stopped = False
        """whether the command was asked to end before it did"""
        self.is_ignored = False
        """whether every process of the tree ignored the signal, so that a status of 0 is that of its own end"""
        self.kill_at = float("inf")

    def supervise(self) -> None:
        """Return when every process of the tree has ended."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        poll.register(self.child_ended, select.POLLIN)
        while True:
            wait_s = self.kill_at - time.monotonic()
            timeout = None if wait_s == float("inf") else max(0.0, wait_s * 1000)
            for descriptor, _ in poll.poll(timeout):
                if descriptor == self.child_ended:
                    _drain(self.child_ended)
                    continue
                packet = b""
                with suppress(ConnectionResetError):  # the launcher had not read all messages
                    packet = self.link.recv(1 << 12)
                if packet:
                    message = json.loads(packet)
                    self.stop(message["stop"], message["grace"])
                else:  # the launcher is gone
                    poll.unregister(self.link)
                    self.stop(self.request["stop"], self.request["grace"])
            if self.reap():
                break
            if time.monotonic() >= self.kill_at:
                for pid in _descendants(os.getpid()):
                    _kill(pid, signal.SIGKILL)
                self.kill_at = time.monotonic() + 0.05  # again, for those that were just forked

    def stop(self, number: int, grace_s: float) -> None:
        """Ask the command's session to end; kill the tree after `grace_s`. A later call can only
        shorten the time."""
        self.reap()  # a command that has ended was not stopped, also if that is read only now
        first = self.kill_at == float("inf")
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
        if self.running:
            self.was_stopped = True
            if first and grace_s > 0:
                # a child that handles it may save and end, and its parent then exit with 0
                self.is_ignored = all(_ignores(pid, number) for pid in _descendants(os.getpid()))
                _kill(-self.pid, number)
                _kill(-self.pid, signal.SIGCONT)  # a stopped process handles no signal

    def reap(self) -> bool:
        """Collect ended processes; return True if none is left."""
        try:
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return False
                if pid == self.pid:
                    self.running = False
                    self.conclude(os.waitstatus_to_exitcode(status), usage)
                    orphans = _descendants(os.getpid())
                    for orphan in orphans:
                        _kill(orphan, signal.SIGTERM)
                        _kill(orphan, signal.SIGCONT)
                    self.kill_at = min(self.kill_at, time.monotonic() + _LEFT_GRACE_S)
        except ChildProcessError:
            return True

    def conclude(self, status: int, usage) -> None:  # type: ignore[no-untyped-def]
        """Write the result to disk, then report it: a launcher that is gone finds it there."""
        unit = 1 if sys.platform == "darwin" else 1024
        result = {
            "status": status,
            "stopped": self.was_stopped and not (self.is_ignored and status == 0),
            "time": time.time(),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            "peak_bytes": usage.ru_maxrss * unit,
        }
        path = self.request["result"]
        with suppress(OSError):  # a full disk: the launcher still hears of it
            fd = os.open(
                f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644
            )
            try:
                os.write(fd, json.dumps(result).encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(f"{path}.tmp", path)  # noqa: PTH104 pathlib is slow to import
        _send(self.link, result)


def _scratch(base: str) -> str:
    """Make a folder for temporary files; its name is short, since that of a Unix socket may have 107
    bytes. Return "" if that is not possible."""
    path = f"{base}/instar-{os.urandom(6).hex()}"
    with suppress(OSError):
        os.mkdir(path, 0o700)  # noqa: PTH102 pathlib is slow to import
        return path
    return ""


def _remove(folder: str) -> None:
    if not folder:
        return
    try:
        os.rmdir(folder)  # noqa: PTH106
    except OSError:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _descendants(root: int, but=frozenset()) -> list[int]:  # type: ignore[no-untyped-def]
    """Return the living descendants of a process, without the subtrees of `but`."""
    pids: list[int] = []
    waiting = [root]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in but and child not in pids:
                pids.append(child)
                waiting.append(child)
    return pids


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
                pids += map(int, file.read().split())
    return pids


def _ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False if that is not known."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _kill(pid: int, number: int) -> None:
    with suppress(OSError):
        (os.killpg if pid < 0 else os.kill)(abs(pid), number)


def _send(link: socket.socket, message: dict) -> None:  # type: ignore[type-arg]
    with suppress(OSError):  # the launcher is gone
        link.send(json.dumps(message).encode())


def _close(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _adopt_descendants() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wakeup() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    receiver, sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return receiver


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 512):
            pass


if __name__ == "__main__":
    serve_requests()
