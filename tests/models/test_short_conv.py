import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from instar.models.layers import ShortConv
from instar.models.shape import Parameter


def make_conv(channels: int, lags: int, dtype: torch.dtype = torch.float64) -> ShortConv:
    table = {"conv.weight": Parameter(("embed", "one", "lags"), (channels, 1, lags), "channel")}
    conv = ShortConv(table, "conv").to(dtype)
    torch.nn.init.normal_(conv.weight, generator=torch.Generator().manual_seed(lags))
    return conv


def inputs(samples: int, length: int, channels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(samples, length, channels, dtype=torch.float64, generator=generator)


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5))
def test_it_is_a_depthwise_convolution_and_its_input(
    samples: int, length: int, channels: int, lags: int
) -> None:
    conv, x = make_conv(channels, lags), inputs(samples, length, channels)
    padded_x = F.pad(x.mT, (lags, -1))
    expected = x + F.conv1d(padded_x, conv.weight.flip(-1), groups=channels).mT
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_derivatives_are_those_of_finite_differences(length: int) -> None:
    conv = make_conv(3, 3)

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(conv, {"weight": weight}, (x,))  # type: ignore[no-any-return]

    x = inputs(2, length, 3).requires_grad_()
    assert torch.autograd.gradcheck(apply, (x, conv.weight))


def test_the_compiled_form_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = make_conv(4, 3), inputs(2, 6, 4)
    eager = conv(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(conv(x), eager)


def test_low_precision_stays_low() -> None:
    conv, x = make_conv(4, 3, torch.float32), inputs(2, 6, 4)
    low = conv(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), conv(x.float()), rtol=0.05, atol=0.05)
