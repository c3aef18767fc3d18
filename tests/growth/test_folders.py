"""Folders of transformers' models grow on disk: every family, as `from_pretrained` then loads it."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from cases import parametrize_first
from small_models import EXACT, OTHER, REFUSED, SIZES, model_of
from tokenizers import Tokenizer as Fast
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from instar.checkpoint.manifest import CheckpointError
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.sections import Operation
from instar.growth import GrowthError, grow, prepare
from instar.growth.folders import grow_folder
from instar.growth.offline import NotProven
from instar.models.hf.families import FAMILIES
from instar.models.hf.pretrained_folder import open_folder
from instar.record.atomic import WriteError


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    result: Tensor = model.eval()(ids).logits[..., :64]
    return result


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model_of("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@parametrize_first("kind", FAMILIES, first=4)
def test_each_family_grows_as_the_live_model_does(kind: str, tmp_path: Path) -> None:
    model, folder, out = copy.deepcopy(model_of(kind)), tmp_path / "small", tmp_path / "grown"
    model.save_pretrained(folder, max_shard_size="60KB")
    names = ("insert_layers", "widen_mlp", "widen_hidden_copied", "add_groups", "widen_mlp_split")
    operations = [EXACT[name] for name in names if name not in REFUSED.get(kind, ())]
    growth = grow_folder(open_folder(folder), out, operations, max_shard_bytes=10**5)
    assert growth.proof is not None
    assert growth.proof.holds
    assert len([*out.glob("*.safetensors")]) > 2
    grown_model = AutoModelForCausalLM.from_pretrained(out)
    assert (logits(grown_model) - logits(model)).abs().max() <= 1e-5 * logits(model).abs().max()
    for operation in operations:
        grow(model, operation)
    live, on_disk = model.state_dict(), grown_model.state_dict()
    assert live.keys() == on_disk.keys()
    assert all(torch.equal(live[name], on_disk[name]) for name in live)


@pytest.mark.parametrize(
    ("kind", "sizes", "class_name"),
    [
        ("llama", {"hidden_size": 32}, "MixtralForCausalLM"),
        ("mistral", {"sliding_window": 8, "tie_word_embeddings": True}, "MixtralForCausalLM"),
        ("qwen3", {"attention_bias": True}, "Qwen3MoeForCausalLM"),
    ],
)
def test_a_dense_model_becomes_one_of_experts(
    kind: str, sizes: dict[str, object], class_name: str, tmp_path: Path
) -> None:
    """By transformers alone: the class is another, the logits are those of before."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "dense")
    operations = [Operation("upcycle", 4, {"num_experts_per_tok": 3}), EXACT["widen_mlp"]]
    growth = grow_folder(open_folder(tmp_path / "dense"), tmp_path / "experts", operations)
    assert growth.proof is not None
    assert growth.proof.holds
    grown_model = AutoModelForCausalLM.from_pretrained(tmp_path / "experts")
    assert type(grown_model).__name__ == class_name
    assert (logits(grown_model) - logits(model)).abs().max() <= 1e-5 * logits(model).abs().max()
    router_logits = grown_model(torch.arange(32)[None], output_router_logits=True).router_logits
    assert [tuple(layer_logits.shape) for layer_logits in router_logits] == [(32, 4)] * 3
    assert all(
        len(set(layer_logits.topk(3).indices.flatten().tolist())) == 4
        for layer_logits in router_logits
    )
    with pytest.raises(GrowthError, match=f"cannot become a {class_name} in place"):
        grow(model, operations[0])
    live = prepare(model, operations[0]).model
    grow(live, operations[1])
    on_disk = grown_model.state_dict()
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in live.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen2", "no family is Qwen2 of this config with experts"),
        ("llama", "Mixtral has no self_attn.q_proj.bias"),
        ("mixtral", "the model has 4 experts already"),
    ],
)
def test_a_family_without_a_counterpart_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    model_of(kind).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=message):
        grow_folder(
            open_folder(tmp_path / "small"), tmp_path / "out", [Operation("upcycle", 4, {})]
        )
    assert not (tmp_path / "out").exists()


def test_a_folder_keeps_its_dtype_its_tokenizer_and_what_else_its_config_says(llama: Path) -> None:
    small = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    small.save_pretrained(llama)
    Fast(WordLevel({"a": 0}, "a")).save(str(llama / "tokenizer.json"))
    (llama / "modeling_llama.py").write_text("raise SystemExit")
    config = json.loads((llama / "config.json").read_text())
    config |= {"rope_scaling": None, "rope_theta": 5000.0, "mark": [1]}
    del config["rope_parameters"]
    (llama / "config.json").write_text(json.dumps(config))
    out = llama.parent / "out"
    growth = grow_folder(open_folder(llama), out, [EXACT["grow_head_dim"], EXACT["widen_hidden"]])
    assert growth.proof is not None
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    grown_config = json.loads((out / "config.json").read_text())
    assert grown_config["mark"] == [1]
    assert "rope_theta" not in grown_config
    assert grown_config["rope_parameters"]["rope_theta"] > 5000.0
    grown_model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in grown_model.parameters()} == {torch.bfloat16}
    assert grown_model.config.hidden_size == 72


