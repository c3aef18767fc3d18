"""What the optimizer remembers goes with what it remembers it of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from growing import (
    KEY,
    batch,
    build_model,
    grow_model,
    grow_optimizer,
    operation,
    random_gpt,
    values,
)
from shapes import gpt2, llama
from torch import Tensor

from instar.config.sections import Operation
from instar.growth.apply import apply, grow_state, grown_states, moments_mode
from instar.growth.operators import plan
from instar.growth.plan import Fresh, Grown, GrowthPlan, Old
from instar.growth.states import Role
from instar.models.architecture import Architecture
from instar.models.gpt import GPT, named_generator
from instar.models.lora import Lora
from instar.run.muon import BatchedMuon
from instar.run.optimizer import check_states

SIZES = {"vocab_size": 11, "n_embd": 16, "n_mlp": 12, "context": 6}
GPT2 = gpt2(**SIZES)
LLAMA = llama(**SIZES)
ADAPTED = replace(LLAMA, lora=(Lora("all", 2, 3.0),))
EXACT = [
    operation("widen_mlp", 19),
    operation("widen_mlp", 30, how="split", share=0.3),
    operation("widen_hidden", 32, how="duplicate"),
    operation("add_heads", 2),
    operation("grow_head_dim", 6),
    operation("extend_context", 8),
    operation("insert_layers", 1),
]


def gradients(model: GPT, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    (model(*data) / data[1].numel()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", [GPT2, LLAMA, ADAPTED], ids=["gpt2", "llama", "adapters"])
@pytest.mark.parametrize("op", [*EXACT, operation("widen_hidden", 25)], ids=str)
def test_gradients_of_what_was_kept_change_by_the_planned_factor(
    arch: Architecture, op: Operation
) -> None:
    if arch.norm == "layernorm" and op == operation("widen_hidden", 25):
        op = operation("widen_hidden", 32)  # the mean of the new channels moves the old ones
        op = replace(op, options={"how": "duplicate"})
    old = random_gpt(arch)
    new, growth_plan = grow_model(old, op)
    data = batch(arch)
    before = gradients(old, data)
    expected = apply(growth_plan, before, Role.FIRST_MOMENT, KEY, "mapped")
    ones = {name: torch.ones_like(gradient) for name, gradient in before.items()}
    kept_mask = apply(growth_plan, ones, Role.FIRST_MOMENT, KEY, "mapped")
    for name, gradient in gradients(new, data).items():
        how = growth_plan.tensors[name]
        if isinstance(how, Grown) and not how.is_copy:
            actual = gradient * (kept_mask[name] != 0)
            torch.testing.assert_close(actual, expected[name], rtol=1e-9, atol=1e-13, msg=name)


def test_split_heads_share_the_gradient_of_their_source() -> None:
    old = random_gpt(LLAMA)
    new, _ = grow_model(old, operation("split_kv_heads", 2))
    data = batch(LLAMA)
    name = "blocks.1.attn.key.weight"
    before, after = gradients(old, data)[name], gradients(new, data)[name]
    shared = after.unflatten(0, (2, 2, 4)).sum(1).flatten(0, 1)
    torch.testing.assert_close(shared, before)


class Trajectory:
    """A model under AdamW, before and after it is split evenly, with half the learning rate on the
    matrices whose fan-in doubles."""

    def __init__(self, arch: Architecture) -> None:
        self.data = [batch(arch, samples) for samples in range(1, 9)]
        self.model = random_gpt(arch)
        self.optimizer = self.adamw(self.model, 1.0)
        for _ in range(5):
            self.step(self.model, self.optimizer)

    def adamw(self, model: GPT, ratio: float) -> torch.optim.AdamW:
        groups = [
            {"params": [p], "lr": 1e-3 * (ratio if name.endswith("down.weight") else 1.0)}
            for name, p in model.named_parameters()
        ]
        # eps breaks the scaling of gradients, and is far below them
        return torch.optim.AdamW(groups, weight_decay=0.0, eps=1e-30, betas=(0.9, 0.95))

    def step(self, model: GPT, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
        gradients(model, self.data[number % len(self.data)])
        optimizer.step()

    def divergence(
        self, change: Callable[[GrowthPlan], GrowthPlan], mode: Any = "mapped", ratio: float = 0.5
    ) -> float:
        """How far 20 more steps of the grown and of the ungrown model lead apart, relative."""
        arch, right = plan(self.model.arch, operation("widen_mlp", "x2", how="split"))
        new = build_model(arch, apply(right, values(self.model), Role.PARAMETER, KEY))
        memory = grow_optimizer(
            change(right), optimizer_memory(self.model, self.optimizer), KEY, mode
        )
        after = self.adamw(new, ratio)
        remember(new, after, memory)
        old = build_model(self.model.arch, values(self.model))
        before = self.adamw(old, 1.0)
        remember(old, before, optimizer_memory(self.model, self.optimizer))
        for number in range(20):
            self.step(old, before, number)
            self.step(new, after, number)
        with torch.no_grad():
            logits = old(self.data[-1][0])
            return ((new(self.data[-1][0]) - logits).abs().max() / logits.abs().max()).item()


def optimizer_memory(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": tensor.clone()
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def remember(model: GPT, optimizer: torch.optim.Optimizer, memory: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for key, tensor in memory.items():
        name, _, state = key.rpartition("/")
        optimizer.state[parameters[name]][state] = tensor.clone()


def identity(growth_plan: GrowthPlan) -> GrowthPlan:
    return growth_plan


def with_gradients(factor: float, dim: int) -> Callable[[GrowthPlan], GrowthPlan]:
    """The plan with the gradients along one dimension multiplied by another factor."""

    def change_plan(growth_plan: GrowthPlan) -> GrowthPlan:
        tensors = {}
        for name, how in growth_plan.tensors.items():
            if isinstance(how, Grown) and how.edits and how.edits[0].dim == dim:
                (edit,) = how.edits
                pieces = tuple(
                    replace(piece, gradient=piece.gradient * factor)
                    for piece in edit.pieces
                    if isinstance(piece, Old)
                )
                how = replace(how, edits=(replace(edit, pieces=pieces),))
            tensors[name] = how
        return replace(growth_plan, tensors=tensors)

    return change_plan


@pytest.fixture(scope="module", params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def trajectory(request: pytest.FixtureRequest) -> Trajectory:
    return Trajectory(request.param)


def test_an_even_split_goes_the_way_of_the_ungrown_model(trajectory: Trajectory) -> None:
    assert trajectory.divergence(identity) < 1e-11


@pytest.mark.parametrize(
    ("wrong", "mode", "ratio"),
    [
        (with_gradients(2.0, dim=0), "mapped", 0.5),
        (with_gradients(0.5, dim=0), "mapped", 0.5),
        (with_gradients(0.5, dim=1), "mapped", 0.5),
        (with_gradients(2.0, dim=1), "mapped", 0.5),
        (identity, "mapped", 1.0),
        (identity, "asymmetric", 0.5),
        (identity, "reset", 0.5),
    ],
    ids=["rows × 2", "rows / 2", "columns / 2", "columns × 2", "rate", "asymmetric", "reset"],
)
def test_with_anything_wrong_it_goes_another_way(
    trajectory: Trajectory, wrong: Callable[[GrowthPlan], GrowthPlan], mode: str, ratio: float
) -> None:
    assert trajectory.divergence(wrong, mode, ratio) > 1e-6


def sgd(model: GPT, split: float) -> torch.optim.SGD:
    """SGD whose rates make up for `split`, the factor of the copies' gradients and of the shares."""
    copy_rates = dict.fromkeys(("up.weight", "up.bias", "gate.weight"), 1 / split)
    rates = {**copy_rates, "down.weight": split}
    groups = [
        {"params": [p], "lr": 1e-2 * rates.get(name.partition("mlp.")[2], 1.0)}
        for name, p in model.named_parameters()
    ]
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_an_even_split_keeps_the_trajectory_under_sgd(arch: Architecture) -> None:
    """A split keeps gradient × weight, so plain momentum shows every factor that Adam cancels."""
    data = [batch(arch, samples) for samples in range(1, 9)]
    old = random_gpt(arch)
    before = sgd(old, 1.0)
    for samples in data[:5]:
        gradients(old, samples)
        before.step()
    grown_arch, growth_plan = plan(arch, operation("widen_mlp", "x2", how="split"))
    new = build_model(grown_arch, apply(growth_plan, values(old), Role.PARAMETER, KEY))
    after = sgd(new, 0.5)
    remember(new, after, grow_optimizer(growth_plan, optimizer_memory(old, before), KEY, "mapped"))
    for samples in data:
        for model, optimizer in ((old, before), (new, after)):
            gradients(model, samples)
            optimizer.step()
    torch.testing.assert_close(new(data[0][0]), old(data[0][0]), rtol=1e-11, atol=1e-11)


