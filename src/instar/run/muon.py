"""Muon, all matrices of one shape at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Newton–Schulz with the steepest slope at zero; five steps (Jordan et al., Muon, 2024)."""

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The minimax polynomial of each step, for singular values above 1e-3 (Polar Express, arXiv
2505.16932, algorithm 1, degree 5); the last one is repeated."""

_SAFETY = 1.02
"""Polar Express must not meet a singular value above 1, which bfloat16 rounding may bring."""

Iteration = Literal["quintic", "polar_express"]


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with the same state and update, orthogonalising equal shapes together.

    One matrix at a time, the launches of many small products cost more than the arithmetic: for
    the 24 matrices of a 4 × 128 GPT this takes a third of the time.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        ns_steps: int,
        iteration: Iteration = "quintic",
    ) -> None:
        super().__init__(params, lr=0.0, momentum=momentum, ns_steps=ns_steps)
        self.coefficients = step_coefficients(iteration, ns_steps)
        self.safety = _SAFETY if iteration == "polar_express" else 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in self._by_shape(group["params"]):
                self._update(parameters, group)
        return loss

    def _by_shape(self, parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
        """Matrices that are one shape, or its transpose."""
        batches: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                batches.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
        return batches.values()

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, buffers, group["momentum"])
        tall = [update.shape[0] > update.shape[1] for update in nesterov]
        flat = [update.mT if t else update for update, t in zip(nesterov, tall, strict=True)]
        whitened = orthogonalise(torch.stack(flat), self.coefficients, self.safety)
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        for parameter, update, t in zip(parameters, whitened.unbind(), tall, strict=True):
            rows, columns = parameter.shape
            scale = max(1.0, rows / columns) ** 0.5
            parameter.add_(update.mT if t else update, alpha=-group["lr"] * scale)


def step_coefficients(iteration: Iteration, steps: int) -> tuple[Coefficients, ...]:
    """The polynomial of each of so many steps."""
    if iteration == "quintic":
        return (QUINTIC,) * steps
    repeated = (POLAR_EXPRESS[-1],) * (steps - len(POLAR_EXPRESS))
    return POLAR_EXPRESS[:steps] + repeated


def orthogonalise(x_NAB: Tensor, coefficients: Iterable[Coefficients], safety: float) -> Tensor:
    """About U Vᵀ for each matrix U S Vᵀ of a batch, A ≤ B, in bfloat16.

    Each step maps the singular values by σ → aσ + bσ³ + cσ⁵.
    """
    x = x_NAB.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * safety).clamp_min(1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
