"""Models of custom tasks come back with the values that were trained, in a script and from elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import Forks
from safetensors.torch import load_file, save_file

import instar
from instar.checkpoint.manifest import CheckpointError
from instar.config.errors import ConfigError
from instar.config.user_code import named, trust

NETS = """
from instar.custom import CustomTask, Section
import numpy as np, torch, torch.nn.functional as F
from torch import nn

class Settings(Section):
    width: int = 4

class Points(CustomTask):
    Model = Settings

    def samples(self):
        x = np.random.default_rng(self.seed).normal(size=(64, 2)).astype("f4")
        return {"x": x, "y": x.sum(1)}

    def module(self, shape):
        width = self.model.width
        return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def loss(self, model, batch):
        return F.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="none")
"""
CONFIG = """
config = {
    "name": "points", "task": TASK, "model": {"width": 5}, "data": {"val": 0.25, "workers": 1, "drop_last": True},
    "train": {"until": "4it", "batch_size": 8}, "learning_rate": {"warmup_iters": 1}, "record": {"report": False},
}
"""
SCRIPT = f"""
import sys
import instar
{NETS}
{CONFIG.replace("TASK", "Points")}
if __name__ == "__main__":
    if sys.argv[1:] == ["resume"]:
        run = instar.resume("latest", {{"train.until": "6it"}}, world_size=2)
    else:
        run = instar.launch(config, {{"train.ema": 0.5}}, world_size=2)
    model = instar.load_model(run)
    print(run, model(torch.ones(3, 2)).sum().item(), instar.load_run(run).summary()["step"])
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return tmp_path


def train_run(forks: Forks, place: Path, ema: str = "null") -> Path:
    config = "task: nets:Points\nmodel: {width: 5}\ndata: {val: 0.25}\nrecord: {run_dir: run, report: false}\n"
    config += (
        f"train: {{until: 4it, batch_size: 8, ema: {ema}}}\nlearning_rate: {{warmup_iters: 1}}\n"
    )
    (place / "run.yaml").write_text(config)
    subprocess.run([forks.command, "train", "run.yaml"], check=True, capture_output=True)
    return place / "run"


@pytest.mark.parametrize("ema", ["null", "0.5"])
def test_a_model_has_the_values_of_the_file(forks: Forks, place: Path, ema: str) -> None:
    run = train_run(forks, place, ema)
    model = instar.load_model(run, "cpu")
    (folder,) = run.glob("checkpoints/step-*4")
    weights = load_file(folder / ("model.safetensors" if ema == "null" else "ema.safetensors"))
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= weights.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, weights[name]), name
    buffers = load_file(folder / "model.safetensors")
    assert buffers["1.num_batches_tracked"] > 0
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert not model.training
    assert model(torch.ones(3, 2)).shape == (3, 1)


def test_another_class_may_build_it_and_a_wrong_one_is_refused(forks: Forks, place: Path) -> None:
    run = train_run(forks, place)
    (place / "moved.py").write_text(NETS)
    (place / "wrong.py").write_text(NETS.replace("nn.Linear(width, 1)", "nn.Linear(width, 2)"))
    (place / "nets.py").unlink()
    with pytest.raises(ConfigError, match="there is no module 'nets'"):
        instar.load_model(run)
    model = instar.load_model(run, task="moved:Points")
    assert sum(p.numel() for p in model.parameters()) == 31
    from moved import Points  # type: ignore[import-not-found]

    assert type(instar.load_model(instar.load_run(run), task=Points)) is type(model)
    with pytest.raises(CheckpointError, match="lead to another architecture"):
        instar.load_model(run, task="wrong:Points")
    with pytest.raises(CheckpointError, match="a model of task nets:Points, not a language model"):
        instar.sample(run)


def test_values_of_another_file_are_refused(forks: Forks, place: Path) -> None:
    run = train_run(forks, place)
    (folder,) = run.glob("checkpoints/step-*4")
    tensors = load_file(folder / "model.safetensors")
    tensors["0.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"damaged|checksum|differs|hash"):
        instar.load_model(run)


def test_code_of_another_user_is_not_run(
    forks: Forks, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_run(forks, place)
    monkeypatch.setattr(
        trust, "foreign_owner", lambda path: "user mallory" * (path.name == "nets.py")
    )
    with pytest.raises(ConfigError, match="belongs to user mallory"):
        instar.load_model(run)
    assert "nets" not in sys.modules


def test_definitions_of_another_user_are_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "definitions.pickle"
    file.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    monkeypatch.setenv("INSTAR_DEFINITIONS", str(file))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        named.load_named("__main__:Missing", key="task")
    monkeypatch.undo()
    assert not (place / "pwned").exists()


def test_a_script_launches_what_it_defines_from_any_folder(tmp_path: Path, forks: Forks) -> None:
    scripts, place = tmp_path / "scripts", tmp_path / "place"
    for folder in (scripts, place):
        folder.mkdir()
    (scripts / "program.py").write_text(SCRIPT)
    outputs = []
    for words in ([], ["resume"]):
        process = subprocess.run(
            [forks.python, scripts / "program.py", *words],
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        outputs.append(process.stdout.split())
    (first, value, step), (second, later, last) = outputs
    assert Path(second).name == Path(first).name
    assert (step, last) == ("4", "6")
    assert value != later
    process = subprocess.run(
        [forks.command, "resume", first, "--set", "train.until=8it"],
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "Points was defined in a notebook or a script" in process.stderr
    shutil.copy(scripts / "program.py", place / "program.py")
    process = subprocess.run(
        [
            forks.command,
            "resume",
            first,
            "--set",
            "train.until=8it",
            "--set",
            "task=program:Points",
        ],
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "the source of the task has changed" in process.stderr


def test_a_module_beside_the_script_is_found_by_its_ranks(tmp_path: Path, forks: Forks) -> None:
    scripts, place = tmp_path / "scripts", tmp_path / "place"
    for folder in (scripts, place):
        folder.mkdir()
    (scripts / "nets.py").write_text(NETS)
    start = (
        CONFIG.replace("TASK", '"nets:Points"')
        + "import instar\nprint(instar.launch(config, world_size=2))"
    )
    (scripts / "program.py").write_text(start)
    process = subprocess.run(
        [forks.python, scripts / "program.py"],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
