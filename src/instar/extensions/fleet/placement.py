"""GPUs and ports that belong to one process at a time on the whole host, and what this machine has.

A lock is a flock of a file in one folder of the host, so it holds between launchers of all users.
It belongs to the open file, not to a process: the launcher passes it on to the process tree that
uses the GPU or port, and it is held until both have closed it.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError, InstarError, printable_text
from instar.extensions.fleet.plan import Slot
from instar.record.lock import try_flock as lock_file

LOCKS_VARIABLE = "INSTAR_LOCK_DIR"
_HOLDER_BYTES = 512
_DEFAULT_FIRST_EPHEMERAL = 32768
_PORTS = 1 << 16
_GIVEN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""which GPUs a scheduler gave"""
_DRIVER_FILE = Path("/dev/nvidiactl")


class LockUnusable(Exception):  # noqa: N818
    """The file of a lock is not one that this user can lock, such as another user's or a folder."""


class Taken(InstarError):  # noqa: N818
    """What a fleet needs is held by another process."""


@dataclass(frozen=True)
class Gpu:
    """A GPU; `id` is what CUDA_VISIBLE_DEVICES takes."""

    index: int
    id: str
    key: str
    """of its lock: the UUID, or the number of a pretended one"""
    name: str = ""
    memory: int = 0
    """bytes"""
    processes: tuple[int, ...] = ()
    """pids that computed on it when it was read"""


class Lock:
    """A held lock; closed, it is free once every process tree that has it has ended."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Close this process's share; closing twice has no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def locks_folder() -> Path:
    """Return the host's folder of locks, created if it is missing.

    Raises:
        ConfigError: it is not a folder that only its files' owners can change.
    """
    folder = Path(os.environ.get(LOCKS_VARIABLE) or "/tmp/instar-locks")
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)
    status = folder.lstat()
    shared = status.st_mode & stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or (shared and not status.st_mode & stat.S_ISVTX):
        hint = f"remove it, or name another one in {LOCKS_VARIABLE}"
        raise ConfigError.of("not a folder with the sticky bit", str(folder), hint)
    return folder


def try_lock_resource(name: str, holder: str) -> Lock | str:
    """Acquire a lock, or return who holds it.

    Args:
        name: e.g. "gpu-3".
        holder: what others are told about this process.

    Raises:
        LockUnusable: this user cannot lock its file.
        ConfigError: the folder's file system has no locks.
    """
    path = locks_folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
    try:
        descriptor = _open_lock(path)
    except OSError as error:
        raise LockUnusable(f"{path} cannot be locked: {error.strerror}") from None
    try:
        is_free = lock_file(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        os.close(descriptor)
        message = f"GPUs and ports cannot be locked: {error.strerror}"
        hint = f"name a folder of another file system in {LOCKS_VARIABLE}"
        raise ConfigError.of(message, str(path.parent), hint) from None
    if not is_free:
        text = os.pread(descriptor, _HOLDER_BYTES, 0).decode("utf-8", "replace")
        os.close(descriptor)
        return printable_text(text.partition("\n")[0]) or "another process"
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder}\n".encode()[:_HOLDER_BYTES], 0)
    return Lock(name, descriptor)


def _open_lock(path: Path) -> int:
    """Open the file of a lock, created for all users if missing.

    Raises:
        OSError: it cannot be opened, or writing to it would change something else: a link's target.
    """
    # without O_CREAT first: the kernel refuses that for others' files in a shared folder
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            with suppress(OSError):
                os.fchmod(descriptor, 0o666)
        except FileExistsError:  # another launcher was faster
            descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file of its own")
    return descriptor


def holder_text(fleet: str, instance: str) -> str:
    """Return what other launchers are told about a lock's holder."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = f"user {os.getuid()}"
    return f"{instance} of fleet {fleet} ({user}, launcher {os.getpid()})"


