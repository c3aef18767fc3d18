"""Rendezvous: all ranks of one start find each other in the store and agree on a new key prefix.

Ranks that torchrun restarts use the same store as their dead predecessors, whose keys are still
in it. The restart count does not tell the rounds apart, because agents on different nodes count
differently. So every rank posts a random token; rank 0 offers a fresh prefix together with the
tokens that it has seen; a rank acknowledges only an offer with its own current token; and when all
have acknowledged, the prefix is agreed on and has no keys yet.
"""

from __future__ import annotations

import errno
import json
import socket
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

import psutil

from instar.config.errors import ConfigError
from instar.distributed.failure import RankMissing
from instar.distributed.placement import ADDRESS_KEY, PORT_KEY, is_loopback

_OFFER = "instar/offer"
_OVER = "instar/over"


class RendezvousStore(Protocol):
    """The methods used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def wait_for_all_ranks(store: RendezvousStore, rank: int, size: int, timeout_s: float) -> str:
    """Wait for all ranks and return a new key prefix, the same on all ranks.

    Raises:
        RankMissing: on all ranks that came, naming those that did not within `timeout_s` seconds.
    """
    token = uuid.uuid4().hex
    store.set(_joined_key(rank), token)
    deadline = time.monotonic() + timeout_s
    rounds = _lead(store, size) if rank == 0 else _follow(store, rank, token)
    for _ in _until(deadline):
        name = next(rounds)
        if name:
            return name
        _raise_posted(store, token)
    absent = _absent(store, rank, size, token)
    raise _post_error(store, absent, size, timeout_s)


def _lead(store: RendezvousStore, size: int) -> Iterator[str]:
    """Rank 0's part: polls once per `next`; yields "" until all ranks have acknowledged, then the prefix."""
    joined_keys = [_joined_key(rank) for rank in range(size)]
    starts: list[str] = []
    name = ""
    while True:
        if store.check(joined_keys):
            tokens = [token.decode() for token in store.multi_get(joined_keys)]
            if tokens != starts:
                starts, name = tokens, uuid.uuid4().hex
                store.set(_OFFER, json.dumps({"name": name, "tokens": tokens}))
            if store.check([_answer_key(name, rank) for rank in range(1, size)]):
                store.set(_go_key(name), "")
                yield name
        yield ""


def _follow(store: RendezvousStore, rank: int, token: str) -> Iterator[str]:
    while True:
        name = _offered_prefix(store, rank, token)
        if name:
            store.set(_answer_key(name, rank), "")
            if store.check([_go_key(name)]):
                yield name
        yield ""


def _offered_prefix(store: RendezvousStore, rank: int, token: str) -> str:
    """Return the prefix that rank 0 offers to this rank's current token; "" if there is none."""
    if not store.check([_OFFER]):
        return ""
    offer = json.loads(store.get(_OFFER))
    is_current = rank < len(offer["tokens"]) and offer["tokens"][rank] == token
    return str(offer["name"]) if is_current else ""


def _absent(store: RendezvousStore, rank: int, size: int, token: str) -> list[int]:
    """Return the ranks that have not come, as far as this rank can tell from the store."""
    name = _offered_prefix(store, rank, token)
    peers = [other for other in range(1, size) if other != rank]
    if name:
        absent = [other for other in peers if not store.check([_answer_key(name, other)])]
    else:
        absent = [other for other in range(size) if not store.check([_joined_key(other)])]
    # With no offer, or one that all have acknowledged, the missing rank is rank 0.
    return absent or [0]


def _post_error(
    store: RendezvousStore, absent: list[int], size: int, timeout_s: float
) -> RankMissing:
    """Post the error for the other ranks that came, so that all end with the same one."""
    ranks = ", ".join(map(str, absent))
    message = f"rank {ranks} of {size} did not join the rendezvous within {timeout_s:g} s"
    joined_keys = [_joined_key(rank) for rank in range(size) if store.check([_joined_key(rank)])]
    tokens = [token.decode() for token in store.multi_get(joined_keys)]
    store.set(_OVER, json.dumps({"tokens": tokens, "message": message, "ranks": absent}))
    return RankMissing(message, absent)


def _raise_posted(store: RendezvousStore, token: str) -> None:
    """Raise the error that another rank has posted to this start, if any."""
    if store.check([_OVER]):
        over = json.loads(store.get(_OVER))
        if token in over["tokens"]:
            raise RankMissing(over["message"], over["ranks"])


def _until(deadline: float) -> Iterator[None]:
    pause_s = 0.005
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause_s)
        pause_s = min(0.1, 1.2 * pause_s)


def _joined_key(rank: int) -> str:
    return f"instar/here/{rank}"


def _answer_key(name: str, rank: int) -> str:
    return f"instar/answer/{name}/{rank}"


def _go_key(name: str) -> str:
    return f"instar/go/{name}"


def listen(port: int, host: str = "127.0.0.1", key: str = PORT_KEY) -> tuple[int, int]:
    """Open a listening socket and return its descriptor and port (`port` 0: any free one).

    Raises:
        ConfigError: it cannot be bound; names the port and the `key` that set it.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise _listen_error(host, port, key, error) from error
        free_port: int = listener.getsockname()[1]
        return listener.detach(), free_port


def listen_to_hosts(port: int, host: str, key: str) -> int | None:
    """Open a socket that listens on `host` only, for ranks of other hosts; return its descriptor.

    Returns None if other hosts may know `host` by another address than this machine does: its name
    resolves to a loopback address here, as on Debian, or the address is translated on the way.

    Raises:
        ConfigError: it cannot be bound; names the port and the `key` that set it.
    """
    local_addresses = {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
    }
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    address = str(infos[0][4][0])
    if is_loopback(address) or address.partition("%")[0] not in local_addresses:
        return None
    return listen(port, address, key)[0]


def port_in_use(host: str, port: int, key: str) -> ConfigError:
    return ConfigError.of(
        f"port {port} of {host} is in use, perhaps by another run",
        where=key,
        hint="choose another port, or 0 for any free one"
        if key == PORT_KEY
        else "choose another port",
    )


def _listen_error(host: str, port: int, key: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return port_in_use(host, port, key)
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return ConfigError.of(
            f"{host} is not an address of this machine, on which rank 0 runs",
            where=ADDRESS_KEY,
            hint="use 127.0.0.1 if all ranks run on one machine",
        )
    return ConfigError.of(f"cannot bind port {port} of {host}: {error.strerror}", where=key)
