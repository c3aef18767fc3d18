"""What is set at a resume: an operation of the history, from that step on; the config stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figures import times
from forks import INSTAR, Forks

from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.fields import PLACES, differing_keys
from instar.config.fields import values as values_of
from instar.logs.query.config import config_lines, config_values
from instar.record.rundir import RunDir
from instar.run.resume import Continuation, Resume, continuation
from instar.schedule.checks import load_checked

RunCli = Callable[..., str]

EVERY = times(3, 1)
"""of the lines and digits of a file, which is damaged there"""

SCHEDULE = [
    {"name": "change_lr", "value": 0.5, "when": {"at_step": 2}},
    {"name": "change_batch_size", "value": 2, "when": {"at_step": 2}},
    {"name": "change_lr", "value": 0.5, "when": {"at_step": 10}},
    {"name": "change_batch_size", "value": 2, "when": {"at_step": 10}},
]
BEGUN = (
    "--set",
    "record.run_dir=run",
    "--set",
    "record.log_interval=1",
    "--set",
    "checkpoint.every_steps=4",
    "--set",
    "checkpoint.keep_last=99",
    "--set",
    "learning_rate.shape=constant",
    "--set",
    "learning_rate.warmup_iters=0",
    "--set",
    "learning_rate.lr_decay_iters=8",
    "--set",
    f"schedule={json.dumps(SCHEDULE)}",
)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def manifest(run: Path, step: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "checkpoints" / step / "manifest.json").read_text())
    return content


def overrides(run: Path, step: str) -> list[Any]:
    """The override entries of a checkpoint's history, with the steps at which they were made."""
    history = manifest(run, step)["history"]
    operations = [(entry["step"], entry["operation"]) for entry in history]
    return [
        (step, operation["value"])
        for step, operation in operations
        if operation["name"] == "override"
    ]


def rates(run: Path) -> dict[int, float]:
    """The learning rate of each step, as it was recorded last."""
    return {event["step"]: event["lr"] for event in events(run, "train")}


def samples_by_step(run: Path) -> dict[int, int]:
    """The samples of each step, as they were recorded last."""
    totals = {0: 0} | {event["step"]: event["samples"] for event in events(run, "train")}
    return {step: totals[step] - totals[step - 1] for step in totals if step}


@pytest.fixture(scope="module")
def first_place(
    tmp_path_factory: pytest.TempPathFactory, fill: Callable[[Path], Path], forks: Forks
) -> Path:
    """A run of 8 steps, of lr 1e-3 and batches of 4, which were halved and doubled after step 2."""
    place = fill(tmp_path_factory.mktemp("begun"))
    child = forks.start(INSTAR, ["train", "tiny.yaml", *BEGUN], place=place)
    assert child.finish() == 0, child.output()
    assert rates(place / "run")[8] == 5e-4
    assert samples_by_step(place / "run")[8] == 8
    return place


@pytest.fixture
def run(first_place: Path, place: Path) -> Path:
    shutil.copytree(first_place, place, dirs_exist_ok=True)
    return place / "run"


@pytest.mark.parametrize("lr", [3e-4, 1e-3])
def test_a_setting_counts_from_the_resume_on_whatever_was_made_of_the_old_one(
    run_cli: RunCli, run: Path, lr: float
) -> None:
    """Also where it is the value that the config has had all along."""
    before = (run / "run.yaml").read_bytes()
    more = ("--set", f"optimizer.lr={lr}", "--set", "train.batch_size=4", "--until", "12it")
    output = run_cli("resume", "run", *more)
    assert f"optimizer.lr: 0.0005 → {lr}" in output
    assert "train.batch_size: 8 → 4" in output
    assert rates(run)[9] == rates(run)[10] == lr
    assert samples_by_step(run)[9] == samples_by_step(run)[10] == 4
    # the schedule is where it was: its next entries multiply what was set
    assert rates(run)[11] == lr / 2
    assert samples_by_step(run)[11] == 8
    assert (run / "run.yaml").read_bytes() == before
    assert overrides(run, "step-8") == []
    [(step, values)] = overrides(run, "step-12")
    assert (step, values["optimizer.lr"], values["train.batch_size"]) == (8, lr, 4)
    origins = manifest(run, "step-12")["history"][2]["operation"]["options"]["origins"]
    assert set(origins.values()) == {"--set"}
    assert manifest(run, "step-12")["config"]["optimizer.lr"] == 1e-3


