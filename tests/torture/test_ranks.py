"""A rank is killed, stopped or missing: the others end in time, and name it.

`make test` tries each once or twice, `make torture` (INSTAR_TORTURE=full) at every place and size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from toy_room import Mishap, Room

SIZES = (2, 4) if figures.FULL else (2,)
PLACES = ("step", "backward", "evaluation", "saving")
SILENCE_S = 3.0
WAIT_S = 4.0
RESTARTS = 50


@dataclass(frozen=True)
class Trial:
    """How long after the mishap all ranks had ended, and which of them did not name its rank."""

    seconds: float
    silent: list[int]


def trial(room: Room, way: str, pattern: str, *, launcher_names: bool = True) -> Trial:
    """One room's end. `named`: what must be said of the rank by all others and by the launcher."""
    living = [rank for rank in range(room.size) if rank != room.mishap.rank]
    with (room.launch if way == "launch" else room.torchrun)() as ranks:
        seconds = ranks.seconds_since_mishap(range(room.size))
        ranks.exit_codes()
        output = ranks.output()
    silent = [rank for rank in living if not re.search(pattern, room.log(rank))]
    if launcher_names and not re.search(pattern, output):
        silent.append(-1)
    return Trial(seconds, silent)


def figures_of(what: str, trials: list[Trial], bar_s: float) -> list[figures.Figures]:
    return [
        figures.at_most(
            f"{len(trials)} × {what}: all ended", [t.seconds for t in trials], "s", bar_s
        ),
        figures.none_of(
            len(trials), f"{what}, not named on every rank", [t for t in trials if t.silent]
        ),
    ]


@pytest.mark.timeout(3600)
def test_a_killed_rank_is_named_and_all_end_within_two_seconds(tmp_path: Path) -> None:
    trials = []
    for size in SIZES:
        for place in PLACES if figures.FULL else ("backward",):
            for _ in range(figures.times(1, 5)):
                mishap = Mishap("kill", size - 1, place)
                room = Room(tmp_path / str(len(trials)), size, mishap=mishap)
                pattern = rf"rank {size - 1} (is gone, last seen in|was killed by SIGKILL)"
                trials.append(trial(room, "launch", pattern))
    figures.write("rank-killed", figures_of("SIGKILL of a rank", trials, 2.0))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_stopped_rank_is_named_and_all_end_at_the_limit(tmp_path: Path) -> None:
    trials = []
    for way in ("launch", "torchrun") if figures.FULL else ("launch",):
        for size in SIZES:
            for place in PLACES if figures.FULL else ("saving",):
                for rank in (0, size - 1) if figures.FULL else (0,):
                    room = Room(
                        tmp_path / str(len(trials)),
                        size,
                        silence_s=SILENCE_S,
                        mishap=Mishap("freeze", rank, place),
                    )
                    trials.append(
                        trial(
                            room,
                            way,
                            rf"rank {rank} has (sent no heartbeat|not answered) for \d+ s",
                        )
                    )
    bar_s = SILENCE_S + 2
    figures.write("rank-stopped", figures_of("SIGSTOP of a rank", trials, bar_s))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_rank_that_never_comes_to_a_meeting_is_named_and_all_end_at_the_limit(
    tmp_path: Path,
) -> None:
    trials = []
    for size in SIZES:
        for place in PLACES if figures.FULL else ("step",):
            rank = size - 1
            room = Room(
                tmp_path / str(len(trials)),
                size,
                silence_s=SILENCE_S,
                timeout_s=WAIT_S,
                mishap=Mishap("sleep", rank, place),
            )
            trials.append(
                trial(
                    room,
                    "launch",
                    rf"(rank {rank} has not entered a|all other ranks wait for rank {rank}:)",
                )
            )
    figures.write("rank-missing", figures_of("a rank that sleeps", trials, WAIT_S + 2))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_rank_that_never_starts_is_named_and_all_end_at_the_limit(tmp_path: Path) -> None:
    trials = []
    for size in SIZES:
        for rank in (0, size - 1) if figures.FULL else (0,):
            room = Room(
                tmp_path / str(len(trials)),
                size,
                timeout_s=WAIT_S,
                mishap=Mishap("sleep", rank, "start"),
            )
            with room.launch() as ranks:
                # The limit begins with the first rank that comes, not with the one that does not.
                ranks.wait_for(*(f"coming-{other}" for other in range(size) if other != rank))
                first = min(file.stat().st_mtime for file in room.folder.glob("coming-*"))
                assert ranks.exit_codes() == [4]
                seconds = ranks.seconds_since(first, range(size))
                output = ranks.output()
            message = f"rank {rank} of {size} did not join the rendezvous"
            trials.append(Trial(seconds, [] if message in output else [-1]))
    figures.write("rank-absent", figures_of("a rank that never starts", trials, WAIT_S + 2))


if figures.FULL:  # the short form is in tests/distributed/test_restarts.py

    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("way", ["torchrun", "launch"])
    def test_every_restart_comes_up_again(tmp_path: Path, way: str) -> None:
        room = Room(tmp_path, mishap=Mishap("kill", 1, "step", starts=RESTARTS, after_s=0), last=5)
        with (room.torchrun if way == "torchrun" else room.launch)(max_restarts=RESTARTS) as ranks:
            # each restart imports torch in two processes
            exit_codes = ranks.exit_codes(60 + 15 * RESTARTS)
        came_up = [
            start
            for start in range(1, RESTARTS + 1)
            if all((tmp_path / f"met-{rank}-{start}").exists() for rank in (0, 1))
        ]
        figures.write(
            f"restarts-{way}",
            [
                figures.all_of(RESTARTS, f"restart under {way}", len(came_up)),
                figures.none_of(
                    1, "a run that restarted and did not end well", [c for c in exit_codes if c]
                ),
            ],
        )
