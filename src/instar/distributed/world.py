"""The process group: this rank, its device, joining and leaving the group."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from instar.config.errors import ConfigError
from instar.config.schema import ParallelConfig
from instar.distributed.failure import PeerLost, RankMissing, RunFailed, is_secondary
from instar.distributed.heartbeat import Position
from instar.distributed.placement import DEVICES_VARIABLE, Placement, is_loopback, placement
from instar.distributed.rendezvous import listen, listen_to_hosts, port_in_use, wait_for_all_ranks
from instar.distributed.watchdog import StoreAddress, WatchdogLimits, watch_ranks

logger = logging.getLogger(__name__)


# The watchdog enforces the time limits. The transport's own timeout would also count time in which
# the whole group was stopped (Ctrl-Z, SLURM), and must not end a run for that.
_TRANSPORT_LIMIT = timedelta(days=1)
_AGENT_ANSWERS_S = 10.0
_LAUNCH_KEY = "instar/launch"
_serving: dict[tuple[int, str, int], TCPStore] = {}
"""The stores that this process serves until it exits: a script that trains in a loop meets there
again. Its port would not be free otherwise, because a deleted DDP keeps its group and its store."""
_POLL_S = 0.05


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks. With `size` 1 there is no process group: backend "none"."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str
    position: Position = field(default_factory=Position, compare=False, repr=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """the group for control messages; None: the default group"""
    local_size: int = 1
    """number of ranks on this host"""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def at(self, where: str, step: int | None = None) -> None:
        """Set the current activity, e.g. "evaluation at step 100", which is reported if this rank hangs."""
        self.position.at(where, step)

    def note_progress(self) -> None:
        """Report progress from a loop that may take longer than `timeout_s`."""
        self.position.moves += 1


@contextmanager
def join_group(config: ParallelConfig, device: str = "auto") -> Iterator[World]:
    """Join the process group given by torchrun's or SLURM's environment; leave it at the end.

    Control messages are CPU tensors over gloo, whatever carries the gradients. MASTER_* is read,
    never written. If a rank hangs inside, every process exits with code 4 (see `watch_ranks`).

    Raises:
        ConfigError: the device, port or environment is invalid.
        RankMissing: some ranks did not join within `config.timeout_s` seconds, or were lost.
        PeerLost: another rank is gone; it is named if known.
        RunFailed: the ranks cannot reach each other.
    """
    place = placement(os.environ, config)
    torch_device = device_of(device, place, chosen_devices(os.environ, config.devices))
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    if place.size == 1:
        yield World(place.rank, place.local_rank, 1, torch_device, "none")
        return
    backend = _backend(config.backend, torch_device)
    excepthook = sys.excepthook
    store = _meet(place, config.timeout_s)
    with _interface_for_gloo(place):
        try:
            with _watching(store, place, config) as position:
                _connect(store, place, backend, torch_device)
                yield World(
                    place.rank,
                    place.local_rank,
                    place.size,
                    torch_device,
                    backend,
                    position,
                    local_size=place.local_size,
                )
        finally:
            sys.excepthook = excepthook


def with_own_group(world: World) -> World:
    """Return `world` with a new process group, for collectives in another thread. A collective."""
    if world.size == 1:
        return world
    group = dist.new_group(backend="gloo", timeout=_TRANSPORT_LIMIT)
    return replace(world, position=Position(), group=group)


def remember(key: str, value: str) -> None:
    """Store `value` in the launcher for the ranks that it restarts; without a launcher, do nothing."""
    store = _kept()
    if store is not None:
        store.set(key, value)


def recall(key: str) -> str | None:
    """Return the value stored by `remember` in an earlier start of this launch, or None."""
    store = _kept()
    if store is None or not store.check([key]):
        return None
    return store.get(key).decode()


def _meet(place: Placement, timeout_s: float) -> PrefixStore:
    """Wait for all ranks and return the store with a prefix unique to this start."""
    try:
        store = _store(place, timeout_s)
        name = wait_for_all_ranks(store, place.rank, place.size, timeout_s)
    except (RuntimeError, OSError) as error:
        if place.rank != 0 and not _agent_serves() and isinstance(error, RuntimeError):
            raise RankMissing(
                f"rank 0 of {place.size} did not join the rendezvous, or has left it: nothing "
                f"answers at {place.host}:{place.port}, where it serves the store",
                [0],
            ) from error
        raise _not_met(place, error) from error
    return PrefixStore(f"instar/round/{name}", store)


def _connect(store: PrefixStore, place: Placement, backend: str, device: torch.device) -> None:
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=_TRANSPORT_LIMIT,
            device_id=device if "nccl" in backend else None,
        )
    except (RuntimeError, OSError) as error:
        raise _not_met(place, error) from error


def _not_met(place: Placement, error: Exception) -> RunFailed:
    kind = PeerLost if is_secondary(error) else RunFailed
    return kind(
        f"rank {place.rank} of {place.size} could not join the process group at "
        f"{place.host}:{place.port}: {error}"
    )


def _watching(
    store: PrefixStore, place: Placement, config: ParallelConfig
) -> AbstractContextManager[Position]:
    # A connection serves one thread at a time, and the main thread may block on its own.
    watch_store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
    # The watchdog measures its waits itself, and a stopped launcher must not end the run.
    watch_store.set_timeout(_TRANSPORT_LIMIT)
    address = StoreAddress(f"{place.host}:{place.port}", None if _agent_serves() else 0)
    limits = WatchdogLimits.of(config.silence_s, config.timeout_s, place.size)
    return watch_ranks(watch_store, address, place.rank, place.size, limits, _part)


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(place: Placement, timeout_s: float) -> TCPStore:
    serves = place.rank == 0 and not _agent_serves()
    key = (os.getpid(), place.host, place.port)
    if serves and key in _serving:
        return _serving[key]
    listener = _listener(place) if serves else None
    if not serves:
        _await_server(place, timeout_s)
    try:
        store = TCPStore(
            place.host,
            place.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=serves,
            master_listen_fd=listener,
        )
    except RuntimeError as error:
        if serves and "EADDRINUSE" in str(error):
            raise port_in_use(place.host, place.port, place.port_key) from error
        raise
    if not _agent_serves():
        _one_launch(store, place)
    if serves:
        _serving[key] = store
    return store


def _listener(place: Placement) -> int | None:
    """Bind the store to its own address only, because it has no authentication."""
    if is_loopback(place.host):
        return listen(place.port, place.host, place.port_key)[0]
    descriptor = listen_to_hosts(place.port, place.host, place.port_key)
    if descriptor is None:
        logger.warning(
            "the rendezvous store listens on port %d of every interface, without authentication: "
            "%s is not an address of an interface of this host; set MASTER_ADDR to one",
            place.port,
            place.host,
        )
    return descriptor


def _one_launch(store: TCPStore, place: Placement) -> None:
    """Raise ConfigError if rank 0 of another launch serves at this port."""
    if place.rank == 0:
        store.set(_LAUNCH_KEY, place.launch)
    elif store.get(_LAUNCH_KEY).decode() != place.launch:
        raise port_in_use(place.host, place.port, place.port_key)


def _await_server(place: Placement, timeout_s: float) -> None:
    """Wait until the store's address accepts connections.

    TCPStore waits too, but with growing pauses, for up to twice its timeout.

    Raises:
        RuntimeError: nothing listens there after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{place.host}:{place.port}: {error}") from error
        time.sleep(_POLL_S)


