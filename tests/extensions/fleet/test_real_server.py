"""Real servers of language models, health-checked by a completion before their client starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleets import FleetPlace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ASK = """\
import json, sys, urllib.request

body = json.dumps({"model": "tiny", "prompt": "1 + 1", "max_tokens": 3}).encode()
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[1]}/v1/completions", body, {"Content-Type": "application/json"}
)
print(json.dumps(json.load(urllib.request.urlopen(request))["usage"]))
"""


def _make_model(folder: Path, head_dim: int = 8) -> None:
    """Save a tiny model with random weights and a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=2 * head_dim,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.mark.torture
@pytest.mark.timeout(300)
def test_transformers_serve_answers_before_its_client_starts(place: FleetPlace) -> None:
    _make_model(place.path / "tiny")
    (place.path / "ask.py").write_text(ASK)
    place.write("""
name: real
services:
  server:
    command: transformers serve tiny --host 127.0.0.1 --port ${ports.http} --device cpu
    ports: [http]
    env: {HF_HUB_OFFLINE: "1"}
    healthcheck: {http: /health, probe: completion, model: tiny, interval: 1s, start_period: 240s}
jobs:
  client:
    command: python3 ask.py ${services.server.ports.http}
    depends_on: {server: service_healthy}
""")
    code, output = place.run("up", "fleet.yaml", timeout_s=280)
    assert code == 0, output
    assert _completion_tokens(place) == 3
    assert not place.living_pids()


VLLM = Path(__file__).parents[3] / ".venv-vllm/bin/python"
VLLM_FLEET = f"""
name: real
services:
  server:
    command: {VLLM} -m vllm.entrypoints.openai.api_server --model tiny --port ${{ports.http}} --enforce-eager --dtype float32 --max-model-len 64
    ports: [http]
    env:
      HF_HUB_OFFLINE: "1"
      VLLM_NO_USAGE_STATS: "1"
      VLLM_TARGET_DEVICE: cpu
      VLLM_CPU_KVCACHE_SPACE: "1"
      VLLM_CPU_OMP_THREADS_BIND: nobind
    healthcheck: {{http: /health, probe: completion, interval: 1s, start_period: 10m}}
jobs:
  client:
    command: python3 ask.py ${{services.server.ports.http}}
    depends_on: {{server: service_healthy}}
"""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_answers_before_its_client_starts(place: FleetPlace) -> None:
    _make_model(place.path / "tiny", head_dim=32)
    (place.path / "ask.py").write_text(ASK)
    place.write(VLLM_FLEET)
    code, output = place.run("up", "fleet.yaml", timeout_s=800)
    assert code == 0, output
    assert _completion_tokens(place) == 3
    assert not place.living_pids()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_vllm_that_is_healthy_and_dies_at_its_first_completion_is_not_ready(
    place: FleetPlace,
) -> None:
    """Its attention on a CPU has no heads of 8 channels, which it finds out when it is asked."""
    _make_model(place.path / "tiny", head_dim=8)
    (place.path / "ask.py").write_text("import pathlib; pathlib.Path('asked').touch()")
    place.write(VLLM_FLEET)
    code, output = place.run("up", "fleet.yaml", timeout_s=800)
    assert code == 4, output
    assert "before it was ready" in output
    assert not (place.path / "asked").exists()
    assert not place.living_pids()


def _completion_tokens(place: FleetPlace) -> int:
    answer = (place.path / "fleets/real/logs/real-0/client.log").read_text().splitlines()[-1]
    return int(json.loads(answer)["completion_tokens"])
