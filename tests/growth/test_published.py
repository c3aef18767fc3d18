"""What is proved of a folder is what `from_pretrained` makes of the published files: each file of it is damaged, and the
proof fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_variants import logits, write_variant
from safetensors.torch import load_file, save_file
from small_models import EXACT, model_of
from transformers import AutoModelForCausalLM, Phi3ForCausalLM

from instar.checkpoint.manifest import CheckpointError
from instar.config.errors import ConfigError
from instar.config.sections import Operation
from instar.growth import GrowthError, folders, grow
from instar.growth.folders import grow_folder
from instar.growth.live.probe import twin_of
from instar.growth.offline import NotProven
from instar.growth.operators import plan
from instar.models.hf.config import complete_config
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.pretrained_folder import PretrainedFolder, open_folder
from instar.models.hf.weights import write_weights
from instar.models.shape import count_parameters

WEIGHTS = "model.safetensors"
V = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model_of("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def change_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change_folder(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[V] = change(tensors[V]).contiguous()
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return change_folder


DAMAGES: dict[str, Callable[[Path], None]] = {
    "nan": change_tensor(lambda tensor: tensor.index_fill(0, torch.tensor([0]), torch.nan)),
    "permuted": change_tensor(lambda tensor: tensor.roll(1, 0)),
    "scaled": change_tensor(lambda tensor: 1.01 * tensor),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tensor_of_the_published_files_is_not_proved(
    name: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_damaged(folder: Path, *arguments: Any) -> None:
        write_weights(folder, *arguments)
        DAMAGES[name](folder)

    monkeypatch.setattr(folders, "write_weights", write_damaged)
    with pytest.raises(
        NotProven, match=r"v_proj\.weight in the written files is not the tensor that was made"
    ):
        grow_folder(open_folder(llama), llama.parent / "out", [EXACT["insert_layers"]])
    assert {path.name for path in llama.parent.iterdir()} == {"llama"}


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"rms_norm_eps": 0.5}, "reads rms_norm_eps as 0.5"),
        ({"num_attention_heads": 2, "head_dim": 16}, r"v_proj\.weight: shape \(16, 48\), but"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "reads rope_parameters"),
        ({"hidden_act": "relu"}, "reads hidden_act as 'relu'"),
    ],
)
def test_a_config_that_is_read_as_another_model_is_not_published(
    values: dict[str, Any], error: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also above the size up to which outputs are compared."""
    config_of = PretrainedFolder.config_of
    monkeypatch.setattr(
        PretrainedFolder, "config_of", lambda folder, shape: config_of(folder, shape) | values
    )
    with pytest.raises(CheckpointError, match=error):
        grow_folder(open_folder(llama), llama.parent / "out", [EXACT["widen_mlp"]], check=False)
    assert {path.name for path in llama.parent.iterdir()} == {"llama"}


def test_both_sides_of_a_proof_are_the_files(llama: Path) -> None:
    """A config whose pattern of layers only the class of transformers knows, and a source of NaNs."""
    small = llama.parent / "gemma"
    write_variant("gemma3_text", "pattern", small)
    growth = grow_folder(open_folder(small), llama.parent / "out", [EXACT["insert_layers"]])
    assert growth.proof is not None
    assert growth.checked_on == "random tokens"
    before, after = (
        logits(AutoModelForCausalLM.from_pretrained(path).eval())
        for path in (small, llama.parent / "out")
    )
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    DAMAGES["nan"](llama)
    with pytest.raises(NotProven, match="outputs moved by nan"):
        grow_folder(open_folder(llama), llama.parent / "nan", [EXACT["widen_mlp"]])


@pytest.mark.parametrize(
    ("kind", "operations"),
    [
        ("llama", ("widen_hidden", "grow_head_dim", "insert_layers", "widen_mlp")),
        ("phi3", ("widen_hidden", "add_groups", "extend_context")),
        ("mixtral", ("widen_mlp", "split_kv_heads")),
        ("gpt2", ("widen_mlp", "insert_layers")),
        ("gemma2", ("insert_layers", "add_inside")),
    ],
)
def test_above_the_size_of_a_proof_a_small_model_of_the_same_config_is_compared(
    kind: str,
    operations: tuple[str, ...],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folders, "PROOF_BYTES", 0)
    small = llama.parent / "small"
    model_of(kind).save_pretrained(small)
    chosen_operations = [EXACT[name] for name in operations]
    growth = grow_folder(open_folder(small), llama.parent / "out", chosen_operations)
    assert growth.proof is not None
    assert growth.proof.holds
    assert growth.checked_on.startswith("a small model of the same config (embed ")
    assert "were not compared: instead, a small model" in growth.warning