def test_resumes_follow_upon_each_other_and_older_checkpoints_know_nothing_of_later_ones(
    run_cli: RunCli, run: Path
) -> None:
    run_cli("resume", "run", "--until", "9it", "--set", "optimizer.lr=3e-4")
    run_cli("resume", "run", "--until", "10it", "--set", "train.clip=0.5")
    run_cli("resume", "run", "--until", "13it")
    assert [set(values) for _, values in overrides(run, "step-13")] == [
        {"train.until", "optimizer.lr"},
        {"train.until", "train.clip"},
        {"train.until"},
    ]
    assert rates(run)[10] == 3e-4
    assert rates(run)[13] == 1.5e-4
    differences = json.loads(run_cli("checkpoint", "diff", "--json", *at(run, 8, 13)))["settings"]
    assert differences["train.clip"] == {"a": 1.0, "b": 0.5}
    assert differences["optimizer.lr"] == {"a": 1e-3, "b": 3e-4}
    assert differences["in force: lr"] == {"a": 5e-4, "b": 1.5e-4}

    output = run_cli("resume", "run", "--from", "4", "--until", "6it")
    assert "train.clip" not in output
    assert "optimizer.lr" not in output
    assert overrides(run, "step-6") == [(4, {"train.until": ["6it"]})]
    assert rates(run)[6] == 5e-4


def test_what_reads_a_run_says_what_is_in_force_at_its_latest_checkpoint(
    run_cli: RunCli, run: Path
) -> None:
    shutil.copytree(run, run.parent / "before")
    run_cli("resume", "run", "--until", "9it", "--set", "train.clip=0.5")
    values, faults = config_values([RunDir(run.parent / "before"), RunDir(run)])
    assert not faults
    differences = differing_keys(values)
    assert differences["train.clip"] == (1.0, 0.5)
    assert differences["train.until"] == (["8it"], ["9it"])
    lines = {line.key: line for line in config_lines(RunDir(run))}
    assert (lines["train.clip"].value, lines["train.clip"].origin) == ("0.5", "set at step 8")
    assert "set at resume: train.until" in run_cli("checkpoint", "inspect", "run")


def at(run: Path, *steps: int) -> list[str]:
    return [str(run / "checkpoints" / f"step-{step}") for step in steps]


def test_a_value_that_is_set_again_to_what_it_was_is_so(run_cli: RunCli, run: Path) -> None:
    run_cli("resume", "run", "--until", "9it", "--set", "train.clip=0.5")
    output = run_cli("resume", "run", "--until", "10it", "--set", "train.clip=1.0")
    assert "train.clip: 0.5 → 1.0" in output
    assert [values.get("train.clip") for _, values in overrides(run, "step-10")] == [0.5, 1.0]
    # the same again is nothing new
    run_cli("resume", "run", "--until", "11it", "--set", "train.clip=1.0")
    assert overrides(run, "step-11")[2:] == [(10, {"train.until": ["11it"]})]


def test_what_says_how_a_process_runs_holds_for_that_process_alone(
    run_cli: RunCli, run: Path
) -> None:
    run_cli("resume", "run", "--until", "10it", "--set", "record.log_interval=2")
    assert 9 not in rates(run)
    start = events(run, "run_started")[-1]
    assert start["launch"] == {"record.log_interval": 2}
    assert overrides(run, "step-10") == [(8, {"train.until": ["10it"]})]
    run_cli("resume", "run", "--until", "12it")
    assert 11 in rates(run)


def test_the_same_command_does_not_take_back_what_operations_did(
    run_cli: RunCli, place: Path
) -> None:
    auto = ("train", "tiny.yaml", *BEGUN, "--set", "resume=auto", "--set", "optimizer.lr=2e-3")
    run_cli(*auto, "--until", "4it")
    run_cli(*auto, "--until", "6it")
    run = place / "run"
    assert rates(run)[6] == 1e-3
    assert samples_by_step(run)[6] == 8
    assert overrides(run, "step-6") == [(4, {"train.until": ["6it"]})]


