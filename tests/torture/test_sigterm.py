"""SIGTERM at any moment: saved and gone at once, and the run goes on as if nothing had been."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from forks import INSTAR, Child
from started import INSTALLED, start_instar
from tiny_run import STEPS, Place, codes, events, output_of, weights

TIMES = figures.times(5, 50)
TO_GROUP = (True, False)[: figures.times(1, 2)]
SAVES = "checkpoint.every_steps=3"
SLOW_EVALUATION = "eval.batch_size=1"
GRACE_S = 1.0
PATIENCE_S = 15.0


def any_step(run: Run) -> None:
    step = run.chance.randint(1, STEPS - 3)
    run.first.wait_for(rf"^ *{step} .*loss")


def first_step(run: Run) -> None:
    run.first.wait_for(r"^run ")


def evaluation(run: Run) -> None:
    """The line of step 7 is shown before the evaluation that follows it."""
    run.first.wait_for(r"^ *7 .*loss")


def a_save(run: Run) -> None:
    folder = run.run_dir / "checkpoints"
    run.first.wait_until(lambda: any(folder.glob(".tmp-*")))


def data_that_block(run: Run) -> None:
    run.ranks[-1].wait_for("^waiting for data")


@dataclass(frozen=True)
class Moment:
    wait: Callable[[Run], None]
    body: str = INSTAR
    settings: tuple[str, ...] = (SAVES,)


MOMENTS = (
    Moment(any_step),
    Moment(first_step),
    Moment(evaluation, settings=(SAVES, SLOW_EVALUATION)),
    Moment(a_save),
    Moment(data_that_block, "failures:data_block_in_epoch_2"),
)


@dataclass(frozen=True)
class Run:
    """One that is to be stopped."""

    run_dir: Path
    ranks: list[Child]
    chance: random.Random

    @property
    def first(self) -> Child:
        return self.ranks[0]


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_sigterm_saves_leaves_and_loses_nothing(place: Place) -> None:
    expected = {size: weights_of_undisturbed(place, size) for size in (1, 2)}
    chance = random.Random(0)
    not_saved, wrong_code, different, seconds = [], [], [], []
    ways = itertools.cycle(itertools.product((True, False), MOMENTS))
    for number, (to_group, moment) in zip(range(TIMES), ways, strict=False):
        run_dir = place.path / f"parts-{number}"
        size = 1 if number % 4 else 2
        what = f"{number}: {moment.wait.__name__}, {'group' if to_group else 'main'}, W={size}"
        run = Run(
            run_dir,
            place.train(run_dir, *moment.settings, ranks=size, body=moment.body),
            chance,
        )
        moment.wait(run)
        start_s = time.monotonic()
        for child in run.ranks:
            child.signal(signal.SIGTERM, group=to_group)
        exit_codes = codes_or_killed(run.ranks)
        seconds.append(time.monotonic() - start_s - grace_of(run_dir))
        if set(exit_codes) != {75}:
            wrong_code.append(f"{what}: {exit_codes}\n{output_of(run.ranks)}")
        stops = events(run_dir, "stop")
        if not stops or events(run_dir, "checkpoint")[-1]["step"] != stops[-1]["step"]:
            not_saved.append(what)
        resumed_children = place.resume(run_dir, ranks=size)
        if set(codes(resumed_children)) != {0} or weights(run_dir) != expected[size]:
            different.append(f"{what}\n{output_of(resumed_children)}")
        shutil.rmtree(run_dir)
    figures.write(
        "sigterm",
        [
            figures.none_of(TIMES, "SIGTERM: an exit code that is not 75", wrong_code),
            figures.none_of(TIMES, "SIGTERM: not saved at the step it stopped at", not_saved),
            figures.none_of(TIMES, "SIGTERM, then resume: other weights at the end", different),
            figures.at_most("SIGTERM: to the end, beyond a step and a save", seconds, "s", GRACE_S),
        ],
    )


def weights_of_undisturbed(place: Place, size: int) -> dict[str, bytes]:
    run_dir = place.path / f"whole-{size}"
    ranks = place.train(run_dir, SAVES, ranks=size)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    return weights(run_dir)


def codes_or_killed(ranks: Sequence[Child]) -> list[int]:
    """How ranks end that must do so soon; one that does not is killed."""
    for rank in ranks:
        if not rank.ended_within(PATIENCE_S):
            rank.signal(signal.SIGKILL, group=True)
    return codes(ranks)


def grace_of(run_dir: Path) -> float:
    """The longest step and the longest save that the run itself recorded, seconds."""
    active = [0.0, *(event["active_s"] for event in events(run_dir, "train"))]
    saves = [event["seconds"] for event in events(run_dir, "checkpoint")]
    return max((b - a for a, b in itertools.pairwise(active)), default=0.0) + max(
        saves, default=0.0
    )


@pytest.mark.torture
@pytest.mark.parametrize("to_group", TO_GROUP)
def test_sigterm_to_a_launcher_stops_its_ranks(
    place: Place, monkeypatch: pytest.MonkeyPatch, to_group: bool
) -> None:
    """Real ranks, started as a person starts them."""
    monkeypatch.chdir(place.path)
    run_dir = place.path / "run"
    words = ["run.yaml", "--nproc", 2, "--until", "100000it"]
    run = start_instar(*words, run_dir=run_dir, command=INSTALLED)
    run.wait_for(r"^ +3 .*loss")
    run.terminate(group=to_group)
    output = run.finish(75)
    assert output.splitlines()[-1] == f"resume with: instar resume {run_dir}"
    stop = events(run_dir, "stop")[-1]
    assert stop["resumable"]
    assert events(run_dir, "checkpoint")[-1]["step"] == stop["step"]


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU], ids=lambda n: n.name
)
def test_what_batch_systems_and_terminals_send_stops_a_run_saved(
    place: Place, number: signal.Signals
) -> None:
    run_dir = place.path / "run"
    (child,) = place.train(run_dir, "train.until=100000it")
    child.wait_for(r"^ +3 .*loss")
    child.signal(number, group=True)
    assert child.finish() == 75, child.output()
    stop = events(run_dir, "stop")[-1]
    assert (stop["reason"], stop["resumable"]) == (number.name, True)
    assert events(run_dir, "checkpoint")[-1]["step"] == stop["step"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_sigterm_while_the_stop_is_saved_changes_nothing(place: Place, ranks: int) -> None:
    run_dir = place.path / "run"
    body = "failures:saves_once_told_twice"
    children = place.train(run_dir, "train.until=100000it", ranks=ranks, body=body)
    children[0].wait_for(r"^ +3 .*loss")
    for child in children:
        child.signal(signal.SIGTERM)
    assert codes(children) == [75] * ranks, output_of(children)
    assert events(run_dir, "checkpoint")[-1]["step"] == events(run_dir, "stop")[-1]["step"]


def test_a_stop_before_there_is_anything_to_resume_does_not_say_resumable(place: Place) -> None:
    run_dir = place.path / "run"
    (child,) = place.train(run_dir, body="failures:told_to_stop_before_it_starts")
    assert child.finish() == 130, child.output()
    assert not run_dir.exists()
    (child,) = place.train(run_dir, "resume=auto", body="failures:told_to_stop_before_it_starts")
    assert child.finish() == 75, child.output()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name)
def test_the_launcher_passes_any_of_them_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(place.path)
    run_dir = place.path / "run"
    run = start_instar("run.yaml", "--nproc", 2, "--until", "100000it", run_dir=run_dir)
    run.wait_for(r"^ +3 .*loss")
    run.process.send_signal(number)
    run.finish(75)
    stop = events(run_dir, "stop")[-1]
    assert events(run_dir, "checkpoint")[-1]["step"] == stop["step"]


def test_a_terminal_closed_on_torchrun_stops_its_ranks(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun hands the signal that it gets to its ranks."""
    monkeypatch.chdir(place.path)
    run_dir = place.path / "run"
    command = [place.forks.bin / "torchrun", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "instar.train"]
    run = start_instar("run.yaml", "--until", "100000it", run_dir=run_dir, command=command)
    run.wait_for(r"^ +3 .*loss")
    run.process.send_signal(signal.SIGHUP)
    run.process.communicate(timeout=60)
    stop = events(run_dir, "stop")[-1]
    assert (stop["reason"], stop["resumable"]) == ("SIGHUP", True)
    assert events(run_dir, "checkpoint")[-1]["step"] == stop["step"]
