"""Squashing and removing give up what they say, and nothing else, also when they are killed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from chains import after, same, save

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import append, links, load_state, verify_chain
from instar.extensions.delta.format.folder import INDEX
from instar.extensions.delta.replay import rebuild_index, remove_states, squash_links
from instar.record import atomic


class Killed(BaseException):
    """Stands for the end of the process."""


def test_squashed_links_have_one_result(tmp_path: Path) -> None:
    states = save(tmp_path, 9)
    link = squash_links(tmp_path, 6, 7)
    assert (link.first, link.number) == (6, 7)
    squash_links(tmp_path, 1, 4)
    assert [chain_link.number for chain_link in verify_chain(tmp_path)] == [0, 4, 5, 7, 8]
    for number in (0, 4, 5, 7, 8):
        assert same(load_state(tmp_path, number), states[number])
    assert link in links(tmp_path)
    squash_links(tmp_path, 7, 8)
    assert same(load_state(tmp_path), states[8])
    append(tmp_path, 90, after(states[8], 9), states[8])
    verify_chain(tmp_path)


@pytest.mark.parametrize(("first", "last"), [(3, 7), (5, 7), (7, 6)])
def test_only_links_between_anchors_are_squashed(tmp_path: Path, first: int, last: int) -> None:
    save(tmp_path, 8)
    with pytest.raises(CheckpointError, match="cannot be squashed"):
        squash_links(tmp_path, first, last)
    assert len(verify_chain(tmp_path)) == 8


def test_old_states_are_removed_up_to_an_anchor(tmp_path: Path) -> None:
    states = save(tmp_path, 8)
    assert remove_states(tmp_path, 4) == []
    assert len(remove_states(tmp_path, 6)) == 5
    assert [link.number for link in verify_chain(tmp_path)] == [5, 6, 7]
    assert same(load_state(tmp_path), states[7])
    append(tmp_path, 80, after(states[7], 8), states[7])
    assert verify_chain(tmp_path)[-1].number == 8


@pytest.mark.parametrize("removal_count", range(4))
def test_a_chain_is_whole_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removal_count: int
) -> None:
    """Squashing is killed after some of its removals, then collecting after some of its own."""
    states = save(tmp_path, 8)
    removals = iter(range(removal_count))

    def removes(path: Path) -> None:
        if path.name.startswith("link") and next(removals, None) is None:
            raise Killed
        path.unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "remove_tree", removes)
        with pytest.raises(Killed) if removal_count < 3 else nullcontext():
            squash_links(tmp_path, 1, 4)
    assert [link.number for link in verify_chain(tmp_path)] == [0, 4, 5, 6, 7]
    assert len(remove_states(tmp_path)) == max(0, 3 - removal_count)
    assert same(load_state(tmp_path, 4), states[4])
    real, removals = Path.unlink, iter(range(removal_count))

    def unlinks(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith((".delta", "-0.safetensors")) and next(removals, None) is None:
            raise Killed
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlinks)
        with pytest.raises(Killed) if removal_count < 2 else nullcontext():
            remove_states(tmp_path, 7)
    assert [link.number for link in verify_chain(tmp_path)] == [5, 6, 7]


@pytest.mark.parametrize("content", [None, b"{}\n"])
def test_a_lost_index_is_written_anew(tmp_path: Path, content: bytes | None) -> None:
    states = save(tmp_path, 3)
    (tmp_path / INDEX).unlink()
    if content is not None:
        (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=INDEX):
        append(tmp_path, 3, states[2], states[2])
    assert [link.number for link in rebuild_index(tmp_path)] == [0, 1, 2]
    assert same(load_state(tmp_path), states[2])
