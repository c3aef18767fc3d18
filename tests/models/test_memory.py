from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from instar.config.language import ModelConfig
from instar.config.schema import OptimizerConfig
from instar.models.architecture import Architecture, resolve_architecture
from instar.models.cost import TrainingSetup, chunk_rows, memory_estimate
from instar.models.gpt import GPT
from instar.models.hf.config import complete_config
from instar.models.hf.cost import pretrained_memory
from instar.models.hf.families import BUILT_IN
from instar.models.hf.module import PretrainedModel
from instar.models.hf.pretrained import LoraShape
from instar.models.lora import Lora
from instar.models.shape import count_parameters

GPT2 = resolve_architecture(ModelConfig(n_layer=3, n_head=4, n_embd=64, context=64), 80)
LLAMA = replace(
    GPT2, n_kv_head=2, norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=False
)
MIXED = replace(LLAMA, activation="relu2", qk_norm=True, conv_size=4)
EXPERTS = replace(LLAMA, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.01)
STYLES = pytest.mark.parametrize(
    "arch", [GPT2, LLAMA, MIXED, EXPERTS], ids=["gpt2", "llama", "mixed", "experts"]
)


def kept_bytes(arch: Architecture, samples: int, *, bf16: bool = False) -> int:
    """Bytes that autograd keeps between a forward and its backward pass, without the weights."""
    model = GPT(arch)
    model.init_weights(0)
    return kept_by(model, (samples, arch.context), bf16=bf16)


