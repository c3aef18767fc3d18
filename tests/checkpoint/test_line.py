"""Which checkpoints lie on the line that a run is on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from instar.checkpoint.listing import (
    RetentionPolicy,
    latest_checkpoint,
    latest_intact,
    list_checkpoints,
    prune_checkpoints,
)
from instar.checkpoint.manifest import (
    LINE,
    CheckpointError,
    Facts,
    RunStart,
    is_on_line,
    line_of,
    line_of_start,
    read_manifest,
    superseded_at,
    write_line,
)
from instar.checkpoint.store import LATEST, CheckpointContent, publish_checkpoint


def save(root: Path, step: int, line: list[RunStart], loss: float | None = None) -> Path:
    tensors = {"weight": torch.full((4,), float(step))}
    facts = Facts(loss=loss, line=line)
    state = {"starts": len(line)}
    return publish_checkpoint(
        root, step, CheckpointContent({"model": tensors}, state, {}, facts=facts)
    )


def damage(path: Path, file: str = "model.safetensors") -> None:
    (path / file).write_bytes(b"")


@pytest.fixture
def forked_run(tmp_path: Path) -> Path:
    """Saved at 10, 20 and 30; gone back to 20, and saved at 25."""
    first = line_of_start(None)
    for step in (10, 20, 30):
        save(tmp_path, step, first)
    second = line_of_start(read_manifest(tmp_path / "checkpoints" / "step-20"))
    write_line(tmp_path, second)
    save(tmp_path, 25, second)
    return tmp_path


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


@pytest.mark.parametrize("has_line", [True, False])
def test_what_was_saved_behind_the_step_gone_back_to_lies_on_a_branch(
    forked_run: Path, has_line: bool
) -> None:
    """Also where only the manifests are left to tell."""
    if not has_line:
        (forked_run / "checkpoints" / LINE).unlink()
    line = line_of(forked_run)
    branches = {
        path.name: superseded_at(read_manifest(path), line) for path in list_checkpoints(forked_run)
    }
    assert branches == {"step-10": None, "step-20": None, "step-30": 20, "step-25": None}


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_behind_a_damaged_latest_the_newest_of_the_same_line_is_found(
    forked_run: Path, file: str
) -> None:
    damage(forked_run / "checkpoints" / "step-25", file)
    checkpoint, faults = latest_intact(forked_run)
    assert checkpoint.path.name == "step-20"
    assert len(faults) == 1


def test_without_a_pointer_the_latest_is_the_newest_of_the_line(forked_run: Path) -> None:
    shutil.rmtree(forked_run / "checkpoints" / "step-25")
    (forked_run / "checkpoints" / LATEST).unlink()
    assert latest_checkpoint(forked_run).name == "step-20"


def test_where_only_a_branch_is_whole_nothing_is_taken_and_the_branch_is_named(
    forked_run: Path,
) -> None:
    for step in (10, 20, 25):
        damage(forked_run / "checkpoints" / f"step-{step}")
    with pytest.raises(CheckpointError, match="step-30: on a branch"):
        latest_intact(forked_run)


def test_a_branch_takes_no_place_of_the_line_and_goes_when_it_is_old(forked_run: Path) -> None:
    second = list(read_manifest(forked_run / "checkpoints" / "step-25").line)
    prune_checkpoints(forked_run, RetentionPolicy(last=2, best=0))
    assert names(forked_run) == ["step-20", "step-30", "step-25"]
    save(forked_run, 28, second)
    prune_checkpoints(forked_run, RetentionPolicy(last=2, best=0))
    assert names(forked_run) == ["step-25", "step-28"]


def test_the_best_that_stays_is_that_of_the_line(tmp_path: Path) -> None:
    first = line_of_start(None)
    save(tmp_path, 10, first, loss=2.0)
    save(tmp_path, 20, first, loss=1.0)
    second = line_of_start(read_manifest(tmp_path / "checkpoints" / "step-10"))
    write_line(tmp_path, second)
    for step in (11, 12, 13):
        save(tmp_path, step, second, loss=3.0)
    prune_checkpoints(tmp_path, RetentionPolicy(last=1, best=1))
    assert names(tmp_path) == ["step-10", "step-13"]


def test_checkpoints_without_a_line_all_count(tmp_path: Path) -> None:
    for step in (10, 30, 20):
        save(tmp_path, step, [])
    assert line_of(tmp_path) is None
    assert latest_intact(tmp_path)[0].path.name == "step-20"
    line = line_of_start(read_manifest(tmp_path / "checkpoints" / "step-20"))
    assert all(is_on_line(read_manifest(path), line) for path in list_checkpoints(tmp_path))
