"""Two ranks save one checkpoint, in the background or not, and refuse replicas that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instar.checkpoint.store import load_checkpoint

Ranks = Callable[[str, int], list[dict[str, Any]]]

PROGRAM = """
import torch
from instar.config.schema import CheckpointConfig
from instar.config.budget import Counters
from instar.run.output.save import Saver, Snapshot

def snapshot(step, weight, own):
    return Snapshot(
        {"model": {"weight": weight}, "rng": {"own": own}}, {}, {}, progress=Counters(step=step)
    )

def saver(world, root, background):
    told = []
    return Saver(CheckpointConfig(asynchronous=background), world, Path(root), told.append), told
"""

SAVE = """
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    made, told = saver(world, ROOT, BACKGROUND)
    weight = torch.arange(4.0)
    made.save(snapshot(1, weight, torch.tensor([world.rank])))
    weight += 1  # the next step must not reach what is being saved
    made.finish()
    answer(path=str(told[0].path), error=str(told[0].error))
"""

AGAIN = """
from instar.checkpoint import tensor_file
from instar.checkpoint.store import load_checkpoint
from instar.checkpoint.layout import SavedRows
tensor_file._FLUSHED_BYTES = 0  # all files are written past the page cache
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    made, told = saver(world, ROOT, True)
    whole = torch.arange(30_000.0).view(100, 300)
    rows = whole[50 * world.rank : 50 * world.rank + 50].clone()
    count = torch.tensor(0.0)
    places = []
    for step in (1, 2, 3):
        saved = {
            "rows": SavedRows(rows, 50 * world.rank, (100, 300), world.rank, 2, saved=True),
            "count": count,
        }
        parts = {"model": saved, "rng": {"own": torch.full((3,), 10 * step + world.rank)}}
        made.save(Snapshot(parts, {}, {}, progress=Counters(step=step)))
        rows += 1  # the next step must not reach what is being saved
        count += 1
        made.finish()
        places.append(made.spare.components["model"]["rows"].tensor.data_ptr())
    right = []
    for step in (1, 2, 3):
        found = load_checkpoint(Path(ROOT) / "checkpoints" / f"step-{step}")
        read, own = found.tensors("model"), found.tensors("rng", rank=world.rank)["own"]
        right += [torch.equal(read["rows"], whole + step - 1), read["count"].item() == step - 1]
        right.append(own.tolist() == [10 * step + world.rank] * 3)
    answer(reused=len(set(places)) == 1, right=right, errors=[str(each.error) for each in told])
"""

UNCOPIED = """
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    made, told = saver(world, ROOT, True)
    own = torch.zeros(2, dtype=torch.complex128 if world.rank else torch.float32)
    error = error_of(lambda: made.save(snapshot(1, torch.arange(4.0), own)))
    answer(error=error, told=len(told))
"""

UNSEEN = """
glob = Path.rglob
Path.rglob = lambda self, *a: (path for path in glob(self, *a) if path.name != "rank-1.safetensors")
"""

DRIFT = """
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    made, told = saver(world, ROOT, False)
    weight = torch.arange(4.0) + world.rank
    error = error_of(lambda: made.save(snapshot(1, weight, torch.tensor([world.rank]))))
    answer(error=error, told=len(told))
"""


DAMAGED = """
def tensors():
    matrix = torch.arange(12.0).view(3, 4)
    return {
        "model/contiguous": matrix.clone(),
        "model/transposed": matrix.clone().t(),
        "model/with gaps": matrix.repeat_interleave(2, 1)[:, ::2],
        "model/channels last": torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last) * 0 + 1,
        "model/number": torch.tensor(1.0),
        "model/half": torch.ones(3, dtype=torch.bfloat16),
        "model/double": torch.ones(3, dtype=torch.float64),
        "model/flags": torch.tensor([True, False]),
        "optimizer/w/step": torch.tensor(3.0),
        "optimizer/w/exp_avg": matrix.clone(),
        "optimizer/w/count.number": torch.tensor(7),
        "ema/w": matrix.clone(),
    }

def damages(tensor):
    last = (-1,) * tensor.ndim
    if tensor.is_floating_point():
        lower = tensor.clone()
        # the next number, of which no sum or mean tells
        lower[last] = torch.nextafter(tensor[last], torch.tensor(9.0, dtype=tensor.dtype))
        yield "one bit", lower
        odd = tensor.clone(); odd[last] = torch.nan
        yield "not a number", odd
        signed = tensor.clone(); signed[(0,) * tensor.ndim] = -0.0
        yield "minus 0", signed
        yield "another type", tensor.double() if tensor.dtype != torch.float64 else tensor.float()
    else:
        other = tensor.clone(); other[last] = ~other[last] if tensor.dtype == torch.bool else other[last] + 1
        yield "one element", other
    yield "another shape", tensor[None]
    yield "nothing", None

