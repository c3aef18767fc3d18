"""`instar control`: a run under way is asked through its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import science
from cases import parametrize_first
from forks import INSTAR, Child, Forks
from tiny_run import codes, events, output_of

from instar.api.control import Refused, change_run, preview_operation
from instar.api.waiting import read_waiting
from instar.cli import control
from instar.config.errors import ConfigError
from instar.record.control import send_post
from instar.record.rundir import RunDir

Instar = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def under_way(place: Path, forks: Forks) -> Child:
    """A run that would go on for hours, and has made its first steps."""
    sets = ("--set", "record.log_interval=5", "--set", f"record.run_dir={place / 'run'}")
    child = forks.start(INSTAR, ["train", "tiny.yaml", *sets, "--until", "10Mit"], place=place)
    assert child.wait_for(r"^\s*5\b"), child.output()
    return child


def test_a_run_is_asked_to_save_and_to_stop(under_way: Child, instar: Instar, place: Path) -> None:
    status = json.loads(instar("control", "run", "status", "--json").stdout)
    assert (status["state"], status["process"]) == ("running", under_way.pid)
    output = instar("control", "run", "save").stdout
    step = re.fullmatch(r"saved: (step-\d+)\n", output)
    assert step
    manifest = json.loads((place / "run" / "checkpoints" / step[1] / "manifest.json").read_text())
    assert manifest["reason"] == "asked for"
    assert instar("control", "run", "stop").stdout.startswith("stopped: step-")
    assert under_way.finish() == 75, under_way.output()
    assert under_way.output().splitlines()[-1].endswith(f"instar resume {place / 'run'}")
    assert "stopped (instar control stop)" in instar("control", "run", "status").stdout


def test_two_runs_in_one_folder_are_refused(under_way: Child, instar: Instar, place: Path) -> None:
    message = instar("resume", "run", code=3).stderr
    assert f"process {under_way.pid} is training there" in message
    under_way.signal(signal.SIGINT)
    assert under_way.finish() == 75, under_way.output()
    assert (place / "run" / "events.jsonl").read_text().count('"run_started"') == 1


def test_a_run_that_is_not_there_to_hear_is_not_asked(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    message = instar("control", "run", "save", code=3).stderr
    assert "run is not running; resume it with: instar resume run" in message
    assert not (place / "run" / "control").exists()
    assert "finished (reached 8it)" in instar("control", "run", "status").stdout


@parametrize_first("ranks", [2, 1], first=1)
def test_every_request_is_answered_by_a_save_however_many_others_there_are(
    tmp_path: Path, ranks: int
) -> None:
    """The run saves after every step, in the background."""
    place, run_dir = science.place(tmp_path), tmp_path / "run"
    settings = (
        "train.until=[1Mit]",
        "learning_rate.lr_decay_iters=1000",
        "early_stopping.rules=[]",
    )
    settings += ("checkpoint.every_steps=1", "checkpoint.keep_last=2", "record.log_interval=1000")
    run = place.train(run_dir, *settings, ranks=ranks)
    assert run[0].wait_until((run_dir / "checkpoints" / "latest").exists), output_of(run)
    for _ in range(12):
        (asking,) = place.instar("control", "run", "save")
        assert asking.finish() == 0, asking.output()
        assert re.match(r"saved: step-\d+$", asking.output())
    (asking,) = place.instar("control", "run", "stop")
    assert asking.finish() == 0, asking.output()
    assert codes(run) == [75] * ranks, output_of(run)


def test_a_request_that_cannot_be_removed_is_answered_and_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    place, run_dir = science.place(tmp_path), tmp_path / "run"
    settings = (
        "train.until=[1Mit]",
        "learning_rate.lr_decay_iters=1000",
        "early_stopping.rules=[]",
    )
    run = place.train(run_dir, *settings, "checkpoint.on_best=false", "test.weights=last", ranks=2)
    assert run[0].wait_until((run_dir / "events.jsonl").exists), output_of(run)
    (run_dir / "control" / "another-users.save").mkdir(parents=True)
    assert run[0].wait_until((run_dir / "checkpoints" / "latest").exists), output_of(run)
    (asking,) = place.instar("control", "run", "stop")
    assert asking.finish() == 0, asking.output()
    assert codes(run) == [75, 75], output_of(run)
    reasons = [event["reason"] for event in events(run_dir, "checkpoint")]
    assert reasons == ["asked for", "instar control stop"]
    assert "cannot be removed" in (run_dir / "logs" / "rank_0.log").read_text("utf-8")


def control_run(instar: Instar, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return instar("control", "run", *words, code=code)


def test_a_run_is_asked_for_operations(
    under_way: Child, instar: Instar, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview = control_run(instar, "apply", "widen_mlp=x2", "--dry-run")
    assert "operation   widen_mlp x2 (exact)" in preview.stdout
    assert "weights" in preview.stdout
    assert "nothing was asked for" in preview.stderr
    assert not (place / "run" / "control").exists()
    # its data are named from the folder that it was started in
    monkeypatch.chdir(place.parent)
    shape = preview_operation(RunDir(place / "run"), {"name": "widen_mlp", "value": "x2"})
    assert shape.after != shape.before
    monkeypatch.undo()

    output = control_run(instar, "apply", "change_lr=0.5").stdout
    assert re.search(r"^\d+ +SET +change_lr .*\(asked for by ", output), output
    answer = json.loads(
        control_run(instar, "apply", "insert_layers=1", "where=even", "--json").stdout
    )
    assert answer["outcome"] == "done"
    assert answer["event"]["verb"] == "GROW"
    assert answer["event"]["proof"]["max_logit_diff"] < 1e-5
    output = control_run(instar, "apply", "change_lr=0.5", "when={at_step: 9000000}").stdout
    number = re.search(r": waits: at step 9,000,000 \((\w{12})\)$", output)
    assert number, output
    rows = control_run(instar, "list").stdout
    assert re.search(rf"^id={number[1]} +change_lr 0.5 .*at step 9,000,000", rows, re.MULTILINE)
    output = control_run(instar, "cancel", f"id={number[1]}").stdout
    assert "change_lr 0.5: cancelled: by " in output
    assert control_run(instar, "list").stderr == "nothing waits\n"

    refusal = control_run(instar, "apply", "widen_mlp=3", code=2).stderr
    assert "refused it: widen_mlp.value is not possible here" in refusal
    unknown = control_run(instar, "apply", "widen_mpl=3", code=2).stderr
    assert "did you mean 'widen_mlp'" in unknown
    for setting in ("lr", "optimizer.lr"):
        unknown = control_run(instar, "apply", f"{setting}=1e-4", code=2).stderr
        assert "did you mean 'set_lr'" in unknown
    assert (
        "no entry 5 of the schedule waits"
        in control_run(instar, "cancel", "entry=5", code=2).stderr
    )
    assert control_run(instar, "stop").stdout.startswith("stopped: step-")
    assert under_way.finish() == 75, under_way.output()
    names = [event["name"] for event in events(place / "run", "operation")]
    assert names == ["change_lr", "insert_layers"]
    assert "is not running" in control_run(instar, "apply", "change_lr=0.5", code=3).stderr
    assert list((place / "run" / "control").glob("*.apply")) == []


def test_what_a_stopped_run_would_carry_out_is_listed_and_given_up(
    instar: Instar, place: Path
) -> None:
    """What a checkpoint has, what a run that crashed had taken in, and entries of its schedule."""
    entry = "schedule=[{name: set_clip, value: 0.5, when: {at_step: 90}}]"
    instar("train", "tiny.yaml", "--set", "record.run_dir=run", "--set", entry)
    folder = place / "run" / "control"
    waits = {"name": "change_lr", "value": 0.5, "when": {"at_step": 80}}
    saved_post, crashed_post = (
        send_post(folder, "apply", content)
        for content in (waits, {"name": "change_lr", "value": 1e9})
    )
    crashed_post.path.rename(crashed_post.path.with_suffix(".aside"))
    instar("resume", "run", "--until", "9it")
    assert not saved_post.path.exists(), "the checkpoint has it"
    crashed_post.path.with_suffix(".aside").rename(crashed_post.path)

    rows = instar("control", "run", "list").stdout
    assert re.search(rf"^id={saved_post.id} +change_lr 0.5 .*at step 80", rows, re.MULTILINE)
    assert re.search(rf"^id={crashed_post.id} +change_lr 1000000000.0", rows, re.MULTILINE)
    assert re.search(r"^entry=0 +set_clip 0.5", rows, re.MULTILINE)
    failure = instar("resume", "run", "--until", "40it", code=4)
    command = f"instar control run cancel id={crashed_post.id}"
    assert f"carries it out again, unless it is given up with: {command}" in failure.stderr

    for words in ((f"id={saved_post.id}",), (f"id={crashed_post.id}",), ("entry=0",)):
        given_up = instar("control", "run", "cancel", *words).stdout
        assert "cancelled: the next resume gives it up" in given_up
    assert instar("control", "run", "list").stderr == "nothing waits\n"
    message = instar("control", "run", "cancel", f"id={saved_post.id}", code=2).stderr
    assert "that does not wait; what waits: nothing" in message
    instar("resume", "run", "--until", "99it")
    last = {e["name"] for e in events(place / "run", "operation") if e["step"] > 9}
    assert last <= {"change_lr"}, "that of the resume which failed"
    assert events(place / "run", "train")[-1]["lr"] < 1.0
    assert list(folder.glob("*.apply")) == []
    assert list(folder.glob("*.cancel")) == []


def test_what_a_resume_would_refuse_is_not_called_cancelled(instar: Instar, place: Path) -> None:
    entry = "schedule=[{name: set_clip, value: 0.5, when: {at_step: 90}}]"
    instar("train", "tiny.yaml", "--set", "record.run_dir=run", "--set", entry)
    run = RunDir(place / "run")
    for target in ({"id": ""}, {"entry": 0.0}, {"entry": False}):  # the last two are equal to 0
        with pytest.raises(Refused, match="does not wait; what waits: entry=0"):
            change_run(run, target, command="cancel")
    send_post(run.control, "cancel", {"entry": False})
    assert [row.entry for row in read_waiting(run).schedule] == [0]
    if os.geteuid() == 0:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            shared = RunDir(shutil.copytree(run.path, Path(folder, "run")))
            for shared_folder in (shared.path, shared.control):
                shared_folder.chmod(0o777)
            os.seteuid(65534)  # of a group whose folder it is, say
            try:
                with pytest.raises(Refused, match=r"would refuse it: .* neither the run's owner"):
                    change_run(shared, {"entry": 0}, command="cancel")
            finally:
                os.seteuid(0)
            assert len(list(shared.control.glob("*.cancel"))) == 1, "that of above"


def test_what_waits_is_that_of_the_checkpoint_to_which_a_resume_walks_back(
    instar: Instar, place: Path
) -> None:
    schedule = [
        {"name": "set_clip", "value": 0.5, "when": {"at_step": 2}},
        {"name": "set_clip", "value": 0.25, "when": {"at_step": 5}},
    ]
    keys = (f"schedule={json.dumps(schedule)}", "checkpoint.every_steps=3", "train.until=[6it]")
    sets = [word for key in ("record.run_dir=run", *keys) for word in ("--set", key)]
    instar("train", "tiny.yaml", *sets)
    shutil.rmtree(place / "run" / "checkpoints" / "step-6")
    rows = instar("control", "run", "list").stdout
    assert "entry=1 " in rows, "a resume goes on from step-3, and carries it out again"
    assert "entry=0 " not in rows, "step-3 has it"


def test_what_is_due_at_once_and_what_is_not_possible_any_more_can_be_given_up(
    instar: Instar, place: Path
) -> None:
    """Due at the step of the checkpoint: an entry, as one that failed is; and one that the ranks of a resume cannot do."""
    schedule = [
        {"name": "set_clip", "value": 0.5, "when": {"at_step": 2}},
        {"name": "set_batch_size", "value": 1, "when": {"at_step": 5}},
        {"name": "change_lr", "value": 0.5, "when": {"at_step": 6}},
    ]
    sets = ("record.run_dir=run", "train.until=[2it]", f"schedule={json.dumps(schedule)}")
    instar("train", "tiny.yaml", *(word for text in sets for word in ("--set", text)))
    later = ("--until", "8it", "--nproc", "2")
    assert "some of 2 ranks" in instar("resume", "run", *later, code=2).stderr
    for entry in (0, 1):
        instar("control", "run", "cancel", f"entry={entry}")
    instar("resume", "run", *later)
    names = [event["name"] for event in events(place / "run", "operation")]
    assert [name for name in names if name != "override"] == ["change_lr"]
    asked = [(e["operation"], e["outcome"], e["step"]) for e in events(place / "run", "asked")]
    assert asked == [("set_clip", "cancelled", 2), ("set_batch_size", "cancelled", 2)]


def test_what_was_given_up_of_one_schedule_is_carried_out_of_another(
    instar: Instar, place: Path
) -> None:
    old, new = (
        f"schedule={json.dumps([{'name': 'set_clip', 'value': value, 'when': {'at_step': 4}}])}"
        for value in (0.5, 0.7)
    )
    sets = ("record.run_dir=run", "train.until=[2it]", old)
    instar("train", "tiny.yaml", *(word for text in sets for word in ("--set", text)))
    instar("control", "run", "cancel", "entry=0")
    instar("resume", "run", "--until", "6it", "--set", new)
    (asked,) = events(place / "run", "asked")
    assert asked["reason"] == "entry 0 was one of the schedule before: this resume has set another"
    done = {event["name"]: event["value"] for event in events(place / "run", "operation")}
    assert done["set_clip"] == 0.7
    assert list((place / "run" / "control").glob("*.cancel")) == []


WRONG = {
    ("apply",): "apply of what?; write e.g. apply change_lr=0.5",
    ("save", "now=1"): "save takes nothing after it",
    ("apply", "change_lr"): "change_lr",
    ("apply", "change_lr=0.5 0.1 when"): "change_lr",
    ("apply", "change_lr=[1"): "change_lr",
    ("cancel", "change_lr=0.5"): "names nothing that waits",
    ("list", "--dry-run"): "--dry-run is for apply",
    (
        "apply",
        "insert_layers=1",
        "when={at_stp: 9}",
    ): "unknown key 'at_stp' in when; did you mean 'at_step'?",
    ("apply", "change_lr=0.5", "trigger_loss=abc"): "trigger_loss must be",
}


def test_what_is_mistyped_is_an_error_before_anything_is_asked(instar: Instar) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    for words, message in WRONG.items():
        error = control_run(instar, *words, code=2).stderr
        assert message in error, words
        assert "schedule[" not in error, "nobody wrote that"
    assert control_run(instar, "list").stderr == "nothing waits\n"


def test_a_file_of_a_running_run_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instar.api.waiting.lock_owner", lambda _: 1)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "waiting.json").write_text('{"asked": [{"name": 3}]}')
    with pytest.raises(ConfigError, match=r"waiting\.json: cannot be read"):
        read_waiting(RunDir(tmp_path))


@pytest.mark.parametrize("id_", ["123456e78901", "00e123456789", "012345678901"])
def test_an_id_that_looks_like_a_number_is_taken_as_it_is(id_: str) -> None:
    assert control._what_waits(f"id={id_}") == {"id": id_}
    assert control._what_waits("entry=3") == {"entry": 3}
