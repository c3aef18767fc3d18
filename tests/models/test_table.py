"""The table of a user's model: parameters and FLOPs of torch's modules, and which axes can grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from growing import KEY, operation
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instar.growth.apply import apply
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.growth.states import Role
from instar.models.table import Shape, Table, check_table

SIZES = {"a": 4, "b": 8, "c": 6}


@dataclass(frozen=True)
class Case:
    module: nn.Module
    inputs: tuple[Tensor, ...]
    fill: Callable[[Table], None]
    is_counted: bool = True
    """whether torch counts its operations"""


def image(*shape: int) -> tuple[Tensor]:
    return (torch.randn(1, *shape),)


def tokens(number: int, width: int) -> Tensor:
    return torch.randn(1, number, width)


SEQUENCE = tokens(5, 8)

CASES = {
    "linear": Case(nn.Linear(4, 8), image(7, 4), lambda t: t.linear("m", "b", "a", times=7)),
    "conv1d": Case(
        nn.Conv1d(4, 8, 3), image(4, 9), lambda t: t.conv("m", "b", "a", [3], positions=7)
    ),
    "conv2d": Case(
        nn.Conv2d(4, 8, (3, 5), stride=2, padding=1, bias=False),
        image(4, 9, 11),
        lambda t: t.conv("m", "b", "a", [3, 5], positions=5 * 5, bias=False),
    ),
    "conv3d": Case(
        nn.Conv3d(4, 8, 2),
        image(4, 3, 4, 5),
        lambda t: t.conv("m", "b", "a", [2] * 3, positions=24),
    ),
    "grouped": Case(
        nn.Conv2d(4, 8, 3, groups=2),
        image(4, 5, 5),
        lambda t: t.conv("m", "b", "a", [3, 3], positions=9, groups=2),
    ),
    "depthwise": Case(
        nn.Conv2d(8, 8, 3, groups=8),
        image(8, 5, 5),
        lambda t: t.conv("m", "b", "b", [3, 3], positions=9, groups="b"),
    ),
    "transposed1d": Case(
        nn.ConvTranspose1d(4, 8, 2, stride=2),
        image(4, 5),
        lambda t: t.conv("m", "b", "a", [2], positions=5, is_transposed=True),
    ),
    "transposed2d": Case(
        nn.ConvTranspose2d(4, 8, 2, groups=2),
        image(4, 5, 5),
        lambda t: t.conv("m", "b", "a", [2, 2], positions=25, groups=2, is_transposed=True),
    ),
    "transposed3d": Case(
        nn.ConvTranspose3d(4, 8, 2),
        image(4, 3, 3, 3),
        lambda t: t.conv("m", "b", "a", [2, 2, 2], positions=27, is_transposed=True),
    ),
    "attention": Case(
        nn.MultiheadAttention(8, 2, batch_first=True),
        (SEQUENCE, SEQUENCE, SEQUENCE),
        lambda t: t.attention("m", "b", tokens=5),
    ),
    "encoder layer": Case(
        nn.TransformerEncoderLayer(8, 2, 6, batch_first=True),
        (SEQUENCE,),
        lambda t: t.encoder_layer("m", "b", "c", tokens=5),
    ),
    "rnn": Case(
        nn.RNN(4, 8, batch_first=True),
        (tokens(5, 4),),
        lambda t: t.recurrent("m", "rnn", "b", "a", steps=5),
    ),
    "gru": Case(
        nn.GRU(4, 8, 2, batch_first=True, bias=False),
        (tokens(5, 4),),
        lambda t: t.recurrent("m", "gru", "b", "a", layers=2, bias=False, steps=5),
    ),
    "lstm": Case(
        nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True),
        (tokens(5, 4),),
        lambda t: t.recurrent("m", "lstm", "b", "a", layers=2, bidirectional=True, steps=5),
    ),
    "batch norm": Case(nn.BatchNorm2d(4), image(4, 3, 3), lambda t: t.batch_norm("m", "a"), False),
    "layer norm": Case(nn.LayerNorm(4), image(4), lambda t: t.norm("m", "a"), False),
    "group norm": Case(nn.GroupNorm(2, 4), image(4, 3), lambda t: t.group_norm("m", "a"), False),
    "rms norm": Case(nn.RMSNorm(4), image(4), lambda t: t.norm("m", "a", bias=False), False),
    "embedding": Case(
        nn.Embedding(8, 4), (torch.arange(3),), lambda t: t.embedding("m", "b", "a"), False
    ),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # a flag that torch sets back
@pytest.mark.parametrize("name", CASES)
def test_a_module_has_the_parameters_and_flops_of_its_table(name: str) -> None:
    case, table = CASES[name], Table(SIZES)
    case.fill(table)
    holder = nn.ModuleDict({"m": case.module.train()})
    shapes = {n: tuple(p.shape) for n, p in holder.named_parameters()}
    assert {n: entry.shape for n, entry in table.entries.items()} == shapes
    assert {*table.buffers} == {n for n, _ in holder.named_buffers() if "num_batches" not in n}
    # torch does not count mkldnn's recurrent networks, and flash attention on CPUs
    plain = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
    with plain[0], plain[1], FlopCounterMode(display=False) as counter:
        case.module(*case.inputs)
    if case.is_counted:
        assert table.flops == counter.get_total_flops() > 0
    else:
        assert table.flops == counter.get_total_flops() == 0


def test_a_kernel_of_one_number_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"up: kernel .*, e\.g\. \(3,\) of an nn.Conv1d and \(3, 3\)"
    ):
        Table(SIZES).conv("up", "a", "b", kernel=3)  # type: ignore[arg-type]


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="m has an axis 'd', which is not a whole-number field"):
        Table(SIZES).conv("m", "a", "d", [3])
    with pytest.raises(ValueError, match="m: a of 4 is not divisible into 3 groups"):
        Table(SIZES).conv("m", "c", "a", [3], groups=3)
    with pytest.raises(ValueError, match="groups 'a' must be both its output and its source"):
        Table(SIZES).conv("m", "b", "a", [3], groups="a")


@dataclass(frozen=True)
class Axes(Shape):
    channels: int = 4
    hidden: int = 3
    grouped: int = 4
    width: int = 4
    units: int = 5

    def table(self, t: Table) -> None:
        t.conv("first", "channels", "3", [3], positions=8)
        t.conv("each", "channels", "channels", [3], positions=8, groups="channels")
        t.batch_norm("norm", "channels")
        t.conv("up", "grouped", "channels", [2], positions=8, is_transposed=True)
        t.conv("by_two", "width", "grouped", [1], positions=16, groups=2)
        t.encoder_layer("encoder", "width", "units", tokens=16)
        t.recurrent("memory", "lstm", "hidden", "width", layers=2, bidirectional=True, steps=16)
        t.linear("head", "2", "2*hidden")


class Net(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        a = axes
        self.first = nn.Conv1d(3, a.channels, 3, padding=1)
        self.each = nn.Conv1d(a.channels, a.channels, 3, padding=1, groups=a.channels)
        self.norm = nn.BatchNorm1d(a.channels)
        self.up = nn.ConvTranspose1d(a.channels, a.grouped, 2, stride=2)
        self.by_two = nn.Conv1d(a.grouped, a.width, 1, groups=2)
        self.encoder = nn.TransformerEncoderLayer(a.width, 2, a.units, batch_first=True)
        self.memory = nn.LSTM(a.width, a.hidden, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * a.hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.norm(self.each(self.first(x)))))
        x = self.encoder(self.by_two(x).mT)
        out: Tensor = self.head(self.memory(x)[0])
        return out


def test_a_net_of_many_modules_has_the_parameters_of_its_table() -> None:
    shapes = {name: tuple(p.shape) for name, p in Net(Axes()).named_parameters()}
    check_table("net", Axes(), shapes)


@pytest.mark.parametrize("axis", ["channels", "hidden", "units"])
@pytest.mark.parametrize("options", [{}, {"how": "split"}])
def test_an_axis_grows_without_a_change_of_the_function(axis: str, options: Any) -> None:
    axes = Axes()
    torch.manual_seed(0)
    x, net = torch.randn(2, 3, 8, dtype=torch.float64), Net(axes).double().eval()
    old = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for value in old.values():
        value += 0.1 * torch.randn_like(value)
    size = 2 * axes.sizes()[axis]
    wide_axes, growth = plan(axes, operation("widen", {"axis": axis, "size": size}, **options))
    assert growth.label == "exact"
    new = Net(wide_axes).double().eval()
    values = apply(growth, old, Role.PARAMETER, KEY)
    torch.testing.assert_close(functional_call(new, values, x), net(x))


@pytest.mark.parametrize("axis", ["grouped", "width"])
def test_an_axis_in_groups_or_heads_cannot_grow(axis: str) -> None:
    with pytest.raises(GrowthError, match=f"{axis} is an input or output axis"):
        plan(Axes(), operation("widen", {"axis": axis, "size": 8}))
