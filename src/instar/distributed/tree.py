"""Sums whose bits do not depend on how many processes hold the summands.

Floating-point addition is not associative: a sum is a tree, and another tree is another sum. Large
tensors are added in one fixed tree (`Tree`), single numbers without rounding (`exact_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from instar.distributed.agree import gather, meeting
from instar.distributed.world import World


class Tree:
    """Adds one flat tensor per leaf in a complete binary tree over all leaves.

    Of L leaves a process of W has L / W neighbours, hence a whole subtree, which it adds as its
    leaves come; the processes add up the top. A process holds log2(L / W) + 1 tensors, and with
    several processes two at least.
    """

    def __init__(self, world: World, leaves: int, length: int, dtype: torch.dtype) -> None:
        """`leaves`: over all processes, a power of two that the world size divides."""
        if leaves & (leaves - 1) or leaves % world.size:
            raise ValueError(f"{world.size} processes cannot share a tree of {leaves} leaves")
        self.world = world
        self.leaves = leaves // world.size
        self._length, self._dtype = length, dtype
        self._free: list[Tensor] = []
        self._sums: list[tuple[int, Tensor]] = []
        """of complete subtrees, with their numbers of leaves, from left to right"""

    def leaf(self) -> Tensor:
        """Zeros, to be given to `add` as this process's next leaf."""
        return self._take().zero_()

    def add(self, leaf: Tensor) -> None:
        """Put in the next leaf, which is not the caller's any more."""
        right, leaves = leaf, 1
        while self._sums and self._sums[-1][0] == leaves:
            _, left = self._sums.pop()
            left.add_(right)
            self._free.append(right)
            right, leaves = left, 2 * leaves
        self._sums.append((leaves, right))

    def root(self) -> Tensor:
        """The sum of all leaves, the same on all processes, which meet here if they are several.

        It holds until the next `leaf`.

        Raises:
            PeerLost: another process is gone.
        """
        ((leaves, total),) = self._sums
        if leaves != self.leaves:
            raise ValueError(f"{leaves} leaves of {self.leaves} have come")
        self._sums.clear()
        if self.world.size > 1:
            self._add_top(total)
        self._free.append(total)
        return total

    def _add_top(self, subtree: Tensor) -> None:
        """Level by level, two processes share what they have both added so far, and each adds
        one half; then the halves go back the same way.

        Recursive halving and doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective
        Communication Operations in MPICH", 2005), nearest first: each element is added in the tree,
        and a process sends 2 (W - 1) / W of its tensor.
        """
        received = self._take()
        begin, end = 0, self._length
        shared = []
        with meeting(self.world, "adding gradients"):
            for level in range(self.world.size.bit_length() - 1):
                peer = self.world.rank ^ (1 << level)
                middle = (begin + end) // 2
                halves = slice(begin, middle), slice(middle, end)
                kept, given = halves if self.world.rank < peer else reversed(halves)
                _swap(peer, subtree[given], received[kept])
                # addition is commutative to the bit, so that either may be the left one
                subtree[kept] += received[kept]
                begin, end = kept.start, kept.stop
                shared.append((peer, kept, given))
            for peer, kept, given in reversed(shared):
                _swap(peer, subtree[kept], subtree[given])
        self._free.append(received)

    def _take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._length, dtype=self._dtype, device=self.world.device)


def _swap(peer: int, sent: Tensor, received: Tensor) -> None:
    both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def exact_sums(world: World, columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The sum of all ranks' values in each column, rounded once: who has which, and their order, do
    not matter.

    Ranks have the same columns; in them different numbers of values, or none.
    """
    mine = [str(_sum(values)) for values in columns.values()]
    everyones = cast(list[list[str]], gather(world, mine))
    sums = (float(sum(map(_number, texts))) for texts in zip(*everyones, strict=True))
    return dict(zip(columns, sums, strict=True))


def _sum(values: Sequence[float]) -> Fraction | float:
    if all(map(math.isfinite, values)):
        return sum(map(Fraction, values), Fraction())
    return sum(values)


def _number(text: str) -> Fraction | float:
    return Fraction(text) if text[-1].isdigit() else float(text)