def test_copies_that_stay_equal_are_told_of(llama: Path) -> None:
    """A folder has no optimizer state that sets them apart."""
    names = ("insert_layers", "widen_mlp_split", "widen_mlp", "widen_hidden_copied")
    growth = grow_folder(open_folder(llama), llama.parent / "out", [EXACT[n] for n in names])
    assert growth.warning.startswith("the copies that widen_mlp and widen_hidden made have")
    assert "stay equal" in growth.warning
    growth = grow_folder(open_folder(llama), llama.parent / "more", [EXACT["widen_mlp"]])
    assert growth.warning == ""


@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_exact_is_as_good_as_its_label(name: str, llama: Path) -> None:
    growth = grow_folder(open_folder(llama), llama.parent / "out", [OTHER[name]])
    assert growth.proof is not None
    assert growth.proof.label == ("bounded" if name == "resize_vocab" else "lossy")
    AutoModelForCausalLM.from_pretrained(llama.parent / "out")


def test_what_breaks_its_label_is_not_written(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(shape: object) -> float:
        del shape
        return 0.5

    monkeypatch.setattr(type(open_folder(llama).shape), "norm_eps", property(wrong))
    with pytest.raises(NotProven, match="widen_hidden: not exact"):
        grow_folder(open_folder(llama), llama.parent / "out", [EXACT["widen_hidden"]])
    assert {path.name for path in llama.parent.iterdir()} == {"llama"}


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Operation("widen_mlp", 7, {}), "mlp is 48 already"),
        (Operation("set_lr", 1e-3, {}), "no growth operation is called 'set_lr'"),
        (Operation("widen_mlp", "x2", {"mask": 3}), "only a GPT supports masks"),
    ],
)
def test_what_no_model_can_become_writes_nothing(
    operation: Operation, message: str, llama: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        grow_folder(open_folder(llama), llama.parent / "out", [operation])
    assert not (llama.parent / "out").exists()


def test_what_is_cut_off_while_it_is_read_leaves_nothing(llama: Path) -> None:
    folder = open_folder(llama)
    os.truncate(llama / "model.safetensors", 5000)
    with pytest.raises(CheckpointError):
        grow_folder(folder, llama.parent / "out", [EXACT["widen_mlp"]])
    assert {path.name for path in llama.parent.iterdir()} == {"llama"}
    (llama.parent / "full").mkdir()
    (llama.parent / "full" / "mine").touch()
    with pytest.raises(WriteError, match="is not empty"):
        grow_folder(folder, llama.parent / "full", [EXACT["widen_mlp"]])


def test_a_kill_between_weights_and_config_leaves_nothing_to_be_seen(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(folder: Path, growth: object, to: Path) -> None:
        del folder, growth
        if (to / "model.safetensors").stat().st_size > 10_000:
            os.kill(os.getpid(), signal.SIGKILL)

    folder, out = open_folder(llama), llama.parent / "out"
    with monkeypatch.context() as patch:
        patch.setattr("instar.growth.folders._copy_files", kill)
        if not (child := os.fork()):
            try:
                grow_folder(folder, out, [EXACT["widen_mlp"]], check=False)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    names = {path.name for path in llama.parent.iterdir()} - {"llama"}
    assert len(names) == 1
    assert names.pop().startswith(".tmp-out-")
    grow_folder(folder, out, [EXACT["widen_mlp"]])
    assert out.is_dir()


def test_it_is_typed_as_for_a_checkpoint(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = llama.parent / "out"
    operations = ("--op", "widen_mlp=x2 how=split", "--op", "insert_layers=1 where=end")
    assert main(["grow", str(llama), str(out), *operations, "--max-shard-size", "100KB"]) == 0
    output = capsys.readouterr()
    assert output.out == f"{out}\n"
    lines = output.err.splitlines()
    assert lines[0].startswith('widen_mlp "x2"')
    assert lines[2].startswith("checked on random tokens: max |Δlogit| ")
    assert lines[-1] == f"next: AutoModelForCausalLM.from_pretrained({str(out)!r})"
    assert (out / "model.safetensors.index.json").is_file()

    assert main(["checkpoint", "inspect", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["dtype"]) == ("Llama", "F32")
    assert facts["axes"]["layers"] == 4
    assert facts["axes"]["mlp"] == 96
    model = AutoModelForCausalLM.from_pretrained(out)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert main(["checkpoint", "inspect", str(out), "--tensors"]) == 0
    assert "layers 4, embed 48, mlp 96" in capsys.readouterr().out

    assert main(["grow", str(llama), str(out) + "2", *operations, "--no-proof"]) == 0
    assert "checked on" not in capsys.readouterr().err
