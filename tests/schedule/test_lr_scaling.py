"""`optimizer.lr_base_width`: rates follow the fan-in of matrices as µP says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from growing import operation
from shapes import gpt2, llama

from instar.growth.operators import plan
from instar.models.shape import Fixed
from instar.schedule.settings import Update, rate_factors

GPT2 = gpt2(n_embd=32, n_mlp=128, tied=False)
LLAMA = llama(n_embd=32, n_mlp=96)


def factors(arch: Any, update: Update, *operations: Any, base: int = 32) -> dict[str, float]:
    """The factors that are not 1 after growth, without numbers of layers."""
    now = arch
    for each in operations:
        now, _ = plan(now, each)
    found = rate_factors(now, arch, base, update)
    assert found.keys() == now.parameters().keys()
    return {
        name.replace("blocks.0.", ""): round(factor, 9)
        for name, factor in found.items()
        if factor != 1.0 and not name.startswith("blocks.1.")
    }


DOUBLED = [operation("widen_hidden", "x2", how="duplicate"), operation("widen_mlp", "x2")]


@pytest.mark.parametrize("update", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("arch", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_at_the_base_width_no_rate_changes(arch: Any, update: Update) -> None:
    assert factors(arch, update) == {}
    assert factors(arch, update, operation("stack_layers", 2)) == {}
    assert factors(arch, update, operation("resize_vocab", "x2")) == {}


def test_rates_of_adamw_fall_as_the_fan_in_grows() -> None:
    hidden = dict.fromkeys(["attn.query.weight", "attn.key.weight", "attn.value.weight"], 0.5)
    assert factors(LLAMA, "adamw", DOUBLED[0]) == {
        **hidden,
        "mlp.gate.weight": 0.5,
        "mlp.up.weight": 0.5,
        "head.weight": 0.5,
    }
    assert factors(LLAMA, "adamw", DOUBLED[1]) == {"mlp.down.weight": 0.5}
    heads = operation("add_heads", 4)
    assert factors(LLAMA, "adamw", heads) == {"attn.output.weight": 0.5}


def test_rates_of_sgd_follow_fan_out_over_fan_in() -> None:
    found = factors(GPT2, "sgd", *DOUBLED)
    assert {name for name, factor in found.items() if factor == 2.0} == {
        "token_embedding.weight",
        "position_embedding.weight",
        "mlp.up.bias",
        *(f"{part}.bias" for part in ("attn.output", "mlp.down", "attn_norm", "mlp_norm")),
        *(f"{part}.weight" for part in ("attn_norm", "mlp_norm")),
        "final_norm.weight",
        "final_norm.bias",
        "attn.output.weight",
    }
    halves = {f"attn.{part}.weight" for part in ("query", "key", "value")} | {"head.weight"}
    assert {name for name, factor in found.items() if factor == 0.5} == halves


def test_rates_of_muon_are_spectral() -> None:
    found = factors(LLAMA, "muon", DOUBLED[1])
    assert found == {"mlp.down.weight": round(math.sqrt(1 / 2), 9)}
    found = factors(LLAMA, "muon", DOUBLED[0])
    assert found["attn.query.weight"] == round(math.sqrt(1 / 2), 9)
    # its own scale of a high matrix, √(rows / columns), is the spectral one already
    assert "mlp.up.weight" not in found
    assert "attn.output.weight" not in found


def test_a_base_of_another_width_has_the_proportions_of_the_start() -> None:
    found = factors(LLAMA, "adamw", base=16)
    assert set(found.values()) == {0.5}
    assert {"mlp.down.weight", "attn.output.weight", "mlp.up.weight"} <= found.keys()
    assert "token_embedding.weight" not in found


def test_a_model_without_a_stream_has_no_width() -> None:
    shape = Fixed((("a.weight", (3, 4)),))
    with pytest.raises(ValueError, match=r"optimizer\.lr_base_width is the width of the residual"):
        rate_factors(shape, shape, 64, "adamw")
