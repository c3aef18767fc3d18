"""Models with every kind of state that an `nn.Module` may have, as one task of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from instar.custom import Batch, CustomTask, Field, SamplesConfig, Section, Shape, Table
from instar.data.columns import Columns

STEPS = 12
CONFIG = f"""\
name: states
task: states:States
data: {{val: 13, test: 14}}
train: {{until: {STEPS}it, batch_size: 8, gradient_accumulation_steps: 2, ema: 0.8}}
optimizer: {{lr: 0.03, weight_decay: 0.0}}
learning_rate: {{shape: constant, warmup_iters: 2}}
eval: {{eval_interval: 4, batch_size: 4}}
test: {{at_end: true, weights: last}}
record: {{log_interval: 1, report: false}}
"""


class Model(Section):
    kind: str = Field("plain", description="what the module keeps")
    hidden: int = Field(6, ge=1, description="hidden units")


@dataclass(frozen=True)
class Axes(Shape):
    kind: str
    hidden: int
    inputs: int = 3
    outputs: int = 1

    def table(self, table: Table) -> None:
        table.linear("up", "hidden", "inputs")
        if self.kind.startswith("batch norm"):
            table.batch_norm("middle", "hidden")
        if self.kind == "running":
            table.buffer("middle.mean", "hidden")
        if self.kind in LAYOUTS:
            table.linear("blocks.0.a", "hidden", "hidden")
            table.conv("blocks.0.conv", "hidden", "hidden", (3, 3))
        if self.kind == "tied":
            table.linear("middle.a", "hidden", "hidden")
            table.linear("middle.b", "hidden", "hidden")
            del table.entries["middle.b.weight"]
        table.linear("down", "outputs", "hidden")


class Net(nn.Module):
    def __init__(self, hidden: int, middle: nn.Module) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(3, hidden), middle, nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.middle(self.up(x))))
        return output.squeeze(1)


class Cast(Net):
    """The last layer is of another type than the first."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.middle(self.up(x.to(self.up.weight.dtype))))
        output: Tensor = self.down(inner.to(self.down.weight.dtype))
        return output.squeeze(1)


class Running(nn.Module):
    """Reads its buffers while it trains, and replaces one instead of writing into it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("warm", torch.tensor(False))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
            self.count += len(x)
            self.warm |= self.count > 50
        scale = torch.where(self.warm, 0.9, 1.0)
        return (x - self.mean) * scale / (1 + self.count / 100)


class FilledLater(nn.Module):
    """A buffer that is None until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach().mean(0)
        return x - self.first


class Tied(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.b(torch.tanh(self.a(x)))
        return output


class Blocks(Net):
    """A matrix, which Muon updates, and a convolution, whose parameters lie in memory as one says."""

    def __init__(self, hidden: int, lay: Callable[[Tensor], Tensor]) -> None:
        super().__init__(hidden, nn.Identity())
        block = nn.ModuleDict(
            {"a": nn.Linear(hidden, hidden), "conv": nn.Conv2d(hidden, hidden, 3, padding=1)}
        )
        for layer in (block["a"], block["conv"], self.up, self.down):
            layer.weight = nn.Parameter(lay(layer.weight.detach()))
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.blocks[0]["a"](self.up(x)))
        image = inner[:, :, None, None].expand(-1, -1, 2, 3)
        output: Tensor = self.down(torch.tanh(self.blocks[0]["conv"](image).mean((2, 3))))
        return output.squeeze(1)


def _transpose(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT


def _channels_last(value: Tensor) -> Tensor:
    return value.to(memory_format=torch.channels_last) if value.ndim == 4 else value


def _with_gaps(value: Tensor) -> Tensor:
    return torch.stack([value, torch.full_like(value, torch.nan)], -1)[..., 0]


class Alternating(Net):
    """Two parameters whose columns alternate in one matrix, an empty one, and one without dimensions."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, nn.Identity())
        weight = torch.randn(hidden, 2 * hidden) / hidden
        self.blocks = nn.ParameterList([weight[:, ::2], weight[:, 1::2]])
        self.nothing = nn.Parameter(torch.empty(0, hidden))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x)) * self.scale
        inner = torch.cat(
            [torch.tanh(inner @ self.blocks[0]) @ self.blocks[1], inner @ self.nothing.T], 1
        )
        output: Tensor = self.down(inner)
        return output.squeeze(1)


class Noisy(Net):
    """Draws, in whatever mode it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) + np.random.rand())


class Extra(nn.Identity):
    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def _buffer(hidden: int, value: Tensor) -> nn.Module:
    net = Net(hidden, nn.Identity())
    net.register_buffer("odd", value)
    return net


def _parameter(hidden: int, value: Tensor) -> nn.Module:
    net = Net(hidden, nn.Identity())
    net.odd = nn.Parameter(value, requires_grad=False)
    return net


