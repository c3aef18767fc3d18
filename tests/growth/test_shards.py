"""`grow` of a model that `fully_shard` has divided among two processes."""

from __future__ import annotations

from pathlib import Path

from cases import parametrize_first
from forks import Forks, children_as_ranks


@parametrize_first(
    ("kind", "operations"),
    [
        ("llama", ["widen_mlp_split", "insert_layers", "widen_hidden"]),
        ("qwen2", ["resize_vocab", "insert_means", "add_groups"]),  # whose head is the table
    ],
    first=1,
)
def test_shards_grow_as_the_whole_model_does(
    kind: str, operations: list[str], tmp_path: Path, forks: Forks
) -> None:
    forks.import_now("grown_shards")
    ranks = children_as_ranks(forks, 2, "grown_shards:run", kind, *operations, place=tmp_path)
    for rank in ranks:
        assert rank.finish() == 0, rank.output()


def test_replicas_that_disagree_go_the_same_way(tmp_path: Path, forks: Forks) -> None:
    forks.import_now("grown_shards")
    for rank in children_as_ranks(forks, 2, "grown_shards:run_replicas", place=tmp_path):
        assert rank.finish() == 0, rank.output()
