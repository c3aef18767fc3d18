"""The mean of checkpoints, in mid-run and offline, against one that is computed from the files."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import science
import tiny_run
import torch
from cases import parametrize_first
from forks import INSTAR
from live import carry_out
from safetensors.torch import load_file
from started import run_ranks

import instar
from instar.checkpoint.listing import latest_checkpoint, list_checkpoints
from instar.checkpoint.manifest import RunStart, read_manifest
from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.sections import Operation
from instar.distributed.failure import RunFailed
from instar.record.control import send_post
from instar.record.events import OperationEvent, Train, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.operations import fold_history

Make = Callable[..., Trainer]
Tensors = Mapping[str, torch.Tensor]
LONG = ("train.until=[9it]", "learning_rate.lr_decay_iters=9", "train.ema=0.9")
EVERY_2 = (
    *LONG,
    "checkpoint.every_steps=2",
    "checkpoint.every_minutes=null",
    "checkpoint.keep_last=9",
)


def entry(value: Any, step: int, *more: Mapping[str, Any], **options: Any) -> str:
    operation = {"name": "average_checkpoints", "value": value, "when": {"at_step": step}}
    return f"schedule={json.dumps([operation | options, *more])}"


REFUSED = {
    "name": "average_checkpoints",
    "value": [5],
    "when": {"at_step": 7},
    "on_failure": "skip",
}


def file_of(root: Path, name: str, component: str = "model") -> dict[str, torch.Tensor]:
    """The tensors of a component by name, of the one file or of its parts' rows."""
    folder = root / "checkpoints" / name
    single_file = folder / f"{component}.safetensors"
    if single_file.is_file():
        return load_file(single_file)
    rows: dict[str, list[torch.Tensor]] = {}
    parts = sorted((folder / component).iterdir(), key=lambda path: int(path.name.split("-")[0]))
    for part in parts:
        for tensor_name, tensor in load_file(part).items():
            rows.setdefault(tensor_name, []).append(tensor)
    return {tensor_name: torch.cat(parts) for tensor_name, parts in rows.items()}


def mean_of(root: Path, *names: str) -> dict[str, torch.Tensor]:
    files = [file_of(root, name) for name in names]
    return {
        name: torch.stack([file[name].double() for file in files]).mean(0).to(tensor.dtype)
        for name, tensor in files[0].items()
    }


def assert_same(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


@pytest.mark.parametrize("value", [3, [2, 4, 6]], ids=str)
def test_the_weights_become_the_mean_and_nothing_else_changes(
    trainer: Make, tmp_path: Path, value: Any
) -> None:
    """That of step 6, which is due at the same step, is saved before."""
    run = trainer(*EVERY_2, entry(value, 6))
    run.train()
    run.parts.saver.finish()
    root = run.parts.saver.root
    assert_same(file_of(root, "step-6.1"), mean_of(root, "step-2", "step-4", "step-6"))
    assert any(
        not torch.equal(t, file_of(root, "step-6.1")[n]) for n, t in file_of(root, "step-6").items()
    )
    for component in ("optimizer", "ema"):
        assert_same(file_of(root, "step-6.1", component), file_of(root, "step-6", component))
    (change,) = run.state.history
    assert change.operation == Operation("average_checkpoints", [2, 4, 6])
    assert change.reason.endswith("; mean of step-2, step-4, step-6")
    before, after = run.parts.initial, fold_history(run.parts.initial, run.state.history)
    assert (after.settings, after.architecture) == (before.settings, before.architecture)
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, OperationEvent)]
    (event,) = events
    assert (event.value, event.preserves, event.verb) == ([2, 4, 6], "lossy", "SET")
    assert event.proof["max_logit_diff"] > 1e-4
    assert event.proof["delta_loss"] != 0
    assert event.notes == ("optimizer and moving average as before",)


def test_a_mean_of_the_present_weights_changes_no_bit(trainer: Make, tmp_path: Path) -> None:
    run, plain = trainer(*EVERY_2, entry([4], 4)), trainer(*EVERY_2, name="plain")
    for trainer_of in (run, plain):
        trainer_of.train()
    assert_same(run.parts.stepper.parameters, plain.parts.stepper.parameters)
    assert_same(run.parts.stepper.states(), plain.parts.stepper.states())
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, OperationEvent)]
    assert [e.proof["max_logit_diff"] for e in events] == [0.0]


