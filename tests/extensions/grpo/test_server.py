"""A real server of a tiny model, whose weights a trainer replaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forks import forks_for_grpo
from safetensors.torch import load, save

from instar.config.errors import ConfigError
from instar.extensions.grpo.models import Sampling, get_weights, load_policy, sample_completions
from instar.extensions.grpo.samplers import ServerLost, ServerSampler
from instar.extensions.grpo.servers import CompletionServer, find_server

PROMPT = {"prompt": "1+2=", "max_tokens": 2}


def serve() -> list[str]:
    return [str(forks_for_grpo().python), "-m", "instar.recipes.grpo.serve"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as address:
        yield address


@contextmanager
def serving(port: int | None = None) -> Iterator[str]:
    """A server that answers."""
    port = port or free_port()
    process = subprocess.Popen(
        [*serve(), "--dtype", "float32", f"--port={port}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        transport = httpx.HTTPTransport(retries=12)  # with pauses that double
        with httpx.Client(transport=transport, trust_env=False, timeout=60) as client:
            assert client.get(f"{address}/health").json() == {"status": "ok"}
        yield address
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def policy() -> Any:
    """The tiny model, trained by other weights than the server began with."""
    import torch

    model, tokenizer = load_policy("tiny", "arithmetic")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model, tokenizer


@contextmanager
def sampler_of(address: str, model: Any, patience_s: float = 60.0) -> Iterator[ServerSampler]:
    server = CompletionServer(address, "tiny", "float32")
    sampling = Sampling(max_tokens=5)
    with closing(ServerSampler(model, server, sampling, patience_s, lambda _: False)) as sampler:
        yield sampler


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_samples_of_a_server_are_those_of_the_trainers_own_weights(
    address: str, policy: Any
) -> None:
    model, tokenizer = policy
    prompts = tokenizer(["1+2=", "3+4=", "0+0="])["input_ids"]
    expected = sample_completions(
        model, tokenizer.pad_token_id, prompts, 4, Sampling(max_tokens=5), seed=7
    )
    with sampler_of(address, model) as sampler:
        assert sampler.draw(prompts, 4, 7, step=1).ids == expected
        assert sampler.draw(prompts, 4, 8, step=1).ids != expected


def test_a_server_that_was_restarted_gets_the_weights_again(policy: Any) -> None:
    model, tokenizer = policy
    prompts = tokenizer(["1+2="])["input_ids"]
    port = free_port()
    with sampler_of(f"http://127.0.0.1:{port}", model) as sampler:
        with serving(port):
            before = sampler.draw(prompts, 8, 7, step=1)
        with serving(port):
            assert sampler.draw(prompts, 8, 7, step=1) == before


def test_a_server_that_is_gone_is_named(policy: Any) -> None:
    model, _ = policy
    address = f"http://127.0.0.1:{free_port()}"
    server_loss = pytest.raises(ServerLost, match=address)
    with sampler_of(address, model, patience_s=0.1) as sampler, server_loss:
        sampler.draw([[3]], 1, 0, step=1)


def test_a_server_is_found_by_its_model_and_its_protocol(address: str) -> None:
    assert find_server("server", port_of(address), "tiny") == CompletionServer(
        address, "tiny", "float32"
    )
    with pytest.raises(ConfigError, match="has tiny, not other"):
        find_server("server", port_of(address), "other")
    with pytest.raises(ConfigError, match="no server answers"):
        find_server("vllm", free_port(), "tiny")


def _corrupt_weights(model: Any, value: float) -> bytes:
    """The weights of a model with this value as the last one of its last tensor."""
    tensors = load(get_weights(model, "float32"))
    tensors[max(tensors)].view(-1)[-1] = value
    return save(tensors)


def test_a_completion_is_openais(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=PROMPT | {"n": 2, "seed": 1}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 4
    assert all(len(choice["token_ids"]) <= 2 for choice in answer["choices"])
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "tiny, not other"),
        ({"weights": "0123"}, 409, "other weights"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": [3, "1"]}, 400, "texts or lists of ids"),
        ({"prompt": [[3, 1 << 40]]}, 400, "ids are below"),
        ({"n": 5000}, 400, "n`"),
        ({"n": 4000, "prompt": ["1", "2"]}, 400, "more than 4096"),
        ({"max_tokens": 10**9}, 400, "1024 tokens"),
        ({"temperature": 0}, 400, "temperature"),
        ({"temperature": 1e-300}, 400, "temperature"),
        ({"prompt": 3}, 400, "prompt"),
    ],
)
def test_a_bad_request_is_refused(
    address: str, change: dict[str, Any], status: int, says: str
) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=PROMPT | change)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


def test_a_body_that_is_nested_too_deep_is_refused(address: str) -> None:
    for depth in (201, 2_000, 100_000):
        body = '{"prompt": "1", "other": ' + "[" * depth + "]" * depth + "}"
        answer = httpx.post(f"{address}/v1/completions", content=body)
        assert (answer.status_code, "levels deep" in answer.text) == (400, True)
    body = json.dumps(PROMPT | {"temperature": 1e-6, "other": "[" * 1000})
    assert httpx.post(f"{address}/v1/completions", content=body).status_code == 200


def test_weights_of_another_form_are_refused_and_change_nothing(address: str, policy: Any) -> None:
    before = httpx.get(f"{address}/v1/models").json()
    model, _ = policy
    for content, says in (
        (b"nonsense", "not safetensors"),
        (get_weights(model, "bfloat16"), "is bfloat16 [14, 64]"),
        (get_weights(model.lm_head, "float32"), "is missing"),
        (_corrupt_weights(model, float("nan")), "not finite"),
        (_corrupt_weights(model, float("-inf")), "not finite"),
        (get_weights(model, "float32") + bytes(2 << 20), "more than"),
    ):
        answer = httpx.put(f"{address}/weights", content=content)
        assert answer.status_code in (413, 422)
        assert says in answer.text
    assert httpx.get(f"{address}/v1/models").json() == before


def test_the_server_module_is_the_documented_command(tmp_path: Path) -> None:
    """A name on the hub would be asked for again and again where there is no network."""
    result = subprocess.run(
        [*serve(), "--model", "./nothing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "./nothing cannot be loaded" in result.stderr
