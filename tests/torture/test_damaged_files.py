"""Every file of a checkpoint, damaged in every way: found, named, and the one before is used."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from tiny_run import STEPS, Place, codes, events, output_of

from instar.checkpoint.listing import latest_checkpoint, latest_intact, list_checkpoints
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint

SEEDS = figures.times(1, 50)
RESUMED = figures.times(3, 1000)
"""damages after which `instar resume` is tried too; there are fewer than a thousand"""
EVERY = 8


def flip(file: Path, _: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, _: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def zero(file: Path, _: Path, chance: random.Random) -> None:
    """A stretch of it, as a sector that was never written; or all."""
    content = bytearray(file.read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    begin = chance.choice(used)
    end = chance.choice((begin + 1, begin + 512, len(content)))
    content[begin:end] = bytes(len(content[begin:end]))
    file.write_bytes(content)


def delete(file: Path, _: Path, __: random.Random) -> None:
    file.unlink()


def swap_within(file: Path, _: Path, chance: random.Random) -> None:
    """With another file of the same checkpoint."""
    swap(file, chance.choice([other for other in files_of(file.parents[0]) if other != file]))


def swap_with_other(file: Path, other: Path, _: random.Random) -> None:
    """With the file of the same name in another checkpoint."""
    swap(file, other)


DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "a bit flipped": flip,
    "truncated": truncate,
    "zeroed": zero,
    "deleted": delete,
    "swapped within": swap_within,
    "swapped with another's": swap_with_other,
}


def swap(first: Path, second: Path) -> None:
    temp_path = first.with_name("aside")
    first.rename(temp_path)
    second.rename(first)
    temp_path.rename(second)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Damage:
    """One damage to one file of the newest checkpoint of `run_dir`; `name` is relative to it."""

    run_dir: Path
    name: str
    how: str

    @property
    def newest(self) -> Path:
        return self.run_dir / "checkpoints" / f"step-{STEPS}"

    @property
    def previous(self) -> Path:
        return self.run_dir / "checkpoints" / f"step-{STEPS - EVERY}"

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


@pytest.fixture(scope="module")
def intact_run(data_dir: Path, forks: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with three checkpoints, every kind of file in each."""
    path = tmp_path_factory.mktemp("whole")
    shutil.copytree(data_dir, path, dirs_exist_ok=True)
    place = Place(path, forks)  # type: ignore[arg-type]
    ranks = place.train(path / "run", f"checkpoint.every_steps={EVERY}", ranks=2)
    assert codes(ranks) == [0, 0], output_of(ranks)
    names = [checkpoint_path.name for checkpoint_path in list_checkpoints(path / "run")]
    assert names == [f"step-{step}" for step in range(EVERY, STEPS + 1, EVERY)]
    return path / "run"


def damages(intact_run: Path, folder: Path, seeds: int) -> Iterator[Damage]:
    """Each file × each damage × several places; the run is damaged when it is handed out."""
    newest = intact_run / "checkpoints" / f"step-{STEPS}"
    for file in files_of(newest):
        name = str(file.relative_to(newest))
        for how, damage in DAMAGES.items():
            for seed in range(seeds if how in ("a bit flipped", "truncated", "zeroed") else 1):
                run_dir = folder / "damaged"
                shutil.copytree(intact_run, run_dir)
                damage_case = Damage(run_dir, name, how)
                damage(damage_case.newest / name, damage_case.previous / name, random.Random(seed))
                if content(damage_case.newest) != content(newest):
                    yield damage_case
                shutil.rmtree(run_dir)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in files_of(folder)}


def test_every_damage_to_every_file_is_found_and_named(intact_run: Path, tmp_path: Path) -> None:
    trials, not_found, not_named, not_used = 0, [], [], []
    for damage in damages(intact_run, tmp_path, SEEDS):
        trials += 1
        try:
            load_checkpoint(damage.newest)
        except CheckpointError as error:
            if not names(error, damage):
                not_named.append(f"{damage}: {error}")
        else:
            not_found.append(str(damage))
        checkpoint, errors = latest_intact(damage.run_dir)
        expected = damage.newest.with_name(f"step-{STEPS - EVERY * reach(damage)}")
        if checkpoint.path != expected or not any(names(error, damage) for error in errors):
            not_used.append(f"{damage}: {checkpoint.path.name}, {errors}")
    figures.write(
        "damaged-files",
        [
            figures.none_of(trials, "damage to a file of a checkpoint: not found", not_found),
            figures.none_of(trials, "damage found: the file not named", not_named),
            figures.none_of(trials, "damage found: the one before not used, or unsaid", not_used),
        ],
    )


def names(error: CheckpointError, damage: Damage) -> bool:
    """A file that was swapped is named by either of its names, a manifest of another by any."""
    if damage.name == "manifest.json" and damage.how.startswith("swapped"):
        return str(damage.newest) in str(error)
    if damage.how == "swapped within":
        return str(damage.newest) in str(error)
    return str(damage.newest / damage.name) in str(error)


def reach(damage: Damage) -> int:
    """How many checkpoints it spoils: what is swapped with another's spoils that too."""
    return 2 if damage.how == "swapped with another's" else 1


@pytest.mark.torture
def test_resume_goes_on_from_the_one_before_and_says_so(intact_run: Path, place: Place) -> None:
    trials, wrong = 0, []
    for damage in damages(intact_run, place.path, seeds=1):
        if trials == RESUMED:
            break
        trials += 1
        (child,) = place.resume(damage.run_dir, "--until", f"{STEPS + 2}it")
        if child.finish() != 0:
            wrong.append(f"{damage}: {child.output()}")
            continue
        began = events(damage.run_dir, "run_started")[-1]["step"]
        if began != STEPS - EVERY * reach(damage) or damage.newest.name not in child.output():
            wrong.append(f"{damage}: from step {began}: {child.output()}")
    figures.write(
        "damaged-resume",
        [figures.none_of(trials, "resume past a damaged checkpoint: not so, or unsaid", wrong)],
    )


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "swapped with another's"])
def test_a_damaged_pointer_hides_no_checkpoint(intact_run: Path, tmp_path: Path, how: str) -> None:
    for seed in range(SEEDS):
        run_dir = tmp_path / f"{seed}"
        shutil.copytree(intact_run, run_dir)
        pointer = run_dir / "checkpoints" / "latest"
        chance = random.Random(seed)
        if how == "swapped within":
            swap(pointer, run_dir / "checkpoints" / f"step-{STEPS}" / "state.json")
        else:
            DAMAGES[how](pointer, pointer, chance)
        checkpoint, _ = latest_intact(run_dir)
        expected = STEPS - EVERY if how == "swapped within" else STEPS
        assert checkpoint.path.name == f"step-{expected}"
        assert latest_checkpoint(run_dir) in list_checkpoints(run_dir)