def states_of(arch: Architecture, *kinds: str) -> dict[str, Tensor]:
    """Moments of which none is zero."""
    memory: dict[str, Tensor] = {}
    for name, entry in arch.parameters().items():
        for kind in kinds:
            random_values = torch.rand(entry.shape, generator=named_generator(name, kind))
            memory[f"{name}/{kind}"] = torch.tensor(40.0) if kind == "step" else random_values + 0.1
    return memory


def test_padded_gains_are_scaled_and_their_moments_the_other_way() -> None:
    _, growth_plan = plan(LLAMA, operation("widen_hidden", 64))
    memory = states_of(LLAMA, "exp_avg", "exp_avg_sq", "step")
    new = grow_optimizer(growth_plan, memory, KEY)
    gain = "blocks.0.mlp_norm.weight"
    scale = (16 / 64) ** 0.5
    parameters = {name: torch.ones(entry.shape) for name, entry in LLAMA.parameters().items()}
    assert apply(growth_plan, parameters, Role.PARAMETER, KEY)[gain].tolist() == [scale] * 64
    torch.testing.assert_close(new[f"{gain}/exp_avg"][:16], memory[f"{gain}/exp_avg"] / scale)
    torch.testing.assert_close(
        new[f"{gain}/exp_avg_sq"][:16], memory[f"{gain}/exp_avg_sq"] / scale**2
    )
    assert (new[f"{gain}/exp_avg"][16:] == 0).all()
    mean = new[f"{gain}/exp_avg_sq"][:16].mean()
    torch.testing.assert_close(new[f"{gain}/exp_avg_sq"][16:], mean.expand(48))


