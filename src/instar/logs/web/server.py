"""Serves the dashboard: the socket, the access token, and limits of each connection."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import signal
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EADDRINUSE, EADDRNOTAVAIL
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from instar.config.errors import ConfigError
from instar.distributed.rendezvous import listen
from instar.logs.web.app import dashboard

ENTRY = (
    '<!doctype html><meta charset="utf-8"><title>Instar</title><script src="/page/enter.js">'
    '</script><noscript><meta http-equiv="refresh" content="0; url=/"></noscript>'
)
"""Goes on to the page from here: of a redirect that another site's link began, browsers send no
cookie that is SameSite=Strict."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class Guard:
    """Around the app: the Host header, the token, the headers of every answer.

    A page elsewhere whose name is made to point here (DNS rebinding) sends that name as Host, so
    only addresses and this machine's own names are answered. A request bears the token as a
    cookie or as `Authorization: Bearer`. `/?token=` exchanges it for the cookie, and leaves the
    address at once for one without it. A ticket is a token that can be exchanged once.
    """

    app: ASGIApp
    names: frozenset[str]
    token: str
    cookie: str = "instar"
    tickets: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        enters = False

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answer[name] = value
                answer.setdefault("Cache-Control", "no-store")
                if enters:
                    answer["Set-Cookie"] = (
                        f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    )
            await send(message)

        app = self.app
        if not self._is_here(headers.get("host", "")):
            app = PlainTextResponse("this host is not served here\n", 421)
        elif scope["path"] == "/" and asked and self._takes(asked):
            enters, app = True, HTMLResponse(ENTRY)
        elif not self._bears_token(headers):
            app = PlainTextResponse(
                "a token is needed: open the address that instar dashboard printed\n",
                401,
                {"WWW-Authenticate": "Bearer"},
            )
        await app(scope, receive, sent)

    def _is_here(self, host: str) -> bool:
        name = host_name(host)
        if not name:
            return False
        if name in self.names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _bears_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_token(morsel.value)

    def _takes(self, given: str) -> bool:
        for ticket in self.tickets:
            if hmac.compare_digest(given.encode("utf-8", "replace"), ticket.encode()):
                self.tickets.remove(ticket)
                return True
        return self._is_token(given)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def host_name(host: str) -> str:
    """The name or address in a Host header, without port and brackets, in small letters."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def own_names(host: str) -> frozenset[str]:
    """Returns this machine's names and the host that the server listens on."""
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))


AT_MOST = 256
"""connections at a time; further ones are closed"""
REQUEST_S = 5.0
"""within which a request's headers must arrive whole, and another request must begin"""
STUCK_S = 15.0
"""A connection whose peer takes nothing of what waits to be sent is dropped after this long."""
LOOK_S = 1.0


class Connection(H11Protocol):
    """Uvicorn's, with limits: it has none for headers that do not end or answers that nobody takes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._answered, self._taken, self._waiting = now, now, 0
        self._look: asyncio.TimerHandle | None = None
        if len(self.connections) > AT_MOST:
            transport.abort()
            return
        self._look = self.loop.call_later(LOOK_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        now = self.loop.time()
        cycle: Any = self.cycle
        waiting = self.transport.get_write_buffer_size() + _unsent(self.transport)
        if waiting or (cycle is not None and not cycle.response_complete):
            self._answered = now
        # what is written meanwhile makes it more; only what is taken makes it less
        if waiting == 0 or waiting < self._waiting:
            self._taken = now
        self._waiting = waiting
        if now - self._answered > REQUEST_S or now - self._taken > STUCK_S:
            self.transport.abort()
            return
        self._look = self.loop.call_later(LOOK_S, self._check)


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that the system holds for the peer, as far as it says."""
    count = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, count)
    return int.from_bytes(count, sys.byteorder)


PORT = 8787
GRACE_S = 2


@dataclass(frozen=True)
class Address:
    """Where the page is; the socket listens already."""

    descriptor: int
    host: str
    port: int
    token: str
    ticket: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    """what is good for the token once: in the address that a browser is started with, which other
    users may see in the list of processes"""

    @property
    def url(self) -> str:
        return f"{self._base}?token={self.token}"

    @property
    def url_once(self) -> str:
        return f"{self._base}?token={self.ticket}"

    @property
    def _base(self) -> str:
        name = self.host
        if name in ("0.0.0.0", "::"):
            name = socket.gethostname()
        elif ":" in name:
            name = f"[{name}]"
        return f"http://{name}:{self.port}/"


def take(host: str, port: int | None, token: str | None) -> Address:
    """Bind a port: `port`, 0 for any, None for the usual one or else any.

    There is always a token, made up where none is given: other users of this machine reach its
    loopback too.

    Raises:
        ConfigError: the port or the host cannot be had, or the token cannot be sent.
    """
    if not token:
        token = secrets.token_urlsafe(18)
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


def serve(folder: Path, address: Address) -> None:
    """Serve `folder` until SIGINT or SIGTERM; open streams are ended, not waited for."""
    ending = Ending()
    with socket.socket(fileno=address.descriptor) as bound:
        Server(configured(folder, address, ending), ending).run(sockets=[bound])


def configured(folder: Path, address: Address, ending: Ending) -> uvicorn.Config:
    """The guarded app over `folder`, and how it is served."""
    app = Guard(
        dashboard(folder, ending),
        own_names(address.host),
        address.token,
        f"instar-{address.port}",
        {address.ticket},
    )
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )


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
    cause = error.__cause__
    # also what getaddrinfo says of an unknown name
    if isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) == EADDRNOTAVAIL:
        return ConfigError.one(
            f"{host} is not an address of this machine: {getattr(cause, 'strerror', cause)}",
            where="--host",
            hint="127.0.0.1 for this machine alone, 0.0.0.0 for every address of it",
        )
    return error