def broken(run: Trainer, how: str) -> tuple[Any, str]:
    """Checkpoints of steps 1, 2 and 3 with a fault; what to average, and what is said of it."""
    root = run.parts.saver.root
    for step in (1, 2, 3):
        run.step()
        parameter = next(iter(run.parts.stepper.parameters.values()))
        values = parameter.detach().clone()
        if how == "not finite" and step == 2:
            parameter.data.view(-1)[3] = torch.nan
        run.save("here", wait=True)
        parameter.data.copy_(values)
        if how in ("set_dropout", "insert_layers") and step == 2:
            carry_out(run, Operation(how, 0.1 if how == "set_dropout" else 1))
    second = root / "checkpoints" / "step-2"
    if how == "damaged":
        file = second / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
        return 2, r"step-2/model.safetensors: content has changed: its checksum does not match"
    if how == "without a manifest":
        (second / "manifest.json").unlink()
        return 3, r"step-2/manifest.json: missing"
    if how == "deleted":
        shutil.rmtree(second)
        return [1, 2], r"no checkpoint of step 2 to be averaged; there are step-1, step-3"
    if how == "too few":
        return (
            4,
            r"4 checkpoints are to be averaged, and 3 can be; there are step-1, step-2, step-3",
        )
    if how == "later":
        return [3, 4], r"no checkpoint of step 4 to be averaged"
    if how == "insert_layers":
        return 2, r"step-2: saved before insert_layers at step 2: its weights are those of another"
    assert how == "not finite"
    return [1, 2, 3], r"step-2: 1 tensors, the first .*, hold values that are not finite"


@pytest.mark.parametrize(
    "how",
    [
        *("damaged", "without a manifest", "deleted", "too few", "later", "not finite"),
        "insert_layers",
    ],
)
def test_what_has_no_mean_is_named_and_the_run_unchanged(trainer: Make, how: str) -> None:
    run = trainer(*LONG, "checkpoint.keep_last=9")
    value, message = broken(run, how)
    stepper = run.parts.stepper
    tensors = {n: t.detach().clone() for n, t in {**stepper.parameters, **stepper.states()}.items()}
    history = run.state.history
    with pytest.raises(RunFailed, match=message):
        carry_out(run, Operation("average_checkpoints", value))
    assert run.state.history == history
    assert run.parts.stepper is stepper
    assert_same(tensors, {**stepper.parameters, **stepper.states()})


def test_dropout_may_differ_between_the_checkpoints(trainer: Make) -> None:
    run = trainer(*LONG)
    with pytest.raises(AssertionError):
        broken(run, "set_dropout")
    carry_out(run, Operation("average_checkpoints", [1, 3]))
    assert_same(run.parts.stepper.parameters, mean_of(run.parts.saver.root, "step-1", "step-3"))


def test_checkpoints_of_other_runs_do_not_count(trainer: Make) -> None:
    run, other = (trainer(*LONG, "checkpoint.keep_last=9", name=name) for name in ("run", "other"))
    for live_run in (run, other):
        live_run.parts.line = [RunStart(live_run.parts.saver.root.name, 0, 0.0)]
        for step in (1, 2, 3):
            live_run.step()
            if (step == 2) == (live_run is other):
                live_run.save("here", wait=True)
    root = run.parts.saver.root
    shutil.copytree(*(r / "checkpoints" / "step-2" for r in (other.parts.saver.root, root)))
    for value in (3, [1, 2]):
        with pytest.raises(RunFailed, match=r"averaged.*; step-2: of another run, or on a branch"):
            carry_out(run, Operation("average_checkpoints", value))
    carry_out(run, Operation("average_checkpoints", 2))
    assert_same(run.parts.stepper.parameters, mean_of(root, "step-1", "step-3"))