def test_the_same_command_does_not_take_back_what_operations_did_to_keys_of_the_config(
    run_cli: RunCli, place: Path
) -> None:
    operations = [
        {"name": name, "value": 0.5, "when": {"at_step": 2}}
        for name in ("set_clip", "set_ema_decay")
    ]
    keys = ("resume=auto", "record.run_dir=run", "train.clip=0.9", "train.ema=0.9")
    sets = (*keys, f"schedule={json.dumps(operations)}")
    auto = ("train", "tiny.yaml", *(word for text in sets for word in ("--set", text)))
    run_cli(*auto, "--until", "4it")
    run_cli(*auto, "--until", "6it")
    assert overrides(place / "run", "step-6") == [(4, {"train.until": ["6it"]})]


def test_an_end_of_the_decay_that_is_left_open_again_stays_where_it_is(
    run_cli: RunCli, place: Path
) -> None:
    keys = (
        "resume=auto",
        "record.run_dir=run",
        "record.log_interval=1",
        "checkpoint.every_steps=4",
    )
    sets = (*keys, "learning_rate.lr_decay_iters=null", "checkpoint.keep_last=9")
    words = [word for text in sets for word in ("--set", text)]
    auto, run = ("train", "tiny.yaml", *words, "--until", "8it"), place / "run"
    run_cli(*auto)
    before = rates(run)
    shutil.rmtree(run / "checkpoints" / "step-8")
    run_cli(*auto)  # from step 4, as after a crash
    assert overrides(run, "step-8") == []
    assert rates(run) == before
    run_cli("resume", "run", "--set", "learning_rate.lr_decay_iters=null", "--until", "12it")
    assert overrides(run, "step-12") == [
        (8, {"learning_rate.lr_decay_iters": 12, "train.until": ["12it"]})
    ]


def test_a_config_that_was_edited_counts_where_it_was_edited(run_cli: RunCli, place: Path) -> None:
    auto = ("train", "tiny.yaml", *BEGUN, "--set", "resume=auto")
    run_cli(*auto, "--until", "4it")
    run, file = place / "run", place / "tiny.yaml"
    run_cli("resume", "run", "--until", "5it", "--set", "train.clip=0.5")
    file.write_text(file.read_text() + "optimizer: {lr: 3e-4}\n")
    output = run_cli(*auto, "--until", "6it")
    assert "optimizer.lr: 0.0005 → 0.0003" in output
    assert rates(run)[6] == 3e-4
    run_cli(*auto, "--until", "7it")
    # what a person has set stays, for the file says nothing of it
    assert [set(values) for _, values in overrides(run, "step-7")] == [
        {"train.until", "train.clip"},
        {"train.until", "optimizer.lr"},
        {"train.until"},
    ]
    origin = manifest(run, "step-7")["history"][3]["operation"]["options"]["origins"]
    assert origin["optimizer.lr"].startswith("tiny.yaml:7")


def test_run_yaml_counts_where_it_was_edited(run_cli: RunCli, run: Path) -> None:
    file = run / "run.yaml"
    text = file.read_text()
    file.write_text(text.replace("clip: 1.0", "clip: 0.5"))
    assert "train.clip: 1.0 → 0.5" in run_cli("resume", "run", "--until", "9it")
    run_cli("resume", "run", "--until", "10it", "--set", "train.clip=0.25")
    assert "train.clip" not in run_cli("resume", "run", "--until", "11it")
    file.write_text(text)
    assert "train.clip: 0.25 → 1.0" in run_cli("resume", "run", "--until", "12it")


