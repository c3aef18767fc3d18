"""Tensors of which each rank holds some rows: Muon on them, bit for bit as on whole ones; how they travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import collectives
from cases import parametrize_first

Ranks = Callable[[str, int, Path], list[dict[str, Any]]]
"""see conftest.py"""

MUON = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter
from instar.distributed.shards import to_local, local_row_range
from instar.run import muon

SHAPES = [(9, 33)] * 5 + [(33, 9)] * 2 + [(2, 40), (16, 16), (1, 5)]
"(1, 5) and (2, 40) have fewer rows than some worlds ranks; few are multiples of a vector register"

held = []
def orthogonalise(batch, *arguments, call=muon.orthogonalise):
    held.append(len(batch))
    return call(batch, *arguments)
muon.orthogonalise = orthogonalise

def trained(spread, iteration, dtype):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made = [Parameter(spread(each)) for each in drawn]
    groups = [{"params": made[:6], "weight_decay": 0.1}, {"params": made[6:], "weight_decay": 0.0}]
    optimizer = muon.BatchedMuon(groups, momentum=0.95, ns_steps=5, iteration=iteration, dtype=dtype)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        for index, (parameter, shape) in enumerate(zip(made, SHAPES)):
            gradient = torch.randn(shape, generator=generator)
            frozen = step == 1 and index in (2, 8)
            parameter.grad = None if frozen else spread(gradient)
        if step == 2:
            del optimizer.state[made[4]]  # as of a new matrix
        optimizer.step()
    return [(p.detach(), optimizer.state[p]["momentum_buffer"]) for p in made]

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    shape = (world.size // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))["shard"]
    equal, most = True, []
    for case in (("quintic", torch.bfloat16), ("polar_express", torch.float32)):
        wanted = trained(torch.clone, *case)
        held.clear()
        found = trained(lambda whole: distribute_tensor(whole, mesh, [Shard(0)]), *case)
        most.append(max(held, default=0))
        for pair, sharded in zip(wanted, found):
            for one, other in zip(pair, sharded):
                first, last = local_row_range(other)
                equal &= torch.equal(one[first:last], to_local(other))
    answer(equal=equal, most=max(most))
"""


