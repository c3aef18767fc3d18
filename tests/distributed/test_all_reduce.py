"""One sum, bit for bit, whoever holds which summands."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.distributed.all_reduce import DeterministicAllReduce, exact_sums
from instar.distributed.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="none")
LENGTH = 1001
"""no multiple of any number of processes"""


def summands(leaves: int) -> list[torch.Tensor]:
    """Normal numbers of very different sizes, so that another order is another sum."""
    generator = torch.Generator().manual_seed(leaves)
    return [torch.randn(LENGTH, generator=generator) * 10.0 ** (leaf % 5) for leaf in range(leaves)]


def pairwise(level: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours are added, then pairs of neighbours, and so on."""
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


def tree_sum(tree: DeterministicAllReduce, leaves: list[torch.Tensor]) -> torch.Tensor:
    for summand in leaves:
        leaf = tree.leaf()
        leaf += summand
        tree.add(leaf)
    return tree.root()


@pytest.mark.parametrize("leaves", [1, 2, 4, 8, 16])
def test_a_tree_adds_neighbours_then_pairs_of_neighbours(leaves: int) -> None:
    tree = DeterministicAllReduce(ALONE, leaves, LENGTH, torch.float32)
    assert torch.equal(tree_sum(tree, summands(leaves)), pairwise(summands(leaves)))


def test_one_after_the_other_would_be_another_sum() -> None:
    one_by_one = summands(8)[0]
    for summand in summands(8)[1:]:
        one_by_one = one_by_one + summand
    assert not torch.equal(one_by_one, pairwise(summands(8)))


def test_a_tree_is_used_again_without_new_memory() -> None:
    tree = DeterministicAllReduce(ALONE, 8, LENGTH, torch.float32)
    places = set()
    for _ in range(3):
        for summand in summands(8):
            leaf = tree.leaf()
            places.add(leaf.data_ptr())
            leaf += summand
            tree.add(leaf)
        assert torch.equal(tree.root(), pairwise(summands(8)))
    assert len(places) == math.log2(8) + 1


def test_a_leaf_too_few_is_noticed() -> None:
    tree = DeterministicAllReduce(ALONE, 2, LENGTH, torch.float32)
    tree.add(tree.leaf())
    with pytest.raises(ValueError, match="expected 2 leaves, got 1"):
        tree.root()


def test_leaves_that_cannot_be_shared_evenly_are_refused() -> None:
    three = World(rank=0, local_rank=0, size=3, device=torch.device("cpu"), backend="gloo")
    for world, leaves in ((ALONE, 6), (three, 8)):
        with pytest.raises(ValueError, match=f"cannot divide {leaves} leaves"):
            DeterministicAllReduce(world, leaves, LENGTH, torch.float32)


def numbers() -> list[float]:
    """Sixteen of whose sum little is left when they are added one by one."""
    return [1e16, 1.0, -1e16, 3e-9, 1e300, -1.0, -1e300, 7.0, *[0.1] * 4, -7.0, -0.1, -0.1, -0.1]


def exact_sum(values: list[float]) -> float:
    """Of one rank alone."""
    return exact_sums(ALONE, {"x": values})["x"]


PROGRAM = f"""
import torch
from instar.distributed.all_reduce import DeterministicAllReduce, exact_sums

LENGTH = {LENGTH}
{inspect.getsource(summands)}
{inspect.getsource(tree_sum)}
{inspect.getsource(numbers)}
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    def own(things):
        each = len(things) // world.size
        return things[world.rank * each : (world.rank + 1) * each]

    sums = []
    for leaves in (4, 8):
        tree = DeterministicAllReduce(world, leaves, LENGTH, torch.float32)
        for _ in range(2):
            sums.append(tree_sum(tree, own(summands(leaves))).numpy().tobytes().hex())
    exact = exact_sums(world, dict(x=own(numbers())))["x"]
    odd = [[float(text)] if world.rank == 1 else [1.0] for text in ("inf", "nan")]
    odd = list(map(str, exact_sums(world, dict(enumerate(odd))).values()))
    answer(sums=sums, exact=exact.hex(), odd=odd)
"""


@pytest.mark.parametrize("size", [2, 4])
def test_processes_find_the_bits_that_one_finds(
    ranks: Callable[[str, int], list[dict[str, Any]]], size: int
) -> None:
    expected_sums = [pairwise(summands(leaves)).numpy().tobytes().hex() for leaves in (4, 4, 8, 8)]
    for fact in ranks(PROGRAM, size):
        assert fact["sums"] == expected_sums
        assert fact["exact"] == exact_sum(numbers()).hex()
        assert fact["odd"] == ["inf", "nan"]


GONE = """
import os
from instar.distributed.all_reduce import DeterministicAllReduce
import torch

with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    tree = DeterministicAllReduce(world, 4, 1000, torch.float32)
    for _ in range(2):
        tree.add(tree.leaf())
    if world.rank == 1:
        answer()
        os._exit(1)
    answer(said=error_of(tree.root))
"""


def test_a_process_that_is_gone_is_noticed(
    ranks: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    message = ranks(GONE, 2)[0]["said"]
    assert message.startswith("PeerLost: rank 0 lost another rank while adding gradients")


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)), st.randoms())
def test_the_order_of_numbers_does_not_matter(values: list[float], chance: Any) -> None:
    shuffled_values = list(values)
    chance.shuffle(shuffled_values)
    assert exact_sum(shuffled_values) == exact_sum(values) == math.fsum(values)


def test_what_is_not_finite_stays_so() -> None:
    assert exact_sum([1.0, math.inf]) == math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert math.isnan(exact_sum([1.0, math.nan]))
    assert exact_sum([]) == 0.0