def test_growth_after_a_resume_with_another_end_is_that_of_a_run_that_had_it_at_once(
    run_cli: RunCli, place: Path
) -> None:
    grow = json.dumps([{"name": "widen_mlp", "value": 192, "when": {"at_step": 6}}])
    more = ("--set", f"schedule={grow}", "--set", "learning_rate.lr_decay_iters=8")
    run_cli("train", "tiny.yaml", *more, "--set", "record.run_dir=whole")
    run_cli("train", "tiny.yaml", *more, "--set", "record.run_dir=parts", "--until", "4it")
    run_cli("resume", "parts", "--until", "8it")
    models = [
        (place / name / "checkpoints" / "step-8" / "model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert models[0] == models[1]


def test_a_checkpoint_grows_with_the_history_that_led_to_it(run_cli: RunCli, run: Path) -> None:
    run_cli("resume", "run", "--until", "9it", "--set", "train.batch_size=3")
    for step, batch in ((8, 8), (9, 3)):
        [checkpoint] = at(run, step)
        out = f"grown-{step}"
        run_cli("grow", checkpoint, out, "--op", "widen_mlp=192")
        run_cli("resume", out, "--until", "10it")
        assert consumed_after(run.parent / out) == batch


def consumed_after(run: Path) -> int:
    first, *_ = events(run, "train")
    progress = next((run / "checkpoints").glob("step-[89]/manifest.json"))
    return int(first["samples"] - json.loads(progress.read_text())["progress"]["samples"])


def continuation_of(run: Path) -> Continuation | str:
    """What a resume would go on with, or why it is refused."""
    place = RunDir(run)
    checkpoint = load_checkpoint(run / "checkpoints" / "step-8", check=False)
    try:
        return continuation(Resume(place), load_checked(str(place.config)), checkpoint)
    except ConfigError as error:
        return str(error)


def says_so_or_is_as_it_was(run: Path, expected: Continuation, text: str) -> bool:
    """Whether a resume under `text` as run.yaml is refused; else it says what is other, or nothing
    that the weights depend on is."""
    (run / "run.yaml").write_text(text)
    actual = continuation_of(run)
    if isinstance(actual, str):
        assert "run.yaml" in actual
        return True
    reported_keys = {*actual.changes, *actual.launch, *PLACES}
    was, now = values_of(expected.loaded_config.config), values_of(actual.loaded_config.config)
    silent = {key for key in now if now[key] != was[key]} - reported_keys
    assert all(key.startswith("record.") for key in silent), silent
    return False


@pytest.mark.repeated
def test_a_run_yaml_that_was_cut_is_refused_after_whatever_line(run: Path) -> None:
    continuation = continuation_of(run)
    assert isinstance(continuation, Continuation)
    assert not continuation.changes
    lines = (run / "run.yaml").read_text().splitlines(keepends=True)
    for end in range(0, len(lines), EVERY):
        is_refused = says_so_or_is_as_it_was(run, continuation, "".join(lines[:end]))
        assert is_refused or not "".join(lines[end:]).strip(), end


@pytest.mark.repeated
def test_no_changed_digit_of_a_run_yaml_is_used_without_a_word(run: Path) -> None:
    continuation = continuation_of(run)
    assert isinstance(continuation, Continuation)
    text = (run / "run.yaml").read_text()
    lines = text.splitlines(keepends=True)
    digits = [
        (number, at)
        for number, line in enumerate(lines)
        for at, char in enumerate(line.partition("  #")[0])
        if char.isdigit()
    ]
    for number, at in digits[::EVERY]:
        line = lines[number]
        new_line = f"{line[:at]}{(int(line[at]) + 1) % 10}{line[at + 1 :]}"
        new_text = "".join([*lines[:number], new_line, *lines[number + 1 :]])
        says_so_or_is_as_it_was(run, continuation, new_text)


def test_a_damaged_run_yaml_is_restored_by_the_command_that_is_named(
    run_cli: RunCli, run: Path
) -> None:
    file = run / "run.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("optimizer:")])
    output = run_cli("resume", "run", "--until", "9it", code=2)
    assert "optimizer.name" in output
    command = "instar checkpoint inspect run --config > run/run.yaml"
    assert command in output
    file.write_text(text.replace("n_layer: 2", "n_layer: ["))
    assert command in run_cli("resume", "run", "--until", "9it", code=2)
    file.write_text(run_cli("checkpoint", "inspect", "run", "--config"))
    output = run_cli("resume", "run", "--until", "9it")
    assert overrides(run, "step-9") == [(8, {"train.until": ["9it"]})]
