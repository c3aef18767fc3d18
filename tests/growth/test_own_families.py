"""A family of one's own: its table is tried against the model, and its class computes the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instar.config.errors import InstarError
from instar.config.sections import Operation
from instar.growth import GrowthError, grow
from instar.growth.folders import check_own_family, grow_folder
from instar.models.hf.families import (
    AXES,
    FAMILIES,
    Family,
    TableEntry,
    attention,
    gated_mlp,
    linear,
    norm,
)
from instar.models.hf.module import PretrainedModel
from instar.models.hf.pretrained import LoraShape
from instar.models.hf.pretrained_folder import open_folder

LLAMA = replace(FAMILIES["llama"], with_experts=None)
LAYER_NORMS: dict[str, Any] = {
    "outside": (
        TableEntry("model.embed_tokens", "embedding", ("vocab", "embed")),
        norm("model.norm", bias=True),
    ),
    "norm": "layernorm",
}
TWO_NORMS = (norm("input_layernorm", bias=True), norm("post_attention_layernorm", bias=True))
OWN: dict[str, Family] = {
    "granite": replace(LLAMA, name="Granite"),
    "cohere": replace(
        LLAMA,
        name="Cohere",
        block=(
            *attention("attention_bias", "attention_bias"),
            *gated_mlp(),
            norm("input_layernorm"),
        ),
        norm="layernorm",
        eps="layer_norm_eps",
    ),
    "stablelm": Family(
        "StableLM",
        block=(*attention("use_qkv_bias"), *gated_mlp(), *TWO_NORMS),
        eps="layer_norm_eps",
        axes={axis: key for axis, key in AXES.items() if axis != "head_dim"},
        **LAYER_NORMS,
    ),
    "starcoder2": Family(
        "StarCoder 2",
        block=(
            *attention("use_bias", "use_bias"),
            linear("mlp.c_fc", "mlp", "embed", bias="use_bias"),
            linear("mlp.c_proj", "embed", "mlp", bias="use_bias"),
            *TWO_NORMS,
        ),
        eps="norm_epsilon",
        heads_divide_width=True,
        **LAYER_NORMS,
    ),
}
KEYS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.2},
}
OPERATIONS: dict[str, Any] = {
    "insert_layers": 1,
    "widen_mlp": 96,
    "widen_hidden": 48,
    "split_kv_heads": 2,
    "grow_head_dim": 16,
    "extend_context": 128,
}
REFUSED = {
    # attention is scaled by a constant
    ("granite", "grow_head_dim"): "the table of the family Granite does not fit its model",
    # RoPE rotates neighboring channels
    ("cohere", "grow_head_dim"): "the table of the family Cohere does not fit its model",
    ("stablelm", "widen_hidden"): "head_dim would become 12, not stay 8",
    ("stablelm", "grow_head_dim"): "RoPE of this model is scaled or partial",
}


@pytest.fixture(params=OWN)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(FAMILIES, request.param, OWN[request.param])
    return str(request.param)


def model_of(kind: str) -> Any:
    config = CONFIG_MAPPING[kind](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **KEYS.get(kind, {}),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return model(torch.arange(3, 23).view(2, 10)).logits


def test_the_class_of_transformers_computes_logits_and_loss(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "m")
    own_model = PretrainedModel(LoraShape(open_folder(tmp_path / "m").shape.to_dict())).eval()
    own_model.inner.load_state_dict(model.state_dict())
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected = model(ids, labels=ids)
        assert torch.equal(own_model(ids), expected.logits)
        total = own_model(ids[:, :-1], ids[:, 1:])
        torch.testing.assert_close(total / 18, expected.loss)
        cache = own_model.new_cache()
        pieces = [own_model(piece, cache=cache) for piece in (ids[:, :4], ids[:, 4:])]
        torch.testing.assert_close(torch.cat(pieces, 1), expected.logits)


def test_an_operation_keeps_the_function_or_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Without a proof of the model itself, in folders and in memory."""
    model_of(kind).save_pretrained(tmp_path / "m")
    before = logits(tmp_path / "m")
    for name, value in OPERATIONS.items():
        operation, out = Operation(name, value), tmp_path / name
        if (refusal := REFUSED.get((kind, name))) is not None:
            with pytest.raises(InstarError, match=refusal):
                grow_folder(open_folder(tmp_path / "m"), out, [operation], check=False)
            continue
        grow_folder(open_folder(tmp_path / "m"), out, [operation], check=False)
        assert (logits(out) - before).abs().max() <= 1e-5 * before.abs().max(), name


def test_a_table_that_is_wrong_of_a_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(OWN["starcoder2"], scales_by_head_dim=False)
    monkeypatch.setitem(FAMILIES, "starcoder2", wrong)
    with pytest.raises(GrowthError, match="grow_head_dim: the table of the family StarCoder 2"):
        grow(model_of("starcoder2"), "grow_head_dim", 16, probe=False)


def test_a_family_without_the_key_of_its_eps_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "olmo", replace(OWN["cohere"], name="OLMo"))
    with pytest.raises(GrowthError, match="no layer_norm_eps, the key that its family names"):
        grow(model_of("olmo"), "insert_layers", 1)


def test_built_in_families_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instar.growth.folders.twin_of", lambda *_: pytest.fail("tried"))
    config = model_of("llama").config.to_dict()
    check_own_family(LoraShape(config), [Operation("widen_mlp", 96)])
