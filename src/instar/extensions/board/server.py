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
from instar.extensions.board.app import dashboard_app
from instar.extensions.board.catalog import MakeFleets

ENTRY = (
    '<!doctype html><meta charset="utf-8"><title>Instar</title><script src="/page/enter.js">'
    '</script><noscript><meta http-equiv="refresh" content="0; url=/"></noscript>'
)
"""forwards to the page by script: after a redirect from another site's link, browsers do not send
SameSite=Strict cookies"""
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
    """ASGI middleware that checks the Host header, the token and the origin, and sets security headers.

    Only addresses and this machine's own names are accepted as Host, against DNS rebinding. A request
    carries the token as a cookie or as `Authorization: Bearer`. `/?token=` exchanges it for the cookie
    and forwards to an address without it. A ticket is a token that can be exchanged once. A request that may
    change something must not come from the page of another site or port.
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
        given_token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        sets_cookie = False

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answer[name] = value
                answer.setdefault("Cache-Control", "no-store")
                if sets_cookie:
                    answer["Set-Cookie"] = (
                        f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    )
            await send(message)

        app = self.app
        if not self._is_served(headers.get("host", "")):
            app = PlainTextResponse("this host is not served here\n", 421)
        elif scope["path"] == "/" and given_token and self._redeem(given_token):
            sets_cookie, app = True, HTMLResponse(ENTRY)
        elif not self._has_token(headers):
            text = "token required: open the address that instar dashboard printed\n"
            app = PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        elif scope["method"] not in ("GET", "HEAD") and not _is_of_own_page(headers):
            app = PlainTextResponse("only the dashboard's own page may ask for that\n", 403)
        await app(scope, receive, send_with_headers)

    def _is_served(self, host: str) -> bool:
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

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(token.strip()):
            return True
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_token(morsel.value)

    def _redeem(self, token: str) -> bool:
        for ticket in self.tickets:
            if hmac.compare_digest(token.encode("utf-8", "replace"), ticket.encode()):
                self.tickets.remove(ticket)
                return True
        return self._is_token(token)

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


def _is_of_own_page(headers: Headers) -> bool:
    """Return whether a request comes from a page of this server, or from no page.

    Browsers say where a POST comes from. A cookie does not: those with SameSite=Strict are also sent for pages of
    other ports of this host, which other users may serve.
    """
    origin = headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == headers.get("host")
    return is_own and headers.get("sec-fetch-site", "same-origin") == "same-origin"


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def own_names(host: str) -> frozenset[str]:
    """Return this machine's names and the host that the server listens on."""
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))


MAX_CONNECTIONS = 256
"""connections at a time; further ones are closed"""
REQUEST_S = 5.0
"""time limit for a request's complete headers, and for the next request of a connection"""
STUCK_S = 15.0
"""time after which a connection is dropped if its peer does not receive pending data"""
CHECK_S = 1.0


class Connection(H11Protocol):
    """Uvicorn's protocol with limits for endless headers and for responses that nobody receives."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._last_answer, self._last_progress, self._unsent_bytes = now, now, 0
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._timer = self.loop.call_later(CHECK_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        now = self.loop.time()
        cycle: Any = self.cycle
        waiting = self.transport.get_write_buffer_size() + _unsent(self.transport)
        if waiting or (cycle is not None and not cycle.response_complete):
            self._last_answer = now
        # writing increases the number; only receiving decreases it
        if waiting == 0 or waiting < self._unsent_bytes:
            self._last_progress = now
        self._unsent_bytes = waiting
        if now - self._last_answer > REQUEST_S or now - self._last_progress > STUCK_S:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(CHECK_S, self._check)


def _unsent(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send buffer; 0 if unknown."""
    count = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, count)
    return int.from_bytes(count, sys.byteorder)


PORT = 8787
GRACE_S = 2


@dataclass(frozen=True)
class Address:
    """Where the page is served; the socket is already listening."""

    descriptor: int
    host: str
    port: int
    token: str
    ticket: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    """one-time token for the address that a browser is started with, which other users may see in the
    process list"""

    @property
    def url(self) -> str:
        return f"{self._base}?token={self.token}"

    @property
    def url_once(self) -> str:
        return f"{self._base}?token={self.ticket}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it; False for names but `localhost`."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def _base(self) -> str:
        name = self.host
        if name in ("0.0.0.0", "::"):
            name = socket.gethostname()
        elif ":" in name:
            name = f"[{name}]"
        return f"http://{name}:{self.port}/"


def bind(host: str, port: int | None, token: str | None) -> Address:
    """Bind a port: `port`, 0 for any, None for the default port or else any.

    Without a `token`, a random one is generated: other users of this machine reach its loopback too.

    Raises:
        ConfigError: port or host are not available, or the token contains other characters than
            letters, digits, - and _.
    """
    if not token:
        token = secrets.token_urlsafe(18)
    elif not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        message = "a token consists of letters, digits, - and _"
        raise ConfigError.of(message, "--token", "omit it to generate one")
    try:
        descriptor, free_port = listen(PORT if port is None else port, host, "--port")
    except ConfigError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno == EADDRINUSE):
            raise _no_host(host, error) from error
        descriptor, free_port = listen(0, host, "--port")
        if port is not None:
            socket.close(descriptor)
            hint = f"{free_port} is free now: --port {free_port}; --port 0 takes any"
            raise ConfigError.of(f"port {port} of {host} is in use", "--port", hint) from error
    return Address(descriptor, host, free_port, token)


def serve_dashboard(
    folder: Path,
    address: Address,
    make_fleets: MakeFleets | None = None,
    *,
    read_only: bool = True,
) -> None:
    """Serve `folder` until SIGINT or SIGTERM; open streams are ended, not waited for."""
    ending = Ending()
    with socket.socket(fileno=address.descriptor) as server_socket:
        config = server_config(folder, address, ending, make_fleets, read_only=read_only)
        Server(config, ending).run(sockets=[server_socket])


def server_config(
    folder: Path,
    address: Address,
    ending: Ending,
    make_fleets: MakeFleets | None = None,
    *,
    read_only: bool = True,
) -> uvicorn.Config:
    """Return uvicorn's config for the guarded app."""
    app = Guard(
        dashboard_app(folder, ending, make_fleets, read_only=read_only),
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
    """Uvicorn's server, but signals end open streams and do not raise afterwards."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self._ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, _: FrameType | None) -> None:  # noqa: ARG001
            self._ending.is_due = True
            self.should_exit = True

        previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {
            number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _no_host(host: str, error: ConfigError) -> ConfigError:
    cause = error.__cause__
    # or an unknown name
    if isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) == EADDRNOTAVAIL:
        message = f"{host} is not an address of this machine: {getattr(cause, 'strerror', cause)}"
        hint = "127.0.0.1 for this machine only, 0.0.0.0 for all its addresses"
        return ConfigError.of(message, "--host", hint)
    return error
