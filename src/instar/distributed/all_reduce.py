"""Sums whose bits do not depend on how many processes hold the summands.

Floating-point addition is not associative: a sum is a tree, and another tree is another sum. Large
tensors are added in one fixed tree (`DeterministicAllReduce`), single numbers without rounding (`exact_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from instar.distributed.agree import collective, gather
from instar.distributed.world import World


class Subtrees:
    """Adds lists of tensors, one list per leaf, in a complete binary tree as they arrive.

    At most log2(number of leaves) + 1 lists are held.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []
        """complete subtrees as (number of leaves, sums), from left to right"""

    def add(self, leaf: list[Tensor]) -> list[list[Tensor]]:
        """Add the next leaf; takes ownership of it. Return the lists that are free again."""
        right, leaves, free = leaf, 1, []
        while self._sums and self._sums[-1][0] == leaves:
            _, left_sum = self._sums.pop()
            if left_sum:
                torch._foreach_add_(left_sum, right)
            free.append(right)
            right, leaves = left_sum, 2 * leaves
        self._sums.append((leaves, right))
        return free

    def root(self, leaves: int) -> list[Tensor]:
        """Return the sums over all leaves, of which there are `leaves`, and start again."""
        ((count, total),) = self._sums
        if count != leaves:
            raise ValueError(f"expected {leaves} leaves, got {count}")
        self._sums.clear()
        return total


class DeterministicAllReduce:
    """All-reduce that adds one flat tensor per leaf in a complete binary tree over all leaves.

    Each of W processes owns L / W adjacent leaves, that is, a whole subtree, and adds them as they
    arrive; the processes then reduce the top of the tree together. A process holds at most
    log2(L / W) + 1 tensors, and at least two if W > 1.
    """

    def __init__(self, world: World, leaves: int, length: int, dtype: torch.dtype) -> None:
        """
        Args:
            leaves: number of leaves over all processes, a power of two divisible by the world size.
            length: number of elements of each leaf.
        """
        if leaves & (leaves - 1) or leaves % world.size:
            raise ValueError(f"cannot divide {leaves} leaves among {world.size} processes")
        self.world = world
        self.leaves = leaves // world.size
        self._length, self._dtype = length, dtype
        self._free: list[Tensor] = []
        self._sums = Subtrees()

    def leaf(self) -> Tensor:
        """Return a zeroed tensor to fill and pass to `add` as this process's next leaf."""
        return self._take().zero_()

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf; takes ownership of the tensor."""
        self._free += (free for (free,) in self._sums.add([leaf]))

    def root(self) -> Tensor:
        """Return the sum of all leaves, identical on all processes. A collective if W > 1.

        The tensor is valid until the next call of `leaf`.

        Raises:
            PeerLost: another process is gone.
        """
        (total,) = self._sums.root(self.leaves)
        if self.world.size > 1:
            self._add_top(total)
        self._free.append(total)
        return total

    def _add_top(self, subtree: Tensor) -> None:
        """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
        MPICH", 2005, with the nearest peer first, so that every element is added in tree order. A
        process sends 2 (W - 1) / W of its tensor.
        """
        buffer = self._take()
        begin, end = 0, self._length
        shared = []
        with collective(self.world, "adding gradients"):
            for level in range(self.world.size.bit_length() - 1):
                peer = self.world.rank ^ (1 << level)
                middle = (begin + end) // 2
                halves = slice(begin, middle), slice(middle, end)
                added_half, sent_half = halves if self.world.rank < peer else reversed(halves)
                _swap(peer, subtree[sent_half], buffer[added_half])
                # floating-point addition commutes bit for bit, so either operand may be the left one
                subtree[added_half] += buffer[added_half]
                begin, end = added_half.start, added_half.stop
                shared.append((peer, added_half, sent_half))
            for peer, added_half, sent_half in reversed(shared):
                _swap(peer, subtree[added_half], subtree[sent_half])
        self._free.append(buffer)

    def _take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._length, dtype=self._dtype, device=self.world.device)


def tree_sum(rows: Tensor) -> Tensor:
    """Return the sum of the rows in a binary tree, complete if their number is a power of two."""
    while len(rows) > 1:
        pairs = rows[: len(rows) // 2 * 2]
        sums = pairs[0::2] + pairs[1::2]
        rows = sums if len(rows) % 2 == 0 else torch.cat((sums, rows[-1:]))
    return rows[0]


def row_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of each row, float64; its bits do not depend on the other rows."""
    if not tensor.numel():
        return tensor.new_zeros(0, dtype=torch.float64)
    flat = tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    if flat.shape[1] == 1:
        return flat[:, 0].double().square()
    # a reduction to a single number may be divided among threads
    is_single = len(flat) == 1
    flat = flat.expand(2, -1) if is_single else flat
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return norms[: 1 if is_single else None].square()


def norms_of_rows(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the Euclidean norm of each group of tensors, given as the `row_squares` of all rows of
    each; (groups,), float64."""
    none = torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.cat(list(group)).sum().sqrt() if group else none for group in groups])


def _swap(peer: int, outgoing: Tensor, incoming: Tensor) -> None:
    operations = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def exact_sums(world: World, columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Sum each column over all ranks, rounded once, so that neither the order of the values nor their
    distribution over ranks matters. A collective.

    All ranks pass the same columns; the number of values in a column may differ, or be 0.
    """
    own_sums = [str(exact_sum(values)) for values in columns.values()]
    everyones = cast(list[list[str]], gather(world, own_sums))
    sums = (exact_sum([*map(parse_sum, texts)]) for texts in zip(*everyones, strict=True))
    return dict(zip(columns, map(nearest_float, sums), strict=True))


def total(values: Sequence[float]) -> float:
    """Return the sum of `values`, rounded once, so that their order does not matter."""
    return nearest_float(exact_sum(values))


def exact_sum(values: Sequence[float | Fraction]) -> Fraction | float:
    """Return the sum without rounding; inf or nan if a value is not finite."""
    odd = [value for value in values if isinstance(value, float) and not math.isfinite(value)]
    return sum(odd) if odd else sum((Fraction(value) for value in values), Fraction())


def nearest_float(value: Fraction | float) -> float:
    """Return the nearest float; inf beyond the largest one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_sum(text: str) -> Fraction | float:
    """Return the sum whose text is `str(exact_sum(…))`."""
    return Fraction(text) if text[-1].isdigit() else float(text)
