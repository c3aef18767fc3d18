"""Ranks that hold shards of a model of transformers, which grows with its optimizer; beside it a whole one."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import of_tensor_subclasses, record_all
from small_models import EXACT, OTHER, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from instar.distributed.shards import full_tensor
from instar.growth import GrowthError, grow, prepare, proof
from instar.growth.apply import GrowthStep
from instar.growth.live import grow as live_grow
from instar.growth.live import optimizers as states
from instar.growth.proof import TOLERANCE
from instar.loops import GrowthSchedule


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and states, whole."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = full_tensor(parameter)
        for field, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{field}"] = full_tensor(value)
    return tensors


def shard(model: nn.Module, mesh: Any) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def disagree(model: nn.Module, wrap: Any, optimizer: torch.optim.Optimizer) -> None:
    """One rank alone misses the tolerance, refuses float64, cannot build, lacks memory between two tensors that are
    gathered, or has a damaged shard: all go the same way."""
    is_last, compare = dist.get_rank() == dist.get_world_size() - 1, proof.compare_outputs

    def misses_first(*arguments: Any) -> proof.Proof:
        vars(proof)["compare_outputs"] = compare
        return replace(compare(*arguments), holds=not is_last)

    vars(proof)["compare_outputs"] = misses_first
    growth_proof = prepare(model, EXACT["widen_mlp"], wrap=wrap).proof
    assert growth_proof is not None
    assert growth_proof.holds

    in_double = live_grow.LiveGrowth.in_double

    def refusing(growth: live_grow.LiveGrowth, candidate: nn.Module) -> proof.Doubled:
        outputs = in_double(growth, candidate)
        if is_last:
            raise TypeError("no float64")
        return outputs

    vars(proof)["compare_outputs"] = misses_first
    live_grow.LiveGrowth.in_double = refusing  # type: ignore[method-assign]
    with pytest.raises(GrowthError, match="more than its label 'exact' allows"):
        prepare(model, EXACT["widen_mlp"], wrap=wrap)
    live_grow.LiveGrowth.in_double = in_double  # type: ignore[method-assign]
    grown_state = vars(states)["_grow_state"]

    def without_room(growth: GrowthStep, name: str, *inputs: Any) -> Any:
        if is_last and name.startswith("blocks.1."):
            raise MemoryError("no room")
        return grown_state(growth, name, *inputs)

    vars(states)["_grow_state"] = without_room
    with pytest.raises(MemoryError if is_last else GrowthError, match=r"no room|another process"):
        prepare(model, EXACT["widen_mlp"], wrap=wrap, optimizer=optimizer)
    vars(states)["_grow_state"] = grown_state

    def without_memory(module: nn.Module) -> None:
        wrap(module)
        if is_last:
            raise MemoryError("no room")

    with pytest.raises(MemoryError if is_last else GrowthError, match=r"no room|another process"):
        prepare(model, EXACT["widen_mlp"], wrap=without_memory)
    build = live_grow.build_sharded

    def build_damaged(*arguments: Any) -> nn.Module:
        module = build(*arguments)
        if is_last:
            next(module.parameters())._local_tensor[-1, -1] += 1  # type: ignore[attr-defined]
        return module

    live_grow.build_sharded = build_damaged
    with pytest.raises(GrowthError, match=r"not what the plan makes|another process|label 'exact'"):
        prepare(model, EXACT["widen_mlp"], wrap=wrap, allow_inexact=True)
    live_grow.build_sharded = build


def run_replicas() -> None:
    """Two processes of DDP, of which the second cannot build, or has another loss."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = copy.deepcopy(model_of("llama")).train()
    replica, rank = DistributedDataParallel(model), dist.get_rank()
    build = live_grow.build_whole

    def without_memory(*arguments: Any) -> nn.Module:
        if rank == 1:
            raise MemoryError("no room")
        module: nn.Module = build(*arguments)
        return module

    live_grow.build_whole = without_memory
    with pytest.raises(MemoryError if rank else GrowthError, match=r"no room|another process"):
        grow(replica, EXACT["widen_mlp"])
    live_grow.build_whole = build
    entry = {"name": "widen_mlp", "value": "x2", "trigger_loss": 2.0}
    schedule = GrowthSchedule([entry])
    assert schedule.step(replica, 1, loss=3.0 if rank else 2.5) == ()
    assert len(schedule.step(replica, 2, loss=3.0 if rank else 1.5)) == 1
    ids = torch.ones(1, 3, dtype=torch.int64)
    replica(input_ids=ids, labels=ids).loss.backward()
    # a group that is destroyed while a DDP holds it sometimes keeps the interpreter from ending


def run(kind: str, *operations: str) -> None:
    record_all()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_model = copy.deepcopy(model_of(kind)).train()
    shard_model.lm_head.weight.requires_grad_(kind != "llama")
    whole_model = copy.deepcopy(shard_model)
    shard(shard_model, mesh)
    optimizers = [
        torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
        for module in (shard_model, whole_model)
    ]
    step(shard_model, optimizers[0], 0)
    tensors = contents(shard_model, optimizers[0])
    for name, parameter in whole_model.named_parameters():
        parameter.data.copy_(tensors[name])
        if parameter.requires_grad:
            fields = ("step", "exp_avg", "exp_avg_sq")
            optimizers[1].state[parameter] = {f: tensors[f"{name}/{f}"].clone() for f in fields}
    averages = {name: 2 * parameter.detach() for name, parameter in shard_model.named_parameters()}
    averages_alone = {name: 2 * p.detach() for name, p in whole_model.named_parameters()}
    with pytest.raises(GrowthError, match="call grow with wrap="):
        grow(shard_model, EXACT["widen_mlp"], optimizer=optimizers[0])
    wrap = partial(shard, mesh=mesh)
    tolerance = TOLERANCE[torch.float32]
    TOLERANCE[torch.float32] = 0.0  # rounding exceeds it, so that float64 decides
    prepare(shard_model, EXACT["widen_mlp_split"], wrap=wrap)
    TOLERANCE[torch.float32] = tolerance
    disagree(shard_model, wrap, optimizers[0])
    for operation in (({**EXACT, **OTHER})[name] for name in operations):
        with torch.no_grad():
            shard_model.eval()(
                input_ids=torch.ones(1, 3, dtype=torch.int64)
            )  # leaves the root whole
        shard_model = grow(
            shard_model.train(), operation, optimizer=optimizers[0], ema=averages, wrap=wrap
        )
        grow(whole_model, operation, optimizer=optimizers[1], ema=averages_alone)
        actual, expected = (
            contents(shard_model, optimizers[0]),
            contents(whole_model, optimizers[1]),
        )
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
        assert averages.keys() == averages_alone.keys()
        for name, tensor in averages_alone.items():
            assert torch.equal(full_tensor(averages[name]), tensor), name
    for (name, shard_parameter), other in zip(
        shard_model.named_parameters(), whole_model.parameters(), strict=True
    ):
        assert isinstance(shard_parameter, DTensor), name
        assert shard_parameter.device_mesh == mesh
        assert shard_parameter.requires_grad == other.requires_grad
    assert shard_model.training
    assert shard_model.config.to_dict() == whole_model.config.to_dict()
    for number in (1, 2):
        step(shard_model, optimizers[0], number)
        step(whole_model, optimizers[1], number)
    actual, expected = contents(shard_model, optimizers[0]), contents(whole_model, optimizers[1])
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4)
    assert of_tensor_subclasses() == []
    dist.destroy_process_group()
