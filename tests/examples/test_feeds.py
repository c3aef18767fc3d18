"""Every config in examples/feeds runs as its first lines say, on real ranks, only shorter and smaller."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from forks import INSTAR, Forks, children_as_ranks

from instar.config.load import load_config

FOLDER = Path(__file__).parents[2] / "examples/feeds"
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
PAIR = ("checkpoint_train", "checkpoint_resume")
COMMAND = re.compile(r"instar train examples/feeds/(\w+)\.yaml$", re.MULTILINE)
RANKS = {"single_process": 1, "4ranks": 4, "4cpu": 4}
"""2 for all others"""

SHORT = ["train.until=3it", "learning_rate.warmup_iters=1", "learning_rate.lr_decay_iters=9"]
SHORT += ["eval.eval_interval=3", "eval.eval_iters=2", "record.log_interval=1"]
SHORT += ["record.sample_tokens=4", "record.report=false"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the rows in it."""
    path = tmp_path_factory.mktemp("place")
    before = Path.cwd()
    os.chdir(path)
    try:
        runpy.run_path(str(FOLDER / "prepare.py"), run_name="__main__")
    finally:
        os.chdir(before)
    return path


def train(name: str, place: Path, forks: Forks, *more: str) -> list[dict[str, Any]]:
    """Run a config, only shorter, in as many ranks as it says; its events."""
    config = load_config(str(CONFIGS[name])).config
    run = config.record.run_dir or f"runs/{name}"
    overrides = [*SHORT, f"record.run_dir={run}", *more]
    words = [word for text in overrides for word in ("--set", text)]
    argv = ["train", str(CONFIGS[name]), *words]
    ranks = config.parallel.world_size or 1
    children = children_as_ranks(forks, ranks, INSTAR, argv, place=place)
    codes = [child.finish() for child in children]
    assert codes == [0] * ranks, "\n".join(child.output() for child in children)
    lines = (place / run / "events.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def values_of(events: list[dict[str, Any]], kind: str, field: str) -> list[Any]:
    return [event.get(field) for event in events if event["kind"] == kind]


@pytest.mark.torture
def test_each_runs_and_those_of_the_same_samples_are_the_same_run(
    place: Path, forks: Forks
) -> None:
    small = ("train.until=2it", "eval.eval_interval=2", "model.n_layer=1")
    losses = {
        name: values_of(train(name, place, forks, *small), "train", "loss")
        for name in CONFIGS
        if name not in PAIR
    }
    assert {len(series) for series in losses.values()} == {2}
    # 64 windows of the same text a step: whoever reads them, and however many ranks there are
    for other in ("4cpu", "dispatched", "grad_accum", "sharded_dataset"):
        assert losses[other] == pytest.approx(losses["2ranks"], rel=1e-4), other
    dispatched_losses, sharded_losses = (
        losses["iterable_dataset"],
        losses["sharded_iterable_dataset"],
    )
    assert sharded_losses == pytest.approx(dispatched_losses, rel=1e-4)
    assert sharded_losses[0] != pytest.approx(losses["2ranks"][0], rel=1e-6)


def test_a_run_goes_on_where_it_was_saved(place: Path, forks: Forks) -> None:
    first, second = PAIR
    train(first, place, forks, "checkpoint.every_steps=2")
    events = train(second, place, forks, "checkpoint.every_steps=2", "train.until=6it")
    assert values_of(events, "run_started", "resumed_from") == [None, "step-3"]
    assert values_of(events, "train", "step") == [1, 2, 3, 4, 5, 6]
    assert values_of(events, "checkpoint", "step") == [2, 3, 4, 6]
    words = ["train", str(CONFIGS[second]), "--dry-run"]
    (child,) = children_as_ranks(forks, 1, INSTAR, words, place=place)
    assert child.finish() == 0, child.output()
    assert "1,000 steps" in child.output()


def test_the_second_of_the_pair_is_the_first_to_a_later_end() -> None:
    first, second = (load_config(str(CONFIGS[name])).config for name in PAIR)
    assert (first.train.until, second.train.until) == (("500it",), ("1000it",))
    assert second.resume == "auto"
    changes = {"name": first.name, "train": first.train, "resume": first.resume}
    assert second.model_copy(update=changes) == first


def test_the_page_has_every_config_with_its_command() -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    assert sorted(COMMAND.findall(page.replace("`", "\n"))) == [*CONFIGS]
    for name, path in CONFIGS.items():
        assert COMMAND.findall(path.read_text("utf-8")) == [name]
        assert (load_config(str(path)).config.parallel.world_size or 1) == RANKS.get(name, 2)
