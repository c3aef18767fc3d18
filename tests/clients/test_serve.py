"""`transformers serve` answers with the completions of Instar."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from exported import NEW_TOKENS, PROMPTS, Exported, offline

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COMMAND = (Path(sys.executable).with_name("transformers"), "serve", "--host", "127.0.0.1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server that loads the model which a request names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = (tmp_path / "said").open("w+")
    process = subprocess.Popen(
        [*COMMAND, "--port", str(port), "--device", "cpu", "--dtype", "float32"],
        env=offline() | {"HF_HOME": str(tmp_path)},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(address):
            assert process.poll() is None, Path(output.name).read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)
        output.close()


def test_completions_over_http_are_those_of_instar(
    exported_models: dict[str, Exported], server: str
) -> None:
    for model in exported_models.values():
        for prompt in PROMPTS:
            expected = model.tokenizer.decode(model.continuation(prompt))
            request = {"model": str(model.folder), "prompt": prompt, "max_tokens": NEW_TOKENS}
            assert _ask(f"{server}/v1/completions", request | {"temperature": 0.0}) == expected


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


def _ask(url: str, fields: dict[str, object]) -> str:
    body = json.dumps(fields).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])
