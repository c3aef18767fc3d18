"""Ranks are killed at random moments; the run goes on from its last save, to the same weights."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import figures
import pytest
from forks import Child
from tiny_run import (
    STEPS,
    Place,
    Way,
    codes,
    events,
    go_on,
    output_of,
    start,
    weights,
    weights_of_undisturbed,
)

RUNS = figures.times(1, 100)
WAIT_S = 10.0
"""for a rank that has not come yet: these have no launcher that would end them"""
SETTINGS = (
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=2",
    f"parallel.timeout_s={WAIT_S}",
)
SHARDED = ("parallel.strategy=fsdp", "optimizer.name=adamw")
APART = ("parallel.strategy=diloco", "parallel.diloco.sync_every=2")
STRATEGIES = ((), ("data.prefetch=false",), ("data.order=random",))
"""how samples come to a rank"""
ALONE_S = WAIT_S + 5.0
"""until a rank whose peer is gone must have ended"""


@pytest.mark.timeout(7200)
def test_killed_runs_end_bit_for_bit_as_the_undisturbed_one(place: Place) -> None:
    """Every fourth has two ranks, of which one is killed or all, and half of these share a model, and a quarter
    train apart; every third is killed twice."""
    chance = random.Random(0)
    expected: dict[Way, dict[str, bytes]] = {}
    kills, different, losses = 0, [], []
    for number in range(RUNS):
        size, strategy = 2 if number % 4 == 1 else 1, STRATEGIES[number % len(STRATEGIES)]
        rank_settings = SHARDED if number % 8 == 1 else APART if number % 16 == 5 else ()
        way = size, (*SETTINGS, *strategy, *rank_settings)
        if way not in expected:
            expected[way] = weights_of_undisturbed(place, way)
        run_dir = place.path / f"parts-{number}"
        ranks = start(place, run_dir, way)
        for _ in range(2 if number % 3 == 2 else 1):
            kills += kill_at_random(ranks, chance)
            ranks = go_on(place, run_dir, way)
        exit_codes = codes(ranks)
        if set(exit_codes) != {0} or weights(run_dir) != expected[way]:
            different.append(f"{run_dir.name}, W={size}: {exit_codes}\n{output_of(ranks)}")
        losses += [f"{run_dir.name}: {what}" for what in lost_saves(run_dir)]
        shutil.rmtree(run_dir)
    assert kills >= RUNS // 2
    figures.write(
        "killed-runs",
        [
            figures.none_of(kills, "SIGKILL of a rank or all: an acknowledged save lost", losses),
            figures.none_of(
                RUNS, "runs killed and resumed: other weights than the undisturbed", different
            ),
        ],
    )


def kill_at_random(ranks: Sequence[Child], chance: random.Random) -> int:
    """After some step or while it starts, and some part of a step or a save; how many kills."""
    if chance.random() < 0.8:
        ranks[0].wait_for(rf"^ *{chance.randint(1, STEPS - 1)} .*loss")
    ranks[0].ended_within(chance.uniform(0.0, 0.03))
    victims = ranks if chance.random() < 0.5 else [chance.choice(ranks)]
    for victim in victims:
        victim.signal(signal.SIGKILL)
    exit_codes = [rank.finish(ALONE_S) for rank in ranks]
    return int(-signal.SIGKILL in exit_codes)


def lost_saves(run_dir: Path) -> list[str]:
    """Segments that began before a save that had been acknowledged."""
    problems, last_save = [], 0
    for event in events(run_dir):
        if event["kind"] == "checkpoint":
            last_save = event["step"]
        elif event["kind"] == "run_started" and event["step"] < last_save:
            problems.append(f"from step {event['step']}, though {last_save} was saved")
    return problems
