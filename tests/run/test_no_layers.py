"""`model.n_layer: 0`: a run that begins with embeddings and a head, and gets its blocks later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from growing import grow_model, operation, proof, random_gpt
from live import change_if_due, restore
from shapes import gpt2, llama

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.growth.operators import plan
from instar.growth.plan import GrowthError
from instar.models.hf.folder import export_folder
from instar.models.sampling import SamplingOptions, stream
from instar.record.events import AnalysisEvent, NewGradients, OperationEvent, Warn, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.render import render

Make = Callable[..., Trainer]

INSERT = {"name": "insert_layers", "value": 2, "from": "normal", "lr": {"rewarm_new": 3}}
KEYS = (
    "model.n_layer=0",
    f"schedule={json.dumps([{**INSERT, 'when': {'at_step': 3}}])}",
    "train.gradient_checkpointing=true",
    "record.analyze_every=3",
    "record.layers_every=2",
    "record.sample_every=2",
    "eval.eval_interval=2",
)


@pytest.mark.parametrize(
    "style",
    [
        ("optimizer.name=muon", "model.num_experts=2"),
        ("preset=llama", "model.n_kv_head=1", "model.n_mlp=32", "train.until=[8it]"),
    ],
    ids=["gpt2 with experts", "llama"],
)
def test_a_run_begins_without_layers_and_gets_them(
    trainer: Make, prepare_run: Callable[..., Prepared], style: tuple[str, ...], tmp_path: Path
) -> None:
    keys = (*KEYS, *style)
    forecast_text = render(prepare_run(*keys).forecast)
    assert "0 layers × 32 wide" in forecast_text
    assert "2 layers × 32 wide" in forecast_text
    run = trainer(*keys, name="whole")
    while run.state.progress.step < 5:
        change_if_due(run)
        run.step()
        if run.state.progress.step in (2, 5):
            run.save("here", must=True)
    continuation = trainer(*keys, name="again")
    restore(continuation, load_checkpoint(latest_checkpoint(tmp_path / "whole")))
    assert run.train().progress.step == continuation.train().progress.step == 8
    for name, tensor in run.parts.stepper.parameters.items():
        assert torch.equal(tensor, continuation.parts.stepper.parameters[name])
    events = [*read_events(tmp_path / "whole.jsonl")]
    (grew,) = (event for event in events if isinstance(event, OperationEvent))
    assert grew.preserves == "exact"
    assert grew.proof["max_logit_diff"] == 0.0
    assert [event for event in events if isinstance(event, AnalysisEvent)]
    assert any(event.grad_norm_new > 0 for event in events if isinstance(event, NewGradients))
    assert not [
        event for event in events if isinstance(event, Warn) and "gradient" in event.message
    ]
    before = load_checkpoint(tmp_path / "whole" / "checkpoints" / "step-2")
    assert main(["checkpoint", "analyze", str(before.path)]) == 0
    with pytest.raises(CheckpointError, match=r"model\.n_layer: 0, but .* has at least one block"):
        export_folder(before, tmp_path / "exported")


@pytest.mark.parametrize("arch", [gpt2(n_layer=0), llama(n_layer=0)], ids=["gpt2", "llama"])
def test_whatever_needs_no_layer_to_copy_grows_and_is_exact(arch: object) -> None:
    model = random_gpt(arch)
    for op in (
        operation("insert_layers", 3, **{"from": "normal"}),
        operation("insert_layers", 1, mask=4, **{"from": "normal"}),
        operation("widen_hidden", "x2", how="duplicate"),
        operation("widen_mlp", "x2"),
        operation("set_lora_rank", {"target": "all", "rank": 2}),
        operation("upcycle", 2),
    ):
        new, growth = grow_model(model, op, step=7)
        assert proof(model, new, growth).holds, op
    lora_model, _ = grow_model(model, operation("set_lora_rank", {"target": "all", "rank": 2}))
    deeper, growth = grow_model(lora_model, operation("insert_layers", 1, **{"from": "normal"}))
    assert proof(lora_model, deeper, growth).holds
    assert "blocks.0.mlp.up.lora_a" in deeper.arch.parameters()


@pytest.mark.parametrize("origin", ["neighbour", "copy", "average"])
def test_nothing_is_copied_where_nothing_is(origin: str) -> None:
    with pytest.raises(GrowthError, match="no layer yet that could be copied; choose from: normal"):
        plan(gpt2(n_layer=0), operation("insert_layers", 2, **{"from": origin}))
    with pytest.raises(GrowthError, match="use insert_layers with from: normal"):
        plan(gpt2(n_layer=0), operation("stack_layers", 2))
    with pytest.raises(GrowthError, match="more than 1,024 times that"):
        plan(gpt2(n_layer=0), operation("insert_layers", 10**9, **{"from": "normal"}))


def test_positions_of_generated_tokens_are_counted_without_layers() -> None:
    model = random_gpt(gpt2(n_layer=0, context=6))
    tokens = torch.tensor([[1]])
    for number, token in zip(
        range(9), stream(model.float(), tokens, SamplingOptions(temperature=0)), strict=False
    ):
        window = tokens[:, -6:]
        assert torch.equal(token, model(window)[:, -1].argmax(-1)), number
        tokens = torch.cat((tokens, token[:, None]), 1)
