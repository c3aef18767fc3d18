import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instar.models.cost import chunk_rows
from instar.models.loss import chunked_cross_entropy, head_cross_entropy

Problem = tuple[Tensor, Tensor, Tensor]


def problem(tokens: int, vocab: int, width: int = 6, dtype: torch.dtype = torch.float64) -> Problem:
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    x_ND = torch.randn(tokens, width, dtype=dtype, generator=generator)
    weight_VD = torch.randn(vocab, width, dtype=dtype, generator=generator)
    targets_N = torch.randint(-1, vocab, (tokens,), generator=generator)
    return x_ND.requires_grad_(), weight_VD.requires_grad_(), targets_N


def reference(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(x_ND @ weight_VD.t(), targets_N, ignore_index=-1, reduction="sum")


@given(tokens=st.integers(1, 30), vocab=st.integers(1, 20), rows=st.integers(1, 40))
@settings(deadline=None)
def test_chunks_of_any_size_give_the_same_loss_and_gradients(
    tokens: int, vocab: int, rows: int
) -> None:
    x, weight, targets = problem(tokens, vocab)
    loss, expected = chunked_cross_entropy(x, weight, targets, rows), reference(x, weight, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight))
    )


def test_derivatives_are_those_of_finite_differences() -> None:
    x, weight, targets = problem(9, 5)
    assert torch.autograd.gradcheck(
        lambda x, weight: chunked_cross_entropy(x, weight, targets, 4), (x, weight)
    )


def test_the_gradient_scales_with_what_follows() -> None:
    x, weight, targets = problem(10, 7)
    (plain,) = torch.autograd.grad(chunked_cross_entropy(x, weight, targets, 4), x)
    (scaled_gradient,) = torch.autograd.grad(chunked_cross_entropy(x, weight, targets, 4) / 8, x)
    torch.testing.assert_close(scaled_gradient * 8, plain)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight, targets = problem(10, 7)
    chunked_cross_entropy(x, weight.detach(), targets, 4).backward()
    assert x.grad is not None
    chunked_cross_entropy(x.detach(), weight, targets, 4).backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(x, weight, targets, 4).requires_grad


@pytest.mark.parametrize(("tokens", "vocab"), [(768, 100), (300, 4096)], ids=["whole", "chunked"])
def test_positions_without_target_add_nothing_and_pass_nothing_back(
    tokens: int, vocab: int
) -> None:
    x, weight, targets = problem(tokens, vocab, dtype=torch.float32)
    targets[5] = -1
    with torch.no_grad():
        x[5] = float("inf")
    loss = head_cross_entropy(x, weight, targets)
    assert loss.isfinite()
    has_target = torch.arange(tokens) != 5
    torch.testing.assert_close(loss, reference(x[has_target], weight, targets[has_target]))


@pytest.mark.parametrize(("tokens", "vocab"), [(64, 100), (300, 4096)], ids=["whole", "chunked"])
def test_all_targets_missing_make_zero(tokens: int, vocab: int) -> None:
    x, weight, targets = problem(tokens, vocab, dtype=torch.float32)
    loss = head_cross_entropy(x, weight, torch.full_like(targets, -1))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert x.grad.abs().max() == 0


def test_large_vocabularies_never_hold_all_logits() -> None:
    x, weight, targets = problem(1024, 8192, width=8, dtype=torch.float32)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            sizes.extend([result.numel()] if isinstance(result, Tensor) else [])
            return result

    with Watch():
        head_cross_entropy(x, weight, targets).backward()
    rows = chunk_rows(1024, 8192)
    assert rows is not None
    assert max(sizes) == rows * 8192 < 1024 * 8192


@pytest.mark.parametrize(("tokens", "vocab"), [(64, 100), (300, 4096)], ids=["whole", "chunked"])
def test_bf16_keeps_the_loss_in_float32_and_weights_gradients_in_theirs(
    tokens: int, vocab: int
) -> None:
    x, weight, targets = problem(tokens, vocab, width=32, dtype=torch.float32)
    exact = torch.autograd.grad(head_cross_entropy(x, weight, targets), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_cross_entropy(x, weight, targets)
    low = torch.autograd.grad(loss, (x, weight))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference(x, weight, targets), rtol=1e-2, atol=0.0)
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_small_gradients_survive_float16_as_far_as_the_loss_is_scaled() -> None:
    """Less than the smallest number of float16: as in a head that is sure of its targets."""
    targets = torch.arange(12) % 8
    weight = torch.eye(8, requires_grad=True)
    # the other tokens' chances are e^-18, 1.5e-8
    x = (18.0 * torch.eye(8)[targets]).requires_grad_()
    expected = torch.autograd.grad(reference(x, weight, targets) * 2.0**16, (x, weight))
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(x, weight, targets, 4)
    actual = torch.autograd.grad(loss * 2.0**16, (x, weight))
    # those of the targets, 1 − p, are as exact as float32 has numbers near 1
    masks = torch.eye(8)[targets] == 0, torch.eye(8) == 0
    for gradient, other, mask in zip(actual, expected, masks, strict=True):
        torch.testing.assert_close(gradient[mask], other[mask], rtol=1e-2, atol=1e-6)