def test_a_label_that_does_not_hold_for_the_small_model_writes_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PROOF_BYTES", 0)
    config_of = PretrainedFolder.config_of

    def other_config(folder: PretrainedFolder, shape: Any) -> dict[str, Any]:
        return config_of(folder, shape) | {"hidden_act": "relu"}

    monkeypatch.setattr(PretrainedFolder, "config_of", other_config)
    monkeypatch.setattr(folders, "_check_published", lambda *_: None)
    with pytest.raises(NotProven, match=r"of a small model of the same config .*out was not made"):
        grow_folder(open_folder(llama), llama.parent / "out", [EXACT["widen_mlp"]])
    assert {path.name for path in llama.parent.iterdir()} == {"llama"}


def test_a_twin_of_a_model_of_seventy_billion_is_small() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 1000}
    shape = PretrainedShape(complete_config({"model_type": "llama", **sizes, **heads}))
    operations = [Operation("widen_hidden", 12288, {}), Operation("widen_mlp", "x2", {})]
    first, _ = plan(shape, operations[0])
    second, _ = plan(first, operations[1])
    twin = twin_of([shape, first, second], operations)
    assert count_parameters(twin.shape).total < 2 * 10**7
    assert twin.shape.sizes()["embed"] % 64 == 0
    assert twin.operations[0].value == 1.5 * twin.shape.sizes()["embed"]


def test_extending_a_context_keeps_frequencies_that_follow_from_it(tmp_path: Path) -> None:
    for number, (kind, name) in enumerate(
        [("phi3", "longrope of this family"), ("llama", "yarn without original")]
    ):
        source, out = tmp_path / f"small{number}", tmp_path / f"out{number}"
        model = write_variant(kind, name, source)
        assert model is not None
        grow_folder(open_folder(source), out, [EXACT["extend_context"]], check=False)
        grown_model = AutoModelForCausalLM.from_pretrained(out).eval()
        assert torch.equal(logits(grown_model), logits(model))
        grow(model, EXACT["extend_context"])
        assert torch.equal(logits(grown_model), logits(model))
        model.save_pretrained(tmp_path / f"live{number}")
        loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / f"live{number}").eval()
        assert torch.equal(logits(grown_model), logits(loaded_model))


@pytest.mark.parametrize("name", ["widen_hidden", "add_groups", "grow_head_dim"])
def test_longrope_of_phi3_refuses_what_transformers_could_not_load(
    name: str, tmp_path: Path
) -> None:
    model = write_variant("phi3", "longrope of this family", tmp_path / "small")
    assert isinstance(model, Phi3ForCausalLM)
    with pytest.raises(GrowthError, match=f"{EXACT[name].name}: .*RoPE"):
        grow(model, EXACT[name])
    with pytest.raises(ConfigError, match=f"{EXACT[name].name}: .*RoPE"):
        grow_folder(open_folder(tmp_path / "small"), tmp_path / "out", [EXACT[name]])


@pytest.mark.parametrize("tied", [True, False])
def test_a_grown_folder_is_tied_as_the_old_one_was(tied: bool, tmp_path: Path) -> None:
    """Also where the family's default is the other."""
    for kind in ("qwen2", "gemma2", "gpt2"):
        name = "tied" if tied else "untied"
        write_variant(kind, name, tmp_path / f"{kind}")
        out = tmp_path / f"{kind}-out"
        grow_folder(open_folder(tmp_path / kind), out, [EXACT["widen_mlp"]])
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
        grown_model = AutoModelForCausalLM.from_pretrained(out)
        assert (
            grown_model.get_output_embeddings().weight is grown_model.get_input_embeddings().weight
        ) is tied
        assert ("lm_head.weight" in load_file(out / WEIGHTS)) is not tied


def test_an_adapter_beside_the_weights_is_refused(llama: Path) -> None:
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: transformers adds"):
        open_folder(llama)
