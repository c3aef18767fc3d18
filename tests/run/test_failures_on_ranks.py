"""One rank fails alone: all ranks act alike at once and name it, wherever DDP communicates."""

from __future__ import annotations

from pathlib import Path

import pytest
import science
from cases import parametrize_first
from forks import children_as_ranks
from tiny_run import Place, codes, events, output_of

LIMIT_S = 60.0
"""far below `parallel.timeout_s`, which ends a run that hangs"""
GROWS = "schedule=[{name: widen, value: {axis: hidden, size: 40}, when: {at_step: 4}}]"
FREEZES = "schedule=[{name: freeze, value: 'up.*', when: {at_step: 4}}]"
NORMED = "task=science:Normed"
SHARDED = "parallel.strategy=fsdp"
BROADCAST = "parallel.ddp.broadcast_buffers=true"

CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "plain": ((), (1, 2, 3)),
    "one micro-batch": (("train.gradient_accumulation_steps=1",), (1, 2, 3)),
    "unused parameters are looked for": (("parallel.ddp.find_unused_parameters=true",), (2, 3)),
    "after growth": ((GROWS,), (5, 6)),
    "after freezing": ((FREEZES,), (5, 6)),
    "buffers": ((NORMED,), (1, 2, 3)),
    "sharded": ((SHARDED,), (1, 2)),
    "sharded, after freezing": ((SHARDED, FREEZES), (5,)),
    "sharded, with buffers": ((SHARDED, NORMED), (2,)),
    "buffers are broadcast": ((NORMED, BROADCAST), (1, 2, 3, 6)),
    "a static graph": (
        ("parallel.ddp.static_graph=true", "train.gradient_accumulation_steps=1"),
        (1, 2, 3, 4),
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


@parametrize_first(
    ("settings", "step"),
    [
        pytest.param(settings, step, id=f"{name}, step {step}")
        for name, (settings, steps) in CASES.items()
        for step in steps
    ],
    first=6,
)
def test_all_ranks_end_and_name_the_one_that_cannot_read(
    place: Place, settings: tuple[str, ...], step: int
) -> None:
    two_each = ("data.samples=204", "train.batch_size=4", "train.gradient_accumulation_steps=4")
    words = ["train", "run.yaml"]
    for setting in (*two_each, *settings, "record.run_dir=run"):
        words += ["--set", setting]
    body = "failures:rank_1_cannot_read_step"
    ranks = children_as_ranks(place.forks, 2, body, words, step, place=place.path)
    for rank in ranks:
        rank.finish(LIMIT_S)
    assert codes(ranks) == [4, 4], output_of(ranks)
    for number in range(2):
        log = (place.path / "run" / "logs" / f"rank_{number}.log").read_text("utf-8")
        assert f"rank 1 failed while in step {step}: OSError" in log or (
            number == 1 and "Input/output error" in log
        ), log
        assert ("step 1: loss" in log) is (step > 1)


DEPENDING = (
    "task=mistaken:Depending",
    "data.order=sequential",
    "train.until=[4it]",
    "early_stopping.rules=[]",
)
DEPENDING += ("data.val=0.1", "data.test=0.1", "test.at_end=false", "precision=fp32")


@parametrize_first("accumulation", [1, 4], first=1)
def test_parameters_that_one_ranks_samples_do_not_use_are_named_at_once(
    place: Place, accumulation: int
) -> None:
    """DDP waits for their gradients; with what the message says the run goes on."""
    batch = f"train.batch_size={8 // accumulation}"
    settings = (*DEPENDING, batch, f"train.gradient_accumulation_steps={accumulation}")
    ranks = place.train(place.path / "run", *settings, "checkpoint.every_steps=1", ranks=2)
    for rank in ranks:
        rank.finish(LIMIT_S)
    assert codes(ranks) == [4, 4], output_of(ranks)
    log = (place.path / "run" / "logs" / "rank_1.log").read_text("utf-8")
    assert (
        "rank 1 failed at step 3: RunFailed: right.weight, right.bias took no part in the loss"
        in log
    )
    key = "parallel.ddp.find_unused_parameters=true"
    assert "set parallel.ddp.find_unused_parameters: true" in log
    resumed_ranks = place.resume(place.path / "run", "--set", key, ranks=2)
    assert codes(resumed_ranks) == [0, 0], output_of(resumed_ranks)


GROWS_IN_STEP_5 = "name: widen, value: {axis: hidden, size: 40}, when: {at_step: 4}"


@pytest.mark.parametrize("skip", [False, True])
def test_a_rank_without_memory_for_the_grown_models_wrapper_keeps_nobody_waiting(
    place: Place, skip: bool
) -> None:
    entry = GROWS_IN_STEP_5 + (", on_failure: skip" if skip else "")
    words = ["train", "run.yaml"]
    for setting in (f"schedule=[{{{entry}}}]", "train.until=[8it]", "record.run_dir=run"):
        words += ["--set", setting]
    body = "failures:rank_1_cannot_wrap_again"
    ranks = children_as_ranks(place.forks, 2, body, words, place=place.path)
    for rank in ranks:
        rank.finish(LIMIT_S)
    assert codes(ranks) == ([0, 0] if skip else [4, 4]), output_of(ranks)
    for number in range(2):
        log = (place.path / "run" / "logs" / f"rank_{number}.log").read_text("utf-8")
        assert "no room for buckets" in log
    save_steps = [event["step"] for event in events(place.path / "run", "checkpoint")]
    assert save_steps[-1] == (8 if skip else 4)


def test_a_rank_that_cannot_compile_the_stages_keeps_nobody_waiting(place: Place) -> None:
    words = ["train", "run.yaml"]
    for setting in ("compile=true", "compile_stages=true", GROWS, "record.run_dir=run"):
        words += ["--set", setting]
    body = "failures:rank_1_has_no_compiler"
    ranks = children_as_ranks(place.forks, 2, body, words, place=place.path)
    for rank in ranks:
        rank.finish(LIMIT_S)
    assert codes(ranks) == [4, 4], output_of(ranks)
    log = (place.path / "run" / "logs" / "rank_0.log").read_text("utf-8")
    assert "rank 1 failed while compiling stage 1" in log
    assert "no compiler here" in log


def test_ranks_whose_samples_differ_are_named_before_anything_is_made(place: Place) -> None:
    ranks = place.train(place.path / "run", "task=science:Unseeded", ranks=3)
    assert codes(ranks) == [4] * 3, output_of(ranks)
    assert "the data of ranks 1, 2 (" in ranks[0].output()
    assert "seed it with self.seed" in ranks[0].output()
    assert not (place.path / "run").exists()


def test_ranks_whose_configs_differ_are_named(place: Place) -> None:
    body, words = "failures:seeds_by_rank", ["train", "run.yaml", "--set", "record.run_dir=run"]
    ranks = children_as_ranks(place.forks, 2, body, words, place=place.path)
    assert codes(ranks) == [4, 4], output_of(ranks)
    assert "the config's seed of rank 1" in ranks[0].output()
    assert not (place.path / "run").exists()


@pytest.mark.parametrize(
    "text",
    [
        "record.noise_every=1",
        "record.log_interval=3",
        "precision=bf16",
        "parallel.strategy=auto",
        "parallel.ddp.static_graph=true",
    ],
)
def test_ranks_that_would_meet_at_other_times_are_named(place: Place, text: str) -> None:
    """Each of these keys decides whether a rank waits for the others, before a step or at one."""
    body, words = "failures:rank_1_was_given", ["train", "run.yaml"]
    words += ["--set", "record.run_dir=run"]
    ranks = children_as_ranks(place.forks, 2, body, words, text, place=place.path)
    for rank in ranks:
        rank.finish(LIMIT_S)
    assert codes(ranks) == [4, 4], output_of(ranks)
    key = ".".join(text.partition("=")[0].split(".")[:2])
    assert f"the config's {key} of rank 1" in ranks[0].output()
    assert not (place.path / "run").exists()
