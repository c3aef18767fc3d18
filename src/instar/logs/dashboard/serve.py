"""From a bound port to a served page, until somebody ends it."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EADDRINUSE
from pathlib import Path
from types import FrameType

import uvicorn

from instar.config.errors import ConfigError
from instar.distributed.listener import listen
from instar.logs.dashboard.app import dashboard
from instar.logs.dashboard.guard import Guard, own_names

PORT = 8787
GRACE_S = 2


@dataclass(frozen=True)
class Address:
    """Where the page is; the socket listens already."""

    descriptor: int
    host: str
    port: int
    token: str = ""

    @property
    def url(self) -> str:
        name = self.host
        if name in ("0.0.0.0", "::"):
            name = socket.gethostname()
        elif ":" in name:
            name = f"[{name}]"
        return f"http://{name}:{self.port}/{f'?token={self.token}' if self.token else ''}"


def take(host: str, port: int | None, token: str | None) -> Address:
    """Bind a port: `port`, 0 for any, None for the usual one or else any.

    Whoever listens beyond this machine has a token, made up where none is given.

    Raises:
        ConfigError: the port or the host cannot be had, or the token cannot be sent.
    """
    if not token:
        token = "" if is_loopback(host) else secrets.token_urlsafe(18)
    elif not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise ConfigError.one(
            "a token is made of letters, digits, - and _", where="--token", hint="leave it out"
        )
    try:
        descriptor, bound = listen(PORT if port is None else port, host, "--port")
    except ConfigError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno == EADDRINUSE):
            raise _no_host(host, error) from error
        descriptor, bound = listen(0, host, "--port")
        if port is not None:
            socket.close(descriptor)
            raise ConfigError.one(
                f"port {port} of {host} is in use",
                where="--port",
                hint=f"{bound} is free now: --port {bound}; --port 0 takes any",
            ) from error
    return Address(descriptor, host, bound, token)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(folder: Path, address: Address) -> None:
    """Serve `folder` until SIGINT or SIGTERM; open streams are ended, not waited for."""
    ending = Ending()
    app = Guard(
        dashboard(folder, ending),
        own_names(address.host),
        address.token,
        f"instar-{address.port}",
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    with socket.socket(fileno=address.descriptor) as bound:
        Server(config, ending).run(sockets=[bound])


@dataclass
class Ending:
    """Whether the server is about to end."""

    is_due: bool = False

    def __call__(self) -> bool:
        return self.is_due


class Server(uvicorn.Server):
    """Uvicorn's, that tells open streams to end, and is itself ended without an error."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self._ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, _: FrameType | None) -> None:  # noqa: ARG001
            self._ending.is_due = True
            self.should_exit = True

        before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {
            number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _no_host(host: str, error: ConfigError) -> ConfigError:
    if isinstance(cause := error.__cause__, OSError) and "no address" in str(error):
        return ConfigError.one(
            f"{host} is no address of this machine: {cause.strerror}",
            where="--host",
            hint="127.0.0.1 for this machine alone, 0.0.0.0 for every address of it",
        )
    return error
