"""Where completions are drawn: from the model in this process, from a server, or from vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from instar.config.errors import ConfigError, InstarError
from instar.data.order import key_bytes
from instar.extensions.grpo.models import Ids, Sampling, sample_completions
from instar.extensions.grpo.weights import get_weights, name_of_weights

if TYPE_CHECKING:
    import httpx

_CHECK_S = 10.0
_RETRY_S = 0.2


class ServerLost(InstarError):  # noqa: N818
    """The server of completions does not answer, or refuses."""


@dataclass(frozen=True)
class Drawn:
    """Completions, n of each prompt in order, and for vLLM the log-probabilities of their tokens."""

    ids: list[Ids]
    log_probs: list[list[float]] | None = None


class Sampler(Protocol):
    """Draws completions with the weights after `step`, a function of these and the arguments."""

    def draw(self, prompts: Sequence[Ids], n: int, seed: int, step: int) -> Drawn: ...


def sampling_seed(seed: int, purpose: str, step: int) -> int:
    """Return the seed of what is drawn at a step, independent of all others."""
    return int.from_bytes(key_bytes(f"grpo/{purpose}", seed, step, 7), "little")


@dataclass(frozen=True)
class LocalSampler:
    """The model in this process."""

    model: Any
    pad_id: int
    sampling: Sampling

    def draw(self, prompts: Sequence[Ids], n: int, seed: int, step: int) -> Drawn:  # noqa: ARG002
        return Drawn(sample_completions(self.model, self.pad_id, prompts, n, self.sampling, seed))


class ServerSampler:
    """A server of `instar.recipes.grpo.serve`, which gets the model's weights after every step.

    Requests name the weights, so that a server which was restarted gets them again.
    """

    def __init__(
        self,
        model: Any,
        server: CompletionServer,
        sampling: Sampling,
        patience_s: float,
        pause: Callable[[float], bool],
    ) -> None:
        """
        Args:
            patience_s: how long to wait for an answer, and for a server that is not there.
            pause: waits for so many seconds; returns True, at once, if the run is to stop.
        """
        self._model, self._server, self._sampling = model, server, sampling
        self._patience_s, self._pause = patience_s, pause
        self._client = sampler_client(server.address, patience_s)
        self.close = self._client.close
        self._content, self._weights, self._step = b"", "", -1

    def draw(self, prompts: Sequence[Ids], n: int, seed: int, step: int) -> Drawn:
        if step != self._step:
            self._content = get_weights(self._model, self._server.dtype)
            self._weights, self._step = name_of_weights(self._content), step
        body = {
            "model": self._server.model,
            "prompt": [list(ids) for ids in prompts],
            "n": n,
            "max_tokens": self._sampling.max_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "seed": seed,
            "weights": self._weights,
        }
        answer = self._request("POST", "/v1/completions", json=body)
        while answer.status_code == 409:
            self._check_answer(self._request("PUT", "/weights", content=self._content))
            answer = self._request("POST", "/v1/completions", json=body)
        return Drawn(
            [choice["token_ids"] for choice in self._check_answer(answer).json()["choices"]]
        )

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        import httpx

        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._client.request(method, path, **content)
            except httpx.TransportError as error:
                if time.monotonic() > deadline or self._pause(_RETRY_S):
                    raise ServerLost(
                        f"{self._server.address} does not answer: "
                        f"{str(error) or type(error).__name__}; restart it, then continue with --resume"
                    ) from error

    def _check_answer(self, answer: httpx.Response) -> httpx.Response:
        if not answer.is_success:
            raise ServerLost(
                f"{self._server.address}{answer.request.url.path}: status {answer.status_code}: "
                f"{answer.text[:300]}"
            )
        return answer


class VllmSampler:
    """The vLLM server of TRL's trainer, which sends it the weights over NCCL."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def draw(self, prompts: Sequence[Ids], n: int, seed: int, step: int) -> Drawn:
        vllm = self._trainer.vllm_generation
        if step != self._trainer._last_loaded_step:
            vllm.sync_weights()
            self._trainer._last_loaded_step = step
        vllm.generation_kwargs["seed"] = seed
        copies = [list(ids) for ids in prompts for _ in range(n)]
        _, ids, log_probs, _ = vllm.generate(prompts=copies, images=None, num_generations=n)
        return Drawn(ids, [[token[0] for token in tokens] for tokens in log_probs])


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
        raise ConfigError.of(
            f"the server at {address} has {', '.join(names) or 'no model'}, not {model}",
            where="--model",
            hint="start it with the model that is trained",
        )
    dtype = models[names.index(model)].get("dtype")
    if generation == "server" and dtype not in ("bfloat16", "float32"):
        raise ConfigError.of(
            f"the server at {address} takes no weights",
            where="--generation server",
            hint=f"start python -m instar.recipes.grpo.serve --port {port}; for vLLM: --generation vllm",
        )
    return CompletionServer(address, model, str(dtype))


def _list_models(generation: str, address: str) -> list[dict[str, Any]]:
    import httpx

    command = "vllm serve MODEL" if generation == "vllm" else "python -m instar.recipes.grpo.serve"
    try:
        with sampler_client(address, _CHECK_S) as client:
            client.get("/health").raise_for_status()
            models = client.get("/v1/models").raise_for_status().json()["data"]
            return [dict(entry) for entry in models]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError.of(
            f"no server answers at {address}: {str(error) or type(error).__name__}",
            where="--vllm-port",
            hint=f"start one there: {command} --port {address.rpartition(':')[2]}",
        ) from error


def sampler_client(address: str, timeout_s: float) -> httpx.Client:
    import httpx

    return httpx.Client(base_url=address, trust_env=False, timeout=timeout_s)
