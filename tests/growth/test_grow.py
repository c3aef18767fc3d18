"""`grow` in a loop of one's own: every family of transformers, with its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import parametrize_first
from shapes import gpt2
from small_models import EXACT, REFUSED, model_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.optimization import Adafactor

from instar.growth import GrowthError, Operation, grow, plan_growth, prepare
from instar.models.gpt import GPT
from instar.models.hf.families import FAMILIES
from instar.models.lora import is_adapter
from instar.models.table import Shape, Table


def fresh(kind: str) -> PreTrainedModel:
    return copy.deepcopy(model_of(kind)).train()


def batch(number: int) -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        optimizer.zero_grad()
        model(input_ids=batch(number), labels=batch(number)).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(input_ids=batch(99)).logits[..., :64]
    return result


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {p for group in optimizer.param_groups for p in group["params"]}


@parametrize_first("kind", FAMILIES, first=4)
def test_a_model_of_each_family_grows_through_all_operations_and_trains_on(
    kind: str, tmp_path: Path
) -> None:
    model = fresh(kind)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    made_by = model.generation_config
    train(model, optimizer, 0, 2)
    scheduler.step()
    for name in ("insert_layers", "widen_mlp_split", "widen_hidden_copied", "add_groups"):
        if name in REFUSED.get(kind, ()):
            continue
        operation = EXACT[name]
        before = logits(model.eval())
        size = sum(p.numel() for p in model.parameters())
        assert grow(model.train(), operation, optimizer=optimizer) is model
        assert (logits(model.eval()) - before).abs().max() <= 1e-5 * before.abs().max()
        assert sum(p.numel() for p in model.parameters()) > size
        assert optimizer_parameters(optimizer) == set(model.parameters())
        for group in optimizer.param_groups:
            assert all((p.ndim > 1) == (group["weight_decay"] > 0) for p in group["params"])
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        train(model.train(), optimizer, 2, 2)
        scheduler.step()
    assert model.generation_config is made_by
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 1e-4
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_what_a_module_is_set_to_stays() -> None:
    """Modes, frozen parameters, dtypes, hooks and attributes of one's own, also of moved blocks."""
    model = fresh("llama").to(torch.bfloat16)
    block = model.model.layers[1]
    block.eval()
    block.mark = "second"
    block.mlp.up_proj.weight.requires_grad_(False)
    model.model.norm.float()
    modules: list[nn.Module] = []
    handle = block.mlp.register_forward_hook(lambda module, *_: modules.append(module))
    grow(model, "insert_layers", 1, where="start", probe=False)
    grow(model, "widen_mlp", "x2", probe=False)
    moved_block = model.model.layers[2]
    assert model.training
    assert not moved_block.training
    assert moved_block.mark == "second"
    assert not moved_block.mlp.up_proj.weight.requires_grad
    assert model.model.layers[1].mlp.up_proj.weight.requires_grad
    assert moved_block.mlp.up_proj.weight.shape == (96, 48)
    assert {p.dtype for p in model.model.layers.parameters()} == {torch.bfloat16}
    assert model.model.norm.weight.dtype is torch.float32
    model.model.norm.bfloat16()
    logits(model)
    assert modules == [moved_block.mlp]
    handle.remove()
    logits(model)
    assert modules == [moved_block.mlp]
    assert model.config.num_hidden_layers == 4
    assert moved_block.mlp.gate_proj.out_features == 96


