"""`model.from`: a new run that starts from the weights of another one, or of a Hugging Face folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from pretrained import write_place
from safetensors.numpy import load_file
from tiny_run import Place, codes, output_of

RunCli = Callable[..., str]
Instar = Callable[..., subprocess.CompletedProcess[str]]

TUNE = """\
model: {from: hf}
data: {source: squares.txt}
train: {until: 4it, batch_size: 4}
learning_rate: {warmup_iters: 2}
test: {at_end: true, weights: last}
record: {sample_tokens: 4, report: false, run_dir: tuned}
"""


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def val_losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "eval") if event["split"] == "val"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"place": tmp_path_factory.mktemp("trained")}


@pytest.fixture
def first(instar: Instar, place: Path, cache: dict[str, Path]) -> Path:
    """A run of a GPT-2, and the folder that it was exported to; made once."""
    cached_dir = cache["place"]
    if not (cached_dir / "hf").exists():
        instar("train", "tiny.yaml", "--set", "record.run_dir=first", "--set", "preset=gpt2")
        instar("checkpoint", "export", "first", "hf", "--to", "hf")
        for name in ("first", "hf"):
            shutil.copytree(place / name, cached_dir / name)
    else:
        shutil.copytree(cached_dir, place, dirs_exist_ok=True)
    (place / "tune.yaml").write_text(TUNE)
    return place / "first"


def test_a_hugging_face_folder_is_tuned_stopped_resumed_and_tested(
    instar: Instar, place: Path, first: Path
) -> None:
    forecast = instar("train", "tune.yaml", "--dry-run").stdout
    assert "GPT-2 of hf" in forecast
    assert "2 layers × 32 wide" in forecast
    instar("train", "tune.yaml")
    tuned_run = place / "tuned"
    config = (tuned_run / "run.yaml").read_text()
    assert re.search(r"  from: hf +# tune.yaml:1:9", config)
    assert re.search(r"n_layer: 2 +# from hf", config)
    assert re.search(r"tokenizer: hf/tokenizer.json +# from hf", config)
    # the same text, cut and tokenised alike: it begins where the other ended
    assert val_losses(tuned_run)[0] == pytest.approx(val_losses(first)[-1], abs=1e-4)
    shutil.rmtree(place / "hf")
    shutil.rmtree(first)
    instar("resume", "tuned", "--until", "6it")
    instar("train", "tune.yaml", "--resume", "tuned", "--until", "8it")  # whose `from` is gone, too
    instar("train", "tune.yaml", "--set", "resume=auto", "--until", "9it")
    assert [event["step"] for event in events(tuned_run, "checkpoint")] == [4, 6, 8, 9]
    instar("test", "tuned", "--from", "latest")
    test_result = json.loads((tuned_run / "test/result.json").read_bytes())
    assert test_result["step"] == 9
    assert test_result["metrics"].keys() == {"loss", "perplexity"}  # of words, bytes are not known
    assert instar("sample", "tuned", "--prompt", "1 sq", "--tokens", "5").stdout.startswith("1 sq")


@pytest.mark.torture
def test_ranks_and_growth_start_from_a_run(
    instar: Instar, forks: Forks, place: Path, first: Path
) -> None:
    (place / "tune.yaml").write_text(TUNE.replace("hf", "first"))
    grow = 'schedule=[{"name": "widen_mlp", "value": "x2", "when": {"at_step": 2}}]'
    sets = ("--set", grow, "--set", "train.ema=0.5", "--set", "parallel.strategy=fsdp")
    ranks = Place(place, forks).instar("train", "tune.yaml", *sets, ranks=2)
    assert codes(ranks) == [0, 0], output_of(ranks)
    tuned_run = place / "tuned"
    assert "from: first/checkpoints/step-8" in (tuned_run / "run.yaml").read_text()
    assert "tokenizer: first/tokenizer.json" in (tuned_run / "run.yaml").read_text()
    assert val_losses(tuned_run)[0] == pytest.approx(val_losses(first)[-1], abs=1e-4)
    # a grown model with a moving average, of which the next run takes the latter
    instar("train", "tune.yaml", "--set", "model.from=tuned", "--set", "record.run_dir=more")
    manifest = json.loads((place / "more/checkpoints/step-4/manifest.json").read_bytes())
    assert manifest["architecture"]["n_mlp"] == 256
    assert val_losses(place / "more")[0] == pytest.approx(val_losses(tuned_run)[-1], abs=1e-4)


@pytest.mark.usefixtures("first")
def test_samples_are_of_their_seed_and_end_before_a_stop(instar: Instar) -> None:
    def sample_text(*options: str) -> str:
        return instar("sample", "first", "--prompt", "1 sq", "--max-tokens", "40", *options).stdout

    text = sample_text("--top-p", "0.9", "--seed", "3")
    assert text.startswith("1 sq")
    assert len(text) >= 4 + 40 + 1
    two_texts = sample_text("--top-p", "0.9", "--seed", "3", "--num", "2")
    assert two_texts.startswith(f"{text}────────\n1 sq")
    assert len(two_texts) > 2 * len(text)
    stop = text[20:23]
    stopped_text = sample_text("--top-p", "0.9", "--seed", "3", "--stop", "never", "--stop", stop)
    assert stopped_text == text[: text.index(stop, 4)] + "\n"
    assert sample_text("--seed", "4") != sample_text("--seed", "5")


TASK = """
import torch
from instar.custom import CustomTask, Section

