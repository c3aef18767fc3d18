"""Runs that stop early and test are struck at the moments that matter; resumed, nothing differs."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import figures
import pytest
import science
from cases import parametrize_first
from forks import LIMIT_S, Child, Forks, children_as_ranks
from science import MOMENTS, evaluations, pointer_target, result
from tiny_run import Place, codes, events, output_of

WAIT_S = 10.0
"""for a rank that has not come yet: these have no launcher that would end them"""
ALONE_S = WAIT_S + 5.0
OF_RANK_0 = ("a pointer to the best", "the file of predictions", "the file of results")
TIMES = {
    "a micro-batch of an evaluation": 28,
    "a piece of the last save": 8,
    "a pointer to the best": 5,
    "a micro-batch of the test": 4,
}
"""how often a moment comes on rank 0, at least; others come once"""
WHO = ((1, (0,)), (2, (0,)), (2, (1,)), (2, (0, 1)))
"""the number of ranks, and those that are struck"""
WAYS = [
    (moment, *group)
    for moment, group in itertools.product(MOMENTS, WHO)
    if 0 in group[1] or moment not in OF_RANK_0
]
ROUNDS = figures.times(1, 10)
CHOSEN = WAYS if figures.FULL else WAYS[::3]
SETTINGS = f"parallel.timeout_s={WAIT_S}"


@pytest.fixture
def place(forks: Forks, tmp_path: Path) -> Place:
    return science.place(tmp_path, forks)


def begin(place: Place, run_dir: Path, size: int, *strike: object) -> list[Child]:
    """Train as so many ranks; `strike` is what befalls them."""
    argv = ["train", "run.yaml", "--set", f"record.run_dir={run_dir}", "--set", SETTINGS]
    body = "science:struck" if strike else "instar.cli.main:main"
    return children_as_ranks(place.forks, size, body, argv, *strike, place=place.path)


def go_on(place: Place, run_dir: Path, size: int, *, afresh: bool) -> list[Child]:
    """Resume; or start again what is to go on by itself."""
    if afresh or not (run_dir / "checkpoints" / "latest").exists():
        return place.train(run_dir, SETTINGS, "resume=auto", ranks=size)
    return place.resume(run_dir, ranks=size)


def end(run_dir: Path) -> dict[str, Any]:
    """All that must be as if nothing had been."""
    stop = events(run_dir, "stop")[-1]
    latest, best = pointer_target(run_dir, "latest"), pointer_target(run_dir, "best")
    return {
        "stop": (stop["step"], stop["reason"], stop["resumable"]),
        "metrics": dict(evaluations(run_dir)),
        "best": (step_of(best), step_of(pointer_target(run_dir, "best-accuracy"))),
        "weights": [_weights(run_dir, name) for name in (latest, best)],
        "test": result(run_dir),
        "files": sorted(file.name for file in (run_dir / "test").iterdir()),
        "predictions": (run_dir / "test" / "predictions.parquet").read_bytes(),
    }


def step_of(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step-").partition(".")[0])


def _weights(run_dir: Path, checkpoint: str) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / checkpoint
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def expected_end(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """The end of a run of so many ranks that nothing happens to."""
    place = science.place(tmp_path_factory.mktemp("undisturbed"), forks)

    @cache
    def train(size: int) -> dict[str, Any]:
        run_dir = place.path / f"whole-{size}"
        ranks = begin(place, run_dir, size)
        assert set(codes(ranks)) == {0}, output_of(ranks)
        outcome = end(run_dir)
        assert outcome["stop"][0] < 60
        assert outcome["best"][0] < outcome["stop"][0]
        return outcome

    return train


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_a_run_killed_around_its_end_comes_to_the_same_end(
    place: Place, expected_end: Callable[[int], dict[str, Any]]
) -> None:
    chance = random.Random(0)
    trials = [way for _ in range(ROUNDS) for way in CHOSEN]
    different, survivals = [], []
    for number, (moment, size, victims) in enumerate(trials):
        run_dir = place.path / f"parts-{number}"
        # the first time, at the last moment possible
        last_time = TIMES.get(moment, 1) if 0 in victims or "save" not in moment else 1
        at = last_time if number < len(CHOSEN) else chance.randint(1, last_time)
        what = f"{number}: {moment} {at}, ranks {victims} of {size}"
        ranks = begin(place, run_dir, size, moment, at, victims, signal.SIGKILL)
        exit_code = ranks[victims[0]].finish(LIMIT_S)
        if len(victims) == size:
            for rank in ranks:
                rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.finish(ALONE_S)
        if exit_code != -signal.SIGKILL:
            survivals.append(f"{what}: {exit_code}\n{output_of(ranks)}")
        ranks = go_on(place, run_dir, size, afresh=number % 3 == 0)
        if set(codes(ranks)) != {0}:
            different.append(f"{what}: {output_of(ranks)}")
        else:
            actual = end(run_dir)
            expected = expected_end(size)
            other = [name for name, value in expected.items() if actual[name] != value]
            different += [f"{what}: another {name}" for name in other]
        shutil.rmtree(run_dir)
    figures.write(
        "killed-science",
        [
            figures.none_of(len(trials), "SIGKILL around the end: it never came", survivals),
            figures.none_of(len(trials), "SIGKILL around the end, then on: another end", different),
        ],
    )


def test_a_run_that_ended_at_a_loss_and_died_in_its_test_is_still_at_its_end(
    place: Place,
) -> None:
    """What ended it was an evaluation, which is not made again."""
    run_dir, loss = place.path / "run", "train.until=[loss<0.535, 60it]"
    argv = ["train", "run.yaml", "--set", f"record.run_dir={run_dir}", "--set", loss]
    argv += ["--set", "checkpoint.on_best=false", "--set", "test.weights=last"]
    strike = "a micro-batch of the test", 2, (0,), signal.SIGKILL
    ranks = children_as_ranks(place.forks, 1, "science:struck", argv, *strike, place=place.path)
    assert codes(ranks) == [-signal.SIGKILL]
    rows = evaluations(run_dir)
    resumed_children = place.resume(run_dir)
    assert codes(resumed_children) == [0], output_of(resumed_children)
    assert evaluations(run_dir) == rows
    (stop,) = events(run_dir, "stop")
    assert (stop["step"], stop["reason"]) == (rows[-1][0], "reached loss<0.535")
    assert result(run_dir)["step"] == stop["step"]


@parametrize_first(("size", "victims"), [(1, (0,)), (2, (1,))], first=1)
def test_sigterm_in_the_test_ends_it_and_it_is_made_again(
    place: Place,
    expected_end: Callable[[int], dict[str, Any]],
    size: int,
    victims: tuple[int, ...],
) -> None:
    run_dir = place.path / "parts"
    moment = "a micro-batch of the test"
    ranks = begin(place, run_dir, size, moment, 2, victims, signal.SIGTERM)
    assert codes(ranks) == [75] * size, output_of(ranks)
    assert "resume with: instar resume" in ranks[0].output()
    assert events(run_dir, "stop")[-1]["resumable"]
    assert not (run_dir / "test" / "result.json").exists()
    resumed_children = place.resume(run_dir, ranks=size)
    assert set(codes(resumed_children)) == {0}, output_of(resumed_children)
    assert end(run_dir) == expected_end(size)
