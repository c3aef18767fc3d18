"""`python -m instar.recipes.grpo.serve`: an OpenAI-style server that takes new weights while it runs.

For machines without a GPU, where vLLM cannot exchange weights. Of vLLM's protocol it speaks what a
trainer needs: prompts as token ids, n completions of each, a seed, and ids in the answer.

GET  /health
GET  /v1/models        the model's name, the dtype of its weights, and which weights it has
POST /v1/completions   `weights` names those that are expected: status 409 if it has others
PUT  /weights          safetensors with all parameters; the answer names them
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.config.errors import ConfigError
from instar.config.files import of_bounded_depth
from instar.extensions.grpo.models import (
    INITIAL,
    Ids,
    Sampling,
    TextEncoder,
    Unfit,
    end_ids,
    load_policy,
    put_weights,
    sample_completions,
    size_bytes,
)

_MOST_COMPLETIONS = 4096
LEAST_TEMPERATURE = 1e-6
"""logits divided by less are infinite"""
_HEADER_BYTES = 1 << 20
_REQUEST_BYTES = 32 << 20
"""of a request for completions: as many prompts as it may have, of some thousand ids each"""


class _Completions(msgspec.Struct):
    """The body of a request; other fields of OpenAI's protocol are ignored."""

    prompt: str | list[str | int | Ids]
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST_COMPLETIONS)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=LEAST_TEMPERATURE, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    weights: str | None = None


_decoder = msgspec.json.Decoder(_Completions)


class ModelService:
    """A model that completes and is replaced, one request at a time."""

    def __init__(self, name: str, model: Any, tokenizer: Any, seed: int = 0) -> None:
        """`seed`: of requests that have none; each gets the next."""
        self._name, self._model, self._tokenizer = name, model, tokenizer
        self._next_seed = seed
        self._weights = INITIAL
        self._lock = asyncio.Lock()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/weights", self._put_weights, methods=["PUT"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return _answer({"status": "ok"})

    async def _models(self, _: Request) -> Response:
        dtype = str(self._model.dtype).removeprefix("torch.")
        description = {
            "id": self._name,
            "object": "model",
            "dtype": dtype,
            "weights": self._weights,
        }
        return _answer({"object": "list", "data": [description]})

    async def _completions(self, request: Request) -> Response:
        body = await _body(request, _REQUEST_BYTES)
        if body is None:
            return _too_large(_REQUEST_BYTES)
        try:
            body_fields = _decoder.decode(of_bounded_depth(body))
            # in a thread: the tokenizer of a folder may take long to fail
            prompts = await asyncio.to_thread(self._ids, body_fields)
        except (msgspec.MsgspecError, ValueError, ConfigError) as error:
            return _answer({"error": str(error)}, 400)
        if body_fields.model not in (None, self._name):
            return _answer({"error": f"this server has {self._name}, not {body_fields.model}"}, 404)
        async with self._lock:
            if body_fields.weights not in (None, self._weights):
                return _answer({"error": "other weights", "weights": self._weights}, 409)
            seed, self._next_seed = self._next_seed, self._next_seed + 1
            sampling = Sampling(body_fields.max_tokens, body_fields.temperature, body_fields.top_p)
            pad_id = self._tokenizer.pad_token_id
            completions = await asyncio.to_thread(
                sample_completions,
                self._model,
                pad_id,
                prompts,
                body_fields.n,
                sampling,
                seed if body_fields.seed is None else body_fields.seed,
            )
        choices = [
            self._choice(index, prompts[index // body_fields.n], ids, body_fields.max_tokens)
            for index, ids in enumerate(completions)
        ]
        used = [sum(map(len, prompts)), sum(map(len, completions))]
        usage = dict(zip(("prompt_tokens", "completion_tokens"), used, strict=True))
        return _answer(
            {
                "object": "text_completion",
                "model": self._name,
                "choices": choices,
                "usage": {**usage, "total_tokens": sum(used)},
            }
        )

    async def _put_weights(self, request: Request) -> Response:
        limit = size_bytes(self._model) + _HEADER_BYTES
        body = await _body(request, limit)
        if body is None:
            return _too_large(limit)
        async with self._lock:
            try:
                self._weights = await asyncio.to_thread(put_weights, self._model, body)
            except Unfit as error:
                return _answer({"error": str(error)}, 422)
        return _answer({"weights": self._weights})

    def _ids(self, request: _Completions) -> list[Ids]:
        """Return the prompts as ids; raises ValueError."""
        ids = [token for token in request.prompt if isinstance(token, int)]
        parts: Sequence[Any] = (
            request.prompt if isinstance(request.prompt, list) else [request.prompt]
        )
        if ids and len(ids) < len(parts):
            raise ValueError("prompts are texts or lists of ids")
        parts = [ids] if ids else parts
        texts = [part for part in parts if isinstance(part, str)]
        of_texts = iter(self._encoder(texts) if texts else ())
        prompts = [next(of_texts) if isinstance(part, str) else part for part in parts]
        longest = self._model.config.max_position_embeddings
        vocabulary_size = self._model.config.vocab_size
        if not prompts or not all(prompts):
            raise ValueError("a prompt is empty")
        if len(prompts) * request.n > _MOST_COMPLETIONS:
            raise ValueError(f"more than {_MOST_COMPLETIONS} completions")
        if max(map(len, prompts)) + request.max_tokens > longest:
            raise ValueError(f"a prompt and max_tokens are more than the model's {longest} tokens")
        if any(not 0 <= token < vocabulary_size for ids in prompts for token in ids):
            raise ValueError(f"ids are below {vocabulary_size}")
        return prompts

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self._tokenizer)

    def _choice(self, index: int, prompt: Ids, ids: Ids, limit: int) -> dict[str, Any]:
        is_ended = bool(ids) and ids[-1] in end_ids(self._model)
        return {
            "index": index,
            "text": self._tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if is_ended or len(ids) < limit else "length",
            "logprobs": None,
            "prompt_token_ids": prompt,
            "token_ids": ids,
        }


async def _body(request: Request, limit: int) -> bytes | None:
    """Return the body of a request; None if it has more than so many bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _too_large(limit: int) -> Response:
    return _answer({"error": f"more than {limit:,} bytes"}, 413)


def _answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def run_server(model: str, dataset: str, host: str, port: int, seed: int, dtype: str) -> None:
    """Serve a model until the process is stopped."""
    service = ModelService(model, *load_policy(model, dataset, dtype), seed)
    uvicorn.run(service.app(), host=host, port=port, log_level="warning")
