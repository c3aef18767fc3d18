"""A run's chain of deltas: the weights of its steps, growth, resumes, failures, and two ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live import restore
from science import place as science_place
from tiny_run import Place, codes, events, output_of
from torch import Tensor

from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.extensions.delta import commands, config
from instar.extensions.delta import writer as writing
from instar.extensions.delta.chain import Link, links, load_state, verify_chain
from instar.extensions.delta.events import Delta
from instar.extensions.delta.format.folder import Index, write_chain_index
from instar.logs.read.record import read_record
from instar.record.events import read_events
from instar.record.rundir import RunDir
from instar.run.checkpointing import finish_extensions
from instar.run.output import save as saving
from instar.run.start import preflight
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]
DELTAS = ("checkpoint.delta.every=2", "checkpoint.delta.anchor_every=3")


def train_and_save(run: Trainer) -> Trainer:
    run.train()
    run.save("the end", must=True)
    finish_extensions(run.state, run.parts)
    return run


def folder_of(run: Trainer) -> Path:
    return run.parts.saver.root / "deltas"


def steps(folder: Path) -> list[tuple[int, bool]]:
    """Of each link its step, and whether it is an anchor."""
    return [(link.step, link.kind == "anchor") for link in links(folder)]


def link_of(folder: Path, step: int) -> Link:
    return [link for link in links(folder) if link.step == step][-1]


def same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype
        and tensor.shape == expected[name].shape
        and torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
        )
        for name, tensor in actual.items()
    )


def saved_weights(root: Path, step: int) -> dict[str, Tensor]:
    return load_checkpoint(root / "checkpoints" / f"step-{step}").tensors("model")


@pytest.mark.parametrize(
    ("precision", "dtype", "storage_dtype"),
    [
        ("fp32", "auto", torch.float32),
        ("bf16", "auto", torch.bfloat16),
        ("fp32", "fp16", torch.float16),
        ("bf16", "fp32", torch.float32),
    ],
)
def test_a_checkpoint_and_the_delta_of_its_step_hold_the_same_weights(
    trainer: Make, precision: str, dtype: str, storage_dtype: torch.dtype
) -> None:
    run = train_and_save(
        trainer(
            *DELTAS,
            f"precision={precision}",
            f"checkpoint.delta.dtype={dtype}",
            "checkpoint.every_steps=4",
            "train.ema=0.9",
            "model.tied=true",
        )
    )
    folder = folder_of(run)
    assert steps(folder) == [(0, True), (2, False), (4, False), (6, True), (8, False)]
    verify_chain(folder)
    for step in (4, 8):
        weights = saved_weights(run.parts.saver.root, step)
        expected = {name: tensor.to(storage_dtype) for name, tensor in weights.items()}
        assert same_bits(load_state(folder, link_of(folder, step).number), expected)


def test_deltas_are_recorded_with_their_density_and_are_curves(
    trainer: Make, tmp_path: Path
) -> None:
    train_and_save(trainer("checkpoint.delta.every=1", "checkpoint.delta.dtype=bf16"))
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Delta)]
    assert [(event.step, event.number) for event in events] == [(n, n) for n in range(9)]
    first, second, third = events[:3]
    assert (first.anchor, first.density, first.layers) == (True, None, {})
    assert second.density is not None
    assert 0 < second.density < 1
    assert second.overlap is None
    assert third.overlap is not None
    assert 0 < third.overlap < 1
    assert {"blocks.0", "blocks.1"} < set(third.layers)
    assert first.size_bytes > 0
    assert third.samples == 2 * 8
    record = read_record(RunDir(tmp_path))
    assert record.series("delta_density").step.tolist() == list(range(1, 9))
    assert record.series("delta_overlap").value[0] == third.overlap
    assert record.series("delta_density/blocks.0").value[1] == third.layers["blocks.0"]


def test_training_is_the_same_with_deltas(
    trainer: Make, losses: Callable[[str], list[float]]
) -> None:
    train_and_save(trainer("checkpoint.delta.every=1", name="with"))
    trainer(name="without").train()
    assert losses("with") == losses("without")


def test_growth_starts_an_anchor(trainer: Make) -> None:
    grows = "schedule=[{name: widen_mlp, value: x2, when: {at_step: 3}}]"
    run = train_and_save(trainer("checkpoint.delta.every=1", grows, "checkpoint.on_growth=true"))
    folder = folder_of(run)
    assert steps(folder) == [(n, n in (0, 3)) for n in range(9)]
    state = load_state(folder, link_of(folder, 3).number)
    assert same_bits(state, saved_weights(run.parts.saver.root, 3))


def test_a_resume_from_an_older_step_leaves_the_links_after_it_and_starts_an_anchor(
    trainer: Make,
) -> None:
    run = train_and_save(trainer("checkpoint.delta.every=1", "checkpoint.every_steps=4"))
    folder, before = folder_of(run), links(folder_of(run))
    resumed_run = trainer("checkpoint.delta.every=1", "optimizer.lr=3e-3", name="again")
    resumed_run.parts.extensions[0].writer.folder = folder
    restore(resumed_run, load_checkpoint(run.parts.saver.root / "checkpoints" / "step-4"))
    train_and_save(resumed_run)
    assert links(folder)[: len(before)] == before
    assert steps(folder)[9:] == [(n, n == 4) for n in range(4, 9)]
    assert [link.number for link in links(folder)] == list(range(14))
    verify_chain(folder)
    weights = {name: p.detach() for name, p in resumed_run.parts.stepper.parameters.items()}
    assert same_bits(load_state(folder, links(folder)[-1].number), weights)


def test_a_resume_from_the_last_step_goes_on_with_the_same_chain(place: Place) -> None:
    run_dir = place.path / "run"
    saving = ("checkpoint.delta.every=2", "train.until=[5it]", "learning_rate.lr_decay_iters=9")
    children = place.train(run_dir, *saving)
    assert codes(children) == [0], output_of(children)
    children = place.resume(run_dir, "--until", "9it")
    assert codes(children) == [0], output_of(children)
    # the last weights are saved whatever their step
    expected = [(0, True), *((step, False) for step in (2, 4, 5, 6, 8, 9))]
    assert steps(run_dir / "deltas") == expected


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science_place(tmp_path)


def test_two_ranks_write_one_chain(place: Place) -> None:
    run_dir = place.path / "run"
    children = place.train(
        run_dir, "checkpoint.delta.every=1", "train.until=[4it]", "task=science:Normed", ranks=2
    )
    assert codes(children) == [0, 0], output_of(children)
    folder = run_dir / "deltas"
    assert steps(folder) == [(n, n == 0) for n in range(5)]
    assert same_bits(load_state(folder, 4), saved_weights(run_dir, 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_delta_that_cannot_be_saved_stops_all_ranks_saved(place: Place, ranks: int) -> None:
    run_dir = place.path / "run"
    children = place.train(
        run_dir,
        "checkpoint.delta.every=1",
        "train.until=[20it]",
        ranks=ranks,
        body="failures:no_deltas_from_step_8",
    )
    assert set(codes(children)) == {4}, output_of(children)
    assert "cannot save step" in children[0].output()
    assert f"instar resume {run_dir}" in children[0].output()
    (run_dir / "deltas").unlink()
    (run_dir / "deltas.aside").rename(run_dir / "deltas")
    children = place.resume(run_dir, ranks=ranks)
    assert set(codes(children)) == {0}, output_of(children)
    verify_chain(run_dir / "deltas")
    assert same_bits(
        load_state(run_dir / "deltas", links(run_dir / "deltas")[-1].number),
        saved_weights(run_dir, 20),
    )
    assert [event["step"] for event in events(run_dir, "delta")][-1] == 20


def test_a_missing_library_is_reported_before_the_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "find_spec", lambda _: None)
    run_config = load_config(None, ["checkpoint.delta.every=1"])
    with pytest.raises(ConfigError, match=r"checkpoint.delta.*zstandard.*instar\[delta\]"):
        preflight._check_place(run_config, 1)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_checkpoint_is_published_before_the_deltas_that_it_covers(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A run that resumes from it does not save them again: a kill between both would lose them."""
    publications: list[tuple[int, int]] = []
    append, publish = writing.append, saving.publish_checkpoint

    def slowly(*arguments: Any, **options: Any) -> Link:
        threading.Event().wait(0.05)
        return append(*arguments, **options)

    def record_publish(root: Path, step: int, *arguments: Any, **options: Any) -> Path:
        publications.append((step, max(link.step for link in links(root / "deltas"))))
        return publish(root, step, *arguments, **options)

    monkeypatch.setattr(writing, "append", slowly)
    monkeypatch.setattr(saving, "publish_checkpoint", record_publish)
    settings = f"checkpoint.asynchronous={str(asynchronous).lower()}"
    run = trainer(
        "checkpoint.delta.every=1", "checkpoint.every_steps=2", "train.until=[6it]", settings
    )
    run.train()
    finish_extensions(run.state, run.parts)
    run.save("the end", must=True)
    assert [step for step, _ in publications][-1] == 6
    assert all(delta >= step for step, delta in publications), publications


