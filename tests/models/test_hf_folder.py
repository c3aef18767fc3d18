"""Folders that transformers loads, and saves."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_parts
import pytest
import torch
from forks import Forks
from safetensors.torch import load_file, save_file
from shapes import gpt2, llama
from tokenizer_layouts import write_tokenizer
from tokenizers import Tokenizer as Fast
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint
from instar.cli.main import main
from instar.config.language import ModelConfig
from instar.config.load import load_config
from instar.data.text.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_saved_tokenizer,
    train_bpe,
    train_char,
)
from instar.models.architecture import Architecture, resolve_architecture
from instar.models.gpt import GPT, load_gpt
from instar.models.hf.folder import export_folder, import_folder
from instar.models.hf.tensors import to_tensors
from instar.models.hf.tokenizer import from_fast, to_fast
from instar.models.lora import Lora
from instar.record.atomic import WriteError

GPT2 = gpt2(300, n_mlp=72, norm_eps=1e-3)
LLAMA = llama(300, rope_base=77.0, norm_eps=1e-3)
TEXT = "Zwei Größen: naïve 2 × 3\n\tund “6”. <|end|> <unk>"
TOKENIZERS = [ByteTokenizer(), train_char([TEXT]), train_bpe([TEXT] * 4, 300)]
KINDS = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)


def random_model(arch: Architecture, seed: int = 0) -> GPT:
    """Every parameter drawn, also norms and biases, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(arch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if "norm.weight" in name else 0.0
            parameter.normal_(middle, 0.2, generator=generator)
    return model.eval()


def publish(
    run: Path, model: GPT, ema: GPT | None = None, tokenizer: Tokenizer | None = None
) -> Path:
    run.mkdir()
    if tokenizer:
        (run / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    components = {"model": dict(model.named_parameters())}
    if ema:
        components["ema"] = dict(ema.named_parameters())
    return publish_checkpoint(run, 7, CheckpointContent(components, {}, model.arch.to_dict()))


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 11 % 300
    with torch.no_grad():
        output = model(tokens)
    return getattr(output, "logits", output)


@pytest.mark.parametrize(
    "arch",
    [
        GPT2,
        replace(GPT2, activation="gelu_tanh"),
        replace(GPT2, activation="relu2", tied=False),
        replace(GPT2, bias=False),
        LLAMA,
        replace(LLAMA, tied=True),
        replace(LLAMA, bias=True, n_kv_head=1),
        replace(LLAMA, head_dim=12, n_kv_head=4),
        replace(GPT2, lora=(Lora("all", 3, 6.0),)),
        replace(LLAMA, lora=(Lora("attn", 2, 1.0), Lora("head", 3, 6.0, rank_stabilized=True))),
    ],
    ids=[
        "gpt2",
        "tanh",
        "relu2-untied",
        "biasless",
        "llama",
        "tied",
        "biased",
        "wide-heads",
        "gpt2-adapted",
        "llama-adapted",
    ],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, arch: Architecture) -> None:
    model = random_model(arch)
    export_folder(load_checkpoint(publish(tmp_path / "run", model)), tmp_path / "hf")
    kind = GPT2LMHeadModel if arch.norm == "layernorm" else LlamaForCausalLM
    hf_model, loading_info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    assert logits(model).abs().max() > 0.5
    torch.testing.assert_close(logits(hf_model.eval()), logits(model), rtol=0, atol=1e-5)
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(auto) is kind


def test_the_moving_average_is_exported_where_asked_for(tmp_path: Path) -> None:
    model, average = random_model(LLAMA, 1), random_model(LLAMA, 2)
    path = publish(tmp_path / "run", model, average)
    export_folder(load_checkpoint(path), tmp_path / "hf", averaged=True)
    hf_model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(logits(hf_model), logits(average), rtol=0, atol=1e-5)
    bare = publish(tmp_path / "other", model)
    with pytest.raises(
        CheckpointError, match=r"no moving average was kept \(train\.ema\); it has model"
    ):
        export_folder(load_checkpoint(bare), tmp_path / "none", averaged=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("max_bytes", "files"), [(1 << 20, 1), (40_000, 5), (1, 21)])
def test_a_large_model_is_several_files(tmp_path: Path, max_bytes: int, files: int) -> None:
    model = random_model(LLAMA)
    folder = tmp_path / "hf"
    export_folder(
        load_checkpoint(publish(tmp_path / "run", model)), folder, max_shard_bytes=max_bytes
    )
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) == files
    assert (folder / "model.safetensors.index.json").exists() == (files > 1)
    if files > 1:
        assert names[0] == f"model-00001-of-{files:05}.safetensors"
        assert max((folder / name).stat().st_size for name in names) <= max(
            max_bytes + 2000, 40_000
        )
    hf_model, loading_info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    torch.testing.assert_close(logits(hf_model.eval()), logits(model), rtol=0, atol=1e-5)
    back = load_checkpoint(import_folder(folder, tmp_path / "again", tokenizer="byte")).tensors()
    assert all(torch.equal(back[name], weight) for name, weight in model.named_parameters())


@pytest.mark.torture
def test_a_model_in_parts_is_exported_a_tensor_at_a_time(forks: Forks, tmp_path: Path) -> None:
    arch = llama(300, n_layer=32, n_embd=512)
    model = random_model(arch)
    weights = dict(model.named_parameters())
    in_parts.save(tmp_path, {"model": weights}, 3, arch.to_dict())
    path = tmp_path / "checkpoints" / "step-1"
    child = forks.start("in_parts:export", str(path), str(tmp_path / "hf"), place=tmp_path)
    assert child.finish() == 0, child.output()
    total = sum(weight.nbytes for weight in weights.values())
    assert float(child.output().splitlines()[-1]) * in_parts.MIB < total / 4
    tensors = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    expected = to_tensors(arch, weights)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("arch", [GPT2, replace(LLAMA, tied=True), LLAMA])
def test_export_import_export_changes_no_bit(tmp_path: Path, arch: Architecture) -> None:
    model = random_model(arch)
    first = publish(tmp_path / "run", model, tokenizer=TOKENIZERS[2])
    export_folder(load_checkpoint(first), tmp_path / "one")
    second = import_folder(tmp_path / "one", tmp_path / "again")
    export_folder(load_checkpoint(second), tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    original, back = load_checkpoint(first).tensors(), load_checkpoint(second).tensors()
    assert original.keys() == back.keys()
    assert all(torch.equal(original[name], back[name]) for name in original)


@pytest.mark.parametrize(
    "hf_model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=90, n_positions=24, n_embd=24, n_layer=2, n_head=3)),
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=90,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=24,
                rope_parameters={"rope_type": "default", "rope_theta": 300.0},
            )
        ),
    ],
    ids=["gpt2", "llama"],
)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["one", "sharded"])
def test_what_transformers_saved_becomes_a_run(
    tmp_path: Path, hf_model: Any, shards: dict[str, str]
) -> None:
    hf_model.eval().save_pretrained(tmp_path / "hf", **shards)
    assert (tmp_path / "hf/model.safetensors").exists() == (not shards)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and nothing says which tokens"):
        import_folder(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"byte: 256 tokens, but .* 90 rows"):
        import_folder(tmp_path / "hf", tmp_path / "run", tokenizer="byte")
    (tmp_path / "hf/tokenizer.json").write_text(to_fast(TOKENIZERS[1]))
    path = import_folder(tmp_path / "hf", tmp_path / "run")
    model = load_gpt(path)
    tokens = torch.arange(20).reshape(2, 10) * 7 % 90
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits, rtol=0, atol=1e-5)
    assert path == tmp_path / "run/checkpoints/step-0"
    assert load_checkpoint(path).manifest.reason == "imported from hf"
    config = load_config(str(tmp_path / "run/run.yaml")).config
    assert resolve_architecture(config.model, 90) == model.arch
    assert config.name == "run"


