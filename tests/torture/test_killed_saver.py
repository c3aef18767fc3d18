"""A writer is killed at random moments: nothing acknowledged is lost, nothing broken is published."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import figures
import pytest
import savers
from forks import Child, Forks

from instar.checkpoint.listing import checkpoints, latest, latest_intact
from instar.checkpoint.manifest import MANIFEST, CheckpointError
from instar.checkpoint.store import load

KILLS = figures.times(30, 1000)
PHASES = (
    "between two saves",
    "before the first file",
    "while files are written",
    "manifest written, not renamed",
    "renamed, latest is the one before",
    "published, not acknowledged",
)


@pytest.mark.timeout(3600)
def test_sigkill_in_a_save_loses_nothing_and_publishes_nothing_broken(
    forks: Forks, tmp_path: Path
) -> None:
    root, told = tmp_path / "run", tmp_path / "acknowledged"
    root.mkdir()
    begun = time.perf_counter()
    savers.save(root, 1)
    save_s = time.perf_counter() - begun
    told.write_text("1\n")
    chance = random.Random(0)
    phases: Counter[str] = Counter()
    lost, broken, kept = list[int](), list[str](), list[str]()
    for _ in range(KILLS):
        left_over = unpublished(root)
        before = newest(root)
        saver = forks.start(
            "savers:save_for_ever", str(root), before + 1, str(told), place=tmp_path
        )
        kill_at_random(saver, told, before, save_s, chance)
        acknowledged = last_acknowledged(told)
        phases[phase(root, acknowledged)] += 1
        broken += faults(root)
        if newest(root) < acknowledged or load(latest(root)).manifest.step < acknowledged:
            lost.append(acknowledged)
        if newest(root) > before:
            kept += left_over & unpublished(root)
        forget_all_but_two(root)
    savers.save(root, newest(root) + 1)
    kept += unpublished(root)
    figures.write(
        "killed-saver",
        [
            figures.none_of(KILLS, "SIGKILL mid-save: acknowledged saves lost", lost),
            figures.none_of(KILLS, "SIGKILL mid-save: invalid checkpoints visible", broken),
            figures.none_of(KILLS, "SIGKILL mid-save: leftovers the next save kept", kept),
            *(figures.count(f"kills found {name}", phases[name]) for name in PHASES),
        ],
    )
    if figures.FULL:
        assert phases.keys() == set(PHASES), "the moments do not cover a save"


def kill_at_random(
    saver: Child, told: Path, before: int, save_s: float, chance: random.Random
) -> None:
    """After none to three saves of its own, and some part of the time that one takes."""
    after = before + chance.choice((0, 0, 1, 3))
    saver.wait_until(lambda: last_acknowledged(told) >= after)
    assert not saver.ended_within(chance.uniform(0.0, 1.5 * save_s)), saver.output()
    saver.signal(signal.SIGKILL)
    assert saver.finish() == -signal.SIGKILL


def last_acknowledged(told: Path) -> int:
    """The last whole line: the end of a line came after `publish` had returned."""
    return int(told.read_text().split("\n")[-2])


def newest(root: Path) -> int:
    found, skipped = latest_intact(root)
    assert skipped == []
    return found.manifest.step


def unpublished(root: Path) -> set[str]:
    return {path.name for path in (root / "checkpoints").glob(".*")}


def faults(root: Path) -> list[str]:
    """What is wrong with anything that a reader can see."""
    found = []
    for path in [*checkpoints(root), latest(root)]:
        try:
            if not savers.holds(load(path)):
                found.append(f"{path.name} does not hold what was saved")
        except CheckpointError as error:
            found.append(str(error))
    visible = {path.name for path in checkpoints(root)} | {"latest"} | unpublished(root)
    return found + sorted({path.name for path in (root / "checkpoints").iterdir()} - visible)


def phase(root: Path, acknowledged: int) -> str:
    """How far the save had come that the kill ended."""
    folder = root / "checkpoints"
    top = max(load(path, check=False).manifest.step for path in checkpoints(root))
    named = (folder / "latest").read_text().strip()
    if named != f"step-{top}":
        return "renamed, latest is the one before"
    if top > acknowledged:
        return "published, not acknowledged"
    asides = [path for path in folder.glob(".tmp-*") if path.is_dir()]
    if not asides:
        return "between two saves"
    names = {path.name for path in asides[0].iterdir()}
    if MANIFEST in names:
        return "manifest written, not renamed"
    return "while files are written" if names else "before the first file"


def forget_all_but_two(root: Path) -> None:
    """Only so that a thousand kills need no more room than a few."""
    for path in checkpoints(root)[:-2]:
        if path != latest(root):
            shutil.rmtree(path)
