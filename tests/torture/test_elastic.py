"""`reproducible: elastic`: one hash for 1, 2 and 4 ranks, with whole models and with shards, and for runs
that change between them. `fixed`: whole models and shards are the same run up to rounding."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence

import figures
import pytest
from failures import FAILING_STEP
from forks import INSTAR
from tiny_run import Place, codes, events, fingerprint, output_of

STEPS = 36
RANKS = (1, 2, 4)
CHANGES = figures.times(1, 8)
"""of the number of ranks thrice in a run, for each variant"""

ELASTIC = (
    "reproducible=elastic",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    # four ranks have slices of 6 and 7 samples, in one to three micro-batches; an epoch ends with one sample
    f"train.batch_size={figures.times(9, 3)}",
    f"train.gradient_accumulation_steps={figures.times(3, 9)}",
)
GROWTH = """schedule=[
  {name: widen_mlp, value: x2, when: {at_step: 6}},
  {name: insert_layers, value: 1, when: {at_step: 13}},
  {name: freeze, value: "blocks.1.*", when: {at_step: 20}},
  {name: widen_hidden, value: x2, when: {at_step: 27}},
]"""
VARIANTS: dict[str, tuple[str, ...]] = {
    "muon": (),
    "muon in bf16, clipped, grows": (
        "precision=bf16",
        "parallel.fsdp.gather=bfloat16",
        "train.clip=0.3",
        GROWTH,
    ),
    "muon by polar express, in fp16": ("optimizer.ns_iteration=polar_express", "precision=fp16"),
    "adamw": ("optimizer.name=adamw",),
    "adamw in bf16": ("optimizer.name=adamw", "precision=bf16"),
    "adamw in fp16": ("optimizer.name=adamw", "precision=fp16"),
    "llama, 2 threads, adamw": (
        "optimizer.name=adamw",
        "preset=llama",
        "model.qk_norm=true",
        "parallel.elastic.threads=2",
    ),
    "llama, 2 threads": (
        "preset=llama",
        "model.qk_norm=true",
        "model.conv_size=4",
        "parallel.elastic.threads=2",
    ),
}

FSDP = ("parallel.strategy=fsdp",)
HSDP = ("parallel.strategy=hsdp", "parallel.fsdp.shards=2")
STRATEGIES: list[tuple[str, tuple[str, ...], int]] = [
    ("fsdp", FSDP, 4),
    ("ddp", (), 4),
    ("ddp", (), 2),
    ("fsdp", FSDP, 2),
    ("fsdp, whole in between", (*FSDP, "parallel.fsdp.reshard_after_forward=false"), 2),
    ("hsdp", HSDP, 4),
]


@pytest.mark.timeout(7200)
def test_any_number_of_ranks_is_the_same_run_bit_for_bit(place: Place) -> None:
    chance = random.Random(0)
    names = list(VARIANTS)[: figures.times(1, len(VARIANTS))]
    differing, changes = [], 0
    comparisons = 0
    for name in names:
        overrides = (*ELASTIC, *VARIANTS[name])
        expected = fingerprint_of_run(place, overrides, 1)
        # fewer steps of these are compared in tests/run/test_sharded.py
        for strategy, keys, ranks in STRATEGIES[: figures.times(0, len(STRATEGIES))]:
            comparisons += 1
            if fingerprint_of_run(place, (*overrides, *keys), ranks) != expected:
                differing.append(f"{name}, {strategy}, W={ranks}")
        for number in range(CHANGES):
            worlds = (1, 2, 4, 1) if number == 0 else chance.choices(RANKS, k=4)
            actual, stops = changing(place, overrides, worlds, chance)
            changes += stops
            if actual != expected:
                differing.append(f"{name}, W={worlds}")
    assert changes >= len(names) * CHANGES, "the runs ended before they were stopped"
    figures.write(
        "elastic",
        [
            figures.none_of(
                comparisons + len(names) * CHANGES,
                "runs on 1, 2, 4 or changing numbers of ranks, sharded or not: another hash",
                differing,
            ),
            figures.count("stops and resumes in them", changes),
        ],
    )


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_step_that_one_rank_spoils_is_skipped_alike(place: Place) -> None:
    body, until = "failures:last_rank_has_nan_once", figures.times(FAILING_STEP + 2, STEPS)
    keys, worlds = (*ELASTIC, f"train.until=[{until}it]"), RANKS[: figures.times(2, len(RANKS))]
    fingerprints = {
        fingerprint_of_run(place, keys, ranks, until, body=body, skips=1) for ranks in worlds
    }
    assert len(fingerprints) == 1
    assert fingerprint_of_run(place, keys, 1, until) not in fingerprints


@pytest.mark.timeout(3600)
def test_fixed_runs_are_alike_with_whole_models_and_with_shards(place: Place) -> None:
    """In float32."""
    steps = figures.times(10, 50)
    keys = (f"train.until=[{steps}it]", f"learning_rate.lr_decay_iters={steps}", "precision=fp32")
    cases = []
    for name in ("muon", "adamw")[: figures.times(1, 2)]:  # the latter in tests/run/test_sharded.py
        for ranks in RANKS[1 : figures.times(2, 3)]:
            losses = []
            for number, strategy in enumerate(((), FSDP)):
                run_dir = place.path / f"{name}-{ranks}-{number}"
                more = (*keys, f"optimizer.name={name}", "model.dropout=0.0", *strategy)
                children = place.train(run_dir, *more, ranks=ranks)
                assert set(codes(children)) == {0}, output_of(children)
                losses.append([event["loss"] for event in events(run_dir, "train")])
                assert len(losses[-1]) == steps
            differences = [abs(a - b) / a for a, b in zip(*losses, strict=True)]
            what = f"{name}, fixed, W={ranks}: losses of ddp and fsdp, relative"
            cases.append(figures.at_most(what, differences, "", 1e-5))
    figures.write("sharded-fixed", cases)


def fingerprint_of_run(
    place: Place,
    overrides: Sequence[str],
    ranks: int,
    steps: int = STEPS,
    *,
    body: str = INSTAR,
    skips: int = 0,
) -> str:
    run_dir = place.path / f"whole-{ranks}"
    children = place.train(run_dir, *overrides, ranks=ranks, body=body)
    assert set(codes(children)) == {0}, output_of(children)
    assert len(events(run_dir, "skip")) == skips
    print_of_weights = fingerprint(run_dir, steps)
    shutil.rmtree(run_dir)
    return print_of_weights


def changing(
    place: Place, overrides: Sequence[str], worlds: Sequence[int], chance: random.Random
) -> tuple[str, int]:
    """The fingerprint of a run stopped at random to go on with the next number of ranks, and how
    often it was stopped; the last number brings it to its end."""
    run_dir, last_step, stops = place.path / "parts", 0, 0
    for turn, ranks in enumerate(worlds):
        go_on = place.resume(run_dir, ranks=ranks) if turn else None
        children = go_on or place.train(run_dir, *overrides, ranks=ranks)
        if turn < len(worlds) - 1:
            stop_at = min(last_step + chance.randint(1, STEPS // 4), STEPS - 1)
            children[0].wait_for(rf"^ *{stop_at} .*loss")
            for child in children:
                child.signal(signal.SIGTERM)
        code = set(codes(children))
        assert code in ({0}, {75}), output_of(children)
        last_step = events(run_dir, "train")[-1]["step"]
        if code == {0}:
            break
        stops += 1
    print_of_weights = fingerprint(run_dir, STEPS)
    shutil.rmtree(run_dir)
    return print_of_weights, stops