def test_new_slices_begin_with_the_mean_second_moment_of_theirs() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    memory = states_of(GPT2, "exp_avg", "exp_avg_sq", "step")
    new = grow_optimizer(growth_plan, memory, KEY)
    name = "blocks.1.mlp.down.weight"
    old = memory[f"{name}/exp_avg_sq"]
    assert torch.equal(new[f"{name}/exp_avg"][:, :12], memory[f"{name}/exp_avg"])
    assert (new[f"{name}/exp_avg"][:, 12:] == 0).all()
    assert torch.equal(new[f"{name}/exp_avg_sq"][:, :12], old)
    torch.testing.assert_close(
        new[f"{name}/exp_avg_sq"][:, 12:], old.mean(1, keepdim=True).expand(-1, 8)
    )


def test_new_slices_do_not_leap_at_the_first_step() -> None:
    """Beside a large step count, a second moment of zero would: by about 3 learning rates."""
    old = random_gpt(GPT2)
    before = torch.optim.AdamW(old.parameters(), lr=1e-3, weight_decay=0.0)
    for number in range(60):
        gradients(old, batch(GPT2, 2 + number % 3))
        before.step()
    new, growth_plan = grow_model(old, operation("widen_mlp", 24))
    after = torch.optim.AdamW(new.parameters(), lr=1e-3, weight_decay=0.0)
    remember(new, after, grow_optimizer(growth_plan, optimizer_memory(old, before), KEY))
    weight = new.blocks[0].mlp.down.weight
    was = weight.detach().clone()
    gradients(new, batch(GPT2, 3))
    after.step()
    assert (weight - was).detach()[:, 12:].abs().mean() < 1e-3