def test_a_chain_that_ends_before_the_latest_checkpoint_is_not_said_to_be_whole(
    trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_and_save(trainer("checkpoint.delta.every=1", "train.until=[4it]"))
    folder = folder_of(run)
    assert main(["delta", "verify", str(folder)]) == 0
    assert "5 states, 0 to 4, are whole" in capsys.readouterr().out
    *_, before, last = links(folder)
    last.file.unlink()
    write_chain_index(folder, Index(0, before.number, before.result_hash))
    for words in (["verify"], ["log"]):
        assert main(["delta", *words, str(folder)]) == 0
        out, error = capsys.readouterr()
        assert "step 4 is missing in the chain of deltas, before step-4" in error
        assert "whole" not in out
    assert main(["delta", "verify", "--json", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["whole"], report["gaps"]) == (False, [[4, 4]])


def test_a_chain_that_grows_while_it_is_verified_is_whole(
    trainer: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_and_save(trainer("checkpoint.delta.every=1", "train.until=[4it]"))

    def verify_earlier_chain(folder: Path) -> list[Link]:
        return verify_chain(folder)[:-2]  # the run has made two steps since

    monkeypatch.setattr(commands, "verify_chain", verify_earlier_chain)
    assert main(["delta", "verify", "--json", str(folder_of(run))]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["last"], report["whole"], report["gaps"]) == (2, True, [])


def test_export_refuses_the_state_of_another_shape_than_the_run_has(
    trainer: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grow = json.dumps([{"name": "widen_mlp", "value": 160, "when": {"at_step": 2}}])
    run = train_and_save(
        trainer("checkpoint.delta.every=1", "train.until=[4it]", f"schedule={grow}")
    )
    chain, root = str(folder_of(run)), str(run.parts.saver.root)
    words = ["delta", "export", chain, str(tmp_path / "hf"), "--like", f"{root}/checkpoints/step-4"]
    assert main([*words, "--step", "1"]) == 3
    assert "the weights are not of the model of" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    assert main([*words, "--step", "4"]) == 0
