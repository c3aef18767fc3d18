"""Bytes from rank 0 to one other rank at a time, beside the exchanges of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from instar.distributed.failure import PeerLost
from instar.distributed.world import World, beside


class Parcels:
    """A channel of its own, to be used from one thread of each rank.

    All ranks make it together. What is sent waits until the other side receives it.
    """

    def __init__(self, world: World) -> None:
        self._world = beside(world)

    def send(self, label: Sequence[int], parcel: NDArray[np.uint8], to: int) -> None:
        """Send two numbers and any bytes.

        Raises:
            PeerLost: rank `to` is gone.
        """
        head = torch.tensor([*label, parcel.size], dtype=torch.int64)
        try:
            dist.send(head, to, group=self._world.group)
            if parcel.size:
                dist.send(torch.from_numpy(parcel), to, group=self._world.group)
        except RuntimeError as error:
            raise PeerLost(f"rank 0 lost rank {to} while sending samples") from error

    def receive(self) -> tuple[list[int], NDArray[np.uint8]]:
        """Wait for the next parcel: its two numbers, and its bytes, which are the caller's.

        Raises:
            PeerLost: rank 0 is gone.
        """
        head = torch.zeros(3, dtype=torch.int64)
        try:
            dist.recv(head, 0, group=self._world.group)
            *label, size = head.tolist()
            parcel = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(parcel, 0, group=self._world.group)
        except RuntimeError as error:
            rank = self._world.rank
            raise PeerLost(f"rank {rank} lost rank 0 while receiving samples") from error
        return label, parcel.numpy()
