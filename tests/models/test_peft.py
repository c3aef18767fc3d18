"""Adapters in peft's files: what peft computes with them is what Instar computes, in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import parametrize_first
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import model_of
from tokenizer_layouts import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import instar
from instar.api import train
from instar.checkpoint.manifest import CheckpointError
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.models.hf.module import PretrainedModel
from instar.models.hf.peft import open_adapter
from instar.models.hf.pretrained import LoraShape
from instar.models.hf.pretrained_folder import open_folder

# peft asks transformers for what its next version calls otherwise
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

X = torch.randint(0, 64, (2, 12), generator=torch.manual_seed(1))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """A family and what peft is asked for."""

    kind: str
    targets: list[str] | str
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama, attention": Case("llama", ATTENTION),
    "llama, all linear": Case("llama", "all-linear"),
    "llama, one layer": Case("llama", ["layers.1.self_attn.q_proj"]),
    "llama, layers to transform": Case("llama", ["q_proj"], {"layers_to_transform": [0, 2]}),
    "llama, rank-stabilized": Case("llama", ATTENTION, {"use_rslora": True}),
    "llama, ranks by pattern": Case(
        "llama", [*ATTENTION, *MLP], {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}}
    ),
    "llama, alphas by pattern": Case(
        "llama", ATTENTION, {"alpha_pattern": {"q_proj": 3, "^model.layers.2.self_attn.v_proj": 50}}
    ),
    "llama, both by pattern, stabilized": Case(
        "llama",
        MLP,
        {"rank_pattern": {"up_proj": 6}, "alpha_pattern": {"down_proj": 1}, "use_rslora": True},
    ),
    "llama, drawn otherwise": Case("llama", ATTENTION, {"init_lora_weights": "gaussian"}),
    "mistral": Case("mistral", [*ATTENTION, *MLP]),
    "qwen2": Case("qwen2", [*ATTENTION, *MLP]),
    "qwen2, mlp": Case("qwen2", MLP, {"lora_dropout": 0.1}),
    "qwen3": Case("qwen3", "all-linear"),
    "gemma2": Case("gemma2", [*ATTENTION, *MLP]),
    "gemma3": Case("gemma3_text", ATTENTION, {"use_rslora": True}),
    "olmo2": Case("olmo2", [*ATTENTION, *MLP]),
    "phi3, joined": Case("phi3", ["qkv_proj", "gate_up_proj"]),
    "phi3, all": Case("phi3", "all-linear", {"alpha_pattern": {"qkv_proj": 9}}),
    "mixtral, attention": Case("mixtral", ATTENTION),
    "qwen3_moe, attention": Case("qwen3_moe", ATTENTION, {"use_rslora": True}),
}


def save_base(kind: str, folder: Path) -> None:
    model_of(kind).save_pretrained(folder)


def save_adapter(case: Case, base: Path, folder: Path, **more: Any) -> Any:
    """An adapter with random factors; returns peft's model."""
    options = {"r": 4, "lora_alpha": 10, **case.more, **more}
    config = LoraConfig(target_modules=case.targets, task_type="CAUSAL_LM", **options)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


def load_with_adapter(base: Path, adapter: Path) -> PretrainedModel:
    """Instar's model of the two folders."""
    folder = open_folder(base)
    adapters = open_adapter(adapter, folder.shape)
    model = PretrainedModel(LoraShape(folder.shape.config, adapters.lora))
    with folder.reading() as weights, adapters.reading() as factors, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((factors if ".lora_" in name else weights)(name))
    return model.eval()


