"""The disk is full in a save: the error says so, nothing half is seen, the next save works."""

from __future__ import annotations

import json
import random
from pathlib import Path

import figures
import pytest
import savers
from forks import Forks
from tiny_run import STEPS, Place, codes, events, output_of

TRIES = figures.times(6, 100)
SIZE_BYTES = 4 * savers.ROWS * sum(savers.COMPONENTS.values())


@pytest.mark.timeout(3600)
def test_a_full_disk_leaves_nothing_and_stops_nothing(forks: Forks, tmp_path: Path) -> None:
    """On a real small disk where one may be mounted, else with a limit on the size of files."""
    chance = random.Random(0)
    wrong, kind, refusal = [], "tmpfs", ""
    for number in range(TRIES):
        root = tmp_path / str(number)
        root.mkdir()
        largest = SIZE_BYTES if kind == "tmpfs" else SIZE_BYTES // 2
        room = chance.choice((0, 1, chance.randrange(largest), largest - 1))
        facts = save_in(forks, root, room, kind)
        if "refused" in facts:
            refusal, kind = str(facts["refused"]), "limit"
            facts = save_in(forks, root, room, kind)
        if not as_it_must_be(facts, root):
            wrong.append(f"{room} bytes of room: {facts}")
    how = "a tmpfs" if kind == "tmpfs" else f"a limit on files (tmpfs: {refusal})"
    figures.write(
        "full-disk",
        [
            figures.none_of(
                TRIES,
                f"disk full mid-save, by {how}: no clear error, something partial, or no next save",
                wrong,
            )
        ],
    )


def save_in(forks: Forks, root: Path, room: int, kind: str) -> dict[str, object]:
    body = "savers:save_with_too_little_room"
    child = forks.start(body, str(root), 10, room, kind, place=root.parent)
    assert child.finish() == 0, child.output()
    facts: dict[str, object] = json.loads(child.output().splitlines()[-1])
    return facts


def as_it_must_be(facts: dict[str, object], root: Path) -> bool:
    message = str(facts["told"])
    clear = str(root / "checkpoints") in message and (
        "No space" in message or "too large" in message
    )
    same = facts["before"] == facts["after"] == ["latest", "step-10"]
    goes_on = facts["then"] == "step-12" and not facts["left_over"] and not facts["skipped"]
    return clear and same and facts["found"] == "step-10" and goes_on


RANKS = (1, 2)[: figures.times(1, 2)]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_whose_disk_stays_full_ends_and_every_rank_names_the_cause(
    place: Place, ranks: int
) -> None:
    """Rank 0 has no room for a checkpoint after step 8."""
    run_dir = place.path / "run"
    children = place.train(
        run_dir, "checkpoint.every_steps=5", ranks=ranks, body="failures:full_from_step_8"
    )
    assert set(codes(children)) == {4}, output_of(children)
    assert "File too large" in children[0].output()
    for rank in range(ranks):
        log = (run_dir / "logs" / f"rank_{rank}.log").read_text()
        assert "File too large" in log
        assert "step 20" in log
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [5]
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names <= {"latest", "best", "line", "step-5"}
    resumed_children = place.resume(run_dir, ranks=ranks)
    assert set(codes(resumed_children)) == {0}, output_of(resumed_children)


@pytest.mark.torture
@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_whose_disk_has_room_again_goes_on(place: Place, ranks: int) -> None:
    """The save of step 10 fails, which is said; that of step 15 is made."""
    run_dir = place.path / "run"
    saving = ("checkpoint.every_steps=5", "checkpoint.asynchronous=false")
    children = place.train(run_dir, *saving, ranks=ranks, body="failures:full_at_step_10")
    assert set(codes(children)) == {0}, output_of(children)
    assert "File too large" in children[0].output()
    warnings = [event["message"] for event in events(run_dir, "warning")]
    assert any("File too large" in message for message in warnings)
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [5, 15, 20, STEPS]


@pytest.mark.torture
@pytest.mark.parametrize("background", ["true", "false"][: figures.times(1, 2)])
def test_a_disk_that_is_full_for_one_of_two_parts_leaves_nothing(
    place: Place, background: str
) -> None:
    """Rank 1 has no room for its rows in the save of step 10; that of step 15 is made."""
    run_dir = place.path / "run"
    keys = (
        "checkpoint.every_steps=5",
        f"checkpoint.asynchronous={background}",
        "parallel.strategy=fsdp",
        "optimizer.name=adamw",
    )
    body = "failures:rank_1_full_at_step_10"
    children = place.train(run_dir, *keys, ranks=2, body=body)
    assert set(codes(children)) == {0}, output_of(children)
    (warning,) = (event["message"] for event in events(run_dir, "warning"))
    assert "rank 1" in warning
    assert "File too large" in warning
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [5, 15, 20, STEPS]
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.torture
def test_a_disk_full_for_three_seconds_costs_no_line_of_the_record(place: Place) -> None:
    small, copy = place.path / "small", place.path / "copy"
    small.mkdir()
    argv = ["train", "run.yaml", "--set", f"record.run_dir={small / 'run'}"]
    body = "failures:full_from_step_8_to_20"
    child = place.forks.start(body, argv, str(small), str(copy), place=place.path)
    assert child.finish() == 0, child.output()
    assert child.output().count("are held in memory") == 1
    run_dir = copy / "run"
    assert [event["step"] for event in events(run_dir, "train")] == list(range(1, STEPS + 1))
    assert events(run_dir)[-1]["kind"] == "run_finished"
    (warning,) = events(run_dir, "warning")
    assert "no line was lost" in warning["message"]
    log = (run_dir / "logs" / "rank_0.log").read_text()
    assert all(f"step {step}: loss" in log for step in range(1, STEPS + 1))


@pytest.mark.torture
@pytest.mark.parametrize("ranks", RANKS)
def test_a_record_that_cannot_be_written_for_long_stops_the_run_saved(
    place: Place, ranks: int
) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, ranks=ranks, body="failures:full_until_given_up")
    assert set(codes(children)) == {4}, output_of(children)
    assert "cannot write" in children[0].output()
    assert f"instar resume {run_dir}" in children[0].output()
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    assert 8 <= int(checkpoint.name.removeprefix("step-")) <= 10
    resumed_children = place.resume(run_dir, ranks=ranks)
    assert set(codes(resumed_children)) == {0}, output_of(resumed_children)
    assert events(run_dir)[-1]["kind"] == "run_finished"


def test_a_file_system_without_locks_is_warned_of(place: Place) -> None:
    run_dir = place.path / "run"
    (child,) = place.train(run_dir, "train.until=[2it]", body="failures:without_flock")
    assert child.finish() == 0, child.output()
    assert "has no locks" in child.output()
    assert events(run_dir)[-1]["kind"] == "run_finished"