def test_copies_take_their_sources_second_moment_alone() -> None:
    memory = states_of(LLAMA, "exp_avg", "exp_avg_sq", "step")
    _, growth_plan = plan(LLAMA, operation("stack_layers", 2))
    source, copy = "blocks.0.mlp.up.weight", "blocks.2.mlp.up.weight"
    asymmetric, mapped = (
        grow_optimizer(growth_plan, memory, KEY, m) for m in ("asymmetric", "mapped")
    )
    assert torch.equal(asymmetric[f"{source}/exp_avg"], memory[f"{source}/exp_avg"])
    assert (asymmetric[f"{copy}/exp_avg"] == 0).all()
    assert torch.equal(mapped[f"{copy}/exp_avg"], memory[f"{source}/exp_avg"])
    for new in (asymmetric, mapped):
        assert torch.equal(new[f"{copy}/exp_avg_sq"], memory[f"{source}/exp_avg_sq"])
        assert new[f"{copy}/step"] == 40
        assert new[f"{copy}/step"].data_ptr() != new[f"{source}/step"].data_ptr()


def test_copied_columns_take_their_sources_second_moment_alone() -> None:
    memory = states_of(LLAMA, "exp_avg", "exp_avg_sq")
    _, growth_plan = plan(LLAMA, operation("widen_mlp", 15, how="split"))
    name = "blocks.0.mlp.down.weight"
    asymmetric, mapped = (
        grow_optimizer(growth_plan, memory, KEY, m) for m in ("asymmetric", "mapped")
    )
    first, second = memory[f"{name}/exp_avg"], memory[f"{name}/exp_avg_sq"]
    assert torch.equal(mapped[f"{name}/exp_avg"], torch.cat((first, first[:, :3]), 1))
    assert (asymmetric[f"{name}/exp_avg"][:, 12:] == 0).all()
    for new in (asymmetric, mapped):
        assert torch.equal(new[f"{name}/exp_avg_sq"], torch.cat((second, second[:, :3]), 1))


def test_split_heads_share_what_their_source_remembers() -> None:
    memory = states_of(LLAMA, "exp_avg")
    _, growth_plan = plan(LLAMA, operation("split_kv_heads", 2))
    name = "blocks.0.attn.value.weight/exp_avg"
    halves = grow_optimizer(growth_plan, memory, KEY, "mapped")[name].unflatten(0, (2, 2, 4))
    assert torch.equal(halves[:, 0], halves[:, 1])
    assert torch.equal(halves.sum(1).flatten(0, 1), memory[name])


def test_wholly_new_tensors_have_no_past_and_old_ones_keep_their_steps() -> None:
    memory = states_of(GPT2, "exp_avg", "exp_avg_sq", "step")
    arch, growth_plan = plan(GPT2, operation("insert_layers", 1, where="start"))
    new = grow_optimizer(growth_plan, memory, KEY)
    fresh = {name for name, how in growth_plan.tensors.items() if isinstance(how, Fresh)}
    assert {"blocks.0.attn.output.weight", "blocks.0.mlp.down.bias"} <= fresh
    old_names = arch.parameters().keys() - fresh
    assert set(new) == {
        f"{n}/{kind}" for n in old_names for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert all(new[f"{name}/step"] == 40 for name in old_names)
    moved_name = "blocks.1.attn.key.weight"
    assert new[f"{moved_name}/exp_avg"] is memory["blocks.0.attn.key.weight/exp_avg"]


def test_a_merged_matrix_keeps_its_moments_and_its_adapter_begins_anew() -> None:
    memory = states_of(ADAPTED, "exp_avg", "exp_avg_sq", "step")
    _, growth_plan = plan(ADAPTED, operation("merge_lora"))
    new = grow_optimizer(growth_plan, memory, KEY)
    assert new["head.weight/exp_avg"] is memory["head.weight/exp_avg"]
    assert not any("lora" in name for name in new)


def test_experts_share_the_gradient_and_the_moments_of_their_source() -> None:
    old = random_gpt(LLAMA)
    data = batch(LLAMA)
    gradients(old, data)
    new, growth_plan = grow_model(old, operation("upcycle", 3))
    gradients(new, data)
    for name, parameter in old.named_parameters():
        gradient = new.get_parameter(name).grad
        total = gradient if gradient.ndim == parameter.ndim else gradient.sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-12)
    memory = states_of(LLAMA, "exp_avg", "exp_avg_sq", "step")
    moments = grow_optimizer(growth_plan, memory, KEY)
    assert not any("router" in name for name in moments)
    name = "blocks.0.mlp.up.weight"
    for expert in range(3):
        for kind, share in (("exp_avg", 3), ("exp_avg_sq", 6)):
            expected = memory[f"{name}/{kind}"] / share
            assert torch.equal(moments[f"{name}/{kind}"][expert], expected)
    assert moments[f"{name}/step"] == memory[f"{name}/step"]


