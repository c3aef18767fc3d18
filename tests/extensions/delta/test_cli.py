"""`instar delta` as it is typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import after, first, same, save
from safetensors.torch import load_file, save_file

from instar.cli.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files of weights and a chain of eight states."""
    monkeypatch.chdir(tmp_path)
    save_file(first(), "old.safetensors")
    save_file(after(first(), 1), "new.safetensors")
    save(Path("deltas"), 8)
    return tmp_path


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["delta", *arguments]) == 0
    return capsys.readouterr().out


def refusal_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says on stderr that must end with exit code 3, in an unchanged folder."""
    before = sorted(Path.cwd().rglob("*"))
    capsys.readouterr()
    assert main(["delta", *arguments]) == 3
    assert sorted(Path.cwd().rglob("*")) == before
    return capsys.readouterr().err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("values", ["steps", "absolute"])
def test_create_and_apply_give_the_same_bits(
    capsys: pytest.CaptureFixture[str], values: str
) -> None:
    text = output_of(
        capsys, "create", "old.safetensors", "new.safetensors", "d.delta", "--values", values
    )
    assert "x smaller" in text
    output_of(capsys, "apply", "old.safetensors", "d.delta", "out.safetensors")
    assert same(load_file("out.safetensors"), load_file("new.safetensors"))
    assert "whole" in output_of(capsys, "verify", "d.delta")


@pytest.mark.usefixtures("place")
def test_absolute_values_may_be_applied_twice_and_steps_may_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for values in ("steps", "absolute"):
        output_of(
            capsys, "create", "old.safetensors", "new.safetensors", values, "--values", values
        )
    output_of(capsys, "apply", "new.safetensors", "absolute", "out.safetensors")
    assert same(load_file("out.safetensors"), load_file("new.safetensors"))
    error = refusal_of(capsys, "apply", "new.safetensors", "steps", "again.safetensors")
    assert "new.safetensors: has the hash" in error


@pytest.mark.usefixtures("place")
def test_a_folder_of_several_files_is_one_state(capsys: pytest.CaptureFixture[str]) -> None:
    state = load_file("new.safetensors")
    names = sorted(state)
    folder = Path("model")
    folder.mkdir()
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    output_of(capsys, "create", "old.safetensors", "model", "d.delta")
    output_of(capsys, "apply", "old.safetensors", "d.delta", "out.safetensors")
    assert same(load_file("out.safetensors"), state)
    index.write_text(json.dumps({"weight_map": {"a": "../old.safetensors"}}))
    assert "not the name of a file" in refusal_of(capsys, "create", "old.safetensors", "model", "e")


@pytest.mark.usefixtures("place")
def test_tensors_that_differ_otherwise_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    other = first()
    del other["scale"]
    other["steps"] = torch.arange(8)
    other["mask"] = other["mask"].to(torch.uint8)
    other["added"] = torch.ones(2)
    save_file(other, "other.safetensors")
    error = refusal_of(capsys, "create", "old.safetensors", "other.safetensors", "d.delta")
    for text in ("scale is missing in other", "added is missing in old", "I64 [7]", "U8 [3]"):
        assert text in error


@pytest.mark.usefixtures("place")
def test_bad_input_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "create", "old.safetensors", "new.safetensors", "d.delta")
    Path("text").write_text("hello")
    Path("short").write_bytes(Path("d.delta").read_bytes()[:-1])
    for arguments, text in (
        (["apply", "missing.safetensors", "d.delta", "out"], "missing.safetensors: missing"),
        (["apply", "text", "d.delta", "out"], "text: not a safetensors file"),
        (["apply", "old.safetensors", "text", "out"], "text: not a delta link"),
        (["apply", "old.safetensors", "short", "out"], "short: content has changed"),
        (["apply", "old.safetensors", "d.delta", "text"], "text exists"),
        (["checkout", "deltas", "out", "--link", "9"], "number 9 is not in the chain"),
        (["checkout", "nowhere", "out"], "nowhere: neither a chain"),
        (["verify", "short"], "short: content has changed"),
        (["info", "old.safetensors"], "not an anchor"),
        (["squash", "deltas", "4", "6"], "cannot be squashed"),
    ):
        assert text in refusal_of(capsys, *arguments)


@pytest.mark.usefixtures("place")
def test_log_lists_states_and_with_stats_their_layers(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = json.loads(output_of(capsys, "log", "deltas", "--stats", "--json"))
    assert [row["number"] for row in rows] == list(range(8))
    assert rows[0]["kind"] == "anchor"
    assert 0 < rows[3]["density"] < 1
    assert 0 <= rows[3]["overlap"] < 1
    assert rows[3]["layers"]["layer.0"]["changed"] > 0
    text = output_of(capsys, "log", "deltas", "--stats")
    assert "overlap" in text
    assert "layer.0" in text
    assert output_of(capsys, "log", "deltas", "--plot", "deltas.svg") == text
    assert "layer.0" in Path("deltas.svg").read_text()


@pytest.mark.usefixtures("place")
def test_info_names_what_a_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output_of(capsys, "info", "deltas/link-2.delta", "--tensors", "--json"))
    before = json.loads(output_of(capsys, "info", "deltas/link-1.delta", "--json"))
    assert facts["number"] == 2
    assert facts["base"] == before["result"]
    assert facts["tensors"]["embedding"]["changed"] > 0
    assert "anchor" in output_of(capsys, "info", "deltas/anchor-0.safetensors")


@pytest.mark.usefixtures("place")
def test_a_chain_is_checked_out_squashed_and_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "checkout", "deltas", "a.safetensors", "--step", "30")
    output_of(capsys, "squash", "deltas", "1", "3")
    output_of(capsys, "checkout", "deltas", "b.safetensors", "--link", "3")
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()
    assert "1-3" in output_of(capsys, "log", "deltas")
    assert "removed 3 files" in output_of(capsys, "gc", "deltas", "--keep-from", "7")
    assert json.loads(output_of(capsys, "verify", "deltas", "--json"))["first"] == 5
    Path("deltas/index.json").unlink()
    output_of(capsys, "gc", "deltas", "--rebuild-index")
    output_of(capsys, "verify", "deltas")


@pytest.mark.usefixtures("place")
def test_a_run_stands_for_its_chain(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    assert "neither a chain" in refusal_of(capsys, "log", "run")
    Path("deltas").rename("run/deltas")
    assert "anchor" in output_of(capsys, "log", "run")


@pytest.mark.usefixtures("place")
def test_a_damaged_chain_ends_in_3(capsys: pytest.CaptureFixture[str]) -> None:
    Path("deltas/link-6.delta").unlink()
    assert "number 6 is missing" in refusal_of(capsys, "verify", "deltas")


@pytest.mark.usefixtures("place")
def test_export_loads_in_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from instar.extensions.delta.chain import append

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained("model")
    append(Path("tied"), 0, model.state_dict(), None)
    output_of(capsys, "export", "tied", "exported", "--like", "model")
    loaded_model = LlamaForCausalLM.from_pretrained("exported")
    assert same(dict(loaded_model.state_dict()), dict(model.state_dict()))
    expected_keys = load_file("model/model.safetensors").keys()
    assert load_file("exported/model.safetensors").keys() == expected_keys


@pytest.mark.usefixtures("place")
def test_export_refuses_a_state_that_is_not_of_the_model_beside_whose_config_it_would_lie(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A grown model, adapters, tied and separate heads: transformers would load each with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from instar.extensions.delta.chain import append

    sizes = {
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }

    def model(width: int = 16, *, tied: bool = False) -> LlamaForCausalLM:
        config = LlamaConfig(hidden_size=width, tie_word_embeddings=tied, **sizes)
        return LlamaForCausalLM(config)

    model().save_pretrained("model")
    model(tied=True).save_pretrained("tied-model")
    LlamaConfig(hidden_size=16, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(
        "config"
    )
    states = {
        "good": model().state_dict(),
        "grown": model(32).state_dict(),
        "adapter": {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 16)
        },
        "tied": model(tied=True).state_dict(),
    }
    for name, state in states.items():
        append(Path(name), 0, state, None)
    # weights that fit beside a config that does not: the config is what will load the state
    shutil.copytree("model", "edited")
    LlamaConfig(
        hidden_size=16, architectures=["LlamaForCausalLM"], **(sizes | {"intermediate_size": 64})
    ).save_pretrained("edited")
    for chain, like, reason in (
        ("grown", "model", "has the shape (32, 32), not (32, 16)"),
        ("grown", "config", "has the shape (32, 32), not (32, 16)"),
        ("adapter", "model", "model.embed_tokens.weight is missing"),
        ("tied", "model", "is tied to model.embed_tokens.weight, and separate in model"),
        ("good", "tied-model", "lm_head.weight is not in tied-model"),
        ("good", "edited", "has the shape (32, 16), not (64, 16)"),
    ):
        assert reason in refusal_of(capsys, "export", chain, "exported", "--like", like)
    for like in ("model", "config"):
        output_of(capsys, "export", "good", f"as-{like}", "--like", like)
        loaded_model = LlamaForCausalLM.from_pretrained(f"as-{like}")
        assert same(dict(loaded_model.state_dict()), states["good"])


def test_the_commands_on_files_import_no_torch(place: Path) -> None:
    code = (
        "import sys\n"
        "from instar.cli.main import main\n"
        "assert main(['delta', 'create', 'old.safetensors', 'new.safetensors', 'd']) == 0\n"
        "assert main(['delta', 'apply', 'old.safetensors', 'd', 'out']) == 0\n"
        "assert main(['delta', 'log', 'deltas', '--stats']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True)