def test_a_schedule_may_skip_it(trainer: Make) -> None:
    """There is no such checkpoint; the run goes on as one without the entry."""
    run, plain = (
        trainer(*LONG, entry([7], 3, on_failure="skip"), name="run"),
        trainer(*LONG, name="plain"),
    )
    for live_run in (run, plain):
        live_run.train()
    assert [bool(change.skipped) for change in run.state.history] == [True]
    assert_same(run.parts.stepper.parameters, plain.parts.stepper.parameters)


def test_a_running_run_is_asked_for_it(trainer: Make) -> None:
    """What it cannot do is refused, and it goes on."""
    run = trainer(*EVERY_2)
    for _ in range(4):
        run.step()
        run.save("here", wait=True)
    for value in (2, 9, 10):
        send_post(
            run.parts.saver.root / "control",
            "apply",
            {"name": "average_checkpoints", "value": value},
        )
    run.train()
    mean, refusal = run.state.history
    before = [step for step in (1, 2, 3, 4, 6, 8) if step <= mean.step]
    assert (mean.operation.value, mean.skipped) == (before[-2:], "")
    assert "9 checkpoints are to be averaged, and" in refusal.skipped


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (4, (), r"keeps its last 3 checkpoints only: set checkpoint.keep_last to 4"),
        (0, (), "must be a number of checkpoints, such as 3, or a list of their steps"),
        ([], (), "must be a number of checkpoints"),
        ([2, 2], (), "must be a number of checkpoints"),
        ("x2", (), "must be a number of checkpoints"),
        (True, (), "must be a number of checkpoints"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_it_starts(
    prepare_run: Callable[..., Prepared], value: Any, keys: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_run(*keys, entry(value, 5))
    assert prepare_run("checkpoint.keep_last=4", entry(4, 5)).forecast.stages[1].label == "lossy"
    prepare_run("checkpoint.keep_every=2", entry(4, 5))


@pytest.mark.torture
@pytest.mark.parametrize("reproducible", ["elastic", "fixed"])
def test_any_number_of_ranks_and_any_strategy_have_the_same_mean(
    config_in: Callable[..., Loaded], tmp_path: Path, reproducible: str
) -> None:
    """With sharded parameters and checkpoints, from which one without goes on. Then all skip an entry alike."""
    loaded_config = config_in(
        tmp_path,
        *EVERY_2,
        entry(3, 6, REFUSED),
        "train.batch_size=4",
        "optimizer.name=muon",
        f"reproducible={reproducible}",
    )
    path = tmp_path / "run.yaml"
    path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    weights, curves = {}, {}
    for name, ranks, keys in (
        ("one", 1, ()),
        ("two", 2, ()),
        ("four", 4, ()),
        ("sharded", 2, ("--set", "parallel.strategy=fsdp")),
    ):
        root = tmp_path / name
        place = ("--set", f"record.run_dir={root}")
        if name == "sharded":
            run_ranks(ranks, tmp_path, "train", path, *place, *keys, "--until", "7it")
            assert (root / "checkpoints" / "step-6.1" / "model").is_dir()
            run_ranks(ranks, tmp_path, "resume", root, "--until", "9it")
        else:
            run_ranks(ranks, tmp_path, "train", path, *place, *keys)
        assert_same(file_of(root, "step-6.1"), mean_of(root, "step-2", "step-4", "step-6"))
        weights[name] = load_checkpoint(latest_checkpoint(root)).tensors("model")
        history = read_manifest(latest_checkpoint(root)).history
        skip_reasons = [change["skipped"] for change in history if change["skipped"]]
        assert ["no checkpoint of step 5 to be averaged" in text for text in skip_reasons] == [True]
        events = read_events(root / "events.jsonl")
        curves[name] = [event.loss for event in events if isinstance(event, Train)]
    assert len(curves["one"]) == 9
    for name in ("two", "four", "sharded"):
        if reproducible == "elastic":
            assert_same(weights[name], weights["one"])
        assert curves[name] == pytest.approx(
            curves["one"], rel=0 if reproducible == "elastic" else 1e-4, abs=0
        )


@parametrize_first("saves_result", [True, False], ids=["saved at once", "not saved"], first=1)
def test_a_run_that_is_killed_after_it_ends_as_the_undisturbed_one(
    tmp_path: Path, saves_result: bool
) -> None:
    """Before step 18; the mean is that of step 16, and the checkpoint before it of step 15."""
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    place = tiny_run.Place(tmp_path, science.forks())
    keys = (
        "checkpoint.every_steps=5",
        "checkpoint.asynchronous=false",
        "checkpoint.every_minutes=null",
        f"checkpoint.on_growth={str(saves_result).lower()}",
        entry(3, 16),
    )
    children = place.train(tmp_path / "whole", *keys, ranks=2)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    root, kill_body = tmp_path / "parts", "failures:killed_at_step_18"
    children = place.train(root, *keys, "parallel.timeout_s=10", ranks=2, body=kill_body)
    assert -signal.SIGKILL in tiny_run.codes(children)
    assert tiny_run.acknowledged_step(root) == (16 if saves_result else 15)
    children = place.resume(root, ranks=2, body=INSTAR)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    assert tiny_run.weights(root) == tiny_run.weights(tmp_path / "whole")
    histories = [
        read_manifest(latest_checkpoint(tmp_path / name)).history for name in ("whole", "parts")
    ]
    assert histories[0] == histories[1]
    (change,) = histories[0]
    assert change["operation"]["value"] == [5, 10, 15]


def test_a_mean_offline_is_used_as_any_checkpoint(
    config_in: Callable[..., Loaded],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded_config = config_in(tmp_path, *EVERY_2, f"record.run_dir={tmp_path / 'run'}")
    (tmp_path / "run.yaml").write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    run_ranks(1, tmp_path, "train", tmp_path / "run.yaml")
    root = tmp_path / "run"
    names = [path.name for path in list_checkpoints(root)][-2:]
    assert main(["checkpoint", "average", "run", "--last", "2", "--json"]) == 0
    (text,) = [line for line in [capsys.readouterr().out] if line]
    steps = [int(re.sub(r"\D", "", name)) for name in names]
    path = Path(json.loads(text)["path"])
    assert json.loads(text)["averaged_steps"] == steps
    assert path.parent.parent == tmp_path / "run.average"
    mean = mean_of(root, *names)
    assert_same(file_of(tmp_path / "run.average", path.name), mean)
    manifest = read_manifest(path)
    assert manifest.reason == f"instar checkpoint average: {', '.join(names)} of run"
    assert manifest.history[-1]["operation"]["value"] == steps
    assert (manifest.loss, manifest.metrics) == (None, {})
    assert load_checkpoint(root / "checkpoints" / names[-1]).state["judged_at"] == manifest.step
    assert load_checkpoint(path).state["judged_at"] == -1
    # the moving average would be used in place of the mean
    assert "ema" not in load_checkpoint(path).components
    model = instar.load_model(path, "cpu")
    assert_same({n: p for n, p in model.named_parameters() if n in mean}, mean)
    assert instar.evaluate(path, "3 squared is 9", "cpu").loss > 0
    for words in (
        ["sample", "run.average", "--tokens", "3"],
        ["test", "run.average", "--from", "latest"],
        ["checkpoint", "export", "run.average", "hf", "--to", "hf"],
        ["checkpoint", "average", "run", "--steps", ",".join(map(str, steps)), "--out", "again"],
    ):
        assert main(words) == 0, words
    assert_same(file_of(tmp_path / "again", path.name), mean)
    run_ranks(1, tmp_path, "resume", tmp_path / "again", "--until", "11it")
    assert read_manifest(latest_checkpoint(tmp_path / "again")).step == 11
    for words, code in (
        (["checkpoint", "average", "run", "--last", "2"], None),  # it is there
        (["checkpoint", "average", "run", "--last", "9", "--out", "new"], 3),
        (["checkpoint", "average", "run", "--steps", "5,6", "--out", "new"], 3),
        (["checkpoint", "average", "run", "--steps", "6,6", "--out", "new"], 2),
        (["checkpoint", "average", "run", "--last", "2", "--steps", "6", "--out", "new"], 2),
        (["grow", "run", "new", "--op", "average_checkpoints=2"], 2),
    ):
        result = main(words)
        assert result == code or (code is None and result != 0), words
        assert not (tmp_path / "new").exists()