def of(named):
    components = {"rng": {"own": torch.tensor([world.rank])}}
    for name, tensor in named.items():
        component, _, rest = name.partition("/")
        components.setdefault(component, {})[rest] = tensor
    return Snapshot(components, {}, {}, progress=Counters(step=1))

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    of(tensors()).check_replicas(world)
    # another order in memory is no difference
    of({name: t.contiguous() if world.rank else t for name, t in tensors().items()}).check_replicas(world)
    missed, tried = [], 0
    for name, tensor in tensors().items():
        for what, damaged in damages(tensor):
            if what == "minus 0" and tensor.flatten()[0] != 0:
                continue
            mine = tensors()
            if world.rank:
                mine[name] = damaged
                mine = {key: each for key, each in mine.items() if each is not None}
            told = error_of(lambda: of(mine).check_replicas(world))
            tried += 1
            if told != f"RunFailed: differs from rank 0's: {name} on rank 1":
                missed.append([name, what, told])
    answer(missed=missed, tried=tried)
"""

DRIFTED_SHARDS = """
from instar.checkpoint.layout import SavedRows
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    made, told = saver(world, ROOT, False)
    shard = world.rank % 2
    rows = torch.arange(4.0)[2 * shard : 2 * shard + 2]
    def save(step):
        saved = SavedRows(rows, 2 * shard, (4,), shard, 2, saved=world.rank < 2)
        made.save(snapshot(step, saved, torch.tensor([world.rank])))
    save(1)
    if world.rank == 3:
        rows = rows + 1
    answer(error=error_of(lambda: save(2)), told=len(told))
"""


def program(body: str, root: Path, background: bool = False) -> str:
    return PROGRAM + body.replace("ROOT", repr(str(root))).replace("BACKGROUND", str(background))


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_saves_its_own_and_rank_0_the_rest(
    ranks: Ranks, tmp_path: Path, background: bool
) -> None:
    answers = ranks(program(SAVE, tmp_path / "run", background), 2)
    assert answers[0] == answers[1] == {"path": answers[0]["path"], "error": "None"}
    checkpoint = load_checkpoint(Path(answers[0]["path"]))
    assert checkpoint.manifest.world_size == 2
    assert {name: entry.pattern for name, entry in checkpoint.manifest.files.items()} == {
        "model.safetensors": "REPLICATED",
        "rng/rank-0.safetensors": "PER_RANK",
        "rng/rank-1.safetensors": "PER_RANK",
        "state.json": "GLOBAL",
    }
    assert checkpoint.tensors("model")["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [checkpoint.tensors("rng", rank=rank)["own"].item() for rank in (0, 1)] == [0, 1]


def test_every_rank_overwrites_its_last_copy_and_each_checkpoint_is_of_one_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    for answer in ranks(program(AGAIN, tmp_path / "run"), 2):
        assert answer == {"reused": True, "right": [True] * 9, "errors": ["None"] * 3}


def test_what_one_rank_cannot_copy_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks(program(UNCOPIED, tmp_path / "run"), 2)
    assert all("own has dtype torch.complex128" in answer["error"] for answer in answers)
    assert [answer["told"] for answer in answers] == [0, 0]


def test_replicas_that_differ_are_refused_on_all_ranks_before_anything_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    answers = ranks(program(DRIFT, tmp_path / "run"), 2)
    for answer in answers:
        assert answer == {
            "error": "RunFailed: differs from rank 0's: model/weight on rank 1",
            "told": 0,
        }
    assert not (tmp_path / "run").exists()


def test_any_difference_in_any_tensor_of_any_component_is_found_and_named(
    ranks: Ranks, tmp_path: Path
) -> None:
    """However a tensor lies in memory."""
    for answer in ranks(program(DAMAGED, tmp_path / "run"), 2):
        assert answer["missed"] == []
        assert answer["tried"] > 50


def test_replicas_of_shards_that_differ_are_refused_too(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks 0 and 2 hold the same rows, and so do ranks 1 and 3."""
    for answer in ranks(program(DRIFTED_SHARDS, tmp_path / "run"), 4):
        assert answer == {
            "error": "RunFailed: differs from rank 1's: model/weight on rank 3",
            "told": 1,
        }
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert load_checkpoint(folder).tensors()["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_manifest_lists_a_file_of_another_rank_that_rank_0_does_not_see_yet(
    ranks: Ranks, tmp_path: Path
) -> None:
    """As on NFS, whose clients remember for a while what is in a folder."""
    answers = ranks(UNSEEN + program(SAVE, tmp_path / "run"), 2)
    files = load_checkpoint(Path(answers[0]["path"])).manifest.files
    assert {"rng/rank-0.safetensors", "rng/rank-1.safetensors"} <= set(files)
