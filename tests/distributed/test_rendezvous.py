from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.distributed.failure import RunFailed
from instar.distributed.rendezvous import RendezvousStore, wait_for_all_ranks


def a_store() -> RendezvousStore:
    store: RendezvousStore = dist.HashStore()  # type: ignore[attr-defined]
    return store


def start(
    store: RendezvousStore, ranks: list[int], size: int, timeout_s: float
) -> list[str | Exception]:
    """What the roll call gives each of `ranks`, all at once; the others of `size` are absent."""

    def wait(rank: int) -> str | Exception:
        try:
            return wait_for_all_ranks(store, rank, size, timeout_s)
        except RunFailed as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(wait, ranks))


def test_all_ranks_get_one_name() -> None:
    assert len(set(start(a_store(), [0, 1, 2], 3, 10))) == 1


def test_a_restart_in_the_same_store_gets_another_name() -> None:
    store = a_store()
    first = start(store, [0, 1], 2, 10)
    second = start(store, [0, 1], 2, 10)
    assert len(set(second)) == 1
    assert set(first).isdisjoint(second)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sets(st.integers(0, 2), min_size=1, max_size=2), max_size=2))
def test_dead_predecessors_do_not_count(dead_rounds: list[set[int]]) -> None:
    store = a_store()
    for came in dead_rounds:
        assert all(isinstance(end, RunFailed) for end in start(store, sorted(came), 3, 0.01))
    names = start(store, [0, 1, 2], 3, 10)
    assert len(set(names)) == 1
    assert isinstance(names[0], str)


def test_who_did_not_come_is_named() -> None:
    with pytest.raises(RunFailed, match="rank 1, 2 of 3 did not join"):
        wait_for_all_ranks(a_store(), 0, 3, timeout_s=0.05)


def test_a_rank_known_only_from_an_earlier_start_is_missed() -> None:
    store = a_store()
    start(store, [0, 1, 2], 3, 10)
    ends = start(store, [0, 1], 3, 0.2)
    assert "rank 2 of 3 did not join" in str(ends[0])
