import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from instar.models.layers import masked_norm, rms_norm


def inputs(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    weight = torch.randn(shape[-1], dtype=torch.float64, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_it_is_the_formula(shape: list[int]) -> None:
    x, weight = inputs(*shape)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 0.1), expected)


def test_derivatives_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 0.1), inputs(3, 2, 7))


def test_a_row_of_zeros_stays_zero_and_has_finite_gradients() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    output = rms_norm(x, torch.ones(4), 1e-5)
    output.sum().backward()
    assert output.abs().max() == 0
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_low_precision_is_normalised_in_float32() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5), torch.ones(1, 8))


def test_channels_count_by_their_openings() -> None:
    x, weight = inputs(3, 4)
    bias = torch.full((4,), 0.5, dtype=torch.float64)
    opening = torch.tensor([1.0, 1.0, 0.25, 1.0], dtype=torch.float64)
    mean = (x * opening).sum(-1, keepdim=True) / 3.25
    variance = (opening * (x - mean) ** 2).sum(-1, keepdim=True) / 3.25
    expected = opening * ((x - mean) / (variance + 0.1).sqrt() * weight + bias)
    torch.testing.assert_close(
        masked_norm(x, opening, weight, bias, 0.1, is_centered=True), expected
    )
    square = (opening * x**2).sum(-1, keepdim=True) / 3.25
    expected = opening * (x / (square + 0.1).sqrt() * weight)
    torch.testing.assert_close(
        masked_norm(x, opening, weight, None, 0.1, is_centered=False), expected
    )


@pytest.mark.parametrize("is_centered", [True, False])
def test_open_channels_are_normed_as_ever(is_centered: bool) -> None:
    x, weight = inputs(3, 7)
    output = masked_norm(x, torch.ones(7).double(), weight, None, 0.1, is_centered=is_centered)
    plain = F.layer_norm(x, (7,), weight, None, 0.1) if is_centered else rms_norm(x, weight, 0.1)
    torch.testing.assert_close(output, plain)


def test_low_precision_is_masked_in_float32() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    output = masked_norm(x, torch.ones(8), torch.ones(8), None, 1e-5, is_centered=False)
    torch.testing.assert_close(output, torch.ones(1, 8))
