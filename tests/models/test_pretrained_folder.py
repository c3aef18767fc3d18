"""Folders of transformers: what `save_pretrained` writes is read, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import model_of
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instar.checkpoint.manifest import CheckpointError
from instar.models.hf.families import FAMILIES
from instar.models.hf.pretrained_folder import open_folder

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_is_read_as_transformers_saves_it(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    folder = open_folder(tmp_path)
    tensors = {folder.shape.name(name): p for name, p in model.named_parameters()}
    assert folder.outlines.keys() == tensors.keys()
    with folder.reading() as read:
        assert all(torch.equal(read(name), p) for name, p in tensors.items())
    config = CONFIG_MAPPING[kind].from_dict(folder.shape.to_dict()).to_dict()
    same = model.config.to_dict()
    assert {key for key in config | same if config.get(key) != same.get(key)} <= {
        "architectures",
        "dtype",
    }


def test_files_behind_links_are_read_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    model_of("llama").save_pretrained(blobs, max_shard_size="60KB")
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    folder = open_folder(snapshot)
    with folder.reading() as read:
        weights = read("lm_head.weight")
    assert torch.equal(weights, model_of("llama").lm_head.weight)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_joined_in_files_are_read_too(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.config.save_pretrained(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / WEIGHTS)
    folder = open_folder(tmp_path)
    assert not folder.single_experts
    model.save_pretrained(tmp_path / "single")
    single = open_folder(tmp_path / "single")
    assert single.single_experts
    name = "blocks.1.mlp.experts.gate_up_proj"
    with folder.reading() as read, single.reading() as read_single:
        assert torch.equal(read(name), read_single(name))


def test_old_names_and_buffers_of_gpt2_are_known(tmp_path: Path) -> None:
    model = model_of("gpt2")
    model.config.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): p.detach() for name, p in model.named_parameters()
    }
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, tmp_path / WEIGHTS)
    with open_folder(tmp_path).reading() as read:
        assert torch.equal(read("transformer.wpe.weight"), tensors["wpe.weight"])


def change_config(**values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def change_folder(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change_folder


def pickle_weights(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


Q = "model.layers.1.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "family": (change_config(model_type="bloom"), r"model_type 'bloom' .* gpt2, llama"),
    "no family": (change_config(model_type=None), "model_type None is not a known family"),
    "code": (change_config(auto_map={"AutoModel": "evil.Model"}), r"auto_map: .* is not run"),
    "quantised": (change_config(quantization_config={"bits": 4}), "quantization_config: quantised"),
    "layers": (change_config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000, and"),
    "layers as text": (change_config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "sizes": (change_config(hidden_size=10**9), r"q_proj\.weight: shape \(32, 48\), but"),
    "type": (change_config(hidden_size="wide"), "transformers refuses it: .*hidden_size"),
    "heads": (change_config(num_attention_heads=7), "transformers refuses it: (.|\n)*multiple"),
    "rope": (change_config(rope_parameters="none"), "transformers refuses it"),
    "config": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "not JSON"),
    "pickled": (pickle_weights, r"only as pytorch_model\.bin, which may run any program"),
    "shape": (
        change_tensors(lambda tensors: tensors.update({Q: torch.ones(2, 3)})),
        rf"{Q}: shape \(2, 3\), but config.json says \(32, 48\)",
    ),
    "missing": (change_tensors(lambda tensors: tensors.pop(Q)), f"{Q}: missing"),
    "unknown": (change_tensors(lambda tensors: tensors.update(x=torch.ones(2))), "x: unknown"),
    "integers": (
        change_tensors(lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)})),
        f"{Q}: I8; weights must be in floating point",
    ),
    "tied": (change_config(tie_word_embeddings=True), r"lm_head\.weight: differs from model.embed"),
    "cut off": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
        "ends too early",
    ),
}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model_of("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_such_model_is_refused_by_name(
    bad: str, saved_model: Path, tmp_path: Path
) -> None:
    change, message = BAD[bad]
    folder = shutil.copytree(saved_model, tmp_path / "copy")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_a_tied_head_that_is_saved_too_is_the_table(tmp_path: Path) -> None:
    model_of("qwen2").save_pretrained(tmp_path)
    tokens = "model.embed_tokens.weight"
    change_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[tokens].clone()}))(
        tmp_path
    )
    assert "lm_head.weight" not in open_folder(tmp_path).outlines


def test_a_key_that_transformers_reads_and_nothing_here_knows_is_refused(
    saved_model: Path, tmp_path: Path
) -> None:
    """They would make another model, of other files, or take the place of methods."""
    folder = shutil.copytree(saved_model, tmp_path / "copy")
    change_config(mark=[1], dtype="float16", num_labels=10**12, n_ctx=4)(folder)
    assert open_folder(folder).shape.sizes()["layers"] == 3
    unknown = {
        "to_dict": "x",
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 3,
        "transformers_weights": "other.safetensors",
        "per_layer_config": {"0": {"hidden_size": 8}},
        "_attn_implementation": "someone/kernel",
        "is_encoder_decoder": True,
    }
    for key, value in unknown.items():
        file = folder / "config.json"
        before = file.read_text()
        change_config(**{key: value})(folder)
        with pytest.raises(CheckpointError, match=f"{key}(:| is)"):
            open_folder(folder)
        file.write_text(before)


def test_a_pattern_of_an_older_config_is_that_of_transformers(tmp_path: Path) -> None:
    """Gemma 3 had no `layer_types`, and a key that its class does not declare."""
    model_of("gemma3_text").save_pretrained(tmp_path)
    change_config(sliding_window_pattern=2, layer_types=None)(tmp_path)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert open_folder(tmp_path).shape.config["layer_types"] == kinds
    assert AutoConfig.from_pretrained(tmp_path).layer_types == kinds


HUGE = (10**400, -(10**400), 2**63, float("inf"), float("nan"))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "phi3"])
def test_a_number_without_bounds_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    model_of(kind).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    before = json.loads(file.read_text())
    numbers = [
        key
        for key, value in before.items()
        if type(value) in (int, float) and not key.startswith("_")
    ]
    assert len(numbers) > 8
    nested = ["rope_parameters"] if "rope_parameters" in before else []
    for number, key in enumerate([*numbers, *nested]):
        bad = HUGE[number % len(HUGE)]
        value = {"rope_type": "default", "rope_theta": bad} if key == "rope_parameters" else bad
        file.write_text(json.dumps({**before, key: value}))
        with pytest.raises(
            CheckpointError, match=rf"{key}\b.*(out of all bounds|whole number|tensors)"
        ):
            open_folder(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": "../model.safetensors"}, "'../model.safetensors' is not a safetensors file of this"),
        ({"x": "/etc/passwd"}, "is not a safetensors file of this folder"),
        ({"x": "gone.safetensors"}, r"gone\.safetensors: No such file"),
        ({Q: "b.safetensors"}, rf"{Q} is in a\.safetensors, and the index says b\.safe"),
        ({"x": "a.safetensors"}, r"x is in no shard, and the index says a\.safetensors"),
    ],
)
def test_an_index_names_only_what_its_shards_have(
    entries: dict[str, str], message: str, saved_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_model, tmp_path / "copy")
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    save_file({"beside": torch.ones(1)}, folder / "b.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), **entries}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_a_tensor_in_two_shards_is_refused(saved_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved_model, tmp_path / "copy")
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    index = {"weight_map": {Q: "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: .* is also in a\.safetensors"):
        open_folder(folder)
