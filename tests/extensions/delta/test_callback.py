"""Deltas of a training with transformers' own Trainer, on a model of a few thousand weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta import callback as module
from instar.extensions.delta.callback import DeltaCallback
from instar.extensions.delta.chain import links, load_state, verify_chain

Train = Callable[..., Trainer]
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
SAMPLES = [
    {"input_ids": torch.arange(n, n + 8) % 17, "labels": torch.arange(n, n + 8) % 17}
    for n in range(32)
]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains a GPT-2 with a chain in `deltas`."""

    def run_training(*, resume: str | None = None, frozen: str = "", **options: Any) -> Trainer:
        set_seed(1)
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=17, **TOKENS)
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not (frozen and frozen in name)
        settings = {
            "max_steps": 6,
            "save_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_strategy": "no",
            "dataloader_pin_memory": False,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
        }
        deltas = {key: options.pop(key) for key in ("every", "dtype") if key in options}
        trainer = Trainer(
            model,
            TrainingArguments(str(tmp_path / "out"), **settings | options),
            train_dataset=SAMPLES,
            callbacks=[DeltaCallback(tmp_path / "deltas", **deltas)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run_training


def steps(folder: Path) -> list[tuple[int, bool]]:
    return [(link.step, link.kind == "anchor") for link in links(folder)]


def saved_weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def test_links_hold_the_weights_of_the_trainers_own_checkpoints(
    train: Train, tmp_path: Path
) -> None:
    train()
    folder = tmp_path / "deltas"
    assert steps(folder) == [(n, n == 0) for n in range(7)]
    verify_chain(folder)
    for step in (3, 6):
        chain_state, checkpoint_state = (
            load_state(folder, step),
            saved_weights(tmp_path / "out" / f"checkpoint-{step}"),
        )
        assert chain_state.keys() == {*checkpoint_state, "lm_head.weight"}
        assert all(
            torch.equal(chain_state[name], checkpoint_state[name]) for name in checkpoint_state
        )


def test_tied_weights_are_stored_once_and_load_into_the_model(train: Train, tmp_path: Path) -> None:
    trainer = train(every=4)
    assert steps(tmp_path / "deltas") == [(0, True), (4, False), (6, False)]
    last = links(tmp_path / "deltas")[-1]
    assert last.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert last.elements == trainer.model.num_parameters()
    other = GPT2LMHeadModel(trainer.model.config)
    other.load_state_dict(load_state(tmp_path / "deltas", 2))
    assert torch.equal(other.lm_head.weight, trainer.model.lm_head.weight)


def test_resume_from_checkpoint_goes_on_with_the_chain(train: Train, tmp_path: Path) -> None:
    train(max_steps=3, lr_scheduler_type="constant")
    last = str(tmp_path / "out" / "checkpoint-3")
    expected = train(resume=last, lr_scheduler_type="constant").model.state_dict()
    folder = tmp_path / "deltas"
    assert steps(folder) == [(n, n == 0) for n in range(7)]
    before = links(folder)
    train(resume=last, lr_scheduler_type="constant")
    assert links(folder)[:7] == before
    assert steps(folder)[7:] == [(3, True), (4, False), (5, False), (6, False)]
    verify_chain(folder)
    for number in (6, 10):
        assert all(torch.equal(expected[name], w) for name, w in load_state(folder, number).items())


def test_frozen_parameters_are_in_the_anchor_and_never_change(train: Train, tmp_path: Path) -> None:
    model = train(frozen="wte").model
    first, last = (load_state(tmp_path / "deltas", number) for number in (0, 6))
    assert torch.equal(first["transformer.wte.weight"], last["transformer.wte.weight"])
    assert not torch.equal(first["transformer.wpe.weight"], last["transformer.wpe.weight"])
    assert torch.equal(last["transformer.wte.weight"], model.transformer.wte.weight)


def test_weights_are_rounded_to_the_precision_of_the_training(train: Train, tmp_path: Path) -> None:
    model = train(bf16=True).model
    state = load_state(tmp_path / "deltas", 6)
    assert all(torch.equal(w, model.state_dict()[n].bfloat16()) for n, w in state.items())


def test_a_delta_that_cannot_be_saved_ends_the_training(train: Train, tmp_path: Path) -> None:
    (tmp_path / "deltas").touch()
    with pytest.raises(CheckpointError, match=r"cannot save step 0 in .*deltas"):
        train()


def test_weights_that_are_sharded_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    with pytest.raises(ValueError, match="weight is sharded among processes"):
        module.whole_tensors(model)


def test_without_transformers_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ModuleNotFoundError, match=r"instar\[hf,delta\]"):
        importlib.import_module(module.__name__)