def test_tied_weights_stay_tied() -> None:
    model = fresh("qwen2")
    optimizer = torch.optim.AdamW(model.parameters())
    grow(model, "resize_vocab", 80, optimizer=optimizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (80, 48)
    assert len(optimizer_parameters(optimizer)) == len([*model.parameters()])


BY_NAME = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@parametrize_first("moments", ["asymmetric", "reset"], first=8)
@pytest.mark.parametrize("name", BY_NAME)
def test_optimizers_of_torch_go_on_with_what_is_new(name: str, moments: str) -> None:
    """Also Adagrad, which makes its states in the constructor."""
    model = fresh("llama")
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-4)
    train(model, optimizer, 0, 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    grow(model, "widen_mlp", "x2", optimizer=optimizer, moments=moments)
    grow(model, "insert_layers", 1, where="end", optimizer=optimizer, moments=moments)
    train(model, optimizer, 2, 2)
    assert all(p.isfinite().all() for p in model.parameters())
    assert len(optimizer_parameters(optimizer)) == len([*model.parameters()]) > len(before)
    state = optimizer.state[model.model.layers[-1].mlp.down_proj.weight]
    assert all(torch.as_tensor(value).isfinite().all() for value in state.values())


@pytest.mark.parametrize("rule", ["sgd", "muon", "adafactor", "torch_adafactor", "amsgrad"])
def test_states_of_optimizers_grow(rule: str) -> None:
    model = fresh("llama")
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        "muon": lambda: torch.optim.Muon(matrices, lr=1e-4),
        "adafactor": lambda: Adafactor(model.parameters(), beta1=0.9),
        "torch_adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-3),
        "amsgrad": lambda: torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True),
    }[rule]()
    train(model, optimizer, 0, 2)
    old_state = copy.deepcopy(optimizer.state[model.model.layers[0].self_attn.q_proj.weight])
    before = len(optimizer_parameters(optimizer))
    grow(model, "widen_mlp", "x2", how="split", optimizer=optimizer)
    weight = model.model.layers[0].self_attn.q_proj.weight
    for name, value in optimizer.state[weight].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(old_state[name])), name
    assert len(optimizer_parameters(optimizer)) == before
    train(model, optimizer, 2, 2)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_factored_state_is_that_of_the_matrix_that_it_stands_for() -> None:
    model = fresh("llama")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 1)
    down, up = (
        getattr(model.model.layers[0].mlp, f"{name}_proj").weight for name in ("down", "up")
    )
    before = {p: copy.deepcopy(optimizer.state[p]) for p in (down, up)}
    grow(model, "widen_mlp", "x2", optimizer=optimizer)
    mlp = model.model.layers[0].mlp
    wider = optimizer.state[mlp.down_proj.weight]
    torch.testing.assert_close(wider["col_var"][..., :48], before[down]["col_var"])
    torch.testing.assert_close(wider["row_var"], before[down]["row_var"])
    taller = optimizer.state[mlp.up_proj.weight]["row_var"]
    torch.testing.assert_close(taller[:48], before[up]["row_var"])
    assert (taller[48:] == taller[48]).all()