@KINDS
def test_the_tokenizer_goes_along_and_comes_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = publish(tmp_path / "run", random_model(GPT2), tokenizer=tokenizer)
    export_folder(load_checkpoint(path), tmp_path / "hf")
    fast = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (TEXT, TEXT[:9], "", "a  b\r\n\x00"):
        ids = tokenizer.encode(text).tolist()
        assert fast(text)["input_ids"] == ids
        assert fast.decode(ids) == tokenizer.decode(ids)
    assert fast.eos_token_id == tokenizer.end_id
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "hf").config.eos_token_id == tokenizer.end_id
    back = import_folder(tmp_path / "hf", tmp_path / "again")
    assert load_saved_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint
    assert load_checkpoint(back).manifest.tokenizer == tokenizer.fingerprint
    export_folder(load_checkpoint(back), tmp_path / "back")
    exported = "tokenizer.json"
    assert (tmp_path / "back" / exported).read_bytes() == (tmp_path / "hf" / exported).read_bytes()
    data = load_config(str(tmp_path / "again/run.yaml")).config.data
    tokenizer_file = tmp_path / "again/tokenizer.json"
    assert data.tokenizer == ("byte" if tokenizer.kind == "byte" else str(tokenizer_file))


def test_what_came_with_a_foreign_model_goes_with_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends that are not the tokenizer's, a template and the settings of generation."""
    tokenizer = train_bpe([TEXT] * 4, 300)
    config = LlamaConfig(
        **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        num_attention_heads=2,
        bos_token_id=7,
        eos_token_id=[3, 9],
        pad_token_id=5,
    )
    folder = tmp_path / "hf"
    hf_model = LlamaForCausalLM(config)
    hf_model.generation_config.temperature = 0.3
    hf_model.generation_config.do_sample = True
    hf_model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "e", "bos_token": "Z"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    path = import_folder(folder, tmp_path / "run")
    export_folder(load_checkpoint(path), tmp_path / "back")
    names = {file.name for file in folder.iterdir()}
    assert names == {file.name for file in (tmp_path / "back").iterdir()}
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    original_config, back = (
        json.loads((directory / "config.json").read_text())
        for directory in (folder, tmp_path / "back")
    )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert back[key] == original_config[key]
    fast = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (fast.bos_token, fast.eos_token) == ("Z", "e")
    # also from a run that starts from either
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 30)
    common = ("model.context=16", "data.source=text.txt", "train.until=[1it]", "train.batch_size=2",
              "eval.eval_iters=1", "record.report=false", "record.sample_tokens=0", "device=cpu")  # fmt: skip
    for begins in ("hf", "run"):
        keys = (*common, f"model.from={begins}", f"record.run_dir=of-{begins}")
        assert main(["train", *(word for key in keys for word in ("--set", key))]) == 0
        out = tmp_path / f"back-of-{begins}"
        assert main(["checkpoint", "export", f"of-{begins}", str(out), "--to", "hf"]) == 0
        assert names == {file.name for file in out.iterdir()}
        for name in names - {"config.json", "model.safetensors"}:
            assert (out / name).read_bytes() == (folder / name).read_bytes()
        exported_config = json.loads((out / "config.json").read_text())
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert exported_config[key] == original_config[key]


