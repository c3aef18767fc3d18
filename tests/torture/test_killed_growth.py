"""Ranks are killed before, while and after a run changes; resumed, each change was made once."""

from __future__ import annotations

import json
import random
import shutil
import signal

import figures
import pytest
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

RUNS = figures.times(1, 50)
WAIT_S = 10.0
ALONE_S = WAIT_S + 5.0
LONGEST_S = 0.08
"""after the step's line: the operations, and the save that follows them, take about that long"""

SCHEDULE = [
    {"name": "insert_layers", "value": 1, "when": {"at_step": 4}},
    {"name": "change_lr", "value": 0.5, "trigger_loss": 99.0, "max_wait_iters": 50},
    {"name": "widen_hidden", "value": 48, "when": {"waited": 3}, "reevaluate": True},
    {"name": "widen_mlp", "value": "x1.5", "when": {"at_step": 13}, "how": "split"},
    {"name": "add_heads", "value": 2, "when": {"at_step": 16}, "mask": 3},
    {"name": "set_lora_rank", "value": {"target": "mlp", "rank": 2}, "when": {"at_step": 20}},
]
CHANGES = (4, 7, 10, 13, 16, 19, 20)
"""steps after which something changes"""
SETTINGS = (
    f"schedule={json.dumps(SCHEDULE)}",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=2",
    "model.dropout=0.1",
    f"parallel.timeout_s={WAIT_S}",
)


@pytest.mark.timeout(7200)
def test_a_run_killed_while_it_changes_ends_bit_for_bit_as_the_undisturbed_one(
    place: Place,
) -> None:
    chance = random.Random(0)
    expected: dict[Way, dict[str, bytes]] = {}
    kills, different, not_once = 0, [], []
    for number in range(RUNS):
        way = (1 if number % 2 else 2), SETTINGS
        if way not in expected:
            expected[way] = weights_of_undisturbed(place, way)
        run_dir = place.path / f"parts-{number}"
        ranks = start(place, run_dir, way)
        # the line of a step is there just before what changes after it
        step = CHANGES[number % len(CHANGES)] - chance.choice((0, 0, 0, 1))
        ranks[0].wait_for(rf"^ *{step} .*loss")
        ranks[0].ended_within(chance.uniform(0.0, LONGEST_S))
        for victim in ranks if chance.random() < 0.5 else [chance.choice(ranks)]:
            victim.signal(signal.SIGKILL)
        kills += int(-signal.SIGKILL in [rank.finish(ALONE_S) for rank in ranks])
        ranks = go_on(place, run_dir, way)
        exit_codes = codes(ranks)
        if set(exit_codes) != {0} or weights(run_dir) != expected[way]:
            different.append(
                f"{run_dir.name}, W={way[0]}, step {step}: {exit_codes}\n{output_of(ranks)}"
            )
        elif (changes := changes_of(place, run_dir.name)) != [c["name"] for c in SCHEDULE]:
            not_once.append(f"{run_dir.name}: {changes}")
        shutil.rmtree(run_dir)
    assert kills >= (RUNS + 1) // 2
    figures.write(
        "killed-growth",
        [
            figures.none_of(
                RUNS, "runs killed while they change: other weights than the undisturbed", different
            ),
            figures.none_of(RUNS, "runs killed while they change: not every one once", not_once),
        ],
    )


def changes_of(place: Place, run: str) -> list[str]:
    """The operations of the schedule in the history of the last checkpoint."""
    manifest = place.path / run / "checkpoints" / f"step-{STEPS}" / "manifest.json"
    history = json.loads(manifest.read_text("utf-8"))["history"]
    assert events(place.path / run, "operation")
    return [change["operation"]["name"] for change in history if change["entry"] is not None]
