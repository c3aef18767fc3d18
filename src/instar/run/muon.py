"""Muon: momentum orthogonalised by Newton–Schulz iterations, in batches, also of sharded matrices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from instar.distributed.shards import is_sharded, on_owners, to_local

Coefficients = tuple[float, float, float]

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Newton–Schulz coefficients with the steepest slope at zero; five steps (Jordan et al., Muon,
2024)."""

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Minimax polynomial of each step, for singular values above 1e-3 (Polar Express, arXiv 2505.16932,
algorithm 1, degree 5); further steps repeat the last one."""

_SAFETY = 1.02
"""Divisor that keeps singular values ≤ 1 despite bfloat16 rounding, as Polar Express requires."""

LANES = 16
"""Elements of the widest vector register, in float32."""

Iteration = Literal["quintic", "polar_express"]


class EagerMethods:
    """Mixin for optimizers of torch: methods that do not import `torch._dynamo` when they are first called.

    torch decorates them to keep the compiler from tracing them. Instar compiles models, never optimizers, and that import takes
    a third of the time from a command to its first step.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class BatchedMuon(EagerMethods, torch.optim.Muon):
    """`torch.optim.Muon` with the same state and update, orthogonalising equal shapes in one batch.

    For single small matrices the kernel launches cost more than the arithmetic: for the 24 matrices
    of a 4 × 128 GPT, batching takes a third of the time.

    Of sharded matrices, momentum is as well. Those of a shape are shared out over the ranks: each gathers
    some of them, orthogonalises these whole and returns the rows of the result. No bit depends on how
    many ranks there are.

    A parameter of three dimensions is a batch of matrices, such as those of experts.

    As fused optimizers do for `torch.amp.GradScaler`, a step divides gradients by the attribute `grad_scale`, and changes
    nothing where the attribute `found_inf` is 1; both are numbers on the device.

    Args:
        dtype: in which matrices travel and are orthogonalised. torch's Muon takes bfloat16.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        ns_steps: int,
        iteration: Iteration = "quintic",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # all of torch's constructor but its check that parameters have two dimensions
        defaults = inspect.signature(torch.optim.Muon).parameters
        values = {
            name: parameter.default for name, parameter in defaults.items() if name != "params"
        }
        options = {"lr": 0.0, "momentum": momentum, "ns_steps": ns_steps}
        Optimizer.__init__(self, params, {**values, **options})
        self.dtype = dtype
        self.coefficients = step_coefficients(iteration, ns_steps)
        self.safety = _SAFETY if iteration == "polar_express" else 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every matrix that has a gradient. A collective if they are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        n_updated = 0
        for group in self.param_groups:
            for parameters in self._by_shape(group["params"]):
                self._update(parameters, group, n_updated)
                n_updated += len(parameters)
        return loss

    def _by_shape(self, parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
        """Group parameters of the same dtype whose matrices have the same shape, or its transpose."""
        batches: dict[tuple[object, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                key = (parameter.dtype, *parameter.shape[:-2], *sorted(parameter.shape[-2:]))
                batches.setdefault(key, []).append(parameter)
        return batches.values()

    def _update(self, parameters: list[Tensor], group: dict[str, Any], first_owner: int) -> None:
        gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
        buffers = [to_local(self._momentum(parameter)) for parameter in parameters]
        if (grad_scale := getattr(self, "grad_scale", None)) is not None:
            gradients = [gradient / grad_scale for gradient in gradients]
        factor: Tensor | float = 1.0
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            factor = (1.0 - found_inf).to(gradients[0].dtype)
            gradients = [gradient.where(found_inf == 0, 0.0) for gradient in gradients]
        lerp(buffers, gradients, (1.0 - group["momentum"]) * factor)
        nesterov = torch._foreach_lerp(gradients, buffers, group["momentum"])
        updates = [update.to(self.dtype) for update in nesterov]
        if sharded_params := [parameter for parameter in parameters if is_sharded(parameter)]:
            updates = on_owners(sharded_params, updates, self._orthogonalise, first_owner)
        else:
            updates = self._orthogonalise(updates)
        rows = [to_local(parameter) for parameter in parameters]
        torch._foreach_mul_(rows, 1.0 - group["lr"] * group["weight_decay"] * factor)
        for parameter, row, update in zip(parameters, rows, updates, strict=True):
            height, width = parameter.shape[-2:]
            scale = max(1.0, height / width) ** 0.5
            row.add_(update if found_inf is None else update * factor, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _orthogonalise(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalise matrices, or batches of them, of the same shape or its transpose."""
        if not updates:
            return []
        tall = [update.shape[-2] > update.shape[-1] for update in updates]
        wide = [update.mT if t else update for update, t in zip(updates, tall, strict=True)]
        batch = torch.stack(wide)
        orthogonal = orthogonalise(batch.flatten(0, -3), self.coefficients, self.safety)
        matrices = orthogonal.view_as(batch).unbind()
        return [update.mT if t else update for update, t in zip(matrices, tall, strict=True)]


def lerp(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: Tensor | float) -> None:
    """Move tensors towards others in place: by 0 not at all, by 1 all the way.

    Args:
        weight: a number, also on the device.
    """
    if isinstance(weight, Tensor):
        weights = {dtype: weight.to(dtype) for dtype in {tensor.dtype for tensor in targets}}
        torch._foreach_lerp_(
            list(targets), list(ends), [weights[tensor.dtype] for tensor in targets]
        )
    else:
        torch._foreach_lerp_(list(targets), list(ends), weight)


def step_coefficients(iteration: Iteration, steps: int) -> tuple[Coefficients, ...]:
    """Return the polynomial of each step."""
    if iteration == "quintic":
        return (QUINTIC,) * steps
    last_ones = (POLAR_EXPRESS[-1],) * (steps - len(POLAR_EXPRESS))
    return POLAR_EXPRESS[:steps] + last_ones


def orthogonalise(x_NAB: Tensor, coefficients: Iterable[Coefficients], safety: float) -> Tensor:
    """Approximate U Vᵀ for each matrix U S Vᵀ of a batch, A ≤ B, in its dtype.

    Each step maps the singular values by σ → aσ + bσ³ + cσ⁵.
    """
    count, height, width = x_NAB.shape
    if count == 1 and x_NAB.device.type == "cpu":
        # MKL splits the sums of a lone matrix over threads, and rounds them otherwise than in a batch.
        x_NAB = x_NAB.repeat(2, 1, 1)
    # Kernels round matrices that do not fill vector registers otherwise at other places in a batch.
    x = pad(x_NAB, (0, -width % LANES, 0, -height % LANES))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * safety).clamp_min(1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x[:count, :height, :width]
