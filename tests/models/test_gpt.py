from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt2, llama
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instar.models.architecture import Architecture
from instar.models.cost import flops_per_token
from instar.models.gpt import GPT, named_generator, rope_table, rotate

GPT2 = gpt2()
LLAMA = llama()
MIXED = replace(
    LLAMA,
    activation="relu2",
    qk_norm=True,
    bias=True,
    tied=True,
    conv_size=4,
    embedding_multiplier=4.0,
)
STYLES = pytest.mark.parametrize("arch", [GPT2, LLAMA, MIXED], ids=["gpt2", "llama", "mixed"])


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Every style switch, and sizes that are all unlike each other."""
    groups = draw(st.integers(1, 3))
    n_kv_head = draw(st.integers(1, 3))
    return Architecture(
        n_layer=draw(st.integers(1, 3)),
        n_head=groups * n_kv_head,
        n_kv_head=n_kv_head,
        head_dim=2 * draw(st.integers(1, 5)),
        n_embd=draw(st.integers(1, 24)),
        n_mlp=draw(st.integers(1, 40)),
        context=draw(st.integers(2, 12)),
        vocab_size=draw(st.integers(2, 60)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        activation=draw(st.sampled_from(["gelu", "gelu_tanh", "relu2", "swiglu"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        rope_base=10000.0,
        norm_eps=1e-5,
        qk_norm_eps=1e-5,
        dropout=0.0,
        conv_size=draw(st.sampled_from([None, 2, 4])),
        embedding_multiplier=draw(st.sampled_from([1.0, 3.0])),
    )


def random_model(arch: Architecture, seed: int = 0, **options: Any) -> GPT:
    """A model whose every parameter matters: no zero biases, no tiny outputs."""
    model = GPT(arch, **options)
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape)
            noise.normal_(0.0, 0.2, generator=named_generator(seed, "noise", name))
            parameter += noise
    return model


def tokens(arch: Architecture, samples: int = 3, length: int | None = None) -> torch.Tensor:
    shape = (samples, length or arch.context)
    return torch.randint(arch.vocab_size, shape, generator=named_generator("tokens"))


@given(architectures())
@settings(max_examples=60, deadline=None)
def test_the_module_has_the_parameters_of_the_table(arch: Architecture) -> None:
    with torch.device("meta"):
        model = GPT(arch)
    module = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert module == {name: entry.shape for name, entry in arch.parameters().items()}
    assert set(model.state_dict()) == set(module)


@given(architectures(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_future_does_not_change_the_past(arch: Architecture, data: st.DataObject) -> None:
    model = random_model(arch).double()
    before = tokens(arch)
    first_change = data.draw(st.integers(1, arch.context - 1))
    after = before.clone()
    after[:, first_change:] = (after[:, first_change:] + 1) % arch.vocab_size
    past = slice(0, first_change)
    torch.testing.assert_close(model(before)[:, past], model(after)[:, past])


@STYLES
def test_the_past_changes_the_future(arch: Architecture) -> None:
    model = random_model(arch)
    before = tokens(arch)
    after = before.clone()
    after[:, 0] = (after[:, 0] + 1) % arch.vocab_size
    assert (model(before)[:, -1] - model(after)[:, -1]).abs().min() > 0


@STYLES
def test_the_loss_is_the_sum_over_targets_that_count(arch: Architecture) -> None:
    model = random_model(arch).double()
    inputs, targets = tokens(arch), tokens(arch).flip(0)
    targets[0, :5] = -1
    log_p_BTV = model(inputs).log_softmax(-1)
    places = [(b, t) for b, t in np.ndindex(*targets.shape) if targets[b, t] != -1]
    expected = torch.stack([-log_p_BTV[b, t, targets[b, t]] for b, t in places]).sum()
    torch.testing.assert_close(model(inputs, targets), expected)


def test_the_loss_is_a_float32_scalar_under_autocast() -> None:
    for arch in (GPT2, LLAMA, MIXED):
        model = random_model(arch)
        inputs = tokens(arch)
        exact = model(inputs, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs, inputs)
            logits = model(inputs)
        loss.backward()
        assert (loss.dtype, loss.shape, logits.dtype) == (torch.float32, (), torch.bfloat16)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.0)


@STYLES
def test_float64_agrees_with_float32(arch: Architecture) -> None:
    model = random_model(arch)
    low = model(tokens(arch))
    torch.testing.assert_close(model.double()(tokens(arch)).float(), low, rtol=1e-3, atol=1e-4)


def test_grouped_heads_equal_full_heads_with_the_groups_repeated() -> None:
    grouped_model = random_model(LLAMA).double()
    full = GPT(replace(LLAMA, n_kv_head=LLAMA.n_head)).double()
    values = grouped_model.state_dict()
    for name, value in values.items():
        if ".key." in name or ".value." in name:
            heads = value.unflatten(0, (LLAMA.n_kv_head, LLAMA.head_dim))
            values[name] = heads.repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(values)
    torch.testing.assert_close(full(tokens(LLAMA)), grouped_model(tokens(LLAMA)))


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = rope_table(replace(LLAMA, context=64, head_dim=8))
    q, k = torch.randn(2, 1, 8, dtype=torch.float64, generator=named_generator("q and k"))

    def score(at: int, to: int) -> torch.Tensor:
        turned_q = rotate(q, (cos[at : at + 1], sin[at : at + 1]))
        turned_k = rotate(k, (cos[to : to + 1], sin[to : to + 1]))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(40, 33), score(11, 4))
    torch.testing.assert_close(score(7, 7), (q * k).sum())
    assert abs(score(40, 33) - score(40, 30)) > 1e-3


def test_rotation_pairs_channels_half_a_head_apart() -> None:
    cos, sin = rope_table(replace(LLAMA, context=4, head_dim=4, rope_base=100.0))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 4)
    output = rotate(x, (cos[3:4], sin[3:4])).flatten()
    a, b = torch.tensor([3.0, 0.3], dtype=torch.float64)
    torch.testing.assert_close(output, torch.stack([a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos()]))


@STYLES
def test_gradient_checkpointing_changes_no_gradient(arch: Architecture) -> None:
    inputs = tokens(arch)
    plain, frugal = random_model(arch), random_model(arch, gradient_checkpointing=True)
    plain(inputs, inputs).backward()
    frugal(inputs, inputs).backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_gradient_checkpointing_draws_the_same_dropout_again() -> None:
    arch = replace(GPT2, dropout=0.5)
    gradients = []
    for model in (random_model(arch), random_model(arch, gradient_checkpointing=True)):
        torch.manual_seed(5)
        model(tokens(arch), tokens(arch)).backward()
        gradients.append(model.get_parameter("blocks.0.mlp.up.weight").grad)
    torch.testing.assert_close(*gradients)


def test_dropout_acts_in_training_only() -> None:
    model = random_model(replace(LLAMA, dropout=0.5))
    inputs = tokens(LLAMA)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


@STYLES
def test_every_parameter_receives_a_gradient(arch: Architecture) -> None:
    model = GPT(arch)
    model.init_weights(0)
    model(tokens(arch), tokens(arch).roll(-1, 1)).backward()
    # a shift of all keys moves no attention weight (softmax), unless the keys are normalised
    for name, parameter in model.named_parameters():
        if not name.endswith("attn.key.bias"):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    small, other = GPT(LLAMA), GPT(LLAMA)
    deep = GPT(replace(LLAMA, n_layer=LLAMA.n_layer + 1, tied=True))
    small.init_weights(7)
    torch.manual_seed(123)
    other.init_weights(7)
    deep.init_weights(7)
    values, deeper = small.state_dict(), deep.state_dict()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in values.items())
    shared = "blocks.1.attn.query.weight"
    assert torch.equal(values[shared], deeper[shared])
    assert not torch.equal(values[shared], values["blocks.0.attn.query.weight"])
    other.init_weights(8)
    assert not torch.equal(values[shared], other.state_dict()[shared])


def test_drawing_first_weights_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    GPT(GPT2).init_weights(3)
    assert torch.equal(torch.get_rng_state(), state)


@STYLES
def test_a_model_may_be_shaped_on_meta_and_filled_later(arch: Architecture) -> None:
    with torch.device("meta"):
        model = GPT(arch)
    model.to_empty(device="cpu").init_weights(3)
    direct = GPT(arch)
    direct.init_weights(3)
    assert torch.equal(model(tokens(arch)), direct(tokens(arch)))


def test_a_model_shaped_on_meta_may_take_loaded_weights() -> None:
    with torch.device("meta"):
        model = GPT(LLAMA)
    source = random_model(LLAMA)
    model.to_empty(device="cpu").reset_buffers()
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens(LLAMA)), source(tokens(LLAMA)))


@STYLES
def test_counted_flops_are_those_of_forward_and_backward(arch: Architecture) -> None:
    model = GPT(arch)
    model.init_weights(0)
    inputs = tokens(arch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs, inputs).backward()
    flops = counter.get_total_flops() / inputs.numel()
    assert flops == pytest.approx(flops_per_token(arch), rel=0.02)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit into a context of 16"):
        GPT(GPT2)(torch.zeros(1, 17, dtype=torch.long))


@STYLES
def test_shorter_inputs_see_the_same_positions(arch: Architecture) -> None:
    model = random_model(arch).double()
    inputs = tokens(arch)
    torch.testing.assert_close(model(inputs[:, :5]), model(inputs)[:, :5])
