"""Health checks of services: an HTTP path, a completion of one token, a TCP port, a command."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instar.config.errors import ConfigError
from instar.extensions.fleet.plan import expand
from instar.extensions.fleet.spec import Healthcheck

if TYPE_CHECKING:
    import httpx


class Unhealthy(Exception):  # noqa: N818
    """A check failed; the message says how, `status` which HTTP status was answered."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Checker:
    """Carries out the checks of one service; close it at the end."""

    def __init__(
        self, health: Healthcheck, port: int, variables: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        self._health = health
        self._port = port
        self._env = env
        self._path = None if health.http is None else expand(health.http, variables)
        self._model = health.model and expand(health.model, variables)
        words = shlex.split(health.command or "")
        self._command = [expand(word, variables) for word in words]
        self._client: httpx.AsyncClient | None = None
        if self._path is not None or health.probe:
            self._client = health_client(f"http://127.0.0.1:{port}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def check(self, timeout_s: float, *, probe: bool) -> None:
        """Carry out all checks once; `probe`: also the completion, if there are others.

        Raises:
            Unhealthy: one failed, or they took longer than `timeout_s`.
        """
        health = self._health
        probe = probe or not (health.tcp or health.http or health.command)
        try:
            async with asyncio.timeout(timeout_s):
                if health.tcp:
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.close()
                if self._path is not None:
                    await self._request("GET", self._path)
                if probe and health.probe == "completion":
                    await self._complete()
                if self._command:
                    await _run(self._command, self._env)
        except TimeoutError:
            raise Unhealthy(f"no answer within {timeout_s:.1f} s") from None
        except OSError as error:
            raise Unhealthy(error.strerror or str(error) or type(error).__name__) from None

    async def _complete(self) -> None:
        """Ask an OpenAI-style server for one token."""
        if not self._model:
            response = await self._request("GET", "/v1/models")
            try:
                self._model = str(response["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise Unhealthy("/v1/models lists no model; name it in healthcheck.model") from None
        limits = {"model": self._model, "max_tokens": 1}
        try:
            answer = await self._request("POST", "/v1/completions", {**limits, "prompt": "1"})
        except Unhealthy as error:
            if error.status not in (404, 405):
                raise
            chat = {**limits, "messages": [{"role": "user", "content": "1"}]}
            answer = await self._request("POST", "/v1/chat/completions", chat)
        if not _is_completion(answer):
            raise Unhealthy("the answer is not a completion: no text in its choices")

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer with status 200; None if it is not JSON."""
        import httpx

        assert self._client is not None
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Unhealthy(f"{path}: {str(error) or type(error).__name__}") from None
        if answer.status_code != httpx.codes.OK:
            raise Unhealthy(f"{path}: status {answer.status_code}", answer.status_code)
        try:
            return answer.json()
        except ValueError:
            return None


def _is_completion(answer: Any) -> bool:
    """Return whether an answer has a text, which may be empty, or a message in each of its choices."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(
            isinstance(choice, dict)
            and (isinstance(choice.get("text"), str) or isinstance(choice.get("message"), dict))
            for choice in choices
        )
    )


def health_client(address: str) -> httpx.AsyncClient:
    """Return a client that uses no proxy.

    Raises:
        ConfigError: httpx is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise ConfigError.of(
            "HTTP health checks need httpx", hint="pip install 'instar[fleet]'"
        ) from None
    return httpx.AsyncClient(base_url=address, trust_env=False, timeout=None)


async def _run(words: Sequence[str], env: Mapping[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *words,
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        raise
    if status != 0:
        raise Unhealthy(f"'{shlex.join(words)}' ended with {status}")
