"""P2PChannel over real gloo: in their order, of any size, beside other exchanges; a peer that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[[str, int], list[dict[str, Any]]]

OPENING = """
import numpy as np
from instar.distributed.agree import agree
from instar.distributed.agree import P2PChannel

def content(number, size):
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
"""

SIZES = "SIZES = [0, 1, 1000, 0, (64 << 20) + 17, 3]\n"

BOTH_WAYS = """
import threading

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    parcels = P2PChannel(world)
    found = []

    def carry():
        for number, size in enumerate(SIZES):
            for to in range(1, world.size):
                if world.is_main:
                    parcels.send([7, number * world.size + to], content(number + to, size), to)
        if not world.is_main:
            for number, size in enumerate(SIZES):
                (feed, serial), parcel = parcels.receive()
                same = np.array_equal(parcel, content(number + world.rank, size))
                parcel[:1] = 0
                found.append([feed, serial - number * world.size, same])

    carrying = threading.Thread(target=carry)
    carrying.start()
    agreed = [agree(world, number if world.is_main else None) for number in range(50)]
    carrying.join()
    answer(found=found, agreed=agreed)
"""


def test_parcels_come_whole_and_in_order_beside_other_exchanges(ranks: Ranks) -> None:
    first, *receivers = ranks(OPENING + SIZES + BOTH_WAYS, 3)
    assert first["found"] == []
    for rank, other in enumerate(receivers, 1):
        assert other["found"] == [[7, rank, True]] * 6
        assert other["agreed"] == list(range(50))


DYING = """
import os, time
from instar.distributed.failure import PeerLost

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    parcels = P2PChannel(world)
    begun = time.monotonic()
    error = ""
    try:
        for number in range(1000):
            if number == 3 and world.rank == VICTIM:
                answer(died=True)
                os._exit(9)
            if world.is_main:
                parcels.send([1, number], content(number, 100_000), to=1)
            else:
                parcels.receive()
    except PeerLost as lost:
        error = str(lost)
    answer(error=error, seconds=time.monotonic() - begun)
    os._exit(0)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_is_noticed_at_once_and_named(ranks: Ranks, victim: int) -> None:
    answers = ranks(OPENING + f"VICTIM = {victim}\n" + DYING, 2)
    assert answers[victim] == {"died": True}
    survivor = 1 - victim
    doing = "sending" if survivor == 0 else "receiving"
    message = f"rank {survivor} lost rank {victim} while {doing} samples"
    assert answers[survivor]["error"] == message
    assert answers[survivor]["seconds"] < 2
