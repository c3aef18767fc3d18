"""Ranks that are started again meet anew, and know what the first start has remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_room import Mishap, Room

from instar.distributed.world import recall, remember


@pytest.mark.parametrize(("way", "size", "restarts"), [("torchrun", 2, 2), ("launch", 2, 1)])
def test_ranks_that_are_started_again_find_the_run_of_the_first(
    tmp_path: Path, way: str, size: int, restarts: int
) -> None:
    mishap = Mishap("kill", size - 1, "step", starts=restarts, after_s=0)
    room = Room(tmp_path, size, mishap=mishap, last=5)
    with (room.torchrun if way == "torchrun" else room.launch)(max_restarts=restarts) as ranks:
        assert ranks.exit_codes() == [0], ranks.output()
    first, *later = (tmp_path / "found-0").read_text().splitlines()
    assert first == "None"
    assert len(later) == restarts
    assert set(later) == {(tmp_path / "first-run").read_text()}
    assert (tmp_path / "found-1").read_text().splitlines() == [first, *later]


def test_a_frozen_rank_is_ended_and_all_start_again(tmp_path: Path) -> None:
    """Torchrun asks a stopped process to end, and waits for it half a minute."""
    room = Room(
        tmp_path, silence_s=1, mishap=Mishap("freeze", 1, "step", starts=1, after_s=0), last=5
    )
    with room.torchrun(max_restarts=1) as ranks:
        ranks.wait_for("met-0-1", "met-1-1")
        assert (tmp_path / "met-0-1").stat().st_mtime - room.mishap_time() < 15
        assert ranks.exit_codes() == [0], ranks.output()
    assert "rank 1 has sent no heartbeat for 1 s" in room.log(0)


def test_without_a_launcher_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    remember("run_dir", "runs/a")
    assert recall("run_dir") is None


def test_a_single_rank_remembers_too(tmp_path: Path) -> None:
    room = Room(tmp_path, size=1, mishap=Mishap("kill", 0, "step", starts=1, after_s=0), last=5)
    with room.launch(max_restarts=1) as ranks:
        assert ranks.exit_codes() == [0], ranks.output()
    lines = (tmp_path / "found-0").read_text().splitlines()
    assert lines == ["None", (tmp_path / "first-run").read_text()]
