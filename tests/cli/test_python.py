"""Instar from Python: the same results as the commands, errors for people, light imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from forks import Forks
from terminal import environment, into_pipes
from tiny_run import CONFIG, TEXT
from torch.nn.modules.module import register_module_forward_hook

import instar
from instar.checkpoint.manifest import CheckpointError, encode_manifest, read_manifest
from instar.config.errors import ConfigError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Two runs of one config and two seeds, trained by the command."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "squares.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(CONFIG)
    commands = [
        ["train", "run.yaml", "--set", f"record.run_dir=runs/{name}", "--set", f"seed={seed}"]
        for seed, name in enumerate(("tortured-kmn42", "tortured-pqr73"))
    ]
    for outcome in into_pipes(folder, commands, environment(), forks.python):
        assert outcome.code == 0, outcome.text
    return folder


@pytest.fixture(autouse=True)
def working_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def output_of(forks: Forks, *words: str) -> str:
    process = subprocess.run([forks.command, *words], capture_output=True, text=True, check=True)
    return process.stdout


def test_runs_are_listed_as_the_command_lists_them(forks: Forks) -> None:
    assert instar.list_runs() == json.loads(output_of(forks, "logs", "list", "--json"))
    assert [row["id"] for row in instar.list_runs(last=1)] == ["pqr73"]
    assert instar.list_runs("nothing") == []


def test_a_run_has_metrics_summary_config_and_checkpoints(forks: Forks, place: Path) -> None:
    run = instar.load_run("tortured-kmn42")
    assert (run.name, run.id) == ("tortured", "kmn42")
    summary = json.loads(output_of(forks, "logs", "summary", "tortured-kmn42", "--json"))
    assert [run.summary()] == summary
    assert run.config()["train.ema"] == 0.9
    assert run.checkpoints()[-1].name == "step-24"
    curve = run.metric("val_loss")
    assert curve.step.tolist() == [7, 14, 21, 24]
    assert instar.load_run(place / "runs" / "tortured-kmn42").metrics == run.metrics


def test_a_table_is_the_one_that_is_exported(forks: Forks, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    output_of(forks, "logs", "export", "tortured-kmn42", "--to", "parquet", "-o", str(tmp_path))
    expected = pq.read_table(next(tmp_path.glob("*.parquet"))).to_pandas()
    run = instar.load_run("tortured-kmn42")
    frame = run.to_pandas()
    assert list(frame) == list(expected)
    for name in frame:
        np.testing.assert_array_equal(frame[name], expected[name])
    assert list(run.table("lr"))[-1] == "lr"


def test_runs_are_compared_at_equal_places() -> None:
    runs = [instar.load_run(name) for name in ("tortured-kmn42", "tortured-pqr73")]
    comparison = instar.compare(runs, ["val/loss"], at=["step=14"])
    assert comparison.config["seed"] == (0, 1)
    means = [cells[0].mean for cells in comparison.metrics["val/loss"]]
    values = [run.metric("val/loss").value[1] for run in runs]
    assert means == pytest.approx(values)


def test_a_model_writes_what_the_command_writes(forks: Forks) -> None:
    options = ["--prompt", "1 ", "--tokens", "20", "--samples", "2", "--device", "cpu"]
    output = output_of(forks, "sample", "tortured-kmn42", *options)
    texts = instar.sample("tortured-kmn42", "1 ", max_tokens=20, num=2, device="cpu")
    assert output == f"{texts[0]}\n{'─' * 8}\n{texts[1]}\n"


def test_a_loaded_model_predicts_as_it_is_evaluated() -> None:
    path = instar.load_run("tortured-kmn42").checkpoints()[-1]
    model, tokenizer = instar.load_model(path, "cpu"), instar.load_tokenizer(path)
    assert not model.training
    text = TEXT[:500]
    ids = torch.tensor(tokenizer.encode(text).tolist())
    context = model.arch.context
    losses = []
    with torch.no_grad():
        for window in ids.unfold(0, context + 1, context):
            logits = model(window[None, :-1])[0].double()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    token_count = 1 + context * len(losses)
    evaluation = instar.evaluate(path, tokenizer.decode(ids[:token_count].tolist()), "cpu")
    assert evaluation.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert evaluation.tokens == token_count - 1
    assert evaluation.perplexity == pytest.approx(np.exp(evaluation.loss))
    # as in training: of the predicted tokens, without the bytes of the first
    byte_count = len(tokenizer.decode(ids[1:token_count].tolist()).encode())
    assert evaluation.bytes == byte_count
    assert evaluation.bits_per_byte == pytest.approx(
        evaluation.loss * evaluation.tokens / byte_count / np.log(2), rel=1e-9
    )


def test_a_small_model_is_evaluated_with_one_thread() -> None:
    torch.set_num_threads(2)
    used = set[int]()
    hook = register_module_forward_hook(lambda *_: used.add(torch.get_num_threads()))
    try:
        instar.evaluate("tortured-kmn42", TEXT[:100], "cpu")
    finally:
        hook.remove()
    assert used == {1}
    assert torch.get_num_threads() == 2


def test_errors_say_what_instead() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        instar.load_run("tortured-kmn")
    with pytest.raises(ConfigError, match="did you mean 'val/loss'"):
        instar.load_run("tortured-kmn42").metric("val/los")
    with pytest.raises(ConfigError, match="at least two"):
        instar.evaluate("tortured-kmn42", "1")
    with pytest.raises((ConfigError, CheckpointError)):
        instar.load_model("nothing")
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        instar.load_modle  # type: ignore[attr-defined]  # noqa: B018


def test_runs_are_compared_by_what_load_run_takes() -> None:
    by_run = instar.compare(
        [instar.load_run("kmn42"), instar.load_run("pqr73")], ["loss"], at=["step=9"]
    )
    by_name = instar.compare(
        ["runs/tortured-kmn42", Path("runs/tortured-pqr73")], ["loss"], at=["step=9"]
    )
    assert by_name.metrics == by_run.metrics
    with pytest.raises(ConfigError, match="must be a list of runs"):
        instar.compare("kmn42")
    with pytest.raises(ConfigError, match=r"no run 'kmn43'.*did you mean"):
        instar.compare(["kmn42", "kmn43"])


def test_a_config_may_be_a_dictionary() -> None:
    config = {
        "name": "dict",
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "context": 16},
        "data": {"source": "squares.txt", "path": "tokens", "tokenizer": "char"},
        "train": {"until": "2it", "batch_size": 4},
        "record": {"report": False, "sample_tokens": 0, "run_dir": "others/dict"},
    }
    run = instar.load_run(instar.api.train(config, ["optimizer.lr=3e-4"]))
    assert (run.config()["model.n_layer"], run.config()["optimizer.lr"]) == (1, 3e-4)
    for wrong, message in [
        ({"optimizer": {"lr": torch.ones(1)}}, "is not made of plain data"),
        ({"modle": {}}, "unknown key 'modle'; did you mean 'model'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            instar.launch(wrong)
    with pytest.raises(ConfigError, match=r'write \["seed=3"\]'):
        instar.launch(config, "seed=3")


def test_a_model_of_another_task_is_named(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    shutil.copytree(sorted(place.glob("runs/tortured-kmn42/checkpoints/step-*"))[0], folder)
    manifest = read_manifest(folder)
    content = encode_manifest(
        msgspec.structs.replace(manifest, config=manifest.config | {"task": "spirals:Net"})
    )
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="not in the folder of a run"):
        instar.load_model(folder)
    for function in (instar.load_tokenizer, instar.sample):
        with pytest.raises(
            CheckpointError, match="a model of task spirals:Net, not a language model"
        ):
            function(folder)
    with pytest.raises(CheckpointError, match=r"instar\.load_model loads it"):
        instar.evaluate(folder, "a text")


def test_importing_instar_imports_nothing_else() -> None:
    show = "import sys, instar; print(*sys.modules); instar.load_run; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", show], env=os.environ, capture_output=True, text=True, check=True
    )
    after_import, after_use = (set(line.split()) for line in process.stdout.splitlines())
    assert not {"instar.api", "torch", "numpy", "pydantic", "pandas"} & after_import
    assert "instar.api.runs" in after_use
    assert not {"instar.api.models", "instar.api.training", "torch", "pandas"} & after_use
