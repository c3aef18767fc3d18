"""Ranks of a family are killed while its trunk trains, while branches are made, and while they train."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import figures
import pytest
from forks import Child
from tiny_run import STEPS, Place, codes, events, output_of, start, weights

KILLS = figures.times(2, 50)
EACH = 2
"""kills of one family"""
WAIT_S = 10.0
ALONE_S = WAIT_S + 5.0
SCHEDULE = [
    {"name": "branch", "value": "small", "when": {"at_step": 6}, "iters": 7, "decay": 4},
    {"name": "insert_layers", "value": 1, "when": {"at_step": 9}},
    {
        "name": "branch",
        "value": "middle",
        "when": {"waited": 4},
        "iters": 6,
        "schedule": [{"name": "widen_mlp", "value": "x1.5", "when": {"waited": 2}}],
    },
    {"name": "widen_hidden", "value": 48, "when": {"at_step": 16}},
    {"name": "branch", "value": "large", "when": {"at_step": 20}, "iters": 5},
]
BRANCHES = {"small": (6, 13), "middle": (13, 19), "large": (20, 25)}
"""the steps at which each begins and ends"""
SETTINGS = (
    f"schedule={json.dumps(SCHEDULE)}",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=2",
    f"parallel.timeout_s={WAIT_S}",
)
WAYS = ((2, SETTINGS), (1, SETTINGS), (2, (*SETTINGS, "parallel.strategy=fsdp")), (1, SETTINGS))

Weights = dict[str, dict[str, bytes]]


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_every_member_of_a_killed_family_is_complete_once_and_as_without_kills(
    place: Place,
) -> None:
    chance = random.Random(0)
    expected: dict[int, Weights] = {}
    kills, families, different, not_once = 0, 0, list[str](), list[str]()
    while kills < KILLS:
        number, families = families % len(WAYS), families + 1
        way = WAYS[number]
        if number not in expected:
            ranks = start(place, place.path / "whole", way)
            assert set(codes(ranks)) == {0}, output_of(ranks)
            expected[number] = members(place.path / "whole")
            remove(place.path / "whole")
        run_dir = place.path / f"parts-{families}"
        ranks = start(place, run_dir, way)
        for _ in range(EACH):
            kills += kill(ranks, run_dir, chance)
            if (run_dir / "run.yaml").exists():
                ranks = place.resume(run_dir, ranks=way[0])
            else:
                remove(run_dir)
                ranks = start(place, run_dir, way)
        exit_codes = codes(ranks)
        if set(exit_codes) != {0} or members(run_dir) != expected[number]:
            different.append(f"{run_dir.name}, {way[0]} ranks: {exit_codes}\n{output_of(ranks)}")
        not_once += [f"{run_dir.name}: {what}" for what in not_complete_once(run_dir)]
        remove(run_dir)
    figures.write(
        "killed-branches",
        [
            figures.none_of(
                kills,
                "SIGKILL in a family: a member with other weights than the undisturbed",
                different,
            ),
            figures.none_of(kills, "SIGKILL in a family: not every member complete once", not_once),
        ],
    )


def kill(ranks: Sequence[Child], run_dir: Path, chance: random.Random) -> int:
    """Somewhere in the trunk, where a branch is made, or in a branch; how many kills."""
    name = chance.choice(list(BRANCHES))
    moment = chance.choice(("trunk", "making", "branch"))
    if moment == "trunk":
        ranks[0].wait_for(rf"^ *{chance.randint(1, STEPS - 1)} .*loss")
    elif moment == "making":
        ranks[0].wait_for(rf"^ *{BRANCHES[name][0]} .*loss")
    else:
        ranks[0].wait_for(rf"^run {run_dir.name}\.{name} ")
    ranks[0].ended_within(chance.uniform(0.0, 0.3 if moment == "branch" else 0.08))
    victims = ranks if chance.random() < 0.5 else [chance.choice(ranks)]
    for victim in victims:
        victim.signal(signal.SIGKILL)
    return int(-signal.SIGKILL in [rank.finish(ALONE_S) for rank in ranks])


def members(trunk: Path) -> Weights:
    ends = {trunk: STEPS, **{branch(trunk, name): end for name, (_, end) in BRANCHES.items()}}
    return {run.name.removeprefix(trunk.name): weights(run, step) for run, step in ends.items()}


def branch(trunk: Path, name: str) -> Path:
    return trunk.with_name(f"{trunk.name}.{name}")


def not_complete_once(trunk: Path) -> list[str]:
    """What is wrong with the folders and the records of a family."""
    expected = {trunk, *(branch(trunk, name) for name in BRANCHES)}
    actual = {path for path in trunk.parent.iterdir() if trunk.name in path.name}
    wrong = [f"{path.name} is left or missing" for path in sorted(actual ^ expected)]
    for run in expected & actual - {trunk}:
        starts, ends = len(events(run, "branched")), len(events(run, "run_finished"))
        if (starts, ends) != (1, 1):
            wrong.append(f"{run.name} began {starts} times and ended {ends} times")
    return wrong


def remove(trunk: Path) -> None:
    for path in trunk.parent.glob(f"*{trunk.name}*"):
        shutil.rmtree(path)
