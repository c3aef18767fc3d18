from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instar.checkpoint.listing import (
    BEST,
    RetentionPolicy,
    best_pointer,
    checkpoints_to_prune,
    latest_checkpoint,
    list_checkpoints,
    pointer_target,
    prune_checkpoints,
    update_pointer,
)
from instar.checkpoint.manifest import CheckpointError, Facts, Manifest, read_manifest
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint


def save(root: Path, step: int, loss: float | None = None) -> Path:
    tensors = {"weight": torch.full((4,), float(step))}
    facts = Facts(loss=loss)
    return publish_checkpoint(
        root, step, CheckpointContent({"model": tensors}, {}, {}, facts=facts)
    )


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def manifest(step: int, loss: float | None) -> tuple[Path, Manifest]:
    result = Manifest(
        step=step,
        time=float(step),
        world_size=1,
        files={},
        architecture={},
        history=[],
        versions={},
        loss=loss,
    )
    return Path(f"step-{step}"), result


def test_the_last_the_best_and_every_so_many_steps_stay(tmp_path: Path) -> None:
    losses = {100: 3.0, 150: 2.0, 200: 2.5, 250: None, 300: 2.9, 350: 2.8}
    for step, loss in losses.items():
        save(tmp_path, step, loss)
    paths = prune_checkpoints(tmp_path, RetentionPolicy(last=2, best=1, every=100))
    assert names(tmp_path) == ["step-100", "step-150", "step-200", "step-300", "step-350"]
    assert [path.name for path in paths] == ["step-250"]
    for path in list_checkpoints(tmp_path):
        load_checkpoint(path)


@pytest.mark.parametrize(("better", "best_step"), [("max", 2), ("min", 3)])
def test_the_best_are_those_of_a_metric_in_its_direction(
    tmp_path: Path, better: Literal["min", "max"], best_step: int
) -> None:
    for step, score in {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4}.items():
        facts = Facts(loss=float(step), metrics={"loss": float(step), "a/b": score})
        publish_checkpoint(
            tmp_path,
            step,
            CheckpointContent({"model": {"w": torch.ones(step)}}, {}, {}, facts=facts),
        )
    save(tmp_path, 5)  # which was not evaluated
    prune_checkpoints(tmp_path, RetentionPolicy(last=1, best=1, metric="a/b", better=better))
    assert names(tmp_path) == [f"step-{best_step}", "step-5"]


def test_checkpoints_of_earlier_versions_are_the_best_by_their_loss(tmp_path: Path) -> None:
    for step, loss in {1: 2.0, 2: 1.0, 3: 3.0}.items():
        save(tmp_path, step, loss)
    prune_checkpoints(tmp_path, RetentionPolicy(last=1, best=1, metric="loss"))
    assert names(tmp_path) == ["step-2", "step-3"]


METRICS = st.text(st.sampled_from("ab-/%2F_.é "), min_size=1, max_size=6)


@given(METRICS, METRICS)
def test_no_two_metrics_have_one_pointer(first: str, other: str) -> None:
    assert "/" not in best_pointer(first)
    assert (best_pointer(first) == best_pointer(other)) == (first == other)


def test_the_best_of_a_metric_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
    (tmp_path / "checkpoints" / "best-c-d").write_text(f"{third.name}\n")  # of an earlier version
    update_pointer(tmp_path, best_pointer("a/b"), first)
    update_pointer(tmp_path, best_pointer("a-b"), second)
    assert pointer_target(tmp_path, "best-a/b") == pointer_target(tmp_path, "best-a%2Fb") == first
    assert pointer_target(tmp_path, "best-a-b") == second
    assert pointer_target(tmp_path, "best-c/d") == pointer_target(tmp_path, "best-c-d") == third
    assert pointer_target(tmp_path, "best-../../x") is None


def test_what_latest_and_best_name_stays_whatever_is_asked(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    update_pointer(tmp_path, BEST, first)
    for step in (2, 3, 4):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, RetentionPolicy(last=1, best=0))
    assert names(tmp_path) == ["step-1", "step-4"]
    assert latest_checkpoint(tmp_path).name == "step-4"


def test_one_whose_manifest_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    broken = save(tmp_path, 1)
    (broken / "manifest.json").write_text("{")
    save(tmp_path, 2)
    save(tmp_path, 3)
    prune_checkpoints(tmp_path, RetentionPolicy(last=1))
    assert names(tmp_path) == ["step-1", "step-3"]


def test_the_last_saved_is_not_the_highest_step_after_going_back(tmp_path: Path) -> None:
    """A run that went on from step 100 saves step 150 after step 300."""
    for step in (100, 200, 300, 150):
        save(tmp_path, step)
    assert names(tmp_path)[-1] == "step-150"
    prune_checkpoints(tmp_path, RetentionPolicy(last=1))
    assert names(tmp_path) == ["step-150"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path, loss: float) -> None:
    save(tmp_path, 1, loss)
    save(tmp_path, 2, 5.0)
    save(tmp_path, 3)
    prune_checkpoints(tmp_path, RetentionPolicy(last=1, best=1))
    assert names(tmp_path) == ["step-2", "step-3"]
    assert read_manifest(tmp_path / "checkpoints" / "step-2").loss == 5.0


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 9)), max_size=30),
    st.integers(1, 5),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_no_more_and_no_less_than_asked_for_goes(
    losses: list[float | None], last: int, best: int, every: int | None
) -> None:
    checkpoints = [manifest(step, loss) for step, loss in enumerate(losses)]
    pruned_paths = checkpoints_to_prune(checkpoints, RetentionPolicy(last, best, every))
    remaining_paths = [path for path, _ in checkpoints if path not in pruned_paths]
    assert {path for path, _ in checkpoints[-last:]} <= set(remaining_paths)
    finite_losses = sorted(loss for loss in losses if loss is not None)
    remaining_losses = sorted(
        m.loss for path, m in checkpoints if path in remaining_paths and m.loss is not None
    )
    assert remaining_losses[: min(best, len(finite_losses))] == finite_losses[:best]
    limit = last + best + (0 if every is None else -(-len(losses) // every))
    assert len(remaining_paths) <= limit


def test_nothing_is_deleted_where_a_link_leads(tmp_path: Path) -> None:
    target, link_folder = tmp_path / "mine", tmp_path / "theirs"
    for step in (1, 2, 3):
        save(target, step)
    link_folder.mkdir()
    (link_folder / "checkpoints").symlink_to(target / "checkpoints")
    with pytest.raises(CheckpointError, match="symbolic link"):
        prune_checkpoints(link_folder, RetentionPolicy(last=1))
    assert names(target) == ["step-1", "step-2", "step-3"]
