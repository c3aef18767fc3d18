"""Both roads of attention are the same function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from instar.models.cost import MATERIALIZED_UP_TO
from instar.models.gpt import causal_attention


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_bfloat16_on_a_cpu_is_the_fused_kernels_function(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 33, 8, generator=generator, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    low = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    output = causal_attention(*low, 0.0)
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)

    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    slopes = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    torch.autograd.backward(causal_attention(*exact, 0.0), slopes)
    torch.autograd.backward(output, slopes.bfloat16())
    for tensor, other in zip(low, exact, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=5e-2, atol=5e-2)


def test_long_contexts_take_the_fused_kernel_and_agree_at_the_border() -> None:
    q, k, v = (torch.randn(1, 1, MATERIALIZED_UP_TO + 1, 8).bfloat16() for _ in range(3))
    long = causal_attention(q, k, v, 0.0)[:, :, :-1]
    short = causal_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], 0.0)
    torch.testing.assert_close(long, short, rtol=3e-2, atol=3e-2)


def test_dropout_leaves_the_mean() -> None:
    q, k = (torch.zeros(1, 1, 64, 8).bfloat16() for _ in range(2))
    v = torch.ones(1, 1, 64, 8).bfloat16()
    torch.manual_seed(0)
    mean = torch.stack([causal_attention(q, k, v, 0.5) for _ in range(50)]).float().mean()
    assert mean.item() == pytest.approx(1.0, abs=0.05)
