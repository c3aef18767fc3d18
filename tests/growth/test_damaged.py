"""Grown models that are damaged between the plan and the swap: none takes the old one's place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import EXACT, OTHER, REFUSED, model_of
from spoilt import DAMAGES, damage_in_turn
from torch import Tensor, nn

from instar.growth import GrowthError, Operation, engine, grow, prepare, proof
from instar.growth import folders as on_disk
from instar.growth.live import grow as live_grow
from instar.growth.live import optimizers
from instar.growth.live.grow import LiveGrowth
from instar.growth.offline import NotProven
from instar.growth.proof import TOLERANCE, Probe, verify_parameters
from instar.models.hf.pretrained_folder import open_folder
from instar.models.table import Shape, Table


def damaging(monkeypatch: pytest.MonkeyPatch, damage: Callable[[nn.Module], None]) -> None:
    """The grown module is damaged once it is filled; what is built for a comparison is not."""
    build = LiveGrowth.build

    def build_damaged(growth: LiveGrowth) -> nn.Module:
        module = build(growth)
        damage(module)
        return module

    monkeypatch.setattr(LiveGrowth, "build", build_damaged)


@pytest.mark.parametrize("float64_decides", [False, True])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_module_does_not_take_the_old_ones_place(
    kind: str, monkeypatch: pytest.MonkeyPatch, float64_decides: bool
) -> None:
    if float64_decides:
        monkeypatch.setitem(TOLERANCE, torch.float32, 1e-12)
    model = copy.deepcopy(model_of("llama"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def damage(module: nn.Module) -> None:
        data = module.get_parameter("model.layers.1.mlp.down_proj.weight").data
        data.copy_(DAMAGES[kind](data))

    damaging(monkeypatch, damage)
    with pytest.raises(GrowthError, match=r"not what the plan makes|not finite|label 'exact'"):
        grow(model, EXACT["widen_mlp_split"])
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


@dataclass(frozen=True)
class Normed(Shape):
    hidden: int = 8
    inputs: int = 4
    classes: int = 3

    def table(self, table: Table) -> None:
        table.linear("up", "hidden", "inputs")
        table.batch_norm("norm", "hidden")
        table.linear("down", "classes", "hidden")


class Net(nn.Module):
    def __init__(self, shape: Normed) -> None:
        super().__init__()
        self.shape = shape
        self.up = nn.Linear(4, shape.hidden)
        self.norm = nn.BatchNorm1d(shape.hidden)
        self.down = nn.Linear(shape.hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.norm(self.up(x)).relu())
        return result


@pytest.mark.parametrize("name", ["running_mean", "running_var", "num_batches_tracked"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_buffers_and_averages_are_compared_too(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net(Normed())
    for _ in range(3):
        model(torch.randn(16, 4))
    operation = "widen", {"axis": "hidden", "size": 16}
    buffers = dict(model.named_buffers())
    if name == "num_batches_tracked" and kind == "permuted":
        return

    def damage(module: nn.Module) -> None:
        buffer: Tensor = module.norm._buffers[name]  # type: ignore[union-attr,assignment]
        old_part = buffer[:8] if buffer.ndim else buffer  # new ones are those of a new module
        old_part.copy_(DAMAGES[kind](old_part))

    damaging(monkeypatch, damage)
    with pytest.raises(GrowthError, match=r"norm.* is not what the plan makes|not finite"):
        grow(model, *operation, how="split", probe=(torch.randn(5, 4),), allow_inexact=True)
    assert all(torch.equal(buffer, buffers[n]) for n, buffer in model.named_buffers())
    average = copy.deepcopy(model)
    real = live_grow.build_whole

    def spoilt_average(subject: Any, *arguments: Any) -> nn.Module:
        module: nn.Module = real(subject, *arguments)
        if subject.module is average:
            data = module.up.weight.data  # type: ignore[union-attr]
            data.copy_(DAMAGES[kind](data))
        return module

    monkeypatch.setattr(live_grow, "build_whole", spoilt_average)
    with pytest.raises(GrowthError, match=r"up\.weight is not what the plan makes"):
        grow(model, *operation, ema=average)


@pytest.mark.parametrize("field", ["exp_avg", "exp_avg_sq", "row_var", "average"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_states_of_optimizers_and_averages_by_name_are_compared_too(
    kind: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model_of("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    rule: Any = torch.optim.Adafactor if field == "row_var" else torch.optim.AdamW
    optimizer = rule(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    old = model.get_parameter(name)
    old_state = optimizer.state[old], average[name]
    module, function = (
        (engine, "redistribute_like") if field == "average" else (optimizers, "_grow_state")
    )
    real, damaged_states = getattr(module, function), []

    def spoilt_state(*arguments: Any) -> Any:
        result = real(*arguments)
        if arguments[1] == f"blocks.1.mlp.down_proj.weight/{field}" or (
            field == "average" and result.shape[1:] == (2 * old.shape[1],) and not damaged_states
        ):
            damaged_states.append(result)
            return DAMAGES[kind](result)
        return result

    monkeypatch.setattr(module, function, spoilt_state)
    operation = Operation("widen_mlp", "x2", {"how": "split", "moments": "mapped"})
    with pytest.raises(GrowthError, match=r"down_proj\.weight.* is not what the plan makes"):
        grow(model, operation, optimizer=optimizer, ema=average)
    assert len(damaged_states) == 1
    assert model.get_parameter(name) is old
    assert (optimizer.state[old], average[name]) == old_state
    monkeypatch.setattr(module, function, real)
    grow(model, operation, optimizer=optimizer, ema=average)
    assert average[name].shape == model.get_parameter(name).shape != old.shape


@pytest.mark.parametrize("operation", ["widen_mlp_split", "stack_layers", "resize_vocab"])
def test_outputs_that_are_not_finite_never_pass(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the label, and what is allowed."""
    model = copy.deepcopy(model_of("llama"))
    real, calls = live_grow.run_probe, [0]

    def overflowing(module: nn.Module, batch: Any) -> Probe:
        probe: Probe = real(module, batch)
        calls[0] += 1
        if calls[0] == 2:
            probe.logits[0, -1, -1] = torch.inf
        return probe

    monkeypatch.setattr(live_grow, "run_probe", overflowing)
    with pytest.raises(GrowthError, match="the outputs of the grown model are not finite"):
        grow(model, {**EXACT, **OTHER}[operation], allow_inexact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_no_rounding_is_taken_for_damage(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 decides about every operation that has a label to keep, in any precision."""
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, -1.0)
    sizes: list[int] = []
    real = proof.verify_rounded

    def counting_verify(
        plan: Any, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        sizes.append(len(expected))
        real(plan, tensors, expected)

    monkeypatch.setattr(proof, "verify_rounded", counting_verify)
    monkeypatch.setattr(proof, "coarsest", lambda _: torch.bfloat16)
    names = ["widen_hidden_copied", "widen_mlp_split", "grow_head_dim", "add_inside"]
    names = [name for name in names if name not in REFUSED.get(kind, ())]
    model = copy.deepcopy(model_of(kind)).to(dtype)
    for name in names:
        prepare(model, EXACT[name])
    assert len(sizes) == len(names)


def test_a_check_sees_each_damage_that_it_is_given() -> None:
    model = copy.deepcopy(model_of("mixtral"))
    growth = prepare(model, EXACT["widen_hidden"])
    old, new = (
        {growth.shape.name(n): p for n, p in module.named_parameters()}  # type: ignore[attr-defined]
        for module in (model, growth.model)
    )
    key = (0, sum(p.numel() for p in model.parameters()))
    verify_parameters(growth.plan, old, new, key)
    new_tensors = {
        name: p
        for name, p in new.items()
        if p.data_ptr() not in {o.data_ptr() for o in old.values()}
    }
    for _ in damage_in_turn(new_tensors):
        with pytest.raises(GrowthError, match="is not what the plan makes"):
            verify_parameters(growth.plan, old, new, key)
    with pytest.raises(GrowthError, match=r"other tensors .*: blocks\.0"):
        verify_parameters(
            growth.plan, old, {n: p for n, p in new.items() if "blocks.0" not in n}, key
        )


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_folder_that_was_written_wrongly_is_not_published(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of("llama").save_pretrained(tmp_path / "llama")
    real = on_disk._part

    def spoilt_part(read: Any, part: Any) -> Tensor:
        tensor = real(read, part)
        damages = part.parameter == "blocks.1.mlp.down_proj.weight"
        return DAMAGES[kind](tensor) if damages else tensor

    monkeypatch.setattr(on_disk, "_part", spoilt_part)
    with pytest.raises(NotProven, match=r"blocks\.1\.mlp\.down_proj\.weight .* is not the tensor"):
        on_disk.grow_folder(
            open_folder(tmp_path / "llama"), tmp_path / "out", [OTHER["stack_layers"]]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_small_model_that_stands_for_a_large_one_is_compared_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are written as those of the large one, which are not compared."""
    model_of("llama").save_pretrained(tmp_path / "llama")
    real = on_disk._part

    def spoilt_part(read: Any, part: Any) -> Tensor:
        tensor = real(read, part)
        return (
            DAMAGES[kind](tensor) if part.parameter == "blocks.1.mlp.down_proj.weight" else tensor
        )

    monkeypatch.setattr(on_disk, "_part", spoilt_part)
    monkeypatch.setattr(on_disk, "PROOF_BYTES", 0)
    with pytest.raises(NotProven, match=r"blocks\.1\.mlp\.down_proj\.weight .* is not the tensor"):
        on_disk.grow_folder(
            open_folder(tmp_path / "llama"), tmp_path / "out", [EXACT["widen_mlp_split"]]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