def test_muons_momentum_grows_as_a_first_moment() -> None:
    old = random_gpt(GPT2)
    matrices = {n: p for n, p in old.named_parameters() if p.ndim == 2 and n.startswith("blocks.")}
    muon = BatchedMuon([{"params": list(matrices.values())}], momentum=0.9, ns_steps=5)
    gradients(old, batch(GPT2))
    muon.step()
    memory = optimizer_memory(old, muon)
    new, growth_plan = grow_model(old, operation("widen_mlp", 18))
    momentum = grow_optimizer(growth_plan, memory, KEY)
    assert momentum.keys() == memory.keys()
    down = momentum["blocks.0.mlp.down.weight/momentum_buffer"]
    assert torch.equal(down[:, :12], memory["blocks.0.mlp.down.weight/momentum_buffer"])
    assert (down[:, 12:] == 0).all()
    grown_matrices = [p for n, p in new.named_parameters() if n in matrices]
    after = BatchedMuon([{"params": grown_matrices}], momentum=0.9, ns_steps=5)
    remember(new, after, momentum)
    before = down.clone()
    gradients(new, batch(GPT2))
    after.step()
    assert not torch.equal(after.state[new.blocks[0].mlp.down.weight]["momentum_buffer"], before)


def test_parameters_without_a_past_stay_without_one() -> None:
    memory = states_of(GPT2, "exp_avg", "exp_avg_sq", "step")
    frozen = {name: tensor for name, tensor in memory.items() if ".mlp." not in name}
    _, growth_plan = plan(GPT2, operation("widen_hidden", "x2"))
    assert set(grow_optimizer(growth_plan, frozen, KEY)) == set(frozen)
    assert grow_optimizer(growth_plan, frozen, KEY, "reset") == {}


def test_states_may_be_grown_one_by_one() -> None:
    memory = states_of(LLAMA, "exp_avg", "exp_avg_sq", "step")
    _, growth_plan = plan(LLAMA, operation("widen_mlp", "x1.5", how="split"))
    states = grow_optimizer(growth_plan, memory, KEY)
    assert grown_states(growth_plan, memory) == list(states)
    for name, tensor in states.items():
        assert torch.equal(grow_state(growth_plan, name, memory.__getitem__, KEY), tensor)


def test_a_state_with_the_shape_of_its_parameter_grows_by_its_name() -> None:
    _, growth_plan = plan(GPT2, operation("widen_mlp", 20))
    name = "blocks.0.mlp.down.weight"
    memory = {f"{name}/max_exp_avg_sq": torch.ones(16, 12), f"{name}/slow": torch.ones(16, 12)}
    new = grow_optimizer(growth_plan, memory, KEY)
    assert (new[f"{name}/max_exp_avg_sq"] == 1).all()
    assert new[f"{name}/slow"].sum(0).tolist() == [16.0] * 12 + [0.0] * 8


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot grow the optimizer state head/rows: it is \[3\]"):
        check_states({"head/step": (), "head/rows": (3,)}, {"head": (3, 4)})


def test_an_operation_says_what_is_to_be_remembered() -> None:
    assert moments_mode(operation("widen_mlp", 20)) == "asymmetric"
    assert moments_mode(operation("widen_mlp", 20, moments="reset")) == "reset"