@parametrize_first(("ranks", "shards"), [(2, 2), (3, 3), (4, 4), (4, 2)], first=2)
def test_muon_on_rows_is_muon_on_whole_matrices(
    ranks_in: Ranks, tmp_path: Path, ranks: int, shards: int
) -> None:
    """Of a shape or its transpose there are up to six in a group: no rank holds all of them."""
    answers = ranks_in(MUON.replace("SHARDS", str(shards)), ranks, tmp_path)
    assert all(answer["equal"] for answer in answers)
    assert max(answer["most"] for answer in answers) == -(-6 // shards)


GATHER = """
import torch
import torch.distributed as dist
from instar.config.language import ModelConfig
from instar.config.schema import RunConfig
from instar.distributed.shards import to_local
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT
from instar.run.parallel.choose import parallelize

sent = 0
def gather(output, part, *arguments, call=dist.all_gather_single, **named):
    global sent
    sent += part.nbytes if part.dtype == torch.uint8 else 0  # what torch sends itself are floats
    return call(output, part, *arguments, **named)
dist.all_gather_single = gather

def trained(world, **fsdp):
    global sent
    config = RunConfig(precision="bf16", parallel={"strategy": "fsdp", "fsdp": fsdp})
    shape = ModelConfig(
        n_layer=2, n_head=4, n_embd=64, context=16, norm="rmsnorm", activation="swiglu",
        positions="rope", bias=False, tied=False,
    )
    model = GPT(resolve_architecture(shape, 50))
    model.init_weights(0)
    strategy = parallelize(config, world, model)
    tokens = torch.arange(16).reshape(2, 8) % 8
    sent = 0
    with strategy.evaluating(None), torch.no_grad():
        outside = strategy.bare(tokens)
    evaluated, sent = sent, 0
    with torch.autocast("cpu", torch.bfloat16):
        loss = strategy.model(tokens, tokens.roll(-1))
    loss.backward()
    optimizer = torch.optim.AdamW(strategy.parameters.values(), fused=True)
    optimizer.step()
    made = [to_local(p) for p in strategy.parameters.values()]
    made += [to_local(p.grad) for p in strategy.parameters.values()]
    return [outside, *made], evaluated, sent

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    found, *_ = trained(world)
    rounded, *traffic = trained(world, gather="bfloat16")
    offloaded, *_ = trained(world, offload=True)
    same = [len(found) == len(other) and all(map(torch.equal, found, other))
            for other in (rounded, offloaded)]
    answer(equal=all(same), traffic=traffic)
"""


def test_gathers_in_bfloat16_and_offloading_change_no_bit(ranks_in: Ranks, tmp_path: Path) -> None:
    """Of an evaluation without autocast, and of a training step with it, whose two gathers of each linear
    layer in bfloat16 send as much as one of the evaluation. Without a GPU, what is offloaded stays."""
    for answer in ranks_in(GATHER, 2, tmp_path):
        assert answer["equal"]
        eval_bytes, train_bytes = answer["traffic"]
        assert train_bytes == eval_bytes > 0


WHOLE = """
import sys
import torch
sys.path.append("SUPPORT")
from collectives import of_tensor_subclasses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from instar.distributed.shards import full_tensor

SHAPES = [(1, 3), (2, 1), (5, 3), (7,), (8, 2, 3), (0, 4), (64, 0)]
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]

def tensors():
    for shape in SHAPES:
        for dtype in TYPES:
            yield (100 * torch.randn(shape)).to(dtype)
    yield torch.randn(6, 4).T  # whose rows are not together in memory
    yield torch.randn(5, 3, requires_grad=True)

with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
    torch.manual_seed(0)
    equal, rows = True, [(init_device_mesh("cpu", (world.size,)), [Shard(0)])]
    if world.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        rows += [(mesh, [Replicate(), Shard(0)]), (mesh, [Shard(0), Replicate()]), (mesh["shard"], [Shard(0)])]
    for tensor in tensors():
        for mesh, places in rows:
            whole = full_tensor(distribute_tensor(tensor, mesh, places, src_data_rank=None))
            equal &= torch.equal(whole, tensor) and whole.dtype == tensor.dtype and not whole.requires_grad
    by_torch = len(of_tensor_subclasses())
    columns = distribute_tensor(torch.arange(15).view(5, 3), rows[0][0], [Shard(1)], src_data_rank=None)
    equal &= torch.equal(full_tensor(columns), torch.arange(15).view(5, 3))
    answer(equal=equal, by_torch=by_torch, of_columns=len(of_tensor_subclasses()))
"""


@parametrize_first("ranks", [2, 3, 4], first=2)
def test_rows_are_gathered_whole_but_not_by_torch(
    ranks_in: Ranks, tmp_path: Path, ranks: int
) -> None:
    """Of all types and layouts, also where ranks hold none; what has no rows that are divided is left to torch."""
    program = WHOLE.replace("SUPPORT", str(Path(collectives.__file__).parent))
    for answer in ranks_in(program, ranks, tmp_path):
        assert answer == {"equal": True, "by_torch": 0, "of_columns": 1}


MANY = """
import os
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from instar.config.language import ModelConfig
from instar.config.schema import RunConfig
from instar.distributed.shards import to_local, local_row_range
from instar.distributed.world import World
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT
from instar.run.optimizer import build_optimizers
from instar.run.parallel.choose import wrap_for_eval

SIZE = 64
wrong = []
shape = resolve_architecture(ModelConfig(n_layer=4, n_head=4, n_embd=96, context=16, vocab_size=100), 50)
tokens = torch.zeros(2, 8, dtype=torch.int64)
rank = (0, 17, SIZE - 1)[int(os.environ["RANK"])]
# the fake process group has no exchange in which a rank sends nothing: Muon has a matrix for each shard
for parallel, optimizer in (
    ({"strategy": "fsdp"}, "adamw"),
    ({"strategy": "hsdp", "fsdp": {"shards": 8}}, "muon"),
):
    dist.init_process_group("fake", rank=rank, world_size=SIZE, store=FakeStore())
    world = World(rank, rank % 8, SIZE, torch.device("cpu"), "fake", local_size=8)
    config = RunConfig(precision="fp32", parallel=parallel, optimizer={"name": optimizer})
    with torch.device("meta"):
        model = GPT(shape)
    placed = wrap_for_eval(config, world, model)
    held = placed.parameters
    for parameter in held.values():
        to_local(parameter).fill_(0.01)
    placed.model(tokens, tokens).backward()
    placed.norms([[parameter.grad] for parameter in held.values()])
    for made in build_optimizers(held, config.optimizer):
        made.step()
    for name, parameter in held.items():
        first, last = local_row_range(parameter)
        shards = parameter.device_mesh.size()
        every = [local_row_range(parameter, shard) for shard in range(shards)]
        whole = [row for start, stop in every for row in range(start, stop)]
        as_told = tuple(to_local(parameter).shape) == (last - first, *parameter.shape[1:])
        if not as_told or (first, last) not in every or whole != list(range(parameter.shape[0])):
            wrong.append((rank, shards, name))
    dist.destroy_process_group()
answer(wrong=wrong, shards=shards)
"""


def test_64_ranks_hold_every_row_once(ranks_in: Ranks, tmp_path: Path) -> None:
    """Sharded 64 and 8 × 8, with matrices of fewer rows than there are ranks to hold some: a fake process
    group takes a step on the first rank, the last, and one between. Nothing arrives, all shapes are real."""
    assert ranks_in(MANY, 3, tmp_path) == 3 * [{"wrong": [], "shards": 8}]
