"""`parallel.strategy: fsdp`: the same runs as with whole models, by ranks that each hold some rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import science
import tiny_run
import torch

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.distributed.world import World
from instar.run.lifecycle import inputs
from instar.run.lifecycle.preflight import preflight

STEPS = 8
KEYS = (
    "optimizer.name=adamw",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "eval.eval_interval=4",
    "train.clip=0.5",
    "record.sample_every=4",
    "record.layers_every=3",
    "record.analyze_every=3",
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
HSDP = ("parallel.strategy=hsdp", "parallel.fsdp.shards=2")


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
    """On one rank, on ranks with whole models, with shards, with shards of replicas, and on all of them
    in turn."""
    alone = trained(place, "alone", *ELASTIC, ranks=1)
    others = {
        "ddp": trained(place, "ddp", *ELASTIC, ranks=2),
        "fsdp-2": trained(place, "fsdp-2", *ELASTIC, *FSDP, ranks=2),
        "fsdp-4": trained(place, "fsdp-4", *ELASTIC, *FSDP, ranks=4),
        "hsdp": trained(place, "hsdp", *ELASTIC, *HSDP, ranks=4),
        "in turn": trained(place, "in-turn", *ELASTIC, *HSDP, "train.until=[2it]", ranks=4),
    }
    for until, strategy, ranks in ((4, "ddp", 2), (6, "fsdp", 2), (STEPS, "ddp", 1)):
        keys = ("--set", f"parallel.strategy={strategy}", "--set", "parallel.fsdp.shards=null")
        run_dir = others["in turn"]
        children = place.resume(run_dir, "--until", f"{until}it", *keys, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.said(children)
    for name, other in others.items():
        assert tiny_run.weights(other, STEPS) == tiny_run.weights(alone, STEPS), name
    del others["in turn"]  # which is also evaluated at each of its ends
    for name, other in others.items():
        assert json.dumps(curve(other)) == json.dumps(curve(alone)), name


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        (("model.n_embd=4", "model.n_head=1"), 8, "rows of every parameter are divided among 8 ranks"),
        (("schedule=[{name: widen_mlp, value: x2, when: {at_step: 3}}]",), 2, "changes the model"),
        (("parallel.strategy=hsdp", "parallel.fsdp.shards=4"), 6, "6 ranks cannot be divided"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_the_start(
    config: Callable[..., Loaded], keys: tuple[str, ...], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        preflight(config(*FIXED, *FSDP, *keys, "train.batch_size=16"), ranks)


def test_a_sharded_rank_needs_its_share_of_the_memory(config: Callable[..., Loaded]) -> None:
    whole, sharded = (
        preflight(config(*FIXED, *keys), 4).forecast.stages[0].memory_bytes for keys in ((), FSDP)
    )
    for part in ("weights", "gradients", "optimizer"):
        assert sharded[part] == whole[part] // 4
    assert sharded["activations"] == whole["activations"]


def test_auto_shards_where_the_whole_model_does_not_fit(
    config: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by one of two ranks that are alike."""
    loaded = config(*FIXED, "parallel.strategy=auto")
    world = World(0, 0, 2, torch.device("cpu"), "none")
    monkeypatch.setattr(inputs, "gather", lambda _, value: [value, value])
    prepared = preflight(loaded, 2)
    needed = sum(prepared.forecast.stages[0].memory_bytes.values())
    chosen = {}
    for share, memory in (("little", needed), ("much", 4 * needed)):
        monkeypatch.setattr(inputs, "host_bytes", lambda memory=memory: memory)
        found = inputs.resolve_strategy(loaded, prepared, world)
        chosen[share] = found.config.parallel.strategy
    assert chosen == {"little": "fsdp", "much": "ddp"}
    alone = inputs.resolve_strategy(loaded, prepared, replace(world, size=1))
    assert alone.config.parallel.strategy == "ddp"