def test_a_tokenizer_of_transformers_goes_with_the_export_of_a_model_trained_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder without a model; its tokens and template are its own, and special ones are no text."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer("llama2", tmp_path / "layout")
    saved_tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_file="layout/tokenizer.json", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    saved_tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    saved_tokenizer.save_pretrained("tok")
    (tmp_path / "text.txt").write_text(TEXT * 60)
    common = ("preset=llama", "model.n_layer=1", "model.n_head=1", "model.n_embd=8", "model.context=16", "device=cpu",
              "data.source=text.txt", "train.until=[1it]", "train.batch_size=2", "eval.eval_iters=1",
              "record.report=false", "record.sample_tokens=0", "record.run_dir=run")  # fmt: skip
    for tokenizer, name in (("tok", "out"), ("layout/tokenizer.json", "plain")):
        keys = (*common, f"data.tokenizer={tokenizer}", f"record.run_dir=run-{name}")
        assert main(["train", *(word for key in keys for word in ("--set", key))]) == 0
        assert main(["checkpoint", "export", f"run-{name}", name, "--to", "hf"]) == 0
        fast: Any = AutoTokenizer.from_pretrained(name)
        assert fast.bos_token == "<s>"
        config = json.loads(Path(name, "config.json").read_text())
        assert config["bos_token_id"] == fast.bos_token_id
        assert config["eos_token_id"] == fast.eos_token_id
        assert fast(TEXT[:9])["input_ids"] == saved_tokenizer(TEXT[:9])["input_ids"]
    for file in Path("tok").iterdir():
        assert Path("out", file.name).read_bytes() == file.read_bytes()
    fast = AutoTokenizer.from_pretrained("out")
    messages = [{"role": "user", "content": "words"}]
    assert fast.apply_chat_template(messages) == saved_tokenizer.apply_chat_template(messages)


