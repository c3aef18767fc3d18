"""Runs that are interrupted again and again, at random steps, end as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import figures
import pytest
from tiny_run import Place, codes, events, output_of, weights

RUNS = figures.times(1, 25)
STEPS = figures.times(14, 24)
ENDS = f"train.until=[{STEPS}it]"


@pytest.mark.timeout(3600)
def test_interrupted_runs_end_bit_for_bit_as_the_undisturbed_one(place: Place) -> None:
    """What a terminal does at Ctrl-C, with two ranks in every second run."""
    chance = random.Random(0)
    expected: dict[int, dict[str, bytes]] = {}
    interruptions, different = 0, []
    for number in range(RUNS):
        size = 2 - number % 2
        if size not in expected:
            full_run = place.path / f"whole-{size}"
            assert set(codes(place.train(full_run, ENDS, ranks=size))) == {0}
            expected[size] = weights(full_run, STEPS)
            assert "model.safetensors" in expected[size]
        run_dir = place.path / f"parts-{number}"
        times, problem = interrupt_to_the_end(place, run_dir, size, chance)
        interruptions += times
        if problem or weights(run_dir, STEPS) != expected[size]:
            different.append(f"{run_dir.name}, W={size}: {problem}")
        shutil.rmtree(run_dir)
    assert interruptions >= RUNS
    what = f"runs, {interruptions} interruptions: other final weights than the undisturbed"
    figures.write("interruptions", [figures.none_of(RUNS, what, different)])


def interrupt_to_the_end(
    place: Place, run_dir: Path, size: int, chance: random.Random
) -> tuple[int, str]:
    """Stop a run and go on until it is at its end; how often, and what went wrong."""
    ranks, last_step, times = place.train(run_dir, ENDS, ranks=size), 0, 0
    while True:
        stop_at = last_step + chance.randint(1, STEPS // 2)
        if stop_at >= STEPS - 2:
            exit_codes = codes(ranks)
            return times, "" if set(exit_codes) == {0} else f"{exit_codes}\n{output_of(ranks)}"
        ranks[0].wait_for(rf"^ *{stop_at} .*loss")
        for rank in ranks:
            rank.signal(signal.SIGINT, group=True)
        if set(exit_codes := codes(ranks)) != {75}:
            return times, f"interrupted after step {stop_at}: {exit_codes}\n{output_of(ranks)}"
        times += 1
        last_step = events(run_dir, "stop")[-1]["step"]
        ranks = place.resume(run_dir, ranks=size)
