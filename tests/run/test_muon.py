"""Batched Muon is torch's Muon, and orthogonalises."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from instar.run.muon import BatchedMuon, orthogonalise, step_coefficients

SHAPES = [(16, 16), (16, 16), (64, 16), (16, 64), (16, 64)]


def matrices() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_it_makes_the_updates_of_torchs_muon() -> None:
    actual, expected = matrices(), matrices()
    group = {"params": actual, "weight_decay": 0.1}
    muon = BatchedMuon([group], momentum=0.9, ns_steps=5)
    reference = torch.optim.Muon(expected, lr=0.02, momentum=0.9, weight_decay=0.1)
    muon.param_groups[0]["lr"] = 0.02
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for a, b in zip(actual, expected, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step()
        reference.step()
    for a, b in zip(actual, expected, strict=True):
        # bfloat16 has three digits; the order of its roundings differs in a batch
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
        assert torch.equal(muon.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


@pytest.mark.parametrize(
    ("iteration", "steps", "lowest", "highest"),
    [("quintic", 5, 0.6, 1.3), ("polar_express", 5, 0.8, 1.2), ("polar_express", 7, 0.9, 1.1)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_singular_values_come_close_to_one(
    iteration: str, steps: int, lowest: float, highest: float, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 32, 128, generator=torch.Generator().manual_seed(2))
    coefficients = step_coefficients(iteration, steps)  # type: ignore[arg-type]
    values = torch.linalg.svdvals(orthogonalise(x.to(dtype), coefficients, 1.02).float())
    assert lowest < values.min()
    assert values.max() < highest


def test_a_batch_of_matrices_is_updated_as_each_alone() -> None:
    """Also where other matrices have the same shape, or its transpose."""
    generator = torch.Generator().manual_seed(0)
    stacks = [
        torch.randn(3, 64, 16, generator=generator),
        torch.randn(3, 16, 64, generator=generator),
    ]
    gradients = [torch.randn(stack.shape, generator=generator) for stack in stacks]
    batches = [Parameter(stack.clone()) for stack in stacks]
    expected = [Parameter(matrix.clone()) for stack in stacks for matrix in stack]
    for parameters, their_gradients in (
        (batches, gradients),
        (expected, [m for g in gradients for m in g]),
    ):
        optimizer = BatchedMuon(
            [{"params": parameters, "weight_decay": 0.1}], momentum=0.9, ns_steps=5
        )
        optimizer.param_groups[0]["lr"] = 0.02
        for parameter, gradient in zip(parameters, their_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    actual = [matrix for stack in batches for matrix in stack]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    parameters = matrices()
    before = [p.detach().clone() for p in parameters]
    optimizer = BatchedMuon([{"params": parameters, "weight_decay": 0.1}], momentum=0.9, ns_steps=5)
    optimizer.param_groups[0]["lr"] = 0.1
    parameters[2].grad = torch.ones_like(parameters[2])
    optimizer.step()
    changes = [not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)]
    assert changes == [False, False, True, False, False]


@pytest.mark.parametrize("shape", [(3, 5), (9, 33), (11, 12), (1, 40), (64, 96)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_bit_depends_on_the_number_in_a_batch(
    shape: tuple[int, int], threads: int, dtype: torch.dtype
) -> None:
    """Ranks that share matrices out have fewer in a batch than one that holds all."""
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    coefficients = step_coefficients("polar_express", 5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        full_batch = orthogonalise(x, coefficients, 1.02)
        for first, last in ((0, 1), (4, 5), (1, 3), (2, 5)):
            part = orthogonalise(x[first:last], coefficients, 1.02)
            assert torch.equal(part, full_batch[first:last])
    finally:
        torch.set_num_threads(before)
