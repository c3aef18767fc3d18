"""The power goes at every moment of a save: what is found is the old or the new, never neither."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
import savers
from power import Crash, Operation, crashes, lay_out, recording

from instar.checkpoint.listing import (
    BEST,
    RetentionPolicy,
    latest_checkpoint,
    latest_intact,
    list_checkpoints,
    prune_checkpoints,
    update_pointer,
)
from instar.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from instar.checkpoint.store import load_checkpoint
from instar.record import atomic

ROWS = 8
STATES = figures.times(8, 8192)
"""of one moment; where there are more, so many are drawn"""


def first_save(root: Path) -> Iterator[int]:
    savers.save(root, 10, ROWS)
    yield 10


def second_save(root: Path) -> Iterator[int]:
    """After a crash left something behind."""
    savers.save(root, 10, ROWS)
    yield 10
    leftover = root / "checkpoints" / ".tmp-0123456789abcdef"
    shutil.copytree(root / "checkpoints" / "step-10", leftover)
    savers.save(root, 20, ROWS)
    yield 20


def rewound_save(root: Path) -> Iterator[int]:
    """A step that is there already, with another content."""
    savers.save(root, 20, ROWS)
    yield 20
    savers.save(root, 20, ROWS + 1)
    yield 20


def old_one_pruned(root: Path) -> Iterator[int]:
    """What retention does; `best` names the one that stays beside the newest."""
    savers.save(root, 10, ROWS)
    yield 10
    update_pointer(root, BEST, savers.save(root, 20, ROWS))
    yield 20
    savers.save(root, 30, ROWS)
    assert prune_checkpoints(root, RetentionPolicy(last=1, best=0)) == [
        root / "checkpoints" / "step-10"
    ]
    yield 30


STORIES: dict[str, Callable[[Path], Iterator[int]]] = {
    "the first save": first_save,
    "a save beside an old one, sweeping": second_save,
    "another save of the same step": rewound_save,
    "a save, the deletion of an old one": old_one_pruned,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system has a place there: what a disk keeps is not asked of this one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


@dataclass(frozen=True)
class Tried:
    states: int
    moments: int
    wrong: list[str]


def record_operations(story: Callable[[Path], Iterator[int]], folder: Path) -> list[Operation]:
    """What a story asks of the disk; a step is said once its save has returned."""
    root = folder.resolve() / "runs" / "run"
    root.mkdir(parents=True)
    with recording(root.parent) as recorder:
        for step in story(root):
            recorder.say(step)
    return recorder.operations


def replay(
    operations: list[Operation], folder: Path, exhaustive: int, *, to_first: bool = False
) -> Tried:
    """Find what every state after a loss of power would be taken for."""
    chance, manifests = random.Random(0), set[bytes]()
    wrong, moments, states = [], set(), 0
    for crash in crashes(operations, chance, exhaustive):
        states += 1
        moments.add(crash.at)
        base = folder / "state"
        base.mkdir()
        lay_out(crash.tree, base)
        try:
            check(base / "run", crash, manifests, save_again=states % 100 == 0)
        except (AssertionError, CheckpointError) as error:
            wrong.append(f"power lost at operation {crash.at}: {error}")
        shutil.rmtree(base)
        if wrong and to_first:
            break
    return Tried(states, len(moments), wrong)


def check(root: Path, crash: Crash, manifests: set[bytes], *, save_again: bool) -> None:
    """Everything visible is whole, and nothing acknowledged is lost."""
    checkpoints = list_checkpoints(root) if (root / "checkpoints").is_dir() else []
    for path in checkpoints:
        check_whole(path, manifests)
    if crash.last_word is None and not checkpoints:
        return
    newest, errors = latest_intact(root)
    assert errors == [], f"skipped {errors}"
    assert newest.manifest.step >= (crash.last_word or 0), f"{crash.last_word} lost"
    latest = latest_checkpoint(root)
    assert latest in checkpoints
    assert read_manifest(latest).step >= (crash.last_word or 0), f"{crash.last_word} not the latest"
    if save_again:
        savers.save(root, 40, ROWS)
        assert load_checkpoint(latest_checkpoint(root)).manifest.step == 40
        assert not list((root / "checkpoints").glob(".*")), "leftovers were not swept"


def check_whole(path: Path, manifests: set[bytes]) -> None:
    """Its bytes are those that its manifest says; `known` manifests need no look at the values."""
    checkpoint = load_checkpoint(path)
    manifest = (path / MANIFEST).read_bytes()
    if manifest not in manifests:
        assert savers.holds(checkpoint), f"{path.name} does not hold what was saved"
        manifests.add(manifest)


@pytest.mark.timeout(3600)
def test_after_a_loss_of_power_there_is_the_old_or_the_new(folder: Path) -> None:
    cases = []
    for number, (name, story) in enumerate(STORIES.items()):
        outcome = replay(record_operations(story, folder / str(number)), folder, STATES)
        what = f"states after a loss of power at {outcome.moments} moments of {name}: neither"
        cases.append(figures.none_of(outcome.states, what, outcome.wrong))
    figures.write("power-loss", cases)


@pytest.mark.parametrize("name", ["write_synced", "sync_folder", "sync_file"])
def test_the_replay_finds_what_a_missing_sync_would_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The trial above can fail: a store that forgets one kind of sync is found out."""
    without: dict[str, Callable[..., object]] = {
        "write_synced": lambda path, content: path.write_bytes(content),
        "sync_folder": lambda _: None,
        "sync_file": lambda _: None,
    }
    monkeypatch.setattr(atomic, name, without[name])
    outcome = replay(record_operations(second_save, folder), folder, exhaustive=64, to_first=True)
    assert outcome.wrong


@pytest.mark.torture
def test_a_folder_deleted_in_place_would_be_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion that does not first give up the name leaves half a checkpoint."""
    monkeypatch.setattr(atomic, "discard", atomic.remove_tree)
    outcome = replay(
        record_operations(old_one_pruned, folder), folder, exhaustive=64, to_first=True
    )
    assert outcome.wrong


if figures.FULL and shutil.which("strace"):  # which only looks on, and once is enough

    def test_the_recorder_sees_every_call_that_the_kernel_sees(tmp_path: Path) -> None:
        """Names made, renamed and removed, and syncs, as counted from outside the process."""
        program = (
            "import sys, json; from collections import Counter; from pathlib import Path\n"
            "sys.path[:0] = sys.argv[2:]\n"
            "from power import Names, Synced\n"
            "from test_power_loss import old_one_pruned, record_operations\n"
            "operations = record_operations(old_one_pruned, Path(sys.argv[1]))\n"
            "print(json.dumps(Counter(type(o).__name__ for o in operations)))\n"
        )
        calls = tmp_path / "calls"
        tests_dir, python = Path(__file__).parent, (sys.executable, "-c")
        strace = "strace -f -y -e trace=fsync,fdatasync,sync_file_range -o"
        result = subprocess.run(
            [
                *strace.split(),
                calls,
                *python,
                program,
                tmp_path,
                tests_dir,
                tests_dir.parent / "support",
            ],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        base = str(tmp_path / "runs")
        # a call during which another thread made one is on two lines, the path on the first
        n_syncs = sum(
            base in line and ("= 0" in line or "<unfinished" in line)
            for line in calls.read_text().splitlines()
        )
        counts = json.loads(result.stdout)
        assert counts["Synced"] - 2 == n_syncs, (
            "beside what was settled before: the folder and the run's"
        )
