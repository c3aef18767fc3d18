"""Who may ask, and what a browser may do with the answer."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    only addresses and this machine's own names are answered. With a token, a request bears it as
    a cookie, as `Authorization: Bearer`, or, for the page alone, as `?token=`, which sets the
    cookie.
    """

    app: ASGIApp
    names: frozenset[str]
    token: str = ""
    cookie: str = "instar"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        by_query = scope["path"] == "/" and self._is_token(asked)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answer[name] = value
                answer.setdefault("Cache-Control", "no-store")
                if by_query and self.token:
                    answer["Set-Cookie"] = (
                        f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    )
            await send(message)

        app = self.app
        if not self._is_here(headers.get("host", "")):
            app = PlainTextResponse("this host is not served here\n", 421)
        elif self.token and not (by_query or self._bears_token(headers)):
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

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def host_name(host: str) -> str:
    """The name or address in a Host header, without port and brackets, in small letters."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def own_names(host: str) -> frozenset[str]:
    """What this machine is called, and the name that it was told to listen on."""
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))