def kept_by(
    model: torch.nn.Module, shape: tuple[int, int], *, bf16: bool, documents: bool = False
) -> int:
    own_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own_storages |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    storage_bytes: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own_storages:
            storage_bytes[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    inputs = torch.zeros(shape, dtype=torch.long)
    positions = torch.arange(shape[1]).remainder(32).expand(shape)
    places = {"positions_BT": positions} if documents else {}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model(inputs, inputs, **places)
    return sum(storage_bytes.values())


@STYLES
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_activations_are_those_that_autograd_keeps(arch: Architecture, bf16: bool) -> None:
    samples = 16
    estimate = memory_estimate(
        arch, TrainingSetup(batch_size=samples, precision="bf16" if bf16 else "fp32")
    )
    normalised_logits = 4 * samples * arch.context * arch.vocab_size
    actual_bytes = kept_bytes(arch, samples, bf16=bf16) - normalised_logits
    assert estimate["activations"] == pytest.approx(actual_bytes, rel=0.1)


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_models_of_transformers_keep_what_autograd_keeps(kind: str, bf16: bool) -> None:
    sizes = {"hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 96}
    sizes |= {"head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0}
    changes = {"moe_intermediate_size": 112} if kind == "qwen3_moe" else {}
    if kind == "gpt2":
        sizes = {"n_embd": 80, "n_layer": 3, "n_head": 5, "n_positions": 128, "vocab_size": 96}
    config = AutoConfig.for_model(kind, **sizes, **changes)
    shape = LoraShape(complete_config(config.to_dict()))
    samples, context = 8, 96
    setup = TrainingSetup(samples, context, precision="bf16" if bf16 else "fp32")
    estimate = pretrained_memory(shape, setup)
    packed_bytes = pretrained_memory(shape, replace(setup, document_masks=True))["activations"]
    tensors = 2 if kind == "gemma2" else 1  # of logits; one is the hyperbolic tangent
    logits = 4 * samples * context * 96 * tensors
    actual_bytes = kept_by(PretrainedModel(shape, seed=0), (samples, context), bf16=bf16) - logits
    assert estimate["activations"] == pytest.approx(actual_bytes, rel=0.05)
    assert estimate["logits"] >= logits
    if kind in ("llama", "qwen3"):
        model = PretrainedModel(shape, seed=0)
        more = kept_by(model, (samples, context), bf16=bf16, documents=True) - logits
        assert packed_bytes == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize("windows", [(), (16, None, 16)], ids=["", "windows"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_masks_of_documents_are_kept_once(windows: tuple[int | None, ...], bf16: bool) -> None:
    for plain in (GPT2, LLAMA):
        arch = replace(plain, context=224, windows=windows)
        model = GPT(arch)
        model.init_weights(0)
        setup = TrainingSetup(4, precision="bf16" if bf16 else "fp32", document_masks=True)
        actual_bytes = kept_by(model, (4, 224), bf16=bf16, documents=True) - 4 * 4 * 224 * 80
        estimate = memory_estimate(arch, setup)["activations"]
        assert estimate == pytest.approx(actual_bytes, rel=0.1 if not windows else 0.25)


def test_a_gpu_keeps_masks_of_documents_only_where_its_kernel_is_not_used() -> None:
    setup = TrainingSetup(4, precision="bf16", device="cuda", document_masks=True)
    plain = replace(setup, document_masks=False)
    drops = replace(LLAMA, dropout=0.1)
    for precision, arch in (("bf16", LLAMA), ("fp32", LLAMA), ("bf16", drops)):
        masked, unmasked = (
            memory_estimate(arch, replace(options, precision=precision))["activations"]
            for options in (setup, plain)
        )
        assert (masked > unmasked) == (precision == "fp32" or arch is drops)
    for kind, precision in (("llama", "bf16"), ("llama", "fp32"), ("gemma2", "bf16")):
        shape = LoraShape(complete_config(AutoConfig.for_model(kind).to_dict()))
        masked, unmasked = (
            pretrained_memory(shape, replace(options, context=64, precision=precision))[
                "activations"
            ]
            for options in (setup, plain)
        )
        # Gemma 2 caps its scores, which the kernel cannot
        assert (masked > unmasked) == (precision == "fp32" or kind == "gemma2")


@pytest.mark.parametrize("window", [4, 64, 100])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_windows_keep_what_autograd_keeps(window: int, bf16: bool) -> None:
    for plain in (GPT2, LLAMA):
        arch = replace(plain, context=224, windows=(window, None, window))
        setup = TrainingSetup(batch_size=8, precision="bf16" if bf16 else "fp32")
        normalised_logits = 4 * 8 * arch.context * arch.vocab_size
        actual_bytes = kept_bytes(arch, 8, bf16=bf16) - normalised_logits
        assert memory_estimate(arch, setup)["activations"] == pytest.approx(actual_bytes, rel=0.1)


def test_adapters_keep_what_autograd_keeps() -> None:
    for plain in (GPT2, LLAMA):
        arch = replace(plain, lora=(Lora("all", 16, 32.0),))
        samples = 16
        normalised_logits = 4 * samples * arch.context * arch.vocab_size
        more = kept_bytes(arch, samples) - kept_bytes(plain, samples)
        estimates = [
            memory_estimate(shape, TrainingSetup(batch_size=samples))["activations"]
            for shape in (arch, plain)
        ]
        assert estimates[0] - estimates[1] == pytest.approx(more, rel=0.1)
        assert estimates[0] == pytest.approx(kept_bytes(arch, samples) - normalised_logits, rel=0.1)


def test_state_is_counted_per_parameter() -> None:
    count = count_parameters(GPT2).total
    parts = memory_estimate(GPT2, TrainingSetup(batch_size=1, ema=True))
    assert parts["weights"] == parts["gradients"] == parts["ema"] == 4 * count
    assert parts["optimizer"] == 8 * count


def optimizer_bytes(**settings: object) -> int:
    optimizer = OptimizerConfig.model_validate(settings)
    return memory_estimate(LLAMA, TrainingSetup(1, optimizer=optimizer))["optimizer"]


def test_muon_and_sgd_keep_one_moment() -> None:
    matrices = count_parameters(LLAMA).matmul - LLAMA.vocab_size * LLAMA.n_embd
    assert optimizer_bytes() - optimizer_bytes(name="muon") == 4 * matrices
    assert optimizer_bytes() == 2 * optimizer_bytes(name="sgd")
    assert optimizer_bytes(name="sgd", momentum=0.0) == 0


def test_checkpointing_keeps_one_stream_per_block_and_one_block() -> None:
    deep = replace(GPT2, n_layer=30)
    plain_bytes = memory_estimate(deep, TrainingSetup(batch_size=4))["activations"]
    frugal = memory_estimate(deep, TrainingSetup(batch_size=4, gradient_checkpointing=True))[
        "activations"
    ]
    assert frugal < plain_bytes / 10


def test_logits_in_chunks_do_not_grow_with_the_tokens_by_their_own_number() -> None:
    wide = replace(GPT2, vocab_size=50_000)
    small_batch = memory_estimate(wide, TrainingSetup(batch_size=8))["logits"]
    large_batch = memory_estimate(wide, TrainingSetup(batch_size=64))["logits"]
    assert large_batch < 1.1 * small_batch


def test_small_problems_are_not_cut_into_chunks() -> None:
    assert chunk_rows(768, 100, "cpu") is None
    assert chunk_rows(8192, 4096, "cpu") == 512
    assert chunk_rows(4096, 50_304, "cpu") == 128
    assert chunk_rows(4096, 50_304, "cuda") is None
    assert chunk_rows(65_536, 50_304, "cuda") == 2**27 // 50_304
    assert chunk_rows(32_768, 50_304, "cuda", compiled=True) is None
    assert chunk_rows(65_536, 50_304, "cuda", compiled=True) == 2**29 // 50_304
    assert chunk_rows(4096, 50_304, "cpu", compiled=True) == 128
