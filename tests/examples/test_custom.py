"""Every task in examples/custom is trained, stopped, resumed and tested, on two ranks."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
from cases import parametrize_first
from forks import Forks
from started import run_ranks, start_instar
from tiny_run import TEXT, events

FOLDER = Path(__file__).parents[2] / "examples/custom"
SIZES = {
    "digits": {"train": 800, "val": 100, "test": 100},
    "houses": {"train": 700, "val": 100, "test": 100},
    "molecules": {"train": 480, "val": 60, "test": 60},
    "reviews": {"train": 470, "val": 59, "test": 59},
    "sounds": {"train": 480, "val": 60, "test": 60},
}
GPT = """\
model: {n_layer: 1, n_head: 2, n_embd: 32, context: 32, norm: layernorm, positions: learned}
data: {source: squares.txt, path: tokens, tokenizer: byte}
train: {until: 2it, batch_size: 4, gradient_accumulation_steps: 1}
learning_rate: {warmup_iters: 1}
record: {run_dir: gpt, report: false, sample_tokens: 0}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the examples."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_task_is_short_beside_its_model() -> None:
    examples = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
    assert {*examples} == {*SIZES}
    assert all(len(code_lines(text)) <= 40 for text in examples.values())


def code_lines(text: str) -> set[int]:
    """The numbers of the lines of code outside models: not blank, no comment, no docstring."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        is_model = isinstance(node, ast.ClassDef) and "nn.Module" in map(ast.unparse, node.bases)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_model or is_text:
            assert isinstance(node, ast.stmt)
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


@parametrize_first("name", SIZES, first=2)
def test_an_example_is_trained_stopped_resumed_and_tested(
    name: str, place: Path, forks: Forks
) -> None:
    if name == "reviews":
        (place / "squares.txt").write_text(TEXT, "utf-8")
        (place / "gpt.yaml").write_text(GPT, "utf-8")
        run_ranks(1, place, "train", "gpt.yaml")
        run_ranks(1, place, "checkpoint", "export", "gpt", "gpt2", "--to", "hf")
    torchrun = [forks.bin / "torchrun", "--standalone", "--nproc_per_node=2", "-m", "instar.train"]
    words = (f"{name}.yaml", "--until", "100000it", "--set", "record.report=false")
    run, run_dir = start_instar(*words, run_dir=place / "run", command=torchrun), place / "run"
    run.wait_for(r"^ +\d+ .* val ")
    run.terminate(group=False)
    run.process.communicate(timeout=60)
    (stop,) = events(run_dir, "stop")
    assert (stop["reason"], stop["resumable"]) == ("SIGTERM", True)

    steps = -(-SIZES[name]["train"] // 32)
    epochs = stop["step"] // steps + 1
    run_ranks(2, place, "resume", run_dir, "--until", f"{epochs}ep")
    first, second = events(run_dir, "run_started")
    assert first["splits"] == second["splits"] == SIZES[name]
    assert (first["step"], second["step"]) == (0, stop["step"])
    assert events(run_dir, "eval")[-1]["step"] == epochs * steps
    losses = [event["loss"] for event in events(run_dir, "train")]
    assert min(losses) < losses[0]
    result = json.loads((run_dir / "test/result.json").read_text("utf-8"))
    assert result["samples"] == SIZES[name]["test"]
    assert (run_dir / "test/predictions.parquet").exists()
