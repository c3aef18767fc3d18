"""Samples of what a model writes, and that writing changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from instar.record.events import SampleText, Warn, read_events
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
    said = wrote(tmp_path / "writing.jsonl")
    assert [event.step for event in said] == [4, 8]
    assert {event.prompt for event in said} == {"7 squared"}
    assert all(event.text for event in said), said
    assert wrote(tmp_path / "silent.jsonl") == []  # no tokenizer in its folder


def test_a_model_that_cannot_write_goes_on_training(
    trainer: Make, corpus: Path, tmp_path: Path
) -> None:
    wild = ("optimizer.lr=1e6", "optimizer.weight_decay=1e12", "train.clip=null")
    run = trainer(*wild, "train.max_skipped_steps=99", name="wild")
    shutil.copy(corpus / "tokens" / "tokenizer.json", tmp_path / "wild")
    run.train()
    assert run.state.progress.step == 8
    said = [e.message for e in read_events(tmp_path / "wild.jsonl") if isinstance(e, Warn)]
    assert any("no sample text was generated" in message for message in said)
    assert wrote(tmp_path / "wild.jsonl") == []
