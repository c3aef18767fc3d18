"""`grow` with adapters of peft: base and LoRA grow together, and the grown adapters are saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cases import parametrize_first
from peft.tuners.lora import corda, loraga
from small_models import EXACT, model_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from instar.growth import GrowthError, grow

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["embed_tokens", *ALL], "modules_to_save": ["lm_head", "norm"]},
    "qwen2": {"target_modules": ALL, "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}


def adapted_model(kind: str, **options: Any) -> peft.PeftModel:
    """A model whose adapters have learned something."""
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{**CONFIGS[kind], **options})
    base = copy.deepcopy(model_of(kind))
    prepare_adapters(base, config)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def prepare_adapters(base: nn.Module, config: peft.LoraConfig) -> None:
    """Measure what adapters begin with that are made of activations or of gradients."""
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(5))
    if config.init_lora_weights == "corda":
        # its hook takes one sample at a time
        corda.preprocess_corda(base, config, lambda: [base(input_ids=row[None]) for row in ids])
    elif config.init_lora_weights == "lora_ga":
        config.lora_ga_config = peft.tuners.lora.LoraGAConfig()
        loraga.preprocess_loraga(
            base, config, lambda: base(input_ids=ids, labels=ids).loss.backward()
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(99))
    result: Tensor = model.eval()(input_ids=ids).logits[..., :64]
    model.train()
    return result


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


@parametrize_first(
    ("kind", "names"),
    [
        ("llama", ["insert_drawn", "widen_mlp", "widen_hidden", "add_groups", "grow_head_dim"]),
        ("qwen2", ["insert_layers", "widen_mlp_split", "widen_hidden_copied", "add_groups"]),
        ("gpt2", ["insert_layers", "widen_mlp", "extend_context"]),
    ],
    first=1,
)
def test_adapters_grow_with_their_weights_and_train_on(
    kind: str, names: list[str], tmp_path: Path
) -> None:
    model = adapted_model(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    train(model, optimizer)
    for name in names:
        before, frozen = logits(model), {n for n, p in model.named_parameters() if p.requires_grad}
        assert grow(model, EXACT[name], optimizer=optimizer) is model
        assert (logits(model) - before).abs().max() <= 1e-5 * before.abs().max()
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert frozen <= shapes(model).keys()
        assert optimizer.param_groups[0]["params"] == trainable
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        train(model, optimizer)
    assert model.peft_config["default"].r == 4
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=kind == "llama")
    after, tensors = logits(model), shapes(model)
    model.unload().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert shapes(loaded_model) == tensors
    assert torch.equal(logits(loaded_model), after)


# of a library: it counts on hooks whose modules get ids
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:.*Using default CorDA")
@parametrize_first(
    "init",
    ["pissa", "pissa_niter_2", "olora", "corda", "lora_ga", "orthogonal", "gaussian"],
    first=4,
)
def test_adapters_that_began_as_a_part_of_the_base_load_beside_what_it_left(
    init: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved as documented, and loaded by peft, which begins again as the config says."""
    options = {"target_modules": ALL, "modules_to_save": None}
    model = adapted_model("llama", init_lora_weights=init, **options)
    grow(model, EXACT["insert_layers"])
    has_warning = "save the base with them" in caplog.text
    assert has_warning is (init not in ("orthogonal", "gaussian"))
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    model.unload().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (logits(loaded_model) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_vocabularies_grow_with_their_adapters() -> None:
    model = adapted_model("llama")
    before = logits(model)
    grow(model, "resize_vocab", 80)
    assert model.base_model.model.model.embed_tokens.lora_embedding_A.default.shape == (4, 80)
    assert (logits(model) - before).abs().max() <= 1e-5 * before.abs().max()


def test_adapters_of_some_layers_stay_those_of_their_layers(tmp_path: Path) -> None:
    """Ranks and scales by layer, two adapters, and one that is not in use."""
    model = adapted_model(
        "llama",
        target_modules=["o_proj", "down_proj"],
        modules_to_save=None,
        layers_to_transform=[1, 2],
        rank_pattern={"layers.2.mlp.down_proj": 2},
        alpha_pattern={"layers.2.mlp.down_proj": 6},
    )
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=r".*\.0\.self_attn\.q_proj"))
    model.base_model.set_adapter(["default", "other"])
    before = logits(model)
    grow(model, "insert_layers", 2, where=[1, 2])
    assert (logits(model) - before).abs().max() <= 1e-5 * before.abs().max()
    layers = model.base_model.model.model.layers
    ranks = [getattr(layer.mlp.down_proj, "r", {}) for layer in layers]
    assert ranks == [{}, {}, {"default": 4}, {"default": 4}, {"default": 2}]
    assert layers[4].mlp.down_proj.scaling == {"default": 3.0}
    queries = [getattr(layer.self_attn.q_proj, "r", {}) for layer in layers]
    assert queries == [{"other": 3}, {"other": 3}, {}, {}, {}]
    model.save_pretrained(tmp_path / "adapter")
    after = logits(model)
    model.unload().save_pretrained(tmp_path / "base")
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded_model = peft.PeftModel.from_pretrained(loaded_model, tmp_path / "adapter")
    loaded_model.load_adapter(tmp_path / "adapter/other", "other")
    loaded_model.base_model.set_adapter(["default", "other"])
    assert torch.equal(logits(loaded_model), after)


@pytest.mark.parametrize(
    ("operation", "target", "warns"),
    [
        ("insert_layers", "q_proj", True),
        ("insert_layers", "o_proj", False),
        ("widen_mlp", "up_proj", True),
        ("widen_mlp", "down_proj", False),
        ("widen_mlp_split", "up_proj", False),
        ("insert_layers", None, False),
    ],
)
def test_what_never_trains_is_told(
    operation: str, target: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(model_of("llama"))
    if target:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))
    grow(model, EXACT[operation], probe=False)
    assert ("what is new does not train" in caplog.text) == warns


def test_adapted_models_become_no_experts() -> None:
    with pytest.raises(GrowthError, match=r"upcycle: .*merge_and_unload"):
        grow(adapted_model("qwen2"), "upcycle", 4, num_experts_per_tok=2)


def merged_model() -> nn.Module:
    model = adapted_model("llama")
    model.merge_adapter()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted_model("llama", use_dora=True, modules_to_save=None), "Dora.* do not grow"),
        (merged_model, r"unmerge_adapter\(\) first"),
        (
            lambda: adapted_model("llama").base_model.model,
            "LlamaForCausalLM is inside .* PeftModel",
        ),
        (
            lambda: peft.get_peft_model(copy.deepcopy(model_of("llama")), peft.IA3Config()),
            "kind IA3 do not grow",
        ),
    ],
)
def test_adapters_that_cannot_grow_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(GrowthError, match=message):
        grow(make(), "widen_mlp", "x2")
