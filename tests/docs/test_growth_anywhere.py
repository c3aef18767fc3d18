"""docs/growth-anywhere.md: every loop runs as it is printed, and its table is what the planner says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small_models import EXACT, OTHER, model_of
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from instar.growth import GrowthError, grow, plan_growth
from instar.models.hf.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs/growth-anywhere.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
LOOPS = (
    "A plain loop",
    "transformers' `Trainer`",
    "Lightning",
    "LoRA adapters of peft",
    "Offline",
    "A new tokenizer",
)


def code(section: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
@pytest.mark.parametrize("section", LOOPS)
def test_a_loop_runs_as_it_is_printed(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code(section), section, "exec"), {"__name__": "page"})


def label(kind: str, operation: str) -> str:
    """What the planner says of an operation on a family, with the values of the tests."""
    labels_by_case = []
    for name, operation_case in {**EXACT, **OTHER}.items():
        if operation_case.name == operation and name not in ("overlap", "insert_means"):
            try:
                labels_by_case.append(
                    (plan_growth(model_of(kind).config, operation_case)[1].label, name)
                )
            except GrowthError:
                labels_by_case.append(("", name))
    labels = {operation_case for operation_case, _ in labels_by_case}
    if len(labels) == 1:
        return labels.pop() or "–"
    return ", ".join(
        f"{operation_case} ({EXACT[name].options['how']})"
        for operation_case, name in labels_by_case
        if operation_case
    )


def test_the_table_is_what_the_planner_says() -> None:
    lines = [line for line in SECTIONS["Families and operations"].splitlines() if "|" in line]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    assert table == {
        family.name: {operation: label(kind, operation) for operation in head[1:]}
        for kind, family in FAMILIES.items()
    }


def test_a_family_of_ones_own_takes_twenty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = code("A family of your own")
    assert len(text.splitlines()) <= 30
    monkeypatch.setitem(FAMILIES, "starcoder2", FAMILIES["llama"])
    exec(compile(text, "page", "exec"), {})
    config = Starcoder2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    model = Starcoder2ForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 8))
    before = model(ids).logits
    grow(model, "widen_mlp", "x2", how="split")
    grow(model, "insert_layers", 2)
    grow(model, "widen_hidden", "x2", how="duplicate")
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert model.config.hidden_size == 64
