"""A writer of deltas is killed at random moments, or its disk is full: no acknowledged link is lost."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import delta_savers
import figures
import pytest
from forks import Child, Forks

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import links, verify_chain
from instar.extensions.delta.format.folder import INDEX

KILLS = figures.times(12, 200)
PER_CHAIN = 20
"""kills of one chain, all of which is read after each"""
MOMENTS = ("a file half written", "a link that was not acknowledged", "no trace")
TRIES = figures.times(4, 60)


@pytest.mark.timeout(3600)
def test_sigkill_leaves_a_chain_that_holds_every_acknowledged_link(
    forks: Forks, tmp_path: Path
) -> None:
    chance = random.Random(0)
    losses, broken, numbering = list[object](), list[str](), list[str]()
    moments: Counter[str] = Counter()
    n_links = 0
    for kill in range(KILLS):
        place = tmp_path / str(kill // PER_CHAIN)
        folder, log_path = place / "deltas", place / "acknowledged"
        if kill % PER_CHAIN == 0:
            place.mkdir()
            log_path.touch()
        before = links(folder) if (folder / INDEX).exists() else []
        # every third resumes from an older step, as a run does whose last checkpoint is older
        first = before[-1 - (2 * (kill % 3 == 2) if len(before) > 2 else 0)].step if before else 0
        saver = forks.start(
            "delta_savers:save_for_ever", str(folder), first, str(log_path), place=place
        )
        kill_at_random(saver, log_path, chance)
        after = links(folder) if (folder / INDEX).exists() else []
        moments[moment(folder, len(after), log_path)] += 1
        step_of = {link.number: link.step for link in after}
        losses += [
            entry for entry in acknowledged_links(log_path) if step_of.get(entry[0]) != entry[1]
        ]
        if list(step_of) != list(range(len(after))) or after[: len(before)] != before:
            numbering.append(f"{[(link.number, link.step) for link in after]}")
        n_links += len(after) - len(before)
        if after:
            broken += faults(folder, len(before))
    figures.write(
        "killed-deltas",
        [
            figures.none_of(KILLS, "SIGKILL mid-save: acknowledged deltas lost", losses),
            figures.none_of(KILLS, "SIGKILL mid-save: links that cannot be read", broken),
            figures.none_of(KILLS, "SIGKILL mid-save: links renumbered or replaced", numbering),
            figures.count("links that the killed writers had saved", n_links),
            *(figures.count(f"kills found {name}", moments[name]) for name in MOMENTS),
        ],
    )
    assert n_links
    if figures.FULL:
        assert moments.keys() == set(MOMENTS), "the moments do not cover a save"


def moment(folder: Path, n_links: int, log_path: Path) -> str:
    """How far the save had come that the kill ended."""
    if folder.exists() and list(folder.glob(".tmp-*")):
        return "a file half written"
    newest = max((number for number, _ in acknowledged_links(log_path)), default=-1)
    return "a link that was not acknowledged" if n_links > newest + 1 else "no trace"


def kill_at_random(saver: Child, log_path: Path, chance: random.Random) -> None:
    """After none to six links of its own, and some part of the time that one takes."""
    before, after = len(acknowledged_links(log_path)), chance.choice((0, 1, 1, 3, 6))
    start_s = time.monotonic()
    saver.wait_until(lambda: len(acknowledged_links(log_path)) >= before + after)
    link_s = (time.monotonic() - start_s) / max(1, after)
    assert not saver.ended_within(chance.uniform(0.0, min(0.2, 1.5 * link_s))), saver.output()
    saver.signal(signal.SIGKILL)
    assert saver.finish() == -signal.SIGKILL


def acknowledged_links(log_path: Path) -> list[tuple[int, int]]:
    """Number and step of each link whose line is whole."""
    lines = [line.split() for line in log_path.read_text().split("\n")[:-1]]
    return [(int(number), int(step)) for number, step in lines]


def faults(folder: Path, n_known: int) -> list[str]:
    """What is wrong with the links after the first `known`, and with the files of all."""
    try:
        verify_chain(folder)
        return [
            f"{link.file} does not hold the weights of step {link.step}"
            for link in links(folder)[n_known:]
            if not delta_savers.holds(folder, link.number, link.step)
        ]
    except CheckpointError as error:
        return [str(error)]


@pytest.mark.timeout(3600)
def test_a_full_disk_is_told_and_costs_no_link(forks: Forks, tmp_path: Path) -> None:
    """On a real small disk where one may be mounted, else with a limit on the size of files."""
    chance = random.Random(0)
    wrong, kind, refusal = [], "tmpfs", ""
    for number in range(TRIES):
        root = tmp_path / str(number)
        root.mkdir()
        room = chance.choice((0, 1, chance.randrange(1 << 20)))
        facts = save_in(forks, root, room, kind)
        if "refused" in facts:
            refusal, kind = str(facts["refused"]), "limit"
            facts = save_in(forks, root, room, kind)
        if not as_it_must_be(facts):
            wrong.append(f"{room} bytes of room: {facts}")
    how = "a tmpfs" if kind == "tmpfs" else f"a limit on files (tmpfs: {refusal})"
    figures.write(
        "full-disk-deltas",
        [
            figures.none_of(
                TRIES,
                f"disk full mid-delta, by {how}: no clear error, a lost link, or no next one",
                wrong,
            )
        ],
    )


def save_in(forks: Forks, root: Path, room: int, kind: str) -> dict[str, object]:
    body = "delta_savers:save_with_too_little_room"
    child = forks.start(body, str(root), room, kind, place=root.parent)
    assert child.finish() == 0, child.output()
    facts: dict[str, object] = json.loads(child.output().splitlines()[-1])
    return facts


def as_it_must_be(facts: dict[str, object]) -> bool:
    message = str(facts["told"])
    clear = "cannot save step" in message and ("No space" in message or "too large" in message)
    is_intact = facts["kept"] and facts["whole"] and facts["numbers"]
    goes_on = facts["then"] == [] and facts["more"] == 2 and not facts["left_over"]
    return bool(clear and is_intact and goes_on)