def find_gpus(text: str | None, environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, or those that `text` selects ("0-3,6" or a number).

    Without a driver, `text` names pretended GPUs, so that a fleet can be tried anywhere.

    Args:
        environ: may leave some of them visible, which `text` then counts; None: all are.

    Raises:
        ConfigError: `text` cannot be read or names a GPU that does not exist, or the driver's GPUs
            cannot be listed.
    """
    real = _real_gpus()
    visible = real if environ is None or not real else _visible(real, environ)
    if text is None:
        return visible
    indices = numbers_in(text, "--gpus")
    if not real and has_driver():
        message = "the GPUs of this machine, and which processes use them, cannot be listed"
        hint = "pip install 'instar[fleet]', and see whether nvidia-smi works"
        raise ConfigError.of(message, where="--gpus", hint=hint)
    if not real:
        return tuple(Gpu(number, str(number), f"pretended-{number}") for number in indices)
    if missing := [number for number in indices if number >= len(visible)]:
        hint = f"there are {len(visible)}"
        if len(visible) < len(real):
            hint += f" of {len(real)} that {_variable(environ or {})} leaves visible"
        raise ConfigError.of(f"there is no GPU {missing[0]}", where="--gpus", hint=hint)
    return tuple(visible[number] for number in indices)


def given_gpus(environ: Mapping[str, str], selection: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a scheduler gave to this process.

    Args:
        selection: see `find_gpus`; the engine has then asked its scheduler for none.
    """
    if selection is not None:
        return find_gpus(selection)
    return _visible(_real_gpus(), environ)


def _variable(environ: Mapping[str, str]) -> str:
    """Return the variable that says which GPUs this process may use; "" if none does."""
    return next((name for name in _GIVEN_VARIABLES if name in environ), "")


def _visible(real: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a variable leaves visible: as for CUDA, none from the first name on that is none."""
    variable = _variable(environ)
    if not variable:
        return tuple(real)
    gpus: list[Gpu] = []
    for name in filter(None, environ[variable].replace(" ", "").split(",")):
        gpu = _gpu_named(name, real, len(gpus))
        if gpu is None:  # such as -1 and NoDevFiles
            break
        gpus.append(gpu)
    return tuple(gpus)


def _gpu_named(name: str, real: Sequence[Gpu], position: int) -> Gpu | None:
    """Return the GPU with an index, or the only one whose UUID begins so; None if there is none."""
    if not name.isdecimal() and not name.startswith(("GPU-", "MIG-")):
        return None
    if not real or name.startswith("MIG-"):  # the driver does not list parts of a GPU
        return Gpu(int(name) if name.isdecimal() else position, name, name)
    if name.isdecimal():
        return next((gpu for gpu in real if gpu.index == int(name)), None)
    matching = [gpu for gpu in real if gpu.id.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def numbers_in(text: str, option: str) -> list[int]:
    """Parse "0-3,6", or the first numbers of a count."""
    numbers: list[int] = []
    compact = text.replace(" ", "")
    if compact.isdecimal() and len(compact) < 5:
        return list(range(int(compact)))
    for part in compact.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None:
            raise ConfigError.of(f"cannot read {text!r}", where=option, hint="e.g. 0-7 or 8")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(numbers)) < len(numbers):
        raise ConfigError.of(f"a number is given twice in {text!r}", where=option)
    return numbers


def has_driver() -> bool:
    """Return whether this machine has a driver of GPUs, also where nothing can ask it."""
    return _DRIVER_FILE.exists()


def _real_gpus() -> tuple[Gpu, ...]:
    """Return what the driver lists; nothing without one, or without nvidia-ml-py.

    Raises:
        Taken: it does not answer, e.g. because a GPU is lost.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
            pids: tuple[int, ...] = ()
            with suppress(pynvml.NVMLError):
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
                pids = tuple(int(process.pid) for process in running)
            gpus.append(Gpu(index, str(uuid), str(uuid), str(name), memory, pids))
        return tuple(gpus)
    except pynvml.NVMLError as error:
        raise Taken(f"the driver does not answer: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def lock_gpus(
    gpus: Sequence[Gpu], count: int, first: Sequence[int], holder: str
) -> list[tuple[Gpu, Lock]]:
    """Acquire `count` GPUs, if possible those with the indices `first`.

    Raises:
        Taken: fewer are free; nothing is held then.
    """
    first_gpus = [gpu for gpu in gpus if gpu.index in first]
    locks: list[tuple[Gpu, Lock]] = []
    holders: list[str] = []
    for gpu in [*first_gpus, *(gpu for gpu in gpus if gpu not in first_gpus)]:
        if len(locks) == count:
            break
        if gpu.processes:
            holders.append(f"GPU {gpu.index}: used by process {gpu.processes[0]}")
            continue
        try:
            lock = try_lock_resource(f"gpu-{gpu.key}", holder)
        except LockUnusable as error:
            holders.append(f"GPU {gpu.index}: {error}")
            continue
        if isinstance(lock, Lock):
            locks.append((gpu, lock))
        else:
            holders.append(f"GPU {gpu.index}: held by {lock}")
    if len(locks) < count:
        for _, lock in locks:
            lock.close()
        raise Taken(f"{count} GPUs are needed and {len(locks)} are free; {'; '.join(holders)}")
    return locks


def lock_port(
    first: int, holder: str, say: Callable[[str], None] = lambda _: None
) -> tuple[int, Lock]:
    """Acquire the first free port from `first` on, below those that the kernel gives to clients if `first` is.

    Args:
        say: told of a port that is left out because its lock is unusable.

    Raises:
        Taken: none is free.
    """
    end, unusable = _first_ephemeral(), ""
    if first >= end:
        end = _PORTS
    for port in range(first, end):
        if not is_bindable(port):
            continue
        try:
            lock = try_lock_resource(f"port-{port}", holder)
        except LockUnusable as error:
            unusable = str(error)
            say(f"port {port} is left out: {error}")
            continue
        if isinstance(lock, Lock):
            if is_bindable(port):
                return port, lock
            lock.close()
    raise Taken(
        f"no port is free from {first} to {end - 1}" + (f"; {unusable}" if unusable else "")
    )


def _first_ephemeral() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return _DEFAULT_FIRST_EPHEMERAL


def is_bindable(port: int) -> bool:
    """Return whether a server could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def close_all(locks: Iterable[Lock]) -> None:
    """Close this process's share of locks."""
    for lock in locks:
        lock.close()


@dataclass
class Lease:
    """The GPUs and ports of an instance, by process."""

    gpus: dict[str, list[tuple[Gpu, Lock]]]
    ports: dict[str, dict[str, tuple[int, Lock]]]
    say: Callable[[str], None] = lambda _: None
    """told of what is left out, and why"""

    def locks(self, process: str) -> list[Lock]:
        gpus = [lock for _, lock in self.gpus[process]]
        return [*gpus, *(lock for _, lock in self.ports[process].values())]

    def close(self) -> None:
        close_all(lock for process in self.gpus for lock in self.locks(process))

    def variables(self) -> dict[str, Any]:
        """Return `services.NAME.ports.PORT` and `services.NAME.gpus` of every process."""
        variables: dict[str, Any] = {}
        for name, ports in self.ports.items():
            variables[f"services.{name}.gpus"] = self.visible_gpus(name)
            variables |= {f"services.{name}.ports.{port}": n for port, (n, _) in ports.items()}
        return variables

    def visible_gpus(self, process: str) -> str:
        return ",".join(gpu.id for gpu, _ in self.gpus[process])

    def renew_ports(self, process: str, holder: str) -> None:
        """Replace ports that a program outside the fleet has taken."""
        for port, (number, lock) in self.ports[process].items():
            if not is_bindable(number):
                self.ports[process][port] = lock_port(number + 1, holder, self.say)
                lock.close()


def acquire_lease(
    slot: Slot, gpus: Sequence[Gpu], holder: str, say: Callable[[str], None] = lambda _: None
) -> Lease:
    """Acquire the GPUs and ports of a slot, or others in their place.

    Args:
        gpus: those that this fleet may use.
        say: told of ports that are left out because their locks are unusable.

    Raises:
        Taken: others hold too many of them, or use them now.
    """
    lease = Lease({name: [] for name in slot.gpus}, {name: {} for name in slot.ports}, say)
    if any(slot.gpus.values()):  # programs outside fleets come and go, and hold no locks
        processes = {gpu.key: gpu.processes for gpu in _real_gpus()}
        gpus = [replace(gpu, processes=processes.get(gpu.key, gpu.processes)) for gpu in gpus]
    try:
        for name, gpus_of_process in slot.gpus.items():
            first = [
                gpus[number].index for number in gpus_of_process
            ]  # the slot has positions in `gpus`
            lease.gpus[name] = lock_gpus(gpus, len(gpus_of_process), first, holder)
        for name, ports in slot.ports.items():
            for port, number in ports.items():
                lease.ports[name][port] = lock_port(number, holder, say)
    except BaseException:
        lease.close()
        raise
    return lease
