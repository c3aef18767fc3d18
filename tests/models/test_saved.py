"""What was saved under wrappers loads without them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from forks import Forks
from safetensors.torch import load_file
from tokenizers import Tokenizer as Fast
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.config.language import ModelConfig
from instar.distributed.parallel import unwrap
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT, load_gpt
from instar.models.hf.tokenizer import as_trained, companion_files
from instar.models.lora import Lora
from instar.models.shape import Mask

ARCH = resolve_architecture(ModelConfig(n_layer=1, n_head=2, n_embd=16, context=8), 32)
SUPPORT = Path(__file__).parents[1] / "support"
TWO_RANKS = """
import sys
from instar.distributed.launch import launch_ranks
from instar.distributed.placement import LaunchOptions
from instar.distributed.signals import exit_now
exit_now(launch_ranks(LaunchOptions(sys.argv[1:], 2, module="ddp_saver")))
"""


@pytest.fixture(scope="module")
def run_dir(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model was under DDP on two ranks."""
    root = tmp_path_factory.mktemp("run")
    path = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [forks.python, "-c", TWO_RANKS, str(root), json.dumps(ARCH.to_dict())],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
        timeout=120,
        check=True,
    )
    return root


def test_what_ddp_trained_loads_with_safetensors_into_a_plain_model(run_dir: Path) -> None:
    tensors = load_file(latest_checkpoint(run_dir) / "model.safetensors")
    assert tensors.keys() == ARCH.parameters().keys()
    model = GPT(ARCH)
    model.load_state_dict(tensors, strict=True)
    tokens = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens), load_file(run_dir / "logits.safetensors")["logits"], rtol=0, atol=1e-6
        )


def test_what_ddp_trained_loads_with_instar(run_dir: Path) -> None:
    model = load_gpt(latest_checkpoint(run_dir))
    fresh = GPT(model.arch)
    fresh.init_weights(0)
    changes = [
        not torch.equal(after, before)
        for after, before in zip(model.parameters(), fresh.parameters(), strict=True)
    ]
    assert (model.arch, any(changes)) == (ARCH, True)


def test_what_was_compiled_loads_into_a_plain_model(tmp_path: Path) -> None:
    model = GPT(ARCH)
    model.init_weights(3)
    compiled = cast(torch.nn.Module, torch.compile(model, backend="eager"))
    tokens = torch.arange(16).reshape(2, 8)
    compiled(tokens, tokens).backward()
    weights = dict(unwrap(compiled).named_parameters())
    path = publish_checkpoint(
        tmp_path, 1, CheckpointContent({"model": weights}, {}, ARCH.to_dict())
    )
    plain = GPT(ARCH)
    plain.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    assert torch.equal(plain(tokens), model(tokens))


def test_what_was_saved_while_it_grew_is_as_far_open_as_it_was(tmp_path: Path) -> None:
    arch = replace(
        ARCH, lora=(Lora("all", 2, 4.0),), mask=Mask("mlp", ((32, 64),), begin=10, steps=8)
    )
    model = GPT(arch)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    tokens = torch.arange(16).reshape(2, 8)
    outputs = []
    for step in (10, 12, 18):
        model.set_step(step)
        weights = {"model": dict(model.named_parameters())}
        path = publish_checkpoint(tmp_path, step, CheckpointContent(weights, {}, arch.to_dict()))
        assert torch.equal(load_gpt(path)(tokens), model(tokens))
        outputs.append(model(tokens))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(
    "shape",
    [{"n_embd": 2**20, "n_layer": 10_000, "n_mlp": 2**22}, {"n_layer": 2}, {"vocab_size": 33}],
)
def test_a_manifest_that_claims_another_shape_allocates_nothing(
    shape: dict[str, int], tmp_path: Path
) -> None:
    weights = {"model": dict(GPT(ARCH).named_parameters())}
    path = publish_checkpoint(tmp_path, 1, CheckpointContent(weights, {}, ARCH.to_dict() | shape))
    with pytest.raises(CheckpointError, match="the tensors do not fit the architecture"):
        load_gpt(path)


@pytest.mark.parametrize("field", ["n_layer", "n_head", "n_embd", "n_mlp", "context", "vocab_size"])
def test_a_manifest_of_a_shape_beyond_any_model_is_refused(field: str, tmp_path: Path) -> None:
    weights = {"model": dict(GPT(ARCH).named_parameters())}
    path = publish_checkpoint(
        tmp_path, 1, CheckpointContent(weights, {}, ARCH.to_dict() | {field: 2**40})
    )
    with pytest.raises(CheckpointError, match=f"model.{field}: must be at most"):
        load_gpt(path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    model = GPT(ARCH)
    model.init_weights(0)
    with torch.no_grad():
        model.get_parameter("final_norm.weight")[2] = value
    path = publish_checkpoint(
        tmp_path,
        1,
        CheckpointContent({"model": dict(model.named_parameters())}, {}, ARCH.to_dict()),
    )
    with pytest.raises(
        CheckpointError, match=r"final_norm\.weight, hold values that are not finite"
    ):
        load_gpt(path)


@pytest.mark.parametrize("template", ["own", "plain"])
@pytest.mark.parametrize("kind", ["chat", "tokens"])
def test_a_model_of_chats_ends_its_answers_where_it_is_exported_to(
    tmp_path: Path, kind: str, template: str
) -> None:
    """The token that ends an answer ends a generation, and the template goes along; other exports stay as they are."""
    tokenizer = Fast(WordLevel({"<|end|>": 0, "<|im|>": 1, "a": 2}, "a"))
    tokenizer.add_special_tokens(["<|end|>", "<|im|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    if template == "own":
        (tmp_path / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }} {{ m.content }}<|im|>{% endfor %}"
        )
    (tmp_path / "run.yaml").write_text(
        f"name: chats\ntask: causal_lm\ndata: {{kind: {kind}, source: chats.jsonl}}\n"
        "model: {config: {model_type: llama, max_position_embeddings: 16}}\n"
    )
    config = {"bos_token_id": 5, "eos_token_id": 0, "pad_token_id": None}
    files = {"config.json": json.dumps(config).encode(), **companion_files(tmp_path)}
    exported_files = as_trained(files, tmp_path)
    if kind != "chat":
        assert exported_files == files
        return
    assert "chat_template.jinja" in exported_files
    if template == "own":
        ends = json.loads(exported_files["generation_config.json"])
        assert ends == {"bos_token_id": 5, "eos_token_id": [0, 1]}
        files["generation_config.json"] = json.dumps({"eos_token_id": [0, 1], "top_k": 3}).encode()
        assert as_trained(files, tmp_path) == files
    for name, content in exported_files.items():
        (tmp_path / name).write_bytes(content)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    text = fast.apply_chat_template(messages, tokenize=False)
    assert text.strip().endswith("<|im|>" if template == "own" else "<|end|>")
