"""`instar grow`, `checkpoint inspect` and `checkpoint analyze` for runs that are not language."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import science
from needed import needs
from safetensors.torch import load_file
from tiny_run import codes, output_of

from instar.checkpoint.manifest import read_manifest
from instar.cli.main import main

SAVE = ("--set", "checkpoint.every_steps=8", "--set", "checkpoint.keep_last=9")
COURSE = (
    *("--set", "train.ema=0.9"),
    *("--set", "learning_rate.lr_decay_iters=12"),
    *("--set", "test.at_end=false"),
    *("--set", "early_stopping.rules=[]"),
)


@dataclass(frozen=True)
class Case:
    config: str
    settings: tuple[str, ...]
    operations: tuple[str, ...]
    schedule: str
    frozen: tuple[str, ...] = ()
    """parameters that do not train"""


HIDDEN = "{axis: hidden, size: 40}"
CASES = {
    "graph": Case(
        "graphs.yaml",
        (),
        ("stack_layers=[0, 0]", "widen={axis: mlp, size: 24}"),
        "{name: stack_layers, value: [0, 0], when: {at_step: 8}}, "
        "{name: widen, value: {axis: mlp, size: 24}, when: {at_step: 8}}",
    ),
    "custom": Case(
        "run.yaml",
        (),
        (f"widen={HIDDEN}", "set_lr=5e-4"),
        f"{{name: widen, value: {HIDDEN}, when: {{at_step: 8}}}}, "
        "{name: set_lr, value: 5e-4, when: {at_step: 8}}",
    ),
    "custom with buffers": Case(
        "run.yaml",
        ("--set", "task=science:Normed"),
        (f"widen={HIDDEN}",),
        f"{{name: widen, value: {HIDDEN}, when: {{at_step: 8}}}}",
    ),
    "foreign module": Case(
        "run.yaml",
        ("--set", "task=foreign:Mixed"),
        (f"widen={HIDDEN}",),
        f"{{name: widen, value: {HIDDEN}, when: {{at_step: 8}}}}",
        ("scaled.weight", "scaled.bias"),
    ),
}


MARKS = {"graph": [needs("graphs")]}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=MARKS.get(n, [])) for n in CASES], ids=str
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    """A folder with two runs: `run`, of 8 steps, and `live`, which grew after 8 of its 12."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("grown")
    place = science.place(folder)
    train = ("train", case.config, *case.settings, *COURSE, *SAVE)
    often = ("--set", "checkpoint.every_steps=4")
    short = place.instar(*train, *often, "--until", "8it", "--set", "record.run_dir=run")
    assert codes(short) == [0], output_of(short)
    schedule = ("--set", f"schedule=[{case.schedule}]")
    live = place.instar(*train, *schedule, "--until", "12it", "--set", "record.run_dir=live")
    assert codes(live) == [0], output_of(live)
    return case, folder


@pytest.fixture
def case(trained: tuple[Case, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The case, in a working directory with a copy of its runs."""
    found, folder = trained
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "place"))
    return found


def tensors(run: str, step: int) -> dict[str, dict[str, Any]]:
    """Every tensor of a checkpoint by file and name, as lists."""
    folder = Path(run, f"checkpoints/step-{step}")
    files = ("model", "optimizer", "ema")
    return {
        file: {name: t.tolist() for name, t in load_file(folder / f"{file}.safetensors").items()}
        for file in files
    }


def operations(case: Case) -> list[str]:
    return [word for each in case.operations for word in ("--op", each)]


def test_offline_growth_equals_live_growth(case: Case) -> None:
    assert main(["grow", "run", "offline", *operations(case)]) == 0
    assert tensors("offline", 8) == tensors("live", 8)
    offline, live = (read_manifest(Path(run, "checkpoints/step-8")) for run in ("offline", "live"))
    assert offline.architecture == live.architecture
    assert offline.buffers == live.buffers

    assert main(["resume", "offline", "--until", "12it"]) == 0
    assert tensors("offline", 12) == tensors("live", 12)


def test_growth_is_checked_on_held_out_samples(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grow", "run", "grown", *operations(case), "--check", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checked_on"] == "held-out samples"
    assert said["proof"]["holds"] is True


def test_a_model_whose_outputs_are_no_tensor_needs_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    science.place(tmp_path)
    monkeypatch.chdir(tmp_path)
    pair = ("--set", "task=mistaken:PairOut", "--set", "record.run_dir=run", "--until", "2it")
    assert main(["train", "run.yaml", *pair, *COURSE]) == 0
    capsys.readouterr()
    assert main(["grow", "run", "grown", "--op", f"widen={HIDDEN}", "--check"]) == 2
    assert "PairOut.outputs must return one tensor" in capsys.readouterr().err
    assert not Path("grown").exists()


@pytest.mark.usefixtures("case")
def test_an_operation_that_the_model_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "run", "grown", "--op", "add_heads=4"]) == 2
    assert "add_heads" in capsys.readouterr().err
    assert not Path("grown").exists()


def test_inspect_shows_the_architecture(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "live", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    saved = load_file("live/checkpoints/step-12/model.safetensors")
    trained = [t for name, t in saved.items() if name not in said["buffers"]]
    assert said["parameters"] == sum(t.numel() for t in trained)
    names = [entry["operation"]["name"] for entry in said["history"]]
    assert names == [each.partition("=")[0] for each in case.operations]
    assert main(["checkpoint", "inspect", "live"]) == 0
    assert names[0] in capsys.readouterr().out


def test_analyze_reports_ranks_and_change_and_runs_no_code(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr("instar.config.fields.custom_task_class", refused)
    assert main(["checkpoint", "analyze", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    saved = load_file("run/checkpoints/step-8/ema.safetensors")
    assert {rank["name"] for rank in found["ranks"]} == {
        name.removesuffix(".weight") for name, tensor in saved.items() if tensor.ndim > 1
    }
    assert all(0 < rank["effective"][0] <= rank["full"] for rank in found["ranks"])
    assert Path(found["against"]).name in {"step-4", "step-5", "step-6", "step-7"}
    assert {change["name"] for change in found["changes"]} == set(saved)
    still = {change["name"] for change in found["changes"] if not change["relative"]}
    assert still == set(case.frozen)
    assert any("no causal attention" in reason for reason in found["left_out"])
    assert not found["suggestions"]
    assert main(["checkpoint", "analyze", "run"]) == 0
    assert "rank at 90%" in capsys.readouterr().out


def test_a_run_analyzes_its_weights_while_it_trains(case: Case) -> None:
    """`record.analyze_every` is not limited to GPTs."""
    words = ["train", case.config, *case.settings, *COURSE, "--until", "8it"]
    often = ["--set", "record.analyze_every=4", "--set", "record.run_dir=watched"]
    assert main([*words, *often]) == 0
    lines = map(json.loads, Path("watched/events.jsonl").read_text().splitlines())
    analyses = [line for line in lines if line["kind"] == "analysis"]
    assert analyses
    assert analyses[0]["findings"]["ranks"]
