"""`parallel.strategy: fsdp`: the same runs as with whole models, by ranks that each hold some rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import science
import tiny_run

STEPS = 12
KEYS = (
    "optimizer.name=adamw",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "eval.eval_interval=6",
    "train.clip=0.5",
    "record.sample_every=6",
    "record.layers_every=5",
    "record.analyze_every=4",
)
FIXED = (*KEYS, "model.dropout=0.0")
ELASTIC = (
    *KEYS,
    "reproducible=elastic",
    # slices of 6 and 7 samples, in two and three micro-batches; an epoch ends with one sample
    "train.batch_size=3",
    "train.gradient_accumulation_steps=9",
)
FSDP = ("parallel.strategy=fsdp",)


@pytest.fixture
def place(tmp_path: Path) -> tiny_run.Place:
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    return tiny_run.Place(tmp_path, science.forks())


def trained(place: tiny_run.Place, name: str, *keys: str, ranks: int) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *keys, ranks=ranks)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.said(children)
    return run_dir


def curve(run_dir: Path) -> list[float]:
    """Losses and norms of all steps, and held-out losses."""
    train, held_out = tiny_run.events(run_dir, "train"), tiny_run.events(run_dir, "eval")
    assert [event["step"] for event in train] == list(range(1, STEPS + 1))
    steps = [value for event in train for value in (event["loss"], event["grad_norm"])]
    return [*steps, *(event["loss"] for event in held_out)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_ranks_are_the_same_run_up_to_rounding(place: tiny_run.Place, ranks: int) -> None:
    whole = trained(place, "ddp", *FIXED, ranks=ranks)
    sharded = trained(place, "fsdp", *FIXED, *FSDP, ranks=ranks)
    assert curve(sharded) == pytest.approx(curve(whole), rel=1e-5)
    texts = [tiny_run.events(run, "sample") for run in (whole, sharded)]
    assert [len(each) for each in texts] == [2, 2]
    for kind in ("layers", "analysis"):
        one, other = (tiny_run.events(run, kind) for run in (whole, sharded))
        assert [event["step"] for event in other] == [event["step"] for event in one] != []


def test_elastic_runs_are_one_run_bit_for_bit(place: tiny_run.Place) -> None:
    alone = trained(place, "alone", *ELASTIC, ranks=1)
    for name, keys, ranks in (("ddp", (), 2), ("fsdp-2", FSDP, 2), ("fsdp-4", FSDP, 4)):
        other = trained(place, name, *ELASTIC, *keys, ranks=ranks)
        assert json.dumps(curve(other)) == json.dumps(curve(alone)), name
        assert tiny_run.weights(other, STEPS) == tiny_run.weights(alone, STEPS), name
