"""A writer is killed at random moments, or one of several that write parts of the same checkpoint: nothing
acknowledged is lost, nothing broken is published."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import figures
import pytest
import savers
from forks import Child, Forks, children_as_ranks

from instar.checkpoint.listing import latest_checkpoint, latest_intact, list_checkpoints
from instar.checkpoint.manifest import MANIFEST, CheckpointError
from instar.checkpoint.store import load_checkpoint

KILLS = {1: figures.times(8, 1000), 3: figures.times(2, 500)}
"""by the number of ranks"""
BODIES = {1: "savers:save_for_ever", 3: "savers:save_in_parts_for_ever"}
PHASES = (
    "between two saves",
    "before the first file",
    "while files are written",
    "manifest written, not renamed",
    "renamed, latest is the one before",
    "published, not acknowledged",
)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", KILLS)
def test_sigkill_in_a_save_loses_nothing_and_publishes_nothing_broken(
    forks: Forks, tmp_path: Path, ranks: int
) -> None:
    kills, body = KILLS[ranks], BODIES[ranks]
    root, log_path = tmp_path / "run", tmp_path / "acknowledged"
    root.mkdir()
    start_s = time.perf_counter()
    savers.save(root, 1)
    save_s = ranks * (time.perf_counter() - start_s)
    log_path.write_text("1\n")
    chance = random.Random(0)
    phases: Counter[str] = Counter()
    losses, broken, leftovers, not_named = list[int](), list[str](), list[str](), list[str]()
    for _ in range(kills):
        left_over = hidden_names(root)
        before = newest(root)
        saving = children_as_ranks(
            forks, ranks, body, str(root), before + 1, str(log_path), place=tmp_path
        )
        not_named += kill_at_random(saving, log_path, before, save_s, chance)
        acknowledged_step = last_acknowledged(log_path)
        phases[phase(root, acknowledged_step)] += 1
        broken += faults(root)
        if (
            newest(root) < acknowledged_step
            or load_checkpoint(latest_checkpoint(root)).manifest.step < acknowledged_step
        ):
            losses.append(acknowledged_step)
        if newest(root) > before:
            leftovers += left_over & hidden_names(root)
        forget_all_but_two(root)
    savers.save(root, newest(root) + 1)
    leftovers += hidden_names(root)
    what = "SIGKILL mid-save" if ranks == 1 else f"SIGKILL of one of {ranks} ranks mid-save"
    figures_of_others = figures.none_of(
        kills, f"{what}: others that did not end, or not name it", not_named
    )
    figures.write(
        "killed-saver" if ranks == 1 else "killed-sharded-saver",
        [
            figures.none_of(kills, f"{what}: acknowledged saves lost", losses),
            figures.none_of(kills, f"{what}: invalid checkpoints visible", broken),
            figures.none_of(kills, f"{what}: leftovers the next save kept", leftovers),
            *([figures_of_others] if ranks > 1 else []),
            *(figures.count(f"kills found {name}", phases[name]) for name in PHASES),
        ],
    )
    if figures.FULL:
        assert phases.keys() == set(PHASES), "the moments do not cover a save"


def kill_at_random(
    saving: Sequence[Child], log_path: Path, before: int, save_s: float, chance: random.Random
) -> list[str]:
    """After none to three saves of theirs, and some part of the time that one takes; what others say that do
    not end with an error that names the killed rank."""
    after = before + chance.choice((0, 0, 1, 3)) + (len(saving) > 1)  # once ranks have met
    victim = chance.choice(saving)
    victim.wait_until(lambda: last_acknowledged(log_path) >= after)
    assert not victim.ended_within(chance.uniform(0.0, 1.5 * save_s)), victim.output()
    victim.signal(signal.SIGKILL)
    assert victim.finish() == -signal.SIGKILL
    victim_name = f"rank {saving.index(victim)}"
    survivors = [other for other in saving if other is not victim]
    codes = [other.finish(savers.SAVE_LIMIT_S + 10.0) for other in survivors]
    outputs = [other.output() for other in survivors]
    return [
        text
        for code, text in zip(codes, outputs, strict=True)
        if code == 0 or victim_name not in text
    ]


def last_acknowledged(log_path: Path) -> int:
    """The last whole line: the end of a line came after `publish` had returned."""
    return int(log_path.read_text().split("\n")[-2])


def newest(root: Path) -> int:
    checkpoint, errors = latest_intact(root)
    assert errors == []
    return checkpoint.manifest.step


def hidden_names(root: Path) -> set[str]:
    return {path.name for path in (root / "checkpoints").glob(".*")}


def faults(root: Path) -> list[str]:
    """What is wrong with anything that a reader can see."""
    problems = []
    for path in [*list_checkpoints(root), latest_checkpoint(root)]:
        try:
            if not savers.holds(load_checkpoint(path)):
                problems.append(f"{path.name} does not hold what was saved")
        except CheckpointError as error:
            problems.append(str(error))
    visible = {path.name for path in list_checkpoints(root)} | {"latest"} | hidden_names(root)
    return problems + sorted({path.name for path in (root / "checkpoints").iterdir()} - visible)


def phase(root: Path, acknowledged_step: int) -> str:
    """How far the save had come that the kill ended."""
    folder = root / "checkpoints"
    top = max(load_checkpoint(path, check=False).manifest.step for path in list_checkpoints(root))
    pointer = (folder / "latest").read_text().strip()
    if pointer != f"step-{top}":
        return "renamed, latest is the one before"
    if top > acknowledged_step:
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
    for path in list_checkpoints(root)[:-2]:
        if path != latest_checkpoint(root):
            shutil.rmtree(path)