class Lines(CustomTask):
    class Model(Section):
        width: int = 4
    def samples(self):
        x = torch.arange(200.0).reshape(100, 2) / 200
        return {"x": x, "y": 3 * x.sum(1)}
    def module(self, shape):
        options = self.model.model_dump()
        assert list(options) == ["width"]
        width = options["width"]
        return torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )
    def loss(self, model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2
"""


def test_a_custom_task_starts_from_its_own_runs(instar: Instar, place: Path) -> None:
    (place / "lines.py").write_text(TASK)
    sets = ["task=lines:Lines", "train.until=6it", "learning_rate.warmup_iters=2"]
    sets += ["record.report=false", "precision=fp32"]
    options = [word for text in sets for word in ("--set", text)]
    instar("train", *options, "--set", "record.run_dir=one", "--set", "model.width=8")
    instar("train", *options, "--set", "record.run_dir=two", "--set", "model.from=one")
    assert "width: 8" in (place / "two/run.yaml").read_text()
    assert val_losses(place / "two")[0] == pytest.approx(val_losses(place / "one")[-1], rel=1e-5)
    weights = load_file(place / "two/checkpoints/step-6/model.safetensors")
    assert weights["1.num_batches_tracked"] == 12
    wrong = ("--set", "model.from=one", "--set", "model.width=4")
    error = instar("train", *options, *wrong, code=2).stderr
    assert "model.width is 4, but step 6 of one has 8" in error
    language = instar("train", "--set", "model.from=one", code=2).stderr
    assert "step 6 of one is of task lines:Lines, not of language" in language


@pytest.mark.usefixtures("first")
def test_what_does_not_fit_is_told_with_its_line(instar: Instar, place: Path) -> None:
    (place / "tune.yaml").write_text(
        "model:\n  from: hf\n  n_layer: 3\n  dropout: 0.5\n  context: 8\n"
        "data: {tokenizer: byte, source: squares.txt}\n"
    )
    output = instar("train", "tune.yaml", code=2).stderr
    assert "tune.yaml:3:12: model.n_layer is 3, but GPT-2 of hf has 2" in output
    assert "tune.yaml:6:19: data.tokenizer byte has another vocabulary than GPT-2 of hf" in output
    assert "dropout" not in output
    assert "context" not in output
    assert "2 errors" in output
    for text, message in {
        "gpt2": "hf download",
        "hf/config.json": "no folder",
        "squares": "no folder",
        ".": "has no config.json",
        "first/checkpoints/step-9": "existing checkpoints",
    }.items():
        error = instar("train", "--set", f"model.from={text}", code=2).stderr
        assert message in error
        assert f"--set model.from={text}" in error
    (place / "hf" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in instar("train", "--set", "model.from=hf", code=2).stderr


def test_code_and_damage_are_refused(instar: Instar, place: Path, first: Path) -> None:
    config = place / "hf" / "config.json"
    shape = json.loads(config.read_text())
    config.write_text(json.dumps(shape | {"auto_map": {"AutoModel": "evil.Model"}}))
    assert "which is not run" in instar("train", "tune.yaml", code=2).stderr
    config.write_text(json.dumps(shape | {"n_inner": 64}))
    error = instar("train", "tune.yaml", code=3).stderr
    assert "config.json says" in error
    file = first / "checkpoints/step-8/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    error = instar("train", "tune.yaml", "--set", "model.from=first", code=3).stderr
    assert "content has changed" in error
    assert not (place / "tuned").exists()


def test_data_are_prepared_with_the_tokenizer_that_training_takes(
    tmp_path: Path, run_cli: RunCli
) -> None:
    write_place("qwen3", tmp_path)
    run_cli("data", "prepare", "run.yaml", where=tmp_path)
    assert "done  2 steps" in run_cli("train", "run.yaml", "--until", "2it", where=tmp_path)