@parametrize_first("name", CASES, first=6)
@torch.no_grad()
def test_adapters_of_peft_compute_what_peft_computes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_base(case.kind, tmp_path / "base")
    peft_model = save_adapter(case, tmp_path / "base", tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    expected = peft_model(X).logits
    assert (expected - plain(X).logits).abs().max() > 3e-4
    instar_model = load_with_adapter(tmp_path / "base", tmp_path / "adapter")
    torch.testing.assert_close(instar_model(X), expected, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora True: not known here"),
    "biases": ({"bias": "lora_only"}, "bias 'lora_only': not known here"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
    "changed base weights": ({"init_lora_weights": "pissa"}, "whose weights were changed"),
    "another kind": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "a key of tomorrow": ({"use_qdora": 3}, "use_qdora 3: not known here"),
    "an expression": ({"alpha_pattern": {"(q|k)_proj": 3}}, "is an expression; name modules"),
    "an alpha that is none": ({"lora_alpha": "10"}, "lora_alpha must be a number above 0"),
    "a switch that is none": ({"use_rslora": "yes"}, "use_rslora must be true or false"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and an adapter."""
    place = tmp_path_factory.mktemp("saved")
    save_base("llama", place / "base")
    save_adapter(CASES["llama, attention"], place / "base", place / "adapter")
    return place


def copy_of(folders: Path, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    for file in (folders / "adapter").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_adapter_is_refused_by_name(
    name: str, folders: Path, tmp_path: Path
) -> None:
    changes, message = REFUSED[name]
    file = copy_of(folders, tmp_path) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_adapter(tmp_path, open_folder(folders / "base").shape)


DAMAGED = {
    "a factor is missing": (
        lambda t: {n: x for n, x in t.items() if "layers.1.self_attn.q_proj.lora_A" not in n},
        "blocks.1.self_attn.q_proj: a factor is missing",
    ),
    "a factor has another shape": (
        lambda t: {n: x[:, :5].contiguous() if "k_proj.lora_A" in n else x for n, x in t.items()},
        "for a weight of",
    ),
    "two ranks": (
        lambda t: {n: x[:2].contiguous() if "v_proj.lora_A" in n else x for n, x in t.items()},
        "the two have different ranks",
    ),
    "of another model": (
        lambda t: {n.replace("q_proj", "w_proj"): x for n, x in t.items()},
        "has no weight of this name",
    ),
    "something else": (lambda t: {**t, "extra": torch.ones(2)}, "extra: no factor of an adapter"),
    "a vector": (
        lambda t: {n: x[0] if "o_proj.lora_B" in n else x for n, x in t.items()},
        "factors are matrices of floats",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_the_model_are_named(
    name: str, folders: Path, tmp_path: Path
) -> None:
    change, message = DAMAGED[name]
    file = copy_of(folders, tmp_path) / "adapter_model.safetensors"
    save_file({n: x.clone() for n, x in change(load_file(file)).items()}, file)
    with pytest.raises(CheckpointError, match=message):
        open_adapter(tmp_path, open_folder(folders / "base").shape)


def test_pickled_adapters_are_not_opened(folders: Path, tmp_path: Path) -> None:
    file = copy_of(folders, tmp_path) / "adapter_model.safetensors"
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not opened"):
        open_adapter(tmp_path, open_folder(folders / "base").shape)


def test_an_adapter_as_starting_weights_is_told_where_it_belongs(folders: Path) -> None:
    from instar.run.init_weights import find_weights

    with pytest.raises(
        ConfigError, match=r"holds an adapter of peft; name its base .* in model\.adapter"
    ):
        find_weights(str(folders / "adapter"), "causal_lm")


def test_a_name_on_the_hub_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instar.run.init_weights import find_weights

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hf download") as told:
        find_weights("Someone/Model", "causal_lm")
    assert str(told.value).count("Someone/Model") == 1


def config(name: str, base: str = "base", **more: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "name": name,
        "task": "causal_lm",
        "model": {"from": base, "context": 16},
        "data": {"source": "text.txt", "path": "tokens"},
        "train": {"until": "6it", "batch_size": 2},
        "optimizer": {"lr": 0.01},
        "learning_rate": {"warmup_iters": 1},
        "eval": {"eval_interval": 100, "eval_iters": 2},
        "record": {"report": False, "sample_tokens": 0, "run_dir": name},
        "device": "cpu",
        "precision": "fp32",
    }
    for key, value in more.items():
        sections[key] = {**sections[key], **value} if isinstance(value, dict) else value
    return sections


ADAPTED = [
    {"name": "set_lora_rank", "value": {"target": "attn", "rank": 4}, "when": {"at_step": 0}},
    {"name": "set_lora_rank", "value": {"target": "mlp", "rank": 2}, "when": {"at_step": 0}},
    {"name": "freeze", "value": ["*.weight"], "when": {"at_step": 0}},
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model with a tokenizer, and text, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tokenizer = write_tokenizer("llama", tmp_path / "base")
    files = {f.name: f.read_bytes() for f in Path("base").iterdir()}
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    sizes |= {"hidden_size": 16, "intermediate_size": 24, "vocab_size": tokenizer.get_vocab_size()}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained("base")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        Path("base", name).write_bytes(files[name])
    Path("text.txt").write_text("the words of the many\n" * 300)


def export(*words: str) -> int:
    return main(["checkpoint", "export", *words])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model.eval()(X)
    return logits if isinstance(logits, torch.Tensor) else logits.logits


STILL: dict[str, Any] = {"train": {"until": "1it"}, "optimizer": {"lr": 1e-12}}
"""A run must make a step; this one changes nothing that is seen."""


@pytest.mark.usefixtures("model")
def test_adapters_of_a_run_go_to_peft_and_come_back() -> None:
    def same(first: Any, second: Any) -> None:
        torch.testing.assert_close(logits_of(first), logits_of(second), rtol=1e-5, atol=1e-5)

    def of_run(name: str) -> Any:
        return instar.load_model(name, "cpu")

    train(config("first", schedule=ADAPTED))
    assert export("first", "adapter", "--to", "peft") == 0
    base = AutoModelForCausalLM.from_pretrained("base")
    plain = logits_of(base)
    peft_model: Any = PeftModel.from_pretrained(base, "adapter")
    assert (logits_of(peft_model) - plain).abs().max() > 1e-2
    same(of_run("first"), peft_model)

    # merged by either
    assert export("first", "merged", "--to", "hf") == 0
    same(AutoModelForCausalLM.from_pretrained("merged"), peft_model)
    same(peft_model.merge_and_unload(), of_run("first"))

    # and trained further, with a schedule
    operations = [
        {
            "name": "change_lora_rank",
            "value": {"target": "attn", "factor": 2},
            "when": {"at_step": 2},
        },
        {"name": "insert_layers", "value": 1, "when": {"at_step": 3}},
    ]
    second = {"model": {"adapter": "adapter"}, "schedule": [ADAPTED[2], *operations]}
    train(config("second", **second | STILL))
    same(of_run("second"), of_run("first"))
    assert main(["resume", "second", "--until", "6it"]) == 0
    assert export("second", "grown", "--to", "peft") == 3
    assert not Path("grown").exists()
    assert export("second", "grown", "--to", "peft", "--with-base") == 0
    base = AutoModelForCausalLM.from_pretrained("grown/base")
    assert base.config.num_hidden_layers == 3
    same(PeftModel.from_pretrained(base, "grown"), of_run("second"))


@pytest.mark.usefixtures("model")
def test_an_adapter_without_its_base_is_not_written_silently(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(config("first", schedule=ADAPTED[:2]))
    assert export("first", "adapter", "--to", "peft") == 3
    message = capsys.readouterr().err
    assert (
        "is not that under the adapters, which has been trained or grown since; --with-base"
        in message
    )
    train(config("plain"))
    assert export("plain", "adapter", "--to", "peft", "--with-base") == 3
    assert "the model has no adapters" in capsys.readouterr().err
    assert not Path("adapter").exists()


@pytest.mark.usefixtures("model")
def test_an_adapter_of_chats_has_their_template_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "words"}]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 40)
    train(config("first", schedule=ADAPTED, data={"kind": "chat", "source": "chats.jsonl"}))
    # the base's path begins where the run was started
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert export(str(tmp_path / "first"), "adapter", "--to", "peft") == 0
    assert export(str(tmp_path / "first"), "merged", "--to", "hf") == 0
    names = {"chat_template.jinja", "tokenizer_config.json", "generation_config.json"}
    for name in names:
        assert Path("adapter", name).read_bytes() == Path("merged", name).read_bytes()
    about = json.loads(Path("adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.usefixtures("model")
def test_recomputed_activations_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    train(config("first", train={"until": "1it", "gradient_checkpointing": True}))
    assert not [str(w.message) for w in recwarn if "checkpointing_enable" in str(w.message)]


@pytest.mark.usefixtures("model")
def test_a_run_starts_from_a_run_with_adapters() -> None:
    train(config("first", schedule=ADAPTED))
    train(config("second", base="first", schedule=[ADAPTED[2]], **STILL))
    logits = [logits_of(instar.load_model(name, "cpu")) for name in ("first", "second")]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)