def _kept() -> PrefixStore | None:
    """Connect to the store of the launcher that would restart the ranks; it outlives them."""
    address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if not _agent_serves() or not all(address):
        return None
    host, port = map(str, address)
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=False,
            timeout=timedelta(seconds=_AGENT_ANSWERS_S),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise RunFailed(f"the launcher does not answer at {host}:{port}: {error}") from error
    return PrefixStore(f"instar/kept/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)


def _part(limit_s: float = 2.0) -> None:
    """Destroy the group without waiting for ever for a collective that a dead peer will not join."""
    if not dist.is_initialized():
        return
    parting = threading.Thread(target=dist.destroy_process_group, daemon=True, name="part")
    parting.start()
    parting.join(limit_s)
    if parting.is_alive():
        logger.warning("left the process group while a collective was still pending")


@contextmanager
def _interface_for_gloo(place: Placement) -> Iterator[None]:
    """Set GLOO_SOCKET_IFNAME to the interface between this host and rank 0's, unless the user has set it.

    By default gloo takes the interface of this host's own name, which Debian resolves to 127.0.1.1.
    Call it after the rendezvous.
    """
    interface = None if "GLOO_SOCKET_IFNAME" in os.environ else _interface_to(place)
    if interface is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _interface_to(place: Placement) -> str | None:
    """Return the name of the network interface; None if unknown."""
    if place.one_host:
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), None)
    address = _address_towards(place.host)
    if address is None or is_loopback(address):
        # on rank 0's host, whose name resolves to a loopback there
        address = _reached_at(place.port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address == interface.address.partition("%")[0] for interface in addresses):
            return name
    return None


