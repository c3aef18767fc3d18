"""The small tasks of a study have right answers, and scores are compared at one loss."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "studies" / "growth")
    return importlib.import_module("tasks")


@pytest.fixture
def reasoning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "studies" / "growth")
    return importlib.import_module("reasoning")


def solve(prompt: str) -> str:
    """The answer to a prompt, read from its words alone."""
    word, *words, colon = prompt.split()
    assert colon == ":"
    if word == "copy":
        return " ".join(words)
    if word == "depth":
        text = "".join(words)
        while "()" in text:
            text = text.replace("()", "")
        assert set(text) <= {"("}
        return str(len(text))
    statements, _, question = " ".join(words).rpartition(" ; ")
    pairs = re.findall(r"(\w) (\w)", statements)
    assert len({name for name, _ in pairs}) == len(pairs)
    values: dict[str, str] = {}
    for name, value in pairs:  # every variable is known before another takes its value
        values[name] = value if value.isdecimal() else values[value]
    return values[question]


def test_every_answer_is_the_one_that_the_prompt_asks_for(tasks: ModuleType) -> None:
    for task in tasks.TASKS:
        examples = tasks.examples(task, 200, "here")
        assert all(solve(example.prompt) == example.answer.strip() for example in examples)
        assert all(example.text == f"{example.prompt}{example.answer}\n" for example in examples)
        assert len({example.answer for example in examples}) > 5
        assert examples != tasks.examples(task, 200, "there")


def test_hops_are_as_many_as_the_task_says(tasks: ModuleType) -> None:
    for hops in (1, 2, 3):
        for example in tasks.examples(f"assignment, {hops} hop{'s' * (hops > 1)}", 50, 0):
            *statements, last = example.prompt.removeprefix("let ").removesuffix(" :").split(" ; ")
            value_of = dict(pair.split(" ") for pair in statements)
            steps, name = 0, last
            while not value_of[name].isdecimal():
                steps, name = steps + 1, value_of[name]
            assert steps == hops
            assert len(statements) == 2 * (hops + 1)


def test_scores_are_compared_at_one_loss(reasoning: ModuleType) -> None:
    def model_of(loss: float, nats: float, right: float) -> object:
        scores = {task: reasoning.Score(nats, right) for task in reasoning.TASKS}
        return reasoning.Trained(loss, scores)

    seed = {
        "scratch": [model_of(2.8, 2.0, 0.1), model_of(2.6, 1.0, 0.5)],
        "grown": [model_of(2.7, 1.2, 0.4), model_of(2.5, 0.8, 0.6)],
    }
    figures = {case.case: case.figure for case in reasoning.cases([seed])}
    assert figures["loss on source at which all are compared"] == 2.6
    assert figures["recall: grown less scratch"] == pytest.approx(0.0)
    assert figures["recall: grown less scratch, right"] == pytest.approx(0.0)
    seed["grown"] = [model_of(2.7, 1.1, 0.4), model_of(2.5, 0.5, 0.8)]
    figures = {case.case: case.figure for case in reasoning.cases([seed])}
    assert figures["copying: grown less scratch"] == pytest.approx(-0.2)
    assert figures["all tasks: grown less scratch"] == pytest.approx(-0.2)
    assert figures["copying: grown less scratch, right"] == pytest.approx(10.0)