def test_a_foreign_tokenizer_is_taken_as_it_is() -> None:
    words = Fast(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).to_str()
    from instar.data.text.tokenizer import BPETokenizer

    foreign = BPETokenizer(words)
    assert from_fast(foreign) is foreign
    assert to_fast(foreign) == words


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    small = resolve_architecture(ModelConfig(n_layer=1, n_head=1, n_embd=8, context=8), 256)
    export_folder(load_checkpoint(publish(tmp_path / "run", random_model(small))), tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text(TOKENIZERS[2].to_json())
    with pytest.raises(CheckpointError, match=r"tokenizer.json: \d+ tokens, but .* 256 rows"):
        import_folder(tmp_path / "hf", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def export_model(tmp_path: Path) -> Path:
    export_folder(load_checkpoint(publish(tmp_path / "run", random_model(GPT2))), tmp_path / "hf")
    return tmp_path / "hf"


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    folder = export_model(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "opened")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which may run any program"):
        import_folder(folder, tmp_path / "again")
    assert not (tmp_path / "opened").exists()
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        import_folder(folder, tmp_path / "again")
    assert not (tmp_path / "opened").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; import takes"):
        import_folder(tmp_path, tmp_path / "again")
    folder = export_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        import_folder(folder, tmp_path / "again")
    index = {"weight_map": {"transformer.wte.weight": "../run/x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not a safetensors file of this folder"):
        import_folder(folder, tmp_path / "again")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(CheckpointError, match="not an index"):
        import_folder(folder, tmp_path / "again")


def test_heads_of_another_width_are_those_of_the_run(tmp_path: Path) -> None:
    arch = replace(LLAMA, head_dim=12)
    export_folder(load_checkpoint(publish(tmp_path / "run", random_model(arch))), tmp_path / "hf")
    path = import_folder(tmp_path / "hf", tmp_path / "again", tokenizer="byte")
    config = load_config(str(tmp_path / "again/run.yaml")).config
    assert resolve_architecture(config.model, 300) == load_gpt(path).arch == arch


def test_folders_that_hold_something_are_left_alone(tmp_path: Path) -> None:
    path = publish(tmp_path / "run", random_model(GPT2))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(WriteError, match="is not empty, it holds mine"):
        export_folder(load_checkpoint(path), tmp_path / "full")
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="is a file"):
        export_folder(load_checkpoint(path), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    export_folder(load_checkpoint(path), tmp_path / "empty")
    with pytest.raises(WriteError, match="is not empty, it holds"):
        import_folder(tmp_path / "empty", tmp_path / "run")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = publish(tmp_path / "run", random_model(GPT2))
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write"):
        export_folder(load_checkpoint(path), tmp_path / "file/hf")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "run"]


def test_a_checkpoint_of_no_gpt_is_refused(tmp_path: Path) -> None:
    path = publish_checkpoint(
        tmp_path, 1, CheckpointContent({"model": {"w": torch.ones(2)}}, {}, {"a": 1})
    )
    with pytest.raises(CheckpointError, match="not a GPT"):
        export_folder(load_checkpoint(path), tmp_path / "hf")


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    tensors = load_file(export_model(tmp_path) / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": torch.zeros(300, 32)}, tmp_path / "hf/model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs"):
        import_folder(tmp_path / "hf", tmp_path / "again")


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return config


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("n_layer", "n_layer"),
        ("n_head", "n_head"),
        ("n_inner", "n_mlp"),
        ("n_positions", "context"),
        ("vocab_size", "vocab_size"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_counted(
    tmp_path: Path, key: str, field: str
) -> None:
    folder = export_model(tmp_path)
    config_of(folder, **{key: 2**40, "n_embd": 2**41} if key == "n_head" else {key: 2**40})
    with pytest.raises(CheckpointError, match=f"model.{field}: must be at most"):
        import_folder(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_the_schema_refuses_is_told_in_the_schemas_words(tmp_path: Path) -> None:
    folder = export_model(tmp_path)
    config_of(folder, layer_norm_epsilon=7.0)
    with pytest.raises(CheckpointError) as error:
        import_folder(folder, tmp_path / "new")
    assert "model.norm_eps: must be a number greater than 0 and at most 1, got 7.0" in str(
        error.value
    )
    assert "pydantic" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_imported(tmp_path: Path, value: float) -> None:
    folder = export_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ln_f\.bias: holds values that are not finite"):
        import_folder(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
