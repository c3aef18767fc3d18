from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instar.config.schema import DDPConfig
from instar.distributed.parallel import same_everywhere, sync, unwrap, wrap
from instar.distributed.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="none")

PROGRAM = """
import torch
from torch import nn
from instar.distributed.parallel import same_everywhere, sync, unwrap, wrap

with join(ParallelConfig(timeout_s=30), "cpu") as world:
    torch.manual_seed(world.rank)
    model = nn.Linear(3, 1)
    wrapped = wrap(model, world, DDPConfig())
    ddp = type(wrapped).__name__
    inner = unwrap(wrapped) is model

    def gradient(reduced):
        model.zero_grad()
        with sync(wrapped, reduced):
            wrapped(torch.full((1, 3), world.rank + 1.0)).sum().backward()
        return model.weight.grad[0].tolist()

    alone, mean = gradient(False), gradient(True)
    tensors = {"weight": model.weight, "bias": model.bias, "half": torch.ones(2, dtype=torch.bfloat16)}
    equal = error_of(lambda: same_everywhere(world, tensors))
    if world.rank == 1:
        tensors["bias"] = tensors["bias"] + 1
        del tensors["half"]
    drifted = error_of(lambda: same_everywhere(world, tensors))
    answer(ddp=ddp, inner=inner, alone=alone, mean=mean, equal=equal, drifted=drifted)
"""


def test_two_ranks_share_gradients_and_notice_drift(
    ranks: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    facts = ranks(PROGRAM, 2)
    for rank, fact in enumerate(facts):
        assert (fact["ddp"], fact["inner"]) == ("DistributedDataParallel", True)
        assert fact["alone"] == [rank + 1.0] * 3
        assert fact["mean"] == [1.5] * 3
        assert fact["equal"] is None
        assert fact["drifted"] == (
            "RunFailed: differs from rank 0's: bias on rank 1; half on rank 1"
        )


def test_one_process_is_not_wrapped() -> None:
    model = nn.Linear(2, 2)
    assert wrap(model, ALONE, DDPConfig()) is model
    assert unwrap(model) is model
    with sync(model, enabled=False):
        pass
    same_everywhere(ALONE, dict(model.named_parameters()))


def test_a_model_elsewhere_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is on meta"):
        wrap(model, ALONE, DDPConfig())


def test_a_compiled_model_is_unwrapped() -> None:
    model = nn.Linear(2, 2)
    assert unwrap(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]
