"""Where completions are drawn: from the model in this process, from a server, or from vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from instar.config.errors import InstarError
from instar.data.order import key_bytes
from instar.extensions.grpo.models import (
    Ids,
    Sampling,
    get_weights,
    name_of_weights,
    sample_completions,
)
from instar.extensions.grpo.servers import CompletionServer, sampler_client

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
