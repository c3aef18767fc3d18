"""Servers of completions: finds the one at a port of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from instar.config.errors import ConfigError

_CHECK_S = 10.0


@dataclass(frozen=True)
class CompletionServer:
    """A server that was found to serve the model."""

    address: str
    model: str
    dtype: str


def find_server(generation: str, port: int, model: str) -> CompletionServer:
    """Return the server at a port of this machine.

    Raises:
        ConfigError: none answers there, it has another model, or takes no weights.
    """
    address = f"http://127.0.0.1:{port}"
    models = _list_models(generation, address)
    names = [str(entry.get("id")) for entry in models]
    if model not in names:
        message = f"the server at {address} has {', '.join(names) or 'no model'}, not {model}"
        raise ConfigError.of(message, "--model", "start it with the model that is trained")
    dtype = models[names.index(model)].get("dtype")
    if generation == "server" and dtype not in ("bfloat16", "float32"):
        raise ConfigError.of(
            f"the server at {address} takes no weights",
            where="--generation server",
            hint=f"start python -m instar.recipes.grpo.serve --port {port}; for vLLM: --generation vllm",
        )
    return CompletionServer(address, model, str(dtype))


def _list_models(generation: str, address: str) -> list[dict[str, Any]]:
    command = "vllm serve MODEL" if generation == "vllm" else "python -m instar.recipes.grpo.serve"
    try:
        with sampler_client(address, _CHECK_S) as client:
            client.get("/health").raise_for_status()
            models = client.get("/v1/models").raise_for_status().json()["data"]
            return [dict(entry) for entry in models]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        message = f"no server answers at {address}: {str(error) or type(error).__name__}"
        hint = f"start one there: {command} --port {address.rpartition(':')[2]}"
        raise ConfigError.of(message, "--vllm-port", hint) from error


def sampler_client(address: str, timeout_s: float) -> httpx.Client:
    return httpx.Client(base_url=address, trust_env=False, timeout=timeout_s)