def _reached_at(port: int) -> str | None:
    """Return the address of this host at which other hosts have connected to `port`; None if unknown."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            ip, at = connection.laddr or ("", 0)
            address = ip.removeprefix("::ffff:")  # IPv4 at an IPv6 socket
            if (
                connection.status == psutil.CONN_ESTABLISHED
                and at == port
                and not is_loopback(address)
            ):
                return address
    return None


def _address_towards(host: str) -> str | None:
    """Return this host's address on the route to `host`; None if there is no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # connecting UDP sends nothing; the kernel only chooses a route
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _backend(backend: str, device: torch.device) -> str:
    if device.type == "cpu":
        if backend == "nccl":
            raise ConfigError.of(
                "nccl needs GPUs, but the device is cpu",
                where="parallel.backend",
                hint="use gloo or auto",
            )
        return "gloo"
    return "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"


def chosen_devices(environ: Mapping[str, str], devices: Sequence[int]) -> tuple[int, ...]:
    """Return the GPU indices for the ranks of this machine: from the environment, else `devices`.

    Raises:
        ConfigError: they are not indices.
    """
    text = environ.get(DEVICES_VARIABLE, "")
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise _no_device(f"devices must be indices such as 0,1, not {text!r}")
    return tuple(map(int, parts)) or tuple(devices)


def device_of(kind: str, place: Placement, devices: Sequence[int]) -> torch.device:
    """Return the device of a rank, chosen by its *local* rank among `devices` (empty: 0, 1, 2 …).

    Indices count the GPUs visible under CUDA_VISIBLE_DEVICES. The devices of all local ranks are
    checked, so that all of them fail alike.

    Raises:
        ConfigError: a device does not exist; names it.
    """
    device_list = ",".join(map(str, devices))
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        if devices:
            raise _no_device(
                f"devices {device_list} were requested, but "
                + ("this host has no GPU" if kind == "auto" else "the device is cpu")
            )
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, _, index = kind.partition(":")
    if name not in ("auto", "cuda"):
        raise _no_device(f"unknown device {kind!r}")
    if index and place.local_size > 1:
        raise _no_device(
            f"{kind} is one device, but {place.local_size} ranks run on this host",
            hint="use cuda, and choose devices with --devices",
        )
    if place.own_gpu and count == 1 and not devices:
        return torch.device("cuda", 0)
    indices = [int(index)] if index else list(devices) or list(range(place.local_size))
    if len(indices) < place.local_size:
        raise _no_device(f"{place.local_size} ranks on this host, but only devices {device_list}")
    absent = [index for index in indices[: place.local_size] if index >= count]
    if absent:
        raise _no_device(
            f"cuda:{absent[0]} does not exist: {_visible(count)}",
            hint="use fewer ranks or other devices" if count else "use cpu",
        )
    return torch.device("cuda", indices[place.local_rank])


def _visible(count: int) -> str:
    gpus = f"{count} GPU{'' if count == 1 else 's'}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"this host has {gpus}"
    numbers = f", counted from 0 to {count - 1}" if count > 1 else ", cuda:0" if count else ""
    return f"CUDA_VISIBLE_DEVICES={visible} leaves {gpus}{numbers}"


def _no_device(message: str, hint: str = "") -> ConfigError:
    return ConfigError.of(message, where="device", hint=hint)