def _tied_by_memory(hidden: int) -> nn.Module:
    net = Net(hidden, nn.Identity())
    net.odd = nn.Parameter(net.up.weight.detach()[1:].t())
    return net


def _frozen(hidden: int) -> nn.Module:
    net = Net(hidden, nn.Identity())
    net.up.requires_grad_(False)
    return net


def _still_norm(hidden: int) -> nn.Module:
    norm = nn.BatchNorm1d(hidden)
    nn.init.normal_(norm.running_mean)
    return Net(hidden, norm.requires_grad_(False).eval())


def _mixed_net(hidden: int) -> nn.Module:
    net = Cast(hidden, nn.BatchNorm1d(hidden))
    net.down.double()
    return net


def _spectral(hidden: int) -> nn.Module:
    return Net(hidden, parametrizations.spectral_norm(nn.Linear(hidden, hidden)))


def _weight_norm(hidden: int) -> nn.Module:
    return Net(hidden, parametrizations.weight_norm(nn.Linear(hidden, hidden)))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value,
    "channels last": _channels_last,
    "transposed": _transpose,
    "with gaps": _with_gaps,
}
"""how the weights of `Blocks` lie in memory"""
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda hidden: Net(hidden, nn.Identity()),
    "batch norm": lambda hidden: Net(hidden, nn.BatchNorm1d(hidden)),
    "batch norm in eval": _still_norm,
    "running": lambda hidden: Net(hidden, Running(hidden)),
    "frozen": _frozen,
    "tied": lambda hidden: Net(hidden, Tied(hidden)),
    "dropout": lambda hidden: Net(hidden, nn.Dropout(0.3)),
    "dropout in eval": lambda hidden: Net(hidden, nn.Dropout(0.3).eval()),
    "noise": lambda hidden: Noisy(hidden, nn.Identity()),
    "double": lambda hidden: Cast(hidden, nn.Identity()).double(),
    "bfloat16": lambda hidden: Cast(hidden, nn.Identity()).bfloat16(),
    **{name: (lambda hidden, lay=lay: Blocks(hidden, lay)) for name, lay in LAYOUTS.items()},
    "filled later": lambda hidden: Net(hidden, FilledLater()),
    "mixed": _mixed_net,
    "spectral norm": _spectral,
    "weight norm": _weight_norm,
    "alternating": Alternating,
    "empty": lambda hidden: _parameter(hidden, torch.empty(0, 3)),
    "a number": lambda hidden: _parameter(hidden, torch.tensor(1.0)),
    "complex buffer": lambda hidden: _buffer(hidden, torch.ones(2, dtype=torch.complex64)),
    "view as buffer": lambda hidden: _buffer(hidden, torch.ones(()).expand(3, 2)),
}
GROWING = tuple(KINDS)[: list(KINDS).index("filled later")]
"""the kinds whose axes are named"""
REFUSED: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "lazy": (lambda hidden: Net(hidden, nn.LazyLinear(hidden)), "middle.weight"),
    "extra state": (lambda hidden: Net(hidden, Extra()), "get_extra_state"),
    "integer parameter": (lambda hidden: _parameter(hidden, torch.arange(3)), "odd is of type"),
    "complex parameter": (
        lambda hidden: _parameter(hidden, torch.ones(2, dtype=torch.complex64)),
        "odd is of type",
    ),
    "expanded parameter": (
        lambda hidden: _parameter(hidden, torch.ones(()).expand(3, 2)),
        "several elements of the parameter odd are one place in memory",
    ),
    "tied by memory": (_tied_by_memory, "up.weight and odd are two parameters in the same memory"),
    "sparse buffer": (
        lambda hidden: _buffer(hidden, torch.eye(3).to_sparse()),
        "the buffer odd",
    ),
    "complex128 buffer": (
        lambda hidden: _buffer(hidden, torch.ones(2, dtype=torch.complex128)),
        "the buffer odd",
    ),
    "all frozen": (
        lambda hidden: Net(hidden, nn.Identity()).requires_grad_(False),
        "requires a gradient",
    ),
}
"""what no run takes, and a word of why"""


class States(CustomTask[Model, SamplesConfig]):
    Model = Model

    def samples(self) -> Columns:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(75, 3)).astype(np.float32)
        return {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}

    def shape(self) -> Axes | None:
        has_axes = self.model.kind in GROWING
        return Axes(self.model.kind, self.model.hidden) if has_axes else None

    def module(self, shape: Any) -> nn.Module:
        kind, hidden = self.model.kind, getattr(shape, "hidden", self.model.hidden)
        make = KINDS[kind] if kind in KINDS else REFUSED[kind][0]
        return make(hidden)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]).float() - batch["y"]).square()
