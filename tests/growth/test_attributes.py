"""Attributes that were set by hand on submodules: a grown model keeps them, or says by name that it cannot."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import parametrize_first
from small_models import EXACT, OTHER, REFUSED, model_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM

from instar.growth import grow
from instar.growth.attributes import (
    AttributeComparison,
    Reference,
    build_reference,
    carry_attributes,
    compare_attributes,
)
from instar.growth.live import build
from instar.models.hf.families import FAMILIES
from instar.models.table import Shape, Table

WIDER = "widen", {"axis": "hidden", "size": 12}
DEEPER = "stack_layers", 2


@dataclass(frozen=True)
class Axes(Shape):
    width: int = 4
    hidden: int = 6
    layers: int = 2

    streams = ("width",)

    def table(self, table: Table) -> None:
        for layer in range(self.layers):
            table.norm(f"blocks.{layer}.norm", "width")
            table.linear(f"blocks.{layer}.up", "hidden", "width")
            table.linear(f"blocks.{layer}.down", "width", "hidden")


class Block(nn.Module):
    patience = 2

    def __init__(self, axes: Axes, layer: int, shared: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(axes.width)
        self.up = nn.Linear(axes.width, axes.hidden)
        self.down = nn.Linear(axes.hidden, axes.width)
        self.dropout = nn.Dropout(0.5)
        self.shared = shared
        self.scale = 1.0
        self.of_width = axes.hidden**-0.5
        self.of_depth = layer / axes.layers
        self.length, self.table = 0, None
        self.act = F.relu
        self.moods = [layer, 1]
        self._draw = 0.0

    @property
    def draw(self) -> float:
        return self._draw

    @draw.setter
    def draw(self, value: float) -> None:
        self._draw = value

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(self.norm(x))) * self.of_width
        update: Tensor = self.shared(self.dropout(self.down(hidden)))
        return x + self.scale * update


class Net(nn.Module):
    patience = 2

    def __init__(self, shape: Axes) -> None:
        super().__init__()
        self.shape = shape
        self.offset = 0.0
        shared = nn.Dropout(0.25)
        self.blocks = nn.ModuleList(Block(shape, layer, shared) for layer in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.offset


def net() -> Any:
    return Net(Axes())


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    """All that was said about attributes."""
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    caplog.clear()
    return "\n".join(messages)


def values(model: Any, name: str) -> list[Any]:
    """An attribute of a submodule of each block."""
    path, _, last = name.rpartition(".")
    return [getattr(block.get_submodule(path), last) for block in model.blocks]


def set_by_hand(model: Any) -> None:
    model.offset = 0.125
    first, second = model.blocks
    first.dropout.p = 0.0
    first.norm.eps = 1e-3
    second.scale = 0.7
    second.draw = 0.3
    second.up.note = "mine"


def check_carried(model: Any) -> None:
    assert model.offset == 0.125
    assert values(model, "dropout.p")[:2] == [0.0, 0.5]
    assert values(model, "norm.eps")[:2] == [1e-3, 1e-5]
    assert values(model, "scale")[:2] == [1.0, 0.7]
    assert values(model, "draw")[:2] == [0.0, 0.3]


@pytest.mark.parametrize("operation", [WIDER, DEEPER])
def test_values_that_were_set_by_hand_stay(
    operation: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = net(), torch.randn(3, 4)
    set_by_hand(model)
    average, of_torch = copy.deepcopy(model), AveragedModel(model)
    grow(model, *operation, ema=average, probe=False)
    grow(of_torch, *operation, probe=False)
    for module in (model, average, of_torch.module):
        check_carried(module)
        assert torch.isfinite(module(x)).all()
    assert model.blocks[0].of_width == Block(model.shape, 0, nn.Identity()).of_width
    assert warnings_of(caplog) == ""


def test_without_carrying_the_values_would_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "carry_attributes", lambda *_: None)
    model = net()
    set_by_hand(model)
    grow(model, *WIDER, probe=False)
    with pytest.raises(AssertionError):
        check_carried(model)


def test_a_copy_has_the_values_of_its_source_and_a_drawn_block_those_of_the_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    set_by_hand(model)
    grow(model, *DEEPER, probe=False)
    assert values(model, "dropout.p") == [0.0, 0.5, 0.0, 0.5]
    assert values(model, "scale") == [1.0, 0.7, 1.0, 0.7]
    grow(model, "insert_layers", 1, where=[1], probe=False, **{"from": "copy"})
    assert values(model, "dropout.p") == [0.0, 0.0, 0.5, 0.0, 0.5]
    grow(model, "insert_layers", 1, where="start", probe=False, **{"from": "normal"})
    assert values(model, "dropout.p") == [0.5, 0.0, 0.0, 0.5, 0.0, 0.5]
    assert warnings_of(caplog) == ""


def test_a_value_that_depends_on_the_shape_is_the_classes_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    model.blocks[0].of_width = 2.0
    model.blocks[1].of_depth = 0.0
    model.blocks[1].scale = 0.5
    grow(model, *WIDER, probe=False)
    assert values(model, "of_width") == [12**-0.5] * 2
    assert values(model, "of_depth") == [0.0, 0.0]  # which the width does not change
    assert (
        "widen: set by hand, and now as the class sets it: blocks.0.of_width (2.0, now 0.288"
        in (message := warnings_of(caplog))
    )
    assert "of_depth" not in message
    assert "scale" not in message
    grow(model, *DEEPER, probe=False)
    assert values(model, "of_depth") == [0.0, 0.25, 0.5, 0.75]
    assert values(model, "scale") == [1.0, 0.5, 1.0, 0.5]
    message = warnings_of(caplog)
    assert "blocks.1.of_depth (0.0, now 0.25), blocks.3.of_depth (0.0, now 0.75);" in message
    grow(model, *WIDER[:1], {"axis": "hidden", "size": 24}, probe=False)
    assert warnings_of(caplog) == ""  # it is said once


def test_a_submodule_that_is_shared(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    model.blocks[0].shared.p = 0.0
    model.blocks[1].dropout = model.blocks[0].dropout  # the class has two of them
    model.blocks[0].dropout.p = 0.1
    grow(model, *DEEPER, probe=False)
    assert values(model, "shared.p") == [0.0] * 4
    assert len({id(block.shared) for block in model.blocks}) == 1
    assert values(model, "dropout.p") == [0.1] * 4
    assert warnings_of(caplog) == ""
    model.blocks[3].shared = nn.Dropout(0.75)  # the class has one of them
    grow(model, *WIDER, probe=False)
    assert values(model, "shared.p") == [0.25] * 4
    assert "blocks.0.shared.p (0" in warnings_of(caplog)


def test_what_is_no_plain_value_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    first, second = model.blocks
    first.act = F.gelu
    first.moods[1] = 3
    second.dropout = nn.Identity()
    second.extra = nn.Identity()
    first.dropout.p = 0.0
    grow(model, *WIDER, probe=False)
    message = warnings_of(caplog)
    for text in (
        "blocks.0.act (gelu, now relu)",
        "blocks.0.moods (list, now list)",
        "blocks.1.dropout (Identity, now Dropout)",
        "blocks.1.extra (Identity, now nothing)",
    ):
        assert text in message
    assert values(model, "dropout.p") == [0.0, 0.5]


def test_a_length_that_belongs_to_a_cache_goes_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """A module that had the length of a table, but no table, would fail, or compute something else."""
    model = net()
    block = model.blocks[0]
    block.length, block.table, block.scale = 8, torch.ones(8, 6), 0.5
    grow(model, *WIDER, probe=False)
    block = model.blocks[0]
    assert (block.length, block.table, block.scale) == (0, None, 0.5)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config.max_position_embeddings = 8
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    llama: Any = LlamaForCausalLM(config).eval()
    ids = torch.arange(16)[None]
    before = llama(input_ids=ids).logits
    assert llama.model.rotary_emb.max_seq_len_cached == 16
    caplog.clear()
    grow(llama, "widen_mlp", "x2", probe=False)
    assert warnings_of(caplog) == ""
    torch.testing.assert_close(llama(input_ids=ids).logits, before)


class Reading(Net):
    def __init__(self, shape: Axes) -> None:
        super().__init__(shape)
        self.norm_of_first = self.blocks[0].up.weight.norm().item()  # type: ignore[union-attr,operator]


def test_a_class_that_cannot_be_built_without_memory_grows_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = Reading(Axes())
    model.blocks[0].dropout.p = 0.0
    grow(model, *WIDER, probe=False)
    assert model.blocks[0].up.weight.shape == (12, 4)
    assert values(model, "dropout.p") == [0.5, 0.5]
    assert "widen: attributes that were set by hand on submodules, if any" in (
        message := warnings_of(caplog)
    )
    assert "RuntimeError" in message


class Drawing(Net):
    def __init__(self, shape: Axes) -> None:
        super().__init__(shape)
        self.drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())


def test_a_class_that_draws_numbers_grows_and_generators_are_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    reference = build_reference(lambda: Drawing(Axes()))
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert torch.equal(states[2], torch.get_rng_state())
    assert reference.module is not None
    assert all(parameter.is_meta for parameter in reference.module.parameters())
    model: Any = Drawing(Axes())
    model.offset = 1.0
    grow(model, *WIDER, probe=False)
    assert model.offset == 1.0
    assert "drawn" in warnings_of(caplog)


def test_processes_carry_the_same_or_nothing() -> None:
    reference = build_reference(net)
    assert reference.if_on_all(True) is reference
    local_reference = reference.if_on_all(False)
    old, new = net(), net()
    old.offset = 1.0
    comparison = comparison_of(old, local_reference, new)
    assert not comparison.transfers
    assert "another process" in comparison.warning
    assert comparison_of(old, Reference(), new).warning == ""


def comparison_of(old: nn.Module, reference: Reference, new: nn.Module) -> AttributeComparison:
    return compare_attributes(old, reference, new, lambda path: path, with_additional=True)


def test_a_switch_is_not_carried_without_the_private_function_that_it_needs() -> None:
    class Layer(nn.Module):
        switch = False

    for function, is_carried in ((partial(print), False), (None, True)):
        old, new = Layer(), Layer()
        old.switch, old._function = True, function
        comparison = compare_attributes(
            old, build_reference(Layer), new, lambda path: path, with_additional=True
        )
        assert bool(comparison.transfers) is is_carried
        assert ("switch (True, now False)" in comparison.warning) is not is_carried


def test_what_was_added_to_a_module_stays_without_its_cache() -> None:
    old, new, reference = net(), net(), build_reference(net)
    first, second = old.blocks
    first.mark, first.patience = "mine", 3  # the second over the value of the class
    first.norm.forward = first.down.forward
    second.length_now, second.last, second.mean = 5, torch.ones(5), 0.5
    comparison = comparison_of(old, reference, new)
    carry_attributes(new, comparison.transfers)
    assert (new.blocks[0].mark, new.blocks[0].patience) == ("mine", 3)
    assert comparison.resets == ("blocks.0.norm.forward (forward, now nothing)",)
    assert not hasattr(new.blocks[1], "length_now")
    assert not hasattr(new.blocks[1], "last")
    model = net()
    model.blocks[0].patience = 3
    model.patience = 4
    grow(model, *WIDER, probe=False)
    assert (model.patience, model.blocks[0].patience, model.blocks[1].patience) == (4, 3, 2)


def changes(kind: str) -> Mapping[str, Any]:
    operations = {**EXACT, **OTHER}
    return {name: operations[name] for name in operations if name not in REFUSED.get(kind, ())}


@parametrize_first("kind", FAMILIES, first=2)
def test_of_a_model_that_nobody_touched_nothing_is_said(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, operation in changes(kind).items():
        model = copy.deepcopy(model_of(kind)).train()
        if name == "insert_layers":
            model.bfloat16()
        grow(model, operation, probe=False)
        assert "by hand" not in warnings_of(caplog), name


def test_a_model_of_transformers_keeps_what_its_config_does_not_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = copy.deepcopy(model_of("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.125
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    grow(model, EXACT["widen_mlp"], probe=False)
    grow(model, OTHER["stack_layers"], probe=False)
    assert [layer.self_attn.attention_dropout for layer in model.model.layers] == [0.125] * 6
    eps = [layer.input_layernorm.variance_epsilon for layer in model.model.layers]
    assert eps[1] == eps[4] == 1e-3
    assert eps[0] == eps[5] < 1e-3
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [*range(6)]
    assert warnings_of(caplog) == ""
    grow(model, EXACT["widen_hidden"], probe=False)  # which divides eps
    assert "model.layers.1.input_layernorm.variance_epsilon (0.001, now 6.6" in warnings_of(caplog)
