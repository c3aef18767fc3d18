"""Tasks of lm-evaluation-harness within a run: its own model of transformers measures the same on the exported weights."""

from __future__ import annotations

import json
import random
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from pretrained import TEXT, write_place

import instar
from instar.api import train
from instar.cli.main import main
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe
from instar.extensions.harness.hook import Harness, named_results
from instar.extensions.harness.model import HarnessModel
from instar.record.events import Train, read_events

pytestmark = pytest.mark.filterwarnings("ignore")  # what the harness and its libraries warn of


def rows(**_: Any) -> dict[str, Dataset]:
    generator = random.Random(0)
    samples = []
    for n in range(1, 13):
        wrong = [n * n + generator.randint(1, 9) for _ in range(2)]
        choices = [str(n * n), *map(str, wrong)]
        answer = n % 3
        choices[0], choices[answer] = choices[answer], choices[0]
        samples.append({"question": f"{n} squared is", "choices": choices, "answer": answer})
    return {"test": Dataset.from_list(samples)}


def texts(**_: Any) -> dict[str, Dataset]:
    lines = [line for line in TEXT.splitlines() if line][:9]
    return {"test": Dataset.from_list([{"text": " ".join(lines[n : n + 3])} for n in range(6)])}


SQUARES = {
    "task": "squares",
    "custom_dataset": rows,
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "task": "rolling",
    "custom_dataset": texts,
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITTEN = {
    "task": "written",
    "custom_dataset": rows,
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": [",", "\n"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
TASKS = [SQUARES, ROLLING, WRITTEN]
GPT = {
    "name": "harnessed",
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 24, "norm": "rmsnorm"}
    | {"activation": "swiglu", "positions": "rope", "bias": False},
    "data": {"source": "squares.txt", "path": "tokens", "tokenizer": "bpe.json"},
    "train": {"until": "30it", "batch_size": 16},
    "optimizer": {"lr": 0.01},
    "learning_rate": {"warmup_iters": 2},
    "eval": {"eval_interval": 10, "eval_iters": 1},
    "record": {"run_dir": "run", "log_interval": 5, "sample_tokens": 0, "report": False},
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module", params=["gpt", pytest.param("llama", marks=pytest.mark.torture)])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Harness, Path]:
    """A run with the hook, and, beside it, its export."""
    place = tmp_path_factory.mktemp(request.param)
    hook = Harness(TASKS, every=2)
    with chdir(place):
        if request.param == "gpt":
            Path("squares.txt").write_text(TEXT)
            Path("bpe.json").write_text(train_bpe([TEXT], 280).to_json())
            Path("run.yaml").write_text(json.dumps(GPT))
            train("run.yaml", ["train.until=20it"], hooks=[hook])
        else:
            write_place("llama", place)
            keys = [
                "train.until=20it",
                "eval.eval_interval=10",
                "record.run_dir=run",
                "eval.at_start=false",
            ]
            train("run.yaml", keys, hooks=[hook])
        assert main(["checkpoint", "export", "run", "hf", "--to", "hf"]) == 0
    return hook, place


def measure(model: Any) -> dict[str, float]:
    manager = TaskManager(include_defaults=False)
    results: Any = simple_evaluate(model, tasks=TASKS, bootstrap_iters=0, task_manager=manager)
    return {
        f"{task}/{metric.partition(',')[0]}": value
        for task, values in results["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def test_the_harness_measures_the_same_on_what_is_exported(run: tuple[Harness, Path]) -> None:
    """Also pair by pair: a text longer than the model reads, a continuation of several tokens, and an empty text."""
    hook, place = run
    reference_model = HFLM(
        pretrained=str(place / "hf"), device="cpu", dtype="float32", batch_size=4
    )
    expected = measure(reference_model)
    model, tokenizer = instar.load_model(place / "run", "cpu"), load_saved_tokenizer(place / "run")
    harness_model = HarnessModel(model, tokenizer, 5)
    assert hook.results.keys() == {20}
    assert hook.results[20] == pytest.approx(expected, rel=1e-5)
    assert measure(harness_model) == pytest.approx(expected, rel=1e-5)
    pairs = [("4 squared is", " 16, and"), ("", "5 squared"), ("7 ", "squared")]
    pairs.append((" ".join(["9 squared is 81,"] * 9), " and"))
    requests = [type("Request", (), {"args": pair})() for pair in pairs]
    for (score, greedy), (their_score, their_greedy) in zip(
        harness_model.loglikelihood(requests, disable_tqdm=True),
        reference_model.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert score == pytest.approx(their_score, rel=1e-4)
        assert greedy == their_greedy


def answers_of(model: HarnessModel, **options: Any) -> list[str]:
    request = type("Request", (), {"args": ("4 squared is", {"until": [], **options})})()
    return model.generate_until([request] * 16)


def test_answers_are_drawn_as_a_task_says(run: tuple[Harness, Path]) -> None:
    _, place = run
    tokenizer = load_saved_tokenizer(place / "run")
    model = HarnessModel(instar.load_model(place / "run", "cpu"), tokenizer, 5)
    (likeliest,) = {*answers_of(model, max_gen_toks=6)}
    for greedy in ({"do_sample": False, "temperature": 2.0}, {"temperature": 0.0}):
        assert {*answers_of(model, max_gen_toks=6, **greedy)} == {likeliest}
    assert {*answers_of(model, max_gen_toks=6, do_sample=True, top_k=1)} == {likeliest}
    assert {*answers_of(model, max_gen_toks=6, do_sample=True, top_p=1e-6)} == {likeliest}
    drawn_texts = answers_of(model, max_gen_toks=6, do_sample=True, temperature=1.5, top_k=0)
    assert len({*drawn_texts}) > 8
    torch.manual_seed(1)
    assert answers_of(model, max_gen_toks=6, temperature=1.5) == drawn_texts
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert {*answers_of(model, **{name: 6})} == {likeliest}


@pytest.mark.torture
def test_a_run_trains_as_without_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness seeds the generators of the process, and dropout draws from them."""
    monkeypatch.chdir(tmp_path)
    Path("squares.txt").write_text(TEXT)
    Path("bpe.json").write_text(train_bpe([TEXT], 280).to_json())
    config = {**GPT, "model": {**GPT["model"], "dropout": 0.2}}
    Path("run.yaml").write_text(json.dumps(config))
    losses = []
    for name, hooks in (("with", [Harness([SQUARES], limit=3)]), ("without", [])):
        train("run.yaml", [f"record.run_dir={name}", "train.until=15it"], hooks=hooks)
        events = read_events(Path(name) / "events.jsonl")
        losses.append([event.loss for event in events if isinstance(event, Train)])
    assert losses[0] == losses[1]


def test_a_metric_of_several_filters_is_recorded_for_each() -> None:
    values = {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.1,
        "exact_match,flexible-extract": 0.4,
    }
    values |= {"exact_match_stderr,strict-match": "N/A", "acc,none": 1, "sample_len": 8}
    assert named_results({"gsm8k": values}) == {
        "gsm8k/exact_match/strict-match": 0.1,
        "gsm8k/exact_match/flexible-extract": 0.4,
        "gsm8k/acc": 1.0,
    }
