"""Tasks with optimizers of their own: one that is right, and some with a mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from science import Halves
from torch import nn
from torch.optim import Optimizer

from instar.config.schema import OptimizerConfig


class Slowing(Optimizer):
    """Momentum whose steps get shorter: its state is a Python number and a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    velocity = state.setdefault("velocity", torch.zeros_like(p))
                    velocity.mul_(0.9).add_(p.grad)
                    p.sub_(velocity, alpha=group["lr"] / (1 + 0.1 * state["step"]))


class Factored(Slowing):
    """Keeps a value for each row."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.ones(len(p), 3)


class Counting(Slowing):
    """Keeps its state in the parameter group."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Remembering(Slowing):
    """Keeps a list."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1.0]


class Own(Halves):
    """Two optimizers with different rates, and a schedule."""

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        up, down = model.get_submodule("up"), model.get_submodule("down")
        return [
            Slowing(up.parameters(), lr=config.lr),
            torch.optim.RMSprop(down.parameters(), lr=config.lr / 10),
        ]

    def schedule(self, step: int, steps: int | None) -> float:
        assert steps is not None
        return 1 - step / steps


class Scheduled(Halves):
    """A schedule, for the optimizer that the config names."""

    def schedule(self, step: int, steps: int | None) -> float:  # noqa: ARG002
        return 1 / (step + 1)


class Grouped(Halves):
    """Parameter groups for the optimizer that the config names."""

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        up, down = model.get_submodule("up"), model.get_submodule("down")
        return [
            {"params": list(up.parameters()), "lr": 3 * config.lr},
            {"params": list(down.parameters()), "weight_decay": 0.5},
        ]


class Partial(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        return Slowing(model.get_submodule("up").parameters(), lr=config.lr)


class Twice(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        return [Slowing(model.parameters(), lr=config.lr) for _ in range(2)]


class Named(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:  # noqa: ARG002
        return ["adamw"]


class Counted(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        return Counting(model.parameters(), lr=config.lr)


class Listed(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        return Remembering(model.parameters(), lr=config.lr)


class Rowwise(Halves):
    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:
        return Factored(model.parameters(), lr=config.lr)