@pytest.mark.parametrize(
    ("field", "state", "message"),
    [
        ("state1", torch.zeros(64, 48, dtype=torch.uint8), "states of full precision"),
        ("absmax1", torch.zeros(7), r"q_proj.weight/absmax1 .*moments: reset"),
        ("slow", [1.0], r"q_proj.weight/slow \(list\)"),
    ],
)
def test_a_state_that_is_not_known_is_refused_and_nothing_changes(
    field: str, state: Any, message: str
) -> None:
    model = fresh("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.model.layers[0].self_attn.q_proj.weight][field] = state
    before = dict(model.named_parameters())
    with pytest.raises(GrowthError, match=message):
        grow(model, "insert_layers", 1, optimizer=optimizer)
    assert dict(model.named_parameters()) == before
    assert optimizer_parameters(optimizer) == set(before.values())
    assert model.config.num_hidden_layers == 3
    grow(model, "insert_layers", 1, optimizer=optimizer, moments="reset")
    assert optimizer.state == {}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_an_optimizer_with_names_calls_its_parameters_by_them(prefix: str) -> None:
    model = fresh("llama")
    name_pairs = [(f"{prefix}{name}", p) for name, p in model.named_parameters()]
    groups = [
        {"params": [n for n in name_pairs if is_up is ("up_proj" in n[0])]}
        for is_up in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    train(model, optimizer, 0, 1)
    grow(model, "insert_layers", 1, where="start", optimizer=optimizer)
    grow(model, "widen_mlp", "x2", optimizer=optimizer)
    names = {p: f"{prefix}{name}" for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[p] for p in group["params"]]
    optimizer.param_groups[0]["param_names"][0] = "mine"
    with pytest.raises(GrowthError, match="'mine': its names of new parameters are not known"):
        grow(model, "insert_layers", 1, optimizer=optimizer)


@pytest.mark.parametrize(
    ("rule", "steps", "options", "warns"),
    [
        ("AdamW", 1, {}, False),
        ("AdamW", 0, {}, True),
        ("AdamW", 1, {"moments": "reset"}, True),
        ("AdamW", 0, {"how": "zero"}, False),
        ("SGD", 1, {}, True),
    ],
)
def test_copies_that_stay_equal_are_warned_of(
    rule: str,
    steps: int,
    options: Mapping[str, Any],
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = fresh("llama")
    optimizer = getattr(torch.optim, rule)(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, steps)
    grow(model, "widen_mlp", "x2", optimizer=optimizer, **{"how": "split", **options})
    assert ("the copies that widen_mlp made have" in caplog.text) is warns


@pytest.mark.parametrize("has_names", [False, True])
def test_parameters_of_other_modules_keep_their_places_in_a_group(has_names: bool) -> None:
    """A saved state is loaded by position: into an optimizer of the grown parts, as built again."""
    parts = nn.ModuleDict(
        {"before": nn.Linear(2, 2), "model": fresh("llama"), "behind": nn.Linear(2, 2)}
    )
    parameters = parts.named_parameters() if has_names else parts.parameters()
    optimizer = torch.optim.AdamW(parameters)
    grow(parts["model"], "insert_layers", 1, optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in parts.parameters()]
    if has_names:
        assert group["param_names"] == [name for name, _ in parts.named_parameters()]


@pytest.mark.parametrize("of", ["module", "averaged", "tensors"])
def test_a_moving_average_grows_alike(of: str) -> None:
    model = fresh("mistral").eval()
    with torch.no_grad():
        averages = {name: 0.9 * p for name, p in model.named_parameters()}
    ema: Any = {"module": copy.deepcopy(model), "averaged": AveragedModel(model)}.get(of, averages)
    bare = ema.module if of == "averaged" else ema
    if of != "tensors":
        bare.load_state_dict(averages)
    before = torch.func.functional_call(model, averages, kwargs={"input_ids": batch(99)}).logits
    grow(model, "widen_hidden", "x2", how="duplicate", ema=ema)
    tensors = ema if of == "tensors" else dict(bare.named_parameters())
    assert [*tensors] == [
        name for name, _ in model.named_parameters()
    ]  # loops pair them by position
    after = torch.func.functional_call(model, dict(tensors), kwargs={"input_ids": batch(99)}).logits
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


def test_a_growth_that_breaks_its_label_changes_nothing() -> None:
    """A batch on which the outputs are not finite: no proof holds there."""
    model = fresh("llama")
    before = dict(model.named_parameters())
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(GrowthError, match=r"insert_layers: the outputs changed .*'exact'"):
        grow(model, "insert_layers", 1)
    assert dict(model.named_parameters()) == before
    assert len(model.model.layers) == 3
    grow(model, "insert_layers", 1, allow_inexact=True)
    assert len(model.model.layers) == 4


def test_a_loss_of_routers_is_no_part_of_what_growth_keeps() -> None:
    model: Any = fresh("mixtral")
    model.config.output_router_logits = True
    grow(model, "insert_layers", 1)
    assert model(input_ids=batch(0), output_router_logits=True).aux_loss is not None


@pytest.mark.torture
def test_a_compiled_model_compiles_again() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).eval()
    compiled = torch.compile(model, backend="eager")
    before = logits(compiled)
    assert grow(compiled, "widen_mlp", "x2") is compiled
    grow(compiled, "insert_layers", 2)
    torch.testing.assert_close(logits(compiled), before, rtol=1e-4, atol=1e-5)
    assert len(model.model.layers) == 3


def test_a_plan_alone_is_data() -> None:
    model = model_of("gemma2")
    for subject in (model, model.config, model.config.to_dict()):
        shape, growth_plan = plan_growth(subject, {"name": "insert_layers", "value": 3})
        assert (shape.sizes()["layers"], growth_plan.label) == (6, "exact")


def test_a_prepared_growth_can_be_thrown_away() -> None:
    model = fresh("llama")
    growth = prepare(model, Operation("insert_layers", 1))
    assert growth.proof is not None
    assert growth.proof.holds
    assert len(model.model.layers) == 3
    assert len(growth.swap_in().model.layers) == 4


@dataclass(frozen=True)
class TwoLayers(Shape):
    hidden: int = 16
    pixels: int = 8
    classes: int = 4

    def table(self, table: Table) -> None:
        table.linear("up", "hidden", "pixels")
        table.linear("down", "classes", "hidden")


class Net(nn.Module):
    def __init__(self, shape: TwoLayers) -> None:
        super().__init__()
        self.shape = shape
        self.up = nn.Linear(shape.pixels, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


def test_a_comparison_leaves_generators_and_gpus_of_others_alone(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """torch would initialize every GPU of the machine in every process, and say so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    model = fresh("llama")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    grow(model, EXACT["widen_mlp"])
    assert not [warning for warning in recwarn if "available devices" in str(warning.message)]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_of_ones_own_with_a_shape_grows(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Net(TwoLayers()), torch.randn(5, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model(x)
    before.sum().backward()
    optimizer.step()
    before = model(x)
    grow(model, "widen", {"axis": "hidden", "size": 32}, optimizer=optimizer, probe=(x,))
    torch.testing.assert_close(model(x), before)
    assert model.shape == TwoLayers(32)
    assert optimizer.state[model.up.weight]["exp_avg"].shape == (32, 8)
    assert not caplog.records
    for probe in (False, None):  # None: nothing to compare by, which is said
        grow(model, "widen", {"axis": "hidden", "size": "x2"}, optimizer=optimizer, probe=probe)
        assert ("nothing shows that it is exact: pass probe=" in caplog.text) is (probe is None)


@dataclass(frozen=True)
class Pixels(Shape):
    channels: int = 4
    colours: int = 3

    def table(self, table: Table) -> None:
        table.conv("up", "channels", "colours", (3, 3))
        table.conv("down", "colours", "channels", (3, 3))


class Image(nn.Module):
    def __init__(self, shape: Pixels) -> None:
        super().__init__()
        self.shape = shape
        self.up = nn.Conv2d(shape.colours, shape.channels, 3)
        self.down = nn.Conv2d(shape.channels, shape.colours, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).tanh())
        return result


def test_growth_keeps_the_order_in_memory_and_states_have_that_of_their_parameters() -> None:
    """A fused kernel walks the memory of a parameter and of its state, and does not look at strides."""
    x, final_weights = torch.randn(2, 3, 6, 6), []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = Image(Pixels()).to(memory_format=layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for number in range(4):
            if number == 2:
                wider = {"axis": "channels", "size": 6}
                grow(model, "widen", wider, optimizer=optimizer, probe=(x,))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert model.up.weight.shape == (6, 3, 3, 3)
        assert model.up.weight.is_contiguous(memory_format=layout)
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].stride() == parameter.stride()
        final_weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*final_weights)


class NoShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float32))


def quantised_model() -> nn.Module:
    model = fresh("llama")
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 48, dtype=torch.int8), requires_grad=False)
    return model


def other_head() -> nn.Module:
    model = fresh("llama")
    model.score = nn.Linear(48, 2)
    return model


REFUSALS: Mapping[str, tuple[Any, str]] = {
    "no shape": (NoShape, "NoShape is no model of transformers, and has no shape"),
    "quantised": (quantised_model, "lm_head.weight is of type torch.int8: quantised"),
    "another head": (other_head, "score.weight: 2×48 in the model, not there"),
    "impossible": (lambda: fresh("llama"), "widen_mlp: .*"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_models_that_cannot_grow_are_refused_by_name(name: str) -> None:
    make, message = REFUSALS[name]
    with pytest.raises(GrowthError, match=message):
        grow(make(), "widen_mlp", "x0.5")


@pytest.mark.parametrize("name", ["widen_mlp", "fold_masks"])
def test_masks_are_refused_in_a_loop_that_counts_no_steps(name: str) -> None:
    """What is new under a mask would stay off for ever."""
    model = GPT(gpt2())
    options = {"value": "x2", "mask": 500} if name == "widen_mlp" else {}
    with pytest.raises(GrowthError, match=f"{name}: masks open, .* does not count: leave mask out"):
        grow(model, name, shape=model.arch, build=GPT, probe=False, **options)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_new_adapters_of_frozen_weights_are_warned_of(
    is_frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = GPT(gpt2())
    model.init_weights(0)
    model.requires_grad_(not is_frozen)
    adapt = Operation("set_lora_rank", {"target": "mlp", "rank": 2})
    grow(model, adapt, shape=model.arch, build=GPT, probe=batch(0) % 50)
    adapters = [p for name, p in model.named_parameters() if is_adapter(name)]
    assert adapters
    assert all(p.requires_grad is not is_frozen for p in adapters)
    message = "set_lora_rank: new adapters are frozen, as their weights are (blocks.0.mlp."
    assert (message in caplog.text) is is_frozen


def test_the_loss_goes_on_where_the_state_is_kept_and_jumps_where_it_is_reset() -> None:
    """The next 20 steps on the same samples: at most 0.05 nats from the ungrown run, against 0.15."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def count_up(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        first = torch.randint(0, 32, (8, 1), generator=generator)
        pace = torch.randint(1, 4, (8, 1), generator=generator)
        odd = torch.rand((8, 16), generator=generator) < 0.1
        noise = odd * torch.randint(0, 32, (8, 16), generator=generator)
        return (first + pace * torch.arange(16) + noise) % 32

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
        values = []
        for ids in map(count_up, steps):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return torch.tensor(values)

    def after(*operation: Any, steps: range = range(1000, 1020), **options: Any) -> Tensor:
        larger, states = copy.deepcopy((model, optimizer))
        if operation:
            grow(larger, *operation, optimizer=states, **options)
        return losses(larger, states, steps)

    losses(model, optimizer, range(250))
    ungrown = after()
    other_means = [after(steps=range(first, first + 20)).mean() for first in (2000, 3000)]
    spread = max(abs(other - ungrown.mean()) for other in other_means)
    for operation in (("widen_mlp", "x2"), ("insert_layers", 2)):
        kept_losses, reset = after(*operation), after(*operation, moments="reset")
        assert abs(kept_losses.mean() - ungrown.mean()) < spread
        assert (reset - ungrown).max() > 2 * (kept_losses - ungrown).abs().max()
        assert (reset - ungrown).max() > 0.1


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = model_of("llama")
    other = torch.optim.AdamW(copy.deepcopy(model).parameters())
    before = [*model.parameters()]
    with pytest.raises(GrowthError, match="optimizer has no parameter of this model"):
        grow(model, "widen_mlp", "x2", optimizer=other)
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
