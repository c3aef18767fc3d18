"""The ranks of a run: who I am, on which device, and the group in which all meet."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from instar.config.errors import ConfigError
from instar.config.schema import ParallelConfig
from instar.distributed.devices import chosen_devices, device_of
from instar.distributed.failure import (
    Interrupted,
    PeerLost,
    RankMissing,
    RunFailed,
    is_secondary,
)
from instar.distributed.heartbeat import Position
from instar.distributed.listener import listen, port_in_use
from instar.distributed.placement import Placement, is_loopback, placement
from instar.distributed.rounds import roll_call
from instar.distributed.watch import Limits, Served, watching

__all__ = ["Interrupted", "RunFailed", "World", "join", "recall", "remember"]

logger = logging.getLogger(__name__)

# The watch ends a wait at its limit. The transport also counts time in which the whole group was
# stopped, as by Ctrl-Z or SLURM, and must not end a run for that.
_TRANSPORT_LIMIT = timedelta(days=1)
_AGENT_ANSWERS_S = 10.0
_LAUNCH_KEY = "instar/launch"
_GLANCE_S = 0.05


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
    """in which agreements are made; None: the one that all ranks met in"""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def at(self, where: str, step: int | None = None) -> None:
        """Say what this rank begins, e.g. "evaluation at step 100": others name it if it hangs."""
        self.position.at(where, step)

    def moved(self) -> None:
        """Say that this rank is at work, in a loop that may take longer than `timeout_s`."""
        self.position.moves += 1


@contextmanager
def join(config: ParallelConfig, device: str = "auto") -> Iterator[World]:
    """Meet the other ranks named by torchrun's or SLURM's environment; part from them at the end.

    Control traffic goes through CPU tensors over gloo, whatever carries the gradients. MASTER_*
    is read, never written. A rank that hangs inside ends all, each process at once with code 4
    (see `watching`).

    Raises:
        ConfigError: a device, port or environment that cannot be.
        RankMissing: some ranks did not come within `config.timeout_s` seconds, or were lost.
        PeerLost: another rank is gone; names it where that can be known.
        RunFailed: the ranks cannot reach each other.
    """
    place = placement(os.environ, config)
    chosen = device_of(device, place, chosen_devices(os.environ, config.devices))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if place.size == 1:
        yield World(place.rank, place.local_rank, 1, chosen, "none")
        return
    backend = _backend(config.backend, chosen)
    excepthook = sys.excepthook
    with _loopback_for_gloo(place):
        store = _meet(place, config.timeout_s)
        try:
            with _watching(store, place, config) as position:
                _connect(store, place, backend, chosen)
                yield World(place.rank, place.local_rank, place.size, chosen, backend, position)
        finally:
            sys.excepthook = excepthook
            _part()


def beside(world: World) -> World:
    """The same ranks in a group of their own, for a thread that must not disturb the first.

    All ranks must ask for it together.
    """
    if world.size == 1:
        return world
    group = dist.new_group(backend="gloo", timeout=_TRANSPORT_LIMIT)
    return replace(world, position=Position(), group=group)


def remember(key: str, value: str) -> None:
    """Keep `value` for the ranks that this launcher starts again; nothing where none would."""
    store = _kept()
    if store is not None:
        store.set(key, value)


def recall(key: str) -> str | None:
    """What an earlier start of this launch has remembered, or None.

    The launcher's store keeps it: it lives as long as the launcher does.
    """
    store = _kept()
    if store is None or not store.check([key]):
        return None
    return store.get(key).decode()


def _meet(place: Placement, timeout_s: float) -> PrefixStore:
    """The store, under a name of this start's own, when all ranks have come to it."""
    try:
        store = _store(place, timeout_s)
        name = roll_call(store, place.rank, place.size, timeout_s)
    except (RuntimeError, OSError) as error:
        if place.rank != 0 and not _agent_serves() and isinstance(error, RuntimeError):
            raise RankMissing(
                f"rank 0 of {place.size} did not come to the start, or has left it: nothing "
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
        f"rank {place.rank} of {place.size} could not meet the others at "
        f"{place.host}:{place.port}: {error}"
    )


def _watching(
    store: PrefixStore, place: Placement, config: ParallelConfig
) -> AbstractContextManager[Position]:
    # One connection serves one thread at a time, and the main thread may wait on its own.
    own = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
    served = Served(f"{place.host}:{place.port}", None if _agent_serves() else 0)
    limits = Limits.of(config.silence_s, config.timeout_s, place.size)
    return watching(own, served, place.rank, place.size, limits)


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(place: Placement, timeout_s: float) -> TCPStore:
    serves = place.rank == 0 and not _agent_serves()
    # A store asks for no password, so one that serves this host alone listens on loopback alone.
    local = serves and is_loopback(place.host)
    listener = listen(place.port, place.host, place.port_key)[0] if local else None
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
    return store


def _one_launch(store: TCPStore, place: Placement) -> None:
    """Raise ConfigError where another launch's rank 0 serves at this port: its own was refused it."""
    if place.rank == 0:
        store.set(_LAUNCH_KEY, place.launch)
    elif store.get(_LAUNCH_KEY).decode() != place.launch:
        raise port_in_use(place.host, place.port, place.port_key)


def _await_server(place: Placement, timeout_s: float) -> None:
    """Wait until somebody listens where the store shall be.

    TCPStore waits by itself, but with pauses that grow, up to twice as long as it was told.

    Raises RuntimeError if nobody does within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{place.host}:{place.port}: {error}") from error
        time.sleep(_GLANCE_S)


def _kept() -> PrefixStore | None:
    """Where values outlive the ranks: in the store of the launcher that would start them again."""
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
    """Destroy the group, but not wait for ever for an operation that a dead peer will not join."""
    if not dist.is_initialized():
        return
    parting = threading.Thread(target=dist.destroy_process_group, daemon=True, name="part")
    parting.start()
    parting.join(limit_s)
    if parting.is_alive():
        logger.warning("left without the other ranks: an exchange with them is still open")


@contextmanager
def _loopback_for_gloo(place: Placement) -> Iterator[None]:
    if not place.one_host or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _backend(wanted: str, device: torch.device) -> str:
    if device.type == "cpu":
        if wanted == "nccl":
            raise ConfigError.one(
                "nccl needs GPUs, but the device is cpu",
                where="parallel.backend",
                hint="use gloo or auto",
            )
        return "gloo"
    return "gloo" if wanted == "gloo" else "cpu:gloo,cuda:nccl"
