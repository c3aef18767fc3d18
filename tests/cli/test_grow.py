"""`instar grow` and `instar checkpoint analyze` as they are typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from tiny_run import TEXT

from instar.checkpoint.manifest import read_manifest
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.sections import Operation
from instar.schedule.typed import typed_operation

Instar = Callable[..., subprocess.CompletedProcess[str]]

FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")

TINY = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 4}
"""
COURSE = (
    "--set",
    "learning_rate.lr_decay_iters=12",
    "--set",
    "learning_rate.warmup_iters=2",
    "--set",
    "train.ema=0.9",
)
SCHEDULE = (
    "schedule=["
    "{name: widen_mlp, value: x2, how: split, when: {at_step: 8}}, "
    "{name: insert_layers, value: 1, where: start, moments: mapped, when: {at_step: 8}}, "
    "{name: set_lr, value: 5e-4, when: {at_step: 8}}]"
)
OPERATIONS = (
    *("--op", "widen_mlp=x2 how=split"),
    *("--op", "insert_layers=1 where=start moments=mapped"),
    *("--op", "set_lr=5e-4"),
)


def content(run: Path, step: int) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{step}"
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def trained_place(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A folder with a run of 8 steps in it, saved every 2."""
    place = tmp_path_factory.mktemp("trained")
    (place / "squares.txt").write_text(TEXT)
    (place / "tiny.yaml").write_text(TINY)
    often = ("--set", "checkpoint.every_steps=2", "--set", "checkpoint.keep_last=9")
    train = ("train", "tiny.yaml", *COURSE, *often, "--set", "record.run_dir=run")
    subprocess.run(
        [forks.command, *train],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return place


@pytest.fixture
def place(trained_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of that run."""
    copy = Path(shutil.copytree(trained_place, tmp_path / "place"))
    monkeypatch.chdir(copy)
    return copy


def test_offline_growth_is_live_growth_tensor_for_tensor(instar: Instar, place: Path) -> None:
    save = ("--set", "checkpoint.every_steps=8", "--set", "record.run_dir=live")
    instar("train", "tiny.yaml", *COURSE, *save, "--until", "12it", "--set", SCHEDULE)

    assert main(["grow", "run", "offline", *OPERATIONS]) == 0
    assert content(place / "offline", 8) == content(place / "live", 8)

    instar("resume", "offline", "--until", "12it")
    assert content(place / "offline", 12) == content(place / "live", 12)


@pytest.mark.usefixtures("place")
def test_it_says_what_it_made_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "run", "grown", *OPERATIONS, "--check"]) == 0

    output = capsys.readouterr()
    assert output.out == "grown\n"
    lines = output.err.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        'widen_mlp "x2"',
        "insert_layers 1",
        "set_lr 0.0005",
    ]
    assert "exact" in lines[0]
    assert lines[3].startswith("checked on random tokens: max |Δlogit| ")
    assert lines[-1] == "next: instar resume grown"


@pytest.mark.usefixtures("place")
def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "run", "grown", *OPERATIONS, "--check", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["path"] == "grown/checkpoints/step-8"
    assert [stage["label"] for stage in result["stages"]] == ["exact", "exact", None]
    assert result["parameters_before"] < result["stages"][0]["parameters"]
    assert result["proof"]["holds"] is True


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("widen_mlp=16", "only grows"),
        ("widen_mpl=256", "did you mean 'widen_mlp'"),
        ("widen_mlp=256 why=not", "has no option 'why'"),
        ("widen_mlp 256", "is not name=value"),
    ],
)
def test_an_operation_that_cannot_be_is_a_mistake_of_the_caller(
    operation: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grow", "run", "grown", "--op", operation]) == 2
    assert message in capsys.readouterr().err
    assert not (place / "grown").exists()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("walk", "grown"), "Give a checkpoint's folder"),
        (("run", "run"), "run is not empty"),
        (("run", "tiny.yaml"), "tiny.yaml is a file"),
    ],
)
def test_what_is_no_checkpoint_and_what_is_no_new_folder(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grow", *words, *OPERATIONS]) == 3
    assert message in capsys.readouterr().err


def test_an_imported_model_grows_before_its_first_step(instar: Instar, place: Path) -> None:
    assert main(["checkpoint", "export", "run", "hf", "--to", "hf"]) == 0
    assert main(["checkpoint", "import", "hf", "--to", "imported"]) == 0
    assert main(["grow", "imported", "grown", *OPERATIONS]) == 0
    data = ("--set", "data.source=squares.txt", "--set", "data.path=tokens", "--allow", "data")
    instar("resume", "grown", "--until", "2it", *data)
    assert read_manifest(place / "grown/checkpoints/step-2").architecture["n_layer"] == 3


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("widen_mlp=1024", Operation("widen_mlp", 1024)),
        ("widen_mlp=x1.5 share=0.3 how=split", Operation("widen_mlp", "x1.5", {"share": 0.3, "how": "split"})),
        ("merge_lora", Operation("merge_lora")),
        ("stack_layers=[0, 0, 1]", Operation("stack_layers", [0, 0, 1])),
        (
            "set_lora_rank={target: attn, rank: 8}  alpha=16",
            Operation("set_lora_rank", {"target": "attn", "rank": 8}, {"alpha": 16}),
        ),
    ],
)  # fmt: skip
def test_operations_are_read(text: str, operation: Operation) -> None:
    assert typed_operation(text) == operation


@pytest.mark.parametrize("text", ["", "=3", "a b", "x=1 x=2", "x=[1"])
def test_what_is_no_operation(text: str) -> None:
    with pytest.raises(ConfigError, match="--op"):
        typed_operation(text)


def analyze(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["checkpoint", "analyze", *words, "--json"]) == 0
    analysis: dict[str, Any] = json.loads(capsys.readouterr().out)
    return analysis


def test_analysis_looks_at_the_data_and_at_the_checkpoint_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = analyze(capsys, "run")
    first = analyze(capsys, "run/checkpoints/step-2")
    since_first = analyze(capsys, "run", "--against", "run/checkpoints/step-2")

    assert Path(latest["against"]).name == "step-6"
    assert first["against"] is None
    assert len(latest["heads"]) == 4
    assert len(latest["ranks"]) == 12
    assert latest["left_out"] == []
    one, three = (
        {change["name"]: change for change in analysis["changes"]}
        for analysis in (latest, since_first)
    )
    name = "blocks.0.mlp.up.weight"
    assert 0 < one[name]["relative"] < three[name]["relative"]
    assert three[name]["relative_per_step"] == pytest.approx(three[name]["relative"] / 6)

    shutil.rmtree(place / "tokens")
    assert analyze(capsys, "run")["heads"] == []
    assert main(["checkpoint", "analyze", "run"]) == 0
    output = capsys.readouterr().out
    assert "rank at 90%" in output
    assert "left out: attention: " in output


@pytest.mark.usefixtures("place")
def test_a_grown_vocabulary_writes_only_what_its_tokenizer_can_read(instar: Instar) -> None:
    """Of a tokenizer of bytes, and more rows than there are bytes."""
    byte = ("--set", "data.tokenizer=byte", "--set", "data.path=bytes")
    instar("train", "tiny.yaml", *COURSE, *byte, "--set", "record.run_dir=bytes-run")
    assert main(["grow", "bytes-run", "larger", "--op", "resize_vocab=2000"]) == 0
    result = instar("sample", "larger", "--tokens", "60", "--temperature", "9", "--top-k", "2000")
    assert result.stdout
