"""One schedule on one and on three ranks: the same changes at the same steps, and one curve."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import parametrize_first
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.load import Loaded
from instar.config.sections import Operation as Change
from instar.record.control import send_post
from instar.record.events import Asked, Eval, OperationEvent, Train, read_events
from instar.run.offline.grow import grow_checkpoint

SCHEDULE = [
    {"name": "change_lr", "value": 1.5, "trigger_loss": 99.0, "max_wait_iters": 50},
    {"name": "insert_layers", "value": 1, "trigger_loss": 99.0, "max_wait_iters": 1},
    {"name": "set_batch_size", "value": 5, "when": {"at_step": 8}},
    {"name": "widen_mlp", "value": 192, "when": {"at_step": 12}, "reevaluate": True},
    {"name": "freeze", "value": "blocks.0.*", "when": {"at_step": 15}},
    {"name": "widen_hidden", "value": 48, "when": {"waited": 3}, "mask": 4},
    {"name": "unfreeze", "value": "blocks.0.*", "when": {"waited": 2}},
    {"name": "set_context", "value": 8, "when": {"at_step": 24}},
    {"name": "stack_layers", "value": [0, 1, 2, 2], "when": {"at_step": 27}, "moments": "mapped"},
    {"name": "upcycle", "value": 4, "when": {"at_step": 28}, "num_experts_per_tok": 1},
    {"name": "change_grad_accum", "value": 2, "when": {"all": [{"waited": 2}, {"at_step": 20}]}},
]
FIRED = [
    ("change_lr", 0),
    ("insert_layers", 5),
    ("set_batch_size", 8),
    ("widen_mlp", 12),
    ("freeze", 15),
    ("widen_hidden", 18),
    ("unfreeze", 20),
    ("fold_masks", 22),
    ("set_context", 24),
    ("stack_layers", 27),
    ("upcycle", 28),
    ("change_grad_accum", 30),
]


@pytest.fixture(scope="module")
def cfg(config_in: Callable[..., Loaded], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changes")
    loaded_config = config_in(
        folder,
        f"schedule={json.dumps(SCHEDULE)}",
        "train.until=[32it]",
        "train.batch_size=7",
        "train.ema=0.9",
        "eval.eval_interval=5",
        "learning_rate.lr_decay_iters=32",
    )
    path = folder / "run.yaml"
    path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one_rank_run(cfg: Path) -> Path:
    """The run on one rank."""
    run_dir = cfg.parent / "whole"
    run_ranks(1, cfg.parent, "train", cfg, "--set", f"record.run_dir={run_dir}")
    return run_dir


@pytest.mark.torture
def test_any_number_of_ranks_changes_alike(cfg: Path, one_rank_run: Path, tmp_path: Path) -> None:
    curves = {}
    three_ranks_run = tmp_path / "several"
    run_ranks(3, tmp_path, "train", cfg, "--set", f"record.run_dir={three_ranks_run}")
    for ranks, run_dir in ((1, one_rank_run), (3, three_ranks_run)):
        events = list(read_events(run_dir / "events.jsonl"))
        changes = [event for event in events if isinstance(event, OperationEvent)]
        assert [(change.name, change.step) for change in changes] == FIRED
        log = (run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8")
        sync = r" \(DDP SYNC\)" if ranks > 1 else ""
        assert len(re.findall(f"=== SCALING OPERATION TRIGGERED{sync} ===", log)) == len(FIRED)
        history = load_checkpoint(latest_checkpoint(run_dir)).manifest.history
        assert [change["operation"]["name"] for change in history] == [name for name, _ in FIRED]
        curves[ranks] = (
            [event.loss for event in events if isinstance(event, Train)],
            [event.loss for event in events if isinstance(event, Eval)],
        )
    train, validation = curves[1]
    assert len(train) == 32
    assert curves[3][0] == pytest.approx(train, rel=1e-4)
    assert curves[3][1] == pytest.approx(validation, rel=1e-4)


def test_a_run_goes_on_with_other_ranks_after_it_grew(
    cfg: Path, one_rank_run: Path, tmp_path: Path
) -> None:
    """Saved at W = 2 in the middle of a mask, resumed at W = 1: the curve of an unbroken run."""
    parts = tmp_path / "parts"
    first = ("--until", "20it", "--set", f"record.run_dir={parts}")
    run_ranks(2, tmp_path, "train", cfg, *first)
    run_ranks(1, tmp_path, "resume", parts, "--until", "32it")
    actual, expected = (
        [event.loss for event in read_events(run / "events.jsonl") if isinstance(event, Train)]
        for run in (parts, one_rank_run)
    )
    assert actual == pytest.approx(expected, rel=1e-4)
    shapes = [
        load_checkpoint(latest_checkpoint(run)).manifest.architecture
        for run in (parts, one_rank_run)
    ]
    assert shapes[0] == shapes[1]


GROWTH = [
    ("insert_layers", 1, {}),
    ("set_window", 8, {}),
    ("widen_mlp", 192, {"how": "split"}),
    ("widen_hidden", 48, {}),
    ("set_lora_rank", {"target": "attn", "rank": 2}, {}),
    ("upcycle", 4, {}),
]


@pytest.mark.torture
def test_a_live_run_and_its_checkpoint_grow_into_the_same(
    config: Callable[..., Loaded], tmp_path: Path
) -> None:
    """Bit for bit, weights, moments and moving average, after a step on two ranks."""
    common = ["train.ema=0.9", "learning_rate.lr_decay_iters=9"]
    entries = [
        {"name": name, "value": value, "when": {"at_step": 6}, **options}
        for name, value, options in GROWTH
    ]
    operations = [Change(name, value, options) for name, value, options in GROWTH]
    checkpoints = {}
    for kind, schedule, steps in (("plain", [], 6), ("live", entries, 7)):
        loaded_config = config(
            *common, f"schedule={json.dumps(schedule)}", f"train.until=[{steps}it]"
        )
        path = tmp_path / f"{kind}.yaml"
        path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
        run_ranks(2, tmp_path, "train", path, "--set", f"record.run_dir={tmp_path / kind}")
        checkpoints[kind] = load_checkpoint(tmp_path / kind / "checkpoints" / "step-6")
    grow_checkpoint(checkpoints["plain"], tmp_path / "offline", operations)
    offline = load_checkpoint(latest_checkpoint(tmp_path / "offline"))
    assert offline.manifest.architecture == checkpoints["live"].manifest.architecture
    for component in ("model", "optimizer", "ema"):
        live, expected = checkpoints["live"].tensors(component), offline.tensors(component)
        assert live.keys() == expected.keys()
        assert all(torch.equal(live[name], expected[name]) for name in live)
    run_ranks(1, tmp_path, "resume", tmp_path / "offline", "--until", "8it")


STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "diloco": ("parallel.strategy=diloco", "parallel.diloco.sync_every=2"),
}


@parametrize_first("strategy", STRATEGIES, first=1)
def test_what_people_ask_two_ranks_for_is_as_if_the_schedule_had_said_it(
    config: Callable[..., Loaded], tmp_path: Path, strategy: str
) -> None:
    keys, step = STRATEGIES[strategy], 4  # of the resume, which takes in what came meanwhile
    common = ["train.ema=0.9", "learning_rate.lr_decay_iters=10", "optimizer.name=adamw", *keys]
    requests = [{"name": "insert_layers", "value": 1}, {"name": "freeze", "value": "blocks.0.*"}]
    ids = set()
    for kind in ("asked", "scheduled"):
        rows = [{**row, "when": {"at_step": step}} for row in requests if kind == "scheduled"]
        path, run = tmp_path / f"{kind}.yaml", tmp_path / kind
        path.write_text(config(*common, f"schedule={json.dumps(rows)}").to_yaml(origin=False))
        run_ranks(2, tmp_path, "train", path, "--set", f"record.run_dir={run}", "--until", "4it")
        if kind == "asked":
            for row in (requests[0], {"name": "widen_mlp", "value": 3}, requests[1]):
                ids.add(send_post(run / "control", "apply", row).id)
                time.sleep(0.02)  # they are taken in as they came, by a clock that ticks so often
        run_ranks(2, tmp_path, "resume", run, "--until", "10it")
        log = (run / "logs" / "rank_1.log").read_text(encoding="utf-8")
        assert len(re.findall("=== SCALING OPERATION TRIGGERED", log)) == len(requests)
    assert "asked for widen_mlp 3: refused" in (
        tmp_path / "asked" / "logs" / "rank_1.log"
    ).read_text("utf-8")
    by_request, by_schedule = (
        load_checkpoint(tmp_path / kind / "checkpoints" / "step-10")
        for kind in ("asked", "scheduled")
    )
    changes = [change for change in by_request.manifest.history if "id" in change]
    operations = [(change["operation"]["name"], change["step"]) for change in changes]
    assert operations == [(row["name"], step) for row in requests]
    (refusal,) = (
        e for e in read_events(tmp_path / "asked" / "events.jsonl") if isinstance(e, Asked)
    )
    assert ids == {refusal.id, *(change["id"] for change in changes)}
    for component in ("model", "optimizer", "ema"):
        actual, expected = by_request.tensors(component), by_schedule.tensors(component)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in actual)
