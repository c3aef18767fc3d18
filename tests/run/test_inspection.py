"""Samples of what a model writes, and that writing changes nothing; analyses of its weights that come too late."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live import restore

from instar.checkpoint.store import load_checkpoint
from instar.record.events import SampleText, Warn, read_events
from instar.run.output import inspection
from instar.run.output.inspection import WeightAnalyzer
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]


def wrote(path: Path) -> list[SampleText]:
    return [event for event in read_events(path) if isinstance(event, SampleText)]


def test_a_model_writes_at_evaluations_and_at_the_end(
    trainer: Make, losses: Callable[[str], list[float]], corpus: Path, tmp_path: Path
) -> None:
    settings = ("model.dropout=0.2", "eval.eval_interval=2")
    writing = trainer(
        *settings, "record.sample_every=3", "record.sample_prompt=7 squared", name="writing"
    )
    shutil.copy(corpus / "tokens" / "tokenizer.json", tmp_path / "writing")
    writing.train()
    trainer(*settings, name="silent").train()
    assert losses("writing") == losses("silent")
    sample_events = wrote(tmp_path / "writing.jsonl")
    assert [event.step for event in sample_events] == [4, 8]
    assert {event.prompt for event in sample_events} == {"7 squared"}
    assert all(event.text for event in sample_events), sample_events
    assert wrote(tmp_path / "silent.jsonl") == []  # no tokenizer in its folder


def test_texts_come_at_the_same_steps_however_often_a_run_was_resumed(
    trainer: Make, corpus: Path, tmp_path: Path
) -> None:
    settings = ("eval.eval_interval=2", "record.sample_every=3")
    first = trainer(*settings, name="first")
    for _ in range(3):
        first.step()
    first.save("stopped", must=True)
    resumed = trainer(*settings, name="resumed")
    restore(resumed, load_checkpoint(first.parts.saver.root / "checkpoints" / "step-3"))
    shutil.copy(corpus / "tokens" / "tokenizer.json", tmp_path / "resumed")
    resumed.train()
    assert [event.step for event in wrote(tmp_path / "resumed.jsonl")] == [4, 8]


def test_a_model_that_cannot_write_goes_on_training(
    trainer: Make, corpus: Path, tmp_path: Path
) -> None:
    wild = ("optimizer.lr=1e6", "optimizer.weight_decay=1e12", "train.clip=null")
    run = trainer(*wild, "train.max_skipped_steps=99", name="wild")
    shutil.copy(corpus / "tokens" / "tokenizer.json", tmp_path / "wild")
    run.train()
    assert run.state.progress.step == 8
    messages = [e.message for e in read_events(tmp_path / "wild.jsonl") if isinstance(e, Warn)]
    assert any("no sample text was generated" in message for message in messages)
    assert wrote(tmp_path / "wild.jsonl") == []


def test_analyses_that_are_left_out_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is due while another runs, and one that is not done some time after the last step."""
    monkeypatch.setattr(inspection, "LAST_WAIT_S", 0.0)
    warnings: list[tuple[int, str]] = []
    logger: Any = SimpleNamespace(warn=lambda message, step: warnings.append((step, message)))
    stepper: Any = SimpleNamespace(strategy=SimpleNamespace(forward_is_collective=False))
    world: Any = SimpleNamespace(is_main=True)
    analyzer: Any = WeightAnalyzer(1, world)
    analyzer._pending, analyzer._before = Future(), (3, {})

    def state_at(step: int) -> Any:
        return SimpleNamespace(step=step, due=lambda _: True)

    for step in (3, 6, 9):
        analyzer.analyze_if_due(state_at(step), stepper, None, logger)
    assert [step for step, _ in warnings] == [6]
    assert warnings[0][1].startswith(
        "step 6: no analysis of the weights, because that of step 3 is still"
    )
    analyzer.finish(state_at(9), logger)
    assert len(warnings) == 2
    assert warnings[1][1].startswith("the analysis of the weights of step 3 is not recorded")
    analyzer.finish(state_at(9), logger)
    assert len(warnings) == 2
