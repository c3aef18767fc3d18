"""`instar checkpoint` as it is typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_parts
import pytest
import torch
from shapes import llama

from instar.checkpoint.manifest import Facts
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint
from instar.cli.main import main
from instar.data.text.tokenizer import ByteTokenizer
from instar.models.gpt import GPT

ARCH = llama(256)
CHANGE = {"operation": {"name": "set_lr", "value": 5e-4}, "step": 15, "cursor": 240}


def save(run: Path, step: int, history: list[Any] | None = None, **facts: Any) -> Path:
    model = GPT(ARCH)
    model.init_weights(step)
    weights = dict(model.named_parameters())
    moments = {f"{name}/exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
    progress = {"step": step, "samples": 16 * step, "tokens": 256 * step, "active_s": 61.0}
    return publish_checkpoint(
        run,
        step,
        CheckpointContent(
            {"model": weights, "optimizer": moments},
            {"cursor": step},
            ARCH.to_dict(),
            history=history or [],
            facts=Facts(data="f00d", tokenizer="beef", progress=progress, **facts),
        ),
    )


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "tiny-abcde"
    run.mkdir()
    (run / "run.yaml").write_text("name: tiny\noptimizer:\n  lr: 0.001\n")
    (run / "tokenizer.json").write_text(ByteTokenizer().to_json())
    save(run, 10, loss=2.5, reason="every 10 steps")
    save(run, 20, loss=2.25, reason="every 10 steps", history=[CHANGE])
    save(run, 30, reason="the end", history=[CHANGE])
    (run / "checkpoints/best").write_text("step-20\n")
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three checkpoints, in ./runs."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(saved_run, "runs/tiny-abcde"))


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command that ends well prints as JSON."""
    capsys.readouterr()
    assert main(["checkpoint", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("run")
def test_list_shows_every_checkpoint_and_what_points_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["checkpoint", "list", "tiny"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["checkpoint", "step", "tokens", "loss", "size", "age", "reason"]
    assert [row.split()[0] for row in rows] == ["step-10", "step-20", "step-30"]
    assert rows[0].endswith("every 10 steps")
    assert "2.2500" in rows[1]
    assert rows[1].endswith("best")
    assert "7.68k" in rows[2]
    assert rows[2].endswith("the end         latest")


def test_list_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "list", str(run), "--verify")
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert [row["pointers"] for row in rows] == [[], ["best"], ["latest"]]
    assert [row["loss"] for row in rows] == [2.5, 2.25, None]
    assert all(row["verified"] and row["broken"] == [] for row in rows)
    assert rows[0]["tokens"] == 2560
    folder = run / "checkpoints/step-10"
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"]
    assert rows[0]["size_bytes"] == sum(sizes)


def test_list_of_a_run_without_checkpoints_is_empty(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = run.with_name("new-fghjk")
    new.mkdir()
    (new / "run.yaml").touch()
    assert main(["checkpoint", "list", "new"]) == 0
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert json_of(capsys, "list", "new") == []


def test_list_reads_the_files_only_where_asked_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_last_bit(run / "checkpoints/step-20/model.safetensors")
    assert main(["checkpoint", "list", "tiny"]) == 0
    assert main(["checkpoint", "list", "tiny", "--verify"]) == 3
    output = capsys.readouterr()
    states = [line.split()[-1] for line in output.out.splitlines()[-3:]]
    assert states == ["whole", "BROKEN", "whole"]
    assert "step-20/model.safetensors: content has changed" in output.err


@pytest.mark.usefixtures("run")
def test_inspect_says_what_is_there_and_where_it_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["checkpoint", "inspect", "tiny"]) == 0
    output = capsys.readouterr().out
    facts = {line[:14].strip(): line[14:] for line in output.splitlines()}
    assert facts["checkpoint"].endswith("step-30")
    assert facts["step"] == "30"
    assert facts["saved"].endswith("by 1 rank")
    assert facts["reason"] == "the end"
    assert facts["progress"] == "480 samples, 7.68k tokens, 1m01 active"
    assert facts["architecture"] == (
        "2 layers, 32 wide, 4 heads (2 for keys and values) of 8, MLP 96, context 16, "
        "vocabulary 256"
    )
    assert "rmsnorm, swiglu, rope (base 10000), no biases, untied head" in output
    count = sum(parameter.numel() for parameter in GPT(ARCH).parameters())
    assert facts["parameters"] == f"{count:,}"
    assert (facts["data"], facts["tokenizer"]) == ("f00d", "beef")
    assert facts["history"] == "step 15: set_lr 0.0005"
    assert f"torch {torch.__version__}" in facts["versions"]
    rows = [line.split() for line in output.splitlines()]
    (model,) = (row for row in rows if row[:1] == ["model.safetensors"])
    assert model[1:3] == ["REPLICATED", str(len(list(GPT(ARCH).parameters())))]
    assert [row[1] for row in rows if row[:1] == ["state.json"]] == ["GLOBAL"]


def test_inspect_lists_tensors_where_asked_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run / "checkpoints/step-10")
    assert main(["checkpoint", "inspect", path, "--tensors"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["blocks.0.attn.key.weight", "F32", "16×32"] in rows
    assert ["head.weight/exp_avg", "F32", "256×32"] in rows
    tensors = json_of(capsys, "inspect", path, "--tensors")["tensors"]
    entry = tensors["model.safetensors"]["final_norm.weight"]
    assert entry == {"dtype": "F32", "shape": [32], "size_bytes": 128}


def test_inspect_as_json_is_the_manifest_and_more(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json_of(capsys, "inspect", "tiny")
    manifest = json.loads((run / "checkpoints/step-30/manifest.json").read_bytes())
    del manifest["xxh3_128"]
    assert facts.items() >= manifest.items()
    assert facts["parameters"] == sum(p.numel() for p in GPT(ARCH).parameters())
    assert "tensors" not in facts


def test_inspect_of_another_kind_of_model_shows_what_is_said_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"kind": "graph", "layers": 3}
    weights = {"model": {"w": torch.ones(2)}}
    publish_checkpoint(
        run, 40, CheckpointContent(weights, {}, shape, facts=Facts(left_out=["optimizer"]))
    )
    assert main(["checkpoint", "inspect", "tiny"]) == 0
    output = capsys.readouterr().out
    assert "kind graph, layers 3" in output
    assert "no operations" in output
    assert "left out      optimizer" in output


def test_inspect_names_a_torn_file_after_what_it_could_say(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints/step-30/model.safetensors").write_bytes(b"torn")
    assert main(["checkpoint", "inspect", "tiny"]) == 3
    output = capsys.readouterr()
    assert "parameters    ?" in output.out
    assert "model.safetensors: not a safetensors file" in output.err
    assert "instar checkpoint verify" in output.err


def test_verify_says_whole_and_how_fast(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "tiny", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        str(run / f"checkpoints/step-{step}") for step in (10, 20, 30)
    ]
    assert all(": whole, " in line and line.endswith(" GB/s") for line in lines)


def test_verify_names_every_broken_file_and_what_is_left(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints/step-30"
    flip_last_bit(path / "model.safetensors")
    (path / "state.json").unlink()
    assert main(["checkpoint", "verify", str(path)]) == 3
    output = capsys.readouterr()
    assert "BROKEN" in output.out
    assert "step-30/model.safetensors: content has changed" in output.out
    assert "step-30/state.json: missing" in output.out
    assert output.err.rstrip().endswith("step-20")
    assert main(["checkpoint", "verify", "tiny", "--all", "--json"]) == 3
    checks = json.loads(capsys.readouterr().out)
    assert [check["whole"] for check in checks] == [True, True, False]
    assert len(checks[2]["broken"]) == 2


def test_verify_of_a_run_whose_checkpoints_are_all_broken(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.glob("checkpoints/step-*/state.json"):
        path.unlink()
    assert main(["checkpoint", "verify", "tiny"]) == 3
    assert "No checkpoint of this run is whole" in capsys.readouterr().err


def test_diff_says_what_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(run / f"checkpoints/step-{step}") for step in (10, 20))
    assert main(["checkpoint", "diff", a, b]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert "architecture: same" in output
    assert ["in", "force:", "lr", "0.001", "0.0005"] in rows
    names = len(list(GPT(ARCH).parameters()))
    norms = 2 * ARCH.n_layer + 1
    assert ["model.safetensors", str(norms), str(names - norms), "0", "0"] in rows
    assert ["optimizer.safetensors", str(names), "0", "0", "0"] in rows
    assert any(row[:2] == ["head.weight", "changed"] for row in rows)
    differences = json_of(capsys, "diff", a, b)
    assert differences["history"] == {"operation 1": {"a": None, "b": CHANGE}}
    assert differences["saved"]["loss"] == {"a": 2.5, "b": 2.25}
    (head,) = (t for t in differences["tensors"]["model.safetensors"] if t["name"] == "head.weight")
    assert (head["verdict"], head["relative_l2"] > 0.1) == ("changed", True)


@pytest.mark.usefixtures("run")
def test_a_checkpoint_is_the_same_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", "tiny", "latest"]) == 0
    output = capsys.readouterr().out
    for group in ("architecture", "settings", "history", "saved", "state"):
        assert f"{group}: same" in output


def test_diff_sees_every_part_of_a_checkpoint_that_differs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits of the model and of the optimizer, the state, and each fact of the manifest."""

    def differs(name: str, weights: float = 0.0, moments: float = 0.0, **facts: Any) -> set[str]:
        root = run.parent / name
        state, other = facts.pop("state", {"cursor": 1}), {"model": torch.zeros(3) + weights}
        for folder, tensors, moment, more, saved_state in (
            ("a", {"model": torch.zeros(3)}, 0.0, {}, {"cursor": 1}),
            ("b", other, moments, facts, state),
        ):
            more_facts = dict(more)
            architecture = more_facts.pop("architecture", {"width": 3})
            history = more_facts.pop("history", [])
            parts = {"model": tensors, "optimizer": {"model/exp_avg": torch.zeros(3) + moment}}
            publish_checkpoint(root / folder, 1, CheckpointContent(parts, saved_state, architecture, history=history, facts=Facts(**more_facts)))  # fmt: skip
        places = [str(root / key / "checkpoints/step-1") for key in "ab"]
        differences = json_of(capsys, "diff", *places)
        groups = {key for key in ("architecture", "history", "saved", "state") if differences[key]}
        files = differences["tensors"].items()
        return groups | {n for n, rows in files if any(d["verdict"] != "same" for d in rows)}

    assert differs("same") == set()
    assert differs("model", weights=1e-30) == {"model.safetensors"}
    assert differs("optimizer", moments=1e-30) == {"optimizer.safetensors"}
    assert differs("state", state={"cursor": 2}) == {"state"}
    assert differs("shape", architecture={"width": 4}) == {"architecture"}
    assert differs("history", history=[CHANGE]) == {"history"}
    assert differs("loss", loss=1.0) == {"saved"}


@pytest.mark.parametrize("pointer", ["latest", "best", "best-accuracy"])
@pytest.mark.parametrize("names", ["step-99", "step-2", "", "../step-20"])
def test_verify_of_a_run_names_pointers_that_lead_nowhere(
    run: Path, capsys: pytest.CaptureFixture[str], pointer: str, names: str
) -> None:
    (run / "checkpoints" / pointer).write_text(names)
    for words in (["tiny"], ["tiny", "--all"]):
        assert main(["checkpoint", "verify", *words]) == 3
        error = capsys.readouterr().err
        assert f"checkpoints/{pointer}: names no checkpoint of the run" in error
    assert main(["checkpoint", "verify", str(run / "checkpoints/step-20")]) == 0


def test_diff_of_two_shapes_outside_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for width in (3, 4):
        tensors = {"model": {"w": torch.ones(2, width)}, "ema": {"w": torch.full((2, 3), width)}}
        root = tmp_path / f"loose-{width}"
        paths.append(
            str(publish_checkpoint(root, 1, CheckpointContent(tensors, {}, {"width": width})))
        )
    assert main(["checkpoint", "diff", *paths]) == 0
    brief = capsys.readouterr().out
    assert ["width", "3", "4"] in [line.split() for line in brief.splitlines()]
    assert "another shape: 2×3 → 2×4" in brief
    assert "settings: same" in brief
    assert main(["checkpoint", "diff", *paths, "--tensors"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["w", "changed", "1", "0.333"] in rows
    assert len(rows) > len(brief.splitlines())


def test_every_command_takes_a_checkpoint_in_parts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load_checkpoint(run / "checkpoints" / "step-30")
    parts = run.with_name("parts-abcde")
    shutil.copytree(run, parts, ignore=shutil.ignore_patterns("checkpoints"))
    components = {name: checkpoint.tensors(name) for name in ("model", "optimizer")}
    path = in_parts.save(parts, components, 3, ARCH.to_dict())
    assert json_of(capsys, "list", "parts", "--verify")[0]["broken"] == []
    actual, expected = (json_of(capsys, "inspect", name, "--tensors") for name in ("parts", "tiny"))
    assert actual["parameters"] == expected["parameters"]
    assert "model/2-of-3.safetensors" in json.dumps(actual)
    tensors = json_of(capsys, "diff", "tiny", "parts")["tensors"]
    assert {tensor["verdict"] for file in tensors.values() for tensor in file} == {"same"}
    for name in ("parts", "tiny"):
        assert main(["checkpoint", "export", name, f"hf-{name}", "--to", "hf"]) == 0
    files = [Path(f"hf-{name}/model.safetensors").read_bytes() for name in ("parts", "tiny")]
    assert files[0] == files[1]
    (path / "model" / "1-of-3.safetensors").unlink()
    assert main(["checkpoint", "verify", "parts"]) == 3
    assert "model/1-of-3.safetensors: missing" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("run")
def test_the_size_of_exported_files(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "export", "tiny", "hf", "--to", "hf", "--max-shard-size"]
    assert main([*words, "much"]) == 2
    assert "'much' is not a size; write e.g. 500MB or 5GB" in capsys.readouterr().err
    assert main([*words, "2.5 kB"]) == 0
    files = sorted(Path("hf").glob("model-*.safetensors"))
    assert len(files) > 1
    index = json.loads(Path("hf/model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {file.name for file in files}


@pytest.mark.usefixtures("run")
def test_out_to_transformers_and_back_into_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", "tiny", "hf", "--to", "hf"]) == 0
    output = capsys.readouterr()
    assert output.out == "hf\n"
    assert "LlamaForCausalLM.from_pretrained('hf')" in output.err
    assert main(["checkpoint", "import", "hf", "--to", "runs/back-vwxyz"]) == 0
    output = capsys.readouterr()
    assert output.out == "runs/back-vwxyz/checkpoints/step-0\n"
    assert main(["logs", "list", "--json", "--name", "back"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["reason"]) == ("stopped", "nothing trained in it yet")
    tensors = json_of(capsys, "diff", "tiny", "back")["tensors"]
    assert {t["verdict"] for t in tensors["model.safetensors"]} == {"same"}
    assert main(["sample", "back", "--tokens", "5", "--seed", "1"]) == 0
    sample_text = capsys.readouterr().out
    assert main(["sample", "tiny", "--tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out == sample_text
    assert main(["config", "validate", "runs/back-vwxyz/run.yaml"]) == 0
    Path("text.txt").write_text("some text to train on\n" * 99)
    dry = ["--dry-run", "--set", "data.source=text.txt", "--json"]
    count = json_of(capsys, "inspect", "tiny")["parameters"]
    assert main(["train", "runs/back-vwxyz/run.yaml", *dry]) == 0
    assert str(count) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "nothing"], "no run 'nothing' in runs"),
        (["inspect", "nothing"], "no run 'nothing' in runs"),
        (["inspect", "."], ". is not a run: it has no run.yaml\nGive a checkpoint's folder"),
        (["verify", "hollow"], "no checkpoint in runs/hollow-fghjk/checkpoints"),
        (["inspect", "runs/tiny-abcde/checkpoints/step-9"], "step-9"),
        (["inspect", "newer"], "format 99; this Instar reads up to"),
        (["verify", "newer"], "format 99; this Instar reads up to"),
        (["verify", "hollow", "--all"], "runs/hollow-fghjk has no checkpoint yet"),
        (["inspect", "torn"], "instar checkpoint list"),
        (["diff", "tiny", "torn"], "manifest.json: not JSON"),
        (["export", "torn", "hf", "--to", "hf"], "manifest.json: not JSON"),
        (["diff", "tiny", "nothing"], "no run 'nothing' in runs"),
        (["export", "tiny", "runs", "--to", "hf"], "runs is not empty"),
        (["export", "tiny", "hf", "--to", "hf", "--ema"], "no moving average was kept"),
        (["export", "tiny", "adapter", "--to", "peft"], "and this is a GPT: --to hf merges them"),
        (["import", "runs", "--to", "here"], "runs: no config.json"),
    ],
)
def test_bad_input_ends_with_exit_code_3(
    run: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, manifest in [("hollow", ""), ("newer", '{"format": 99}'), ("torn", '{"form')]:
        other = run.with_name(f"{name}-fghjk")
        (other / "checkpoints").mkdir(parents=True)
        (other / "run.yaml").touch()
        if manifest:
            (other / "checkpoints/step-1").mkdir()
            (other / "checkpoints/step-1/manifest.json").write_text(manifest)
    assert main(["checkpoint", *arguments]) == 3
    output = capsys.readouterr()
    assert says in output.err + output.out
    assert "Nothing was started" not in output.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "tiny", "--verify"],
        ["inspect", "tiny", "--tensors"],
        ["inspect", "tiny", "--json"],
        ["verify", "tiny", "--all"],
    ],
)
def test_looking_imports_nothing_heavy(run: Path, arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from instar.cli.main import main\n"
        f"assert main(['checkpoint', *{arguments!r}]) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'ctypes'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=run.parent.parent)


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "import", "hf", "--to", ""],
        ["checkpoint", "import", "hf", "--to", " "],
        ["checkpoint", "export", "tiny", "", "--to", "hf"],
        ["grow", "tiny", "", "--op", "widen_mlp=x2"],
    ],
)
@pytest.mark.usefixtures("run")
def test_an_empty_text_is_no_folder_to_make(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {str(path) for path in Path().rglob("*")}
    assert main(words) == 2
    assert "the path of a folder is empty" in capsys.readouterr().err
    assert {str(path) for path in Path().rglob("*")} == before


@pytest.mark.usefixtures("run")
def test_the_working_directory_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("runs/tiny-abcde").absolute()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["checkpoint", "export", str(run), ".", "--to", "hf"]) == 3
    assert "is the working directory" in capsys.readouterr().err
    assert Path.cwd().is_dir()


def test_an_imported_model_may_be_given_data_and_an_average_until_it_trains(
    place: Path, instar: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (place / "cubes.txt").write_text("".join(f"{n} cubed is {n**3}.\n" for n in range(400)))
    byte = ("--set", "data.tokenizer=byte", "--set", "record.run_dir=trained")
    instar("train", "tiny.yaml", *byte, "--until", "2it")
    instar("checkpoint", "export", "trained", "hf", "--to", "hf")
    instar("checkpoint", "import", "hf", "--to", "imported")
    cubes = ("--set", "data.source=cubes.txt", "--set", "data.path=cubes")
    instar("resume", "imported", *cubes, "--set", "train.ema=0.9", "--until", "3it")
    checkpoint = load_checkpoint(place / "imported" / "checkpoints" / "step-3")
    assert {"model", "ema", "optimizer"} <= set(checkpoint.components)
    for option, is_said in (((), True), (("--ema",), False)):
        exported = instar("checkpoint", "export", "imported", f"hf{is_said}", "--to", "hf", *option)
        assert ("without --ema: the weights themselves" in exported.stderr) is is_said
    instar("resume", "imported", "--until", "4it")
    result = instar("resume", "imported", "--set", "train.ema=0.5", "--until", "5it", code=2)
    assert "train.ema" in result.stderr
    other = ("--set", "data.source=squares.txt", "--set", "data.path=squares")
    assert "data.source" in instar("resume", "imported", *other, "--until", "5it", code=2).stderr
