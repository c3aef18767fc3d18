from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import science
import torch
from forks import children_as_ranks
from tiny_run import codes, output_of
from torch import nn

from instar.config.schema import DDPConfig
from instar.distributed.parallel import check_replicas_equal, checksum, sync, unwrap, wrap
from instar.distributed.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="none")

PROGRAM = """
import torch
from torch import nn
from instar.distributed.parallel import copy_from_rank_0, check_replicas_equal, sync, unwrap, wrap

with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    torch.manual_seed(world.rank)
    unlike = error_of(lambda: copy_from_rank_0(world, nn.Linear(3, 1 + world.rank)))
    model = nn.Linear(3, 1)
    model.register_buffer("mean", torch.full((2, 3), float(world.rank)).T)
    copy_from_rank_0(world, model)
    wrapped = wrap(model, world, DDPConfig())
    ddp = type(wrapped).__name__
    inner = unwrap(wrapped) is model

    def gradient(reduced):
        model.zero_grad()
        with sync(wrapped, reduced):
            wrapped(torch.full((1, 3), world.rank + 1.0)).sum().backward()
        return model.weight.grad[0].tolist()

    alone, mean = gradient(False), gradient(True)
    tensors = {"weight": model.weight, "mean": model.mean, "bias": model.bias, "half": torch.ones(2, dtype=torch.bfloat16)}
    equal = error_of(lambda: check_replicas_equal(world, tensors))
    if world.rank == 1:
        tensors["bias"] = tensors["bias"] + 1
        del tensors["half"]
    drifted = error_of(lambda: check_replicas_equal(world, tensors))
    answer(unlike=unlike, ddp=ddp, inner=inner, alone=alone, mean=mean, equal=equal, drifted=drifted)
"""


def test_two_ranks_share_gradients_and_notice_drift(
    ranks: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    facts = ranks(PROGRAM, 2)
    for rank, fact in enumerate(facts):
        assert (fact["ddp"], fact["inner"]) == ("DistributedDataParallel", True)
        assert fact["unlike"] == (
            "RunFailed: rank 1 has built a different model than rank 0: bias torch.float32 [1]; "
            "bias torch.float32 [2]; weight torch.float32 [1, 3]; weight torch.float32 [2, 3]"
        )
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
    check_replicas_equal(ALONE, dict(model.named_parameters()))


def test_a_model_elsewhere_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is on meta"):
        wrap(model, ALONE, DDPConfig())


def test_a_compiled_model_is_unwrapped() -> None:
    model = nn.Linear(2, 2)
    assert unwrap(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]


DOCUMENTED = {"module", "no_sync"}
"""what every version of torch that pyproject.toml allows has in its documentation of DDP"""
OPTIONAL = {"reducer"}
"""what a version of torch may lack: then ranks that use other parameters wait for each other, as in torch"""
OF_ANY_MODULE = {"named_parameters", "parameters", "named_buffers", "buffers", "modules"}
OF_ANY_MODULE |= {"train", "eval", "training", "state_dict", "__class__", "__call__"}


def test_only_documented_attributes_of_ddp_are_used(tmp_path: Path) -> None:
    """A private one may be missing in another version of torch. A run that trains, grows, freezes,
    evaluates and saves."""
    place = science.place(tmp_path)
    schedule = [
        "{name: widen, value: {axis: hidden, size: 40}, when: {at_step: 4}}",
        "{name: freeze, value: 'up.*', when: {at_step: 6}}",
    ]
    settings = [f"schedule=[{', '.join(schedule)}]", "train.until=[8it]", "record.run_dir=run"]
    settings += ["parallel.ddp.broadcast_buffers=true"]
    words = ["train", "run.yaml", *(word for setting in settings for word in ("--set", setting))]
    body = "failures:notes_what_is_asked_of_ddp"
    ranks = children_as_ranks(place.forks, 2, body, words, "asked", place=tmp_path)
    assert codes(ranks) == [0, 0], output_of(ranks)
    attributes = set((tmp_path / "asked").read_text().split())
    assert "module" in attributes
    assert attributes <= DOCUMENTED | OPTIONAL | OF_ANY_MODULE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_checksum_on_the_device_tells_any_two_tensors_apart(dtype: torch.dtype) -> None:
    values = torch.arange(40).remainder(3).to(dtype).view(5, 8)
    sums = [checksum(values).item()]
    for place in range(values.numel()):
        other = values.clone()
        other.view(-1)[place] = 1 - values.view(-1)[place].to(torch.complex64).real.item()
        sums.append(checksum(other).item())
    assert len(set(sums)) == 1 + values.numel()
    assert checksum(values.t().contiguous().t()) == checksum(values)
    assert checksum(values.flip(0)) != checksum(values)
