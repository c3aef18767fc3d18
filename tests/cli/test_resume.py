"""Going on: from which checkpoint, with what changed, in whose folder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import parametrize_first
from forks import Forks

from instar.checkpoint.manifest import encode_manifest, read_manifest
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.fields import values
from instar.config.load import load_config
from instar.record import rundir
from instar.record.control import send_request
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config
from instar.run.resume import Resume
from instar.run.start import plan
from instar.run.start.launch import preflight_launch

RunCli = Callable[..., str]

EVERY_2 = ("--set", "checkpoint.every_steps=2", "--set", "checkpoint.keep_last=9")
COURSE = ("--set", "learning_rate.lr_decay_iters=8")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def weights(run: Path, step: str = "step-8") -> bytes:
    return (run / "checkpoints" / step / "model.safetensors").read_bytes()


@pytest.fixture
def run(run_cli: RunCli, place: Path) -> Path:
    """A run of 8 steps, saved every 2."""
    run_cli("train", "tiny.yaml", *EVERY_2, "--set", "record.run_dir=run")
    return place / "run"


def test_it_goes_on_from_the_step_that_is_named(run_cli: RunCli, run: Path) -> None:
    before = weights(run)
    run_cli("resume", "run", "--from", "4")
    assert [event["resumed_from"] for event in events(run, "run_started")[1:]] == ["step-4"]
    assert events(run, "checkpoint")[-1]["step"] == 8
    assert weights(run) == before


def test_it_goes_on_with_what_is_saved_until_the_folder_is_free(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that still trains there when a resume is asked for, as after a signal to stop."""
    checkpoints, unfinished = run / "checkpoints", run / "unfinished"
    (checkpoints / "step-8").rename(unfinished)
    (checkpoints / "latest").write_text("step-6\n")
    take_lock = rundir.open_lock

    def take_lock_after_save(path: Path) -> int:
        if unfinished.exists():
            unfinished.rename(checkpoints / "step-8")
            (checkpoints / "latest").write_text("step-8\n")
        return take_lock(path)

    monkeypatch.setattr(rundir, "open_lock", take_lock_after_save)
    assert main(["resume", str(run), "--until", "10it"]) == 0
    assert events(run, "run_started")[-1]["resumed_from"] == "step-8"


def test_a_stop_that_is_asked_for_while_it_prepares_is_heard(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, control = plan.prepare_run_data, run / "control"
    earlier = send_request(control, "stop")

    def prepare_and_ask(*args: Any) -> None:
        assert earlier.is_answered(), "that of an earlier start"
        send_request(control, "stop")
        prepare(*args)

    monkeypatch.setattr(plan, "prepare_run_data", prepare_and_ask)
    assert main(["resume", str(run), "--until", "10it"]) == 75
    assert not (run / "checkpoints" / "step-10").exists()
    assert list(control.glob("*.stop")) == []


def test_it_walks_back_past_a_broken_one_and_says_so(run_cli: RunCli, run: Path) -> None:
    expected = weights(run)
    for step in ("step-8", "step-6"):
        model = run / "checkpoints" / step / "model.safetensors"
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    output = run_cli("resume", "run")
    assert "passed over" in output
    assert "step-8/model.safetensors: content has changed" in output
    assert events(run, "run_started")[-1]["resumed_from"] == "step-4"
    latest = (run / "checkpoints" / "latest").read_text().strip()
    assert latest == "step-8.1"
    assert weights(run, latest) == expected


def test_it_says_what_there_is_when_the_step_is_not(run_cli: RunCli, run: Path) -> None:
    output = run_cli("resume", run.name, "--from", "5", code=3)
    assert "no checkpoint step-5; there are step-2, step-4, step-6, step-8" in output
    (run / "checkpoints" / "best").unlink()
    for command in (("resume", "run", "--from", "best"), ("test", "run")):
        output = run_cli(*command, code=3)
        assert "no checkpoint is its best" in output
        assert "--from latest takes the last one" in output


def test_it_goes_on_from_the_best(run_cli: RunCli, place: Path) -> None:
    best = ("--set", "checkpoint.on_best=true", "--set", "eval.eval_interval=3")
    run_cli("train", "tiny.yaml", *best, "--set", "record.run_dir=run")
    best_name = (place / "run" / "checkpoints" / "best").read_text().strip()
    run_cli("resume", "run", "--from", "best", "--until", "9it")
    assert events(place / "run", "run_started")[-1]["resumed_from"] == best_name


def test_what_is_set_otherwise_is_recorded_and_stays(run_cli: RunCli, run: Path) -> None:
    output = run_cli("resume", "run", "--until", "10it", "--set", "optimizer.lr=1e-4")
    changes = [event["change"] for event in events(run, "operation")]
    assert "optimizer.lr 0.001 → 0.0001" in changes
    assert "optimizer.lr: 0.001 → 0.0001" in output
    run_cli("resume", "run", "--until", "12it")
    changes = [event["change"] for event in events(run, "operation")]
    assert [change for change in changes if "lr" in change] == ["optimizer.lr 0.001 → 0.0001"]


def test_a_section_emptied_at_a_resume_has_its_defaults_from_then_on(
    run_cli: RunCli, run: Path
) -> None:
    rules = ("--set", "early_stopping.rules=[{patience: 1, delta: 9.0}]")
    run_cli("resume", "run", "--until", "9it", *rules)
    run_cli("resume", "run", "--until", "10it", "--set", "early_stopping=null")
    changes = [event["change"] for event in events(run, "operation")]
    assert changes[-1].startswith("early_stopping.rules [{")
    assert changes[-1].endswith("→ []")
    assert "model.n_layer was 2" in run_cli("resume", "run", "--set", "model={}", code=2)


def test_a_source_may_be_spelled_in_another_way(run_cli: RunCli, run: Path) -> None:
    source = values(load_config(str(run / "run.yaml")).config)["data.source"]
    source_path = run.parent / str(source)
    (run.parent / "link.txt").symlink_to(source_path)
    for until, path in ((9, source_path), (10, "link.txt")):
        run_cli("resume", "run", "--until", f"{until}it", "--set", f"data.source={path}")
    changes = [event["change"] for event in events(run, "operation")]
    assert not [change for change in changes if "data.source" in change]
    output = run_cli("resume", "run", "--set", "data.source=stdlib", "--until", "11it", code=2)
    assert "data.source was 'squares.txt' when the run began and cannot become 'stdlib'" in output


def test_a_run_of_before_data_had_a_seed_goes_on(run_cli: RunCli, run: Path) -> None:
    text = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(re.sub(r"  seed: 1337 .*derived\n", "", text))
    assert (run / "run.yaml").read_text() != text
    for path in (run / "checkpoints").glob("step-*"):
        older = msgspec.structs.replace(read_manifest(path), config={}, line=[])
        (path / "manifest.json").write_bytes(encode_manifest(older))
    run_cli("resume", "run", "--until", "9it")
    output = run_cli("resume", "run", "--set", "data.seed=5", "--until", "11it", code=2)
    assert "data.seed" in output


def test_damaged_shards_are_named_with_the_command_that_makes_them_again(
    run_cli: RunCli, run: Path
) -> None:
    place = run.parent
    shard = place / "tokens" / "val-00000.safetensors"
    shard.chmod(0o644)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    output = run_cli("resume", "run", "--until", "9it", code=2)
    assert "tokens/val-00000.safetensors: the tokens are not those that were written" in output
    output = run_cli("train", "tiny.yaml", "--set", "record.run_dir=other", code=2)
    assert "tokens/val-00000.safetensors" in output
    assert not (place / "other").exists()
    command = re.search(r"prepare the data set again: (rm -r .*)", output)
    assert command is not None
    remove_command, _, prepare_command = command[1].partition(" && instar ")
    assert shlex.split(remove_command) == ["rm", "-r", "tokens"]
    shutil.rmtree(place / "tokens")
    run_cli(*shlex.split(prepare_command))
    run_cli("resume", "run", "--until", "9it")


def test_what_cannot_change_any_more_is_refused_by_name(run_cli: RunCli, run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    output = run_cli(
        "resume", "run", "--set", "model.n_layer=3", "--set", "seed=5", "--until", "9it", code=2
    )
    assert "model.n_layer was 2 when the run began and cannot become 3" in output
    assert "the operation insert_layers changes it" in output
    assert "seed was 1337 when the run began and cannot become 5" in output
    assert "start a new run" in output
    impossible = ("--set", "model.n_layer=1", "--set", "model.n_embd=16")
    output = run_cli("resume", "run", *impossible, "--until", "9it", code=2)
    assert "the operation" not in output
    assert output.count("start a new run") == 2
    assert (run / "events.jsonl").read_bytes() == before


@parametrize_first(
    ("part", "loss"),
    [
        ("optimizer", "moments start at zero"),
        ("scheduler", "schedule starts again"),
        ("dataset", "start again at the first sample"),
        ("rng", "seeded again"),
    ],
    first=2,
)
def test_what_was_left_out_is_said_with_what_it_costs(
    run_cli: RunCli, place: Path, part: str, loss: str
) -> None:
    without = ("--set", f"checkpoint.save_{part}_state=false", *COURSE)
    run_cli("train", "tiny.yaml", *without, "--set", "record.run_dir=run", "--until", "3it")
    output = run_cli("resume", "run", "--until", "5it")
    assert f"saved without its {part} state" in output
    assert loss in output
    samples = 8 if part == "dataset" else 20
    assert events(place / "run", "run_finished")[-1]["samples"] == samples


def test_data_without_their_state_begin_again_after_a_change_of_the_samples(
    run_cli: RunCli, place: Path
) -> None:
    schedule = "schedule=[{name: set_context, value: 8, when: {at_step: 2}}]"
    without = ("--set", "checkpoint.save_dataset_state=false", "--set", schedule, *COURSE)
    run_cli("train", "tiny.yaml", *without, "--set", "record.run_dir=run", "--until", "3it")
    run_cli("resume", "run", "--until", "5it")
    assert events(place / "run", "run_finished")[-1]["samples"] == 8
    state = json.loads((place / "run/checkpoints/step-5/state.json").read_text())
    assert (state["course"]["since"], state["course"]["epochs_before"]) == (0, 0.0)
    run_cli("resume", "run", "--until", "6it")


def test_samples_of_another_length_count_epochs_on(run_cli: RunCli, place: Path) -> None:
    large = ("--set", "train.batch_size=128", *COURSE, "--set", "record.run_dir=run")
    run_cli("train", "tiny.yaml", *large, "--until", "1ep")
    steps = events(place / "run", "run_finished")[-1]["step"]
    run_cli("resume", "run", "--allow", "data", "--set", "data.context=8", "--until", "2ep")
    assert events(place / "run", "run_finished")[-1]["step"] in (3 * steps - 1, 3 * steps)
    run_cli("resume", "run", "--until", "3ep")
    assert events(place / "run", "run_finished")[-1]["step"] in (5 * steps - 2, 5 * steps)


def test_more_ranks_than_the_first_batch_had_samples_go_on_with_the_present_one(
    run_cli: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = "schedule=[{name: set_batch_size, value: 8, when: {at_step: 2}}]"
    small = ("--set", "train.batch_size=2", "--set", schedule, *COURSE)
    run_cli("train", "tiny.yaml", *small, "--set", "record.run_dir=run", "--until", "3it")
    monkeypatch.chdir(place)
    run = RunDir(Path("run"))
    for ranks, is_refused in ((4, False), (9, True)):
        loaded_config = load_run_config(str(run.config), resuming=True)
        raises = pytest.raises(ConfigError, match="a global batch of 8 samples")
        with raises if is_refused else nullcontext():
            preflight_launch(loaded_config, ranks, Resume(run), print)


def test_automatic_begins_a_run_and_then_goes_on_with_it(run_cli: RunCli, place: Path) -> None:
    auto = ("train", "tiny.yaml", "--set", "resume=auto", "--set", "record.run_dir=run", *COURSE)
    run_cli(*auto, "--until", "3it")
    run_cli(*auto, "--until", "8it")
    steps = [event["step"] for event in events(place / "run", "run_started")]
    assert steps == [0, 3]
    run_cli("train", "tiny.yaml", *COURSE, "--set", "record.run_dir=whole")
    assert weights(place / "run") == weights(place / "whole")


def test_a_missing_component_is_named(run_cli: RunCli, run: Path) -> None:
    folder = run / "checkpoints" / "step-8"
    (folder / "optimizer.safetensors").unlink()
    output = run_cli("resume", "run", "--from", "8", "--until", "9it", code=3)
    assert "step-8/optimizer.safetensors: missing" in output


def test_switches_of_the_same_tensors_may_change_where_one_says_so(
    run_cli: RunCli, run: Path
) -> None:
    more = ("--until", "9it", "--set", "model.dropout=0.1")
    output = run_cli("resume", "run", *more, code=2)
    assert "model.dropout was 0.0 when the run began" in output
    run_cli("resume", "run", *more, "--allow", "architecture")
    changes = [event["value"] for event in events(run, "operation")]
    assert {"model.dropout": 0.1} in changes
    assert events(run, "run_started")[-1]["architecture"]["dropout"] == 0.1
    # it is the run's own from then on
    run_cli("resume", "run", "--until", "10it")


def test_other_tensors_are_refused_even_so(run_cli: RunCli, run: Path) -> None:
    wider = ("--set", "model.n_mlp=64", "--allow", "architecture")
    output = run_cli("resume", run.name, "--until", "9it", *wider, code=3)
    assert "of another architecture than the config's" in output
    assert "n_mlp" in output


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step-*")}


def test_the_way_that_a_run_has_left_is_never_taken_up_again_unasked(
    run_cli: RunCli, run: Path
) -> None:
    run_cli("resume", "run", "--from", "4", "--until", "6it")
    assert names(run) == {"step-2", "step-4", "step-6", "step-8", "step-6.1"}
    listing = run_cli("checkpoint", "list", "run").splitlines()
    left_steps = {line.split()[0] for line in listing if "left at step 4" in line}
    assert left_steps == {"step-6", "step-8"}
    (run / "checkpoints" / "step-6.1" / "model.safetensors").write_bytes(b"")
    run_cli("resume", "run", "--until", "5it")
    assert events(run, "run_started")[-1]["resumed_from"] == "step-4"
    # the newest on its line, of two that have the step
    run_cli("test", "run", "--from", "5")
    output = run_cli("resume", "run", "--from", "8", "--until", "9it")
    assert "step-8 lies on a branch that the run left at step 4" in output
    assert events(run, "run_started")[-1]["resumed_from"] == "step-8"
    listing = run_cli("checkpoint", "list", "run").splitlines()
    assert not any("left at" in line for line in listing if line.startswith(("step-6 ", "step-8")))
    output = run_cli("resume", "run", "--from", "step-6.1", "--until", "9it", code=3)
    assert "step-6.1/model.safetensors" in output


def test_a_resume_of_a_finished_run_saves_nothing_and_says_how_to_go_on(
    run_cli: RunCli, run: Path
) -> None:
    before, text = names(run), (run / "checkpoints" / "latest").read_text()
    for _ in range(2):
        output = run_cli("resume", "run", "--set", "train.clip=0.5")
        assert "reached 8it: nothing is left to train" in output
        assert "instar resume run --until 16it" in output
    assert names(run) == before
    assert (run / "checkpoints" / "latest").read_text() == text
    assert events(run, "run_finished")[-1]["step"] == 8
    assert [e for e in events(run, "operation") if e["name"] == "override"] == []
    assert not (run / "test").exists()
    # what is missing is made, once
    run_cli("resume", "run", *("--set", "test.at_end=true", "--set", "test.weights=last"))
    result = (run / "test" / "result.json").read_bytes()
    run_cli("resume", "run", *("--set", "test.at_end=true", "--set", "test.weights=last"))
    assert (run / "test" / "result.json").read_bytes() == result
    assert names(run) == before


def test_a_run_that_died_before_its_first_save_begins_anew_in_its_folder(
    run_cli: RunCli, run: Path
) -> None:
    expected = weights(run)
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    output = run_cli("train", "tiny.yaml", *EVERY_2, "--set", "record.run_dir=run", code=2)
    assert "instar resume run" in output
    output = run_cli("resume", "run")
    assert "nothing was saved" in output
    assert events(run, "run_started")[-1]["step"] == 0
    assert weights(run) == expected


def test_automatic_begins_where_a_start_left_nothing_but_folders(
    run_cli: RunCli, place: Path
) -> None:
    for name in ("logs", "checkpoints"):
        (place / "run" / name).mkdir(parents=True)
    (place / "run" / "lock").touch()
    run_cli("train", "tiny.yaml", "--set", "resume=auto", "--set", "record.run_dir=run")
    assert names(place / "run") == {"step-8"}
    (place / "other" / "logs").mkdir(parents=True)
    (place / "other" / "logs" / "mine.txt").touch()
    output = run_cli("train", "tiny.yaml", "--set", "record.run_dir=other", code=2)
    assert "is not empty: it holds logs" in output


def test_a_budget_of_time_counts_training_over_the_whole_run(run_cli: RunCli, place: Path) -> None:
    course = ("--set", "record.run_dir=run", "--set", "record.log_interval=1")
    output = run_cli("train", "tiny.yaml", *course, "--until", "0.05s")
    assert "learning_rate.shape cosine does not decay, because 0.05s has no last step" in output
    run = place / "run"
    first = events(run, "run_finished")[-1]
    assert first["active_s"] >= 0.05
    output = run_cli("resume", "run")
    assert "reached 0.05s: nothing is left to train" in output
    run_cli("resume", "run", "--until", f"{first['active_s'] + 0.05:.3f}s")
    second = events(run, "run_finished")[-1]
    assert second["step"] > first["step"]
    assert second["active_s"] >= first["active_s"] + 0.049


def test_the_time_left_does_not_count_the_pause_before_a_resume(
    run_cli: RunCli, place: Path, forks: Forks
) -> None:
    log = ("--set", "record.log_interval=1", "--set", "record.run_dir=run")
    run_cli("train", "tiny.yaml", *COURSE, *log)
    times_left = []
    for more in ("12it", f"{events(place / 'run', 'run_finished')[-1]['active_s'] + 1:.3f}s"):
        child = forks.start(
            "failures:an_hour_later", ["resume", "run", "--until", more], place=place
        )
        assert child.finish() == 0, child.output()
        assert events(place / "run", "run_finished")[-1]["wall_s"] > 3600
        times_left.append(re.findall(r"eta (\S+)$", child.output(), re.MULTILINE))
    for_steps, for_seconds = times_left
    assert len(for_steps) == 4
    assert all(re.fullmatch(r"[\d.]+s", time_left) for time_left in for_steps), (
        for_steps
    )  # under a minute
    assert float(for_seconds[0].removesuffix("s")) > 0.3


def test_a_run_goes_on_with_its_data_where_a_new_one_is_refused(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    with (place / "squares.txt").open("a") as file:
        file.write("one more line\n")
    says = (
        "the files of data.source squares.txt have changed (changed: squares.txt) since tokens was"
    )
    assert says in run_cli("train", "tiny.yaml", code=2)
    assert says in run_cli("train", "tiny.yaml", "--dry-run", code=2)
    assert says in run_cli("data", "prepare", "tiny.yaml", code=2)
    output = run_cli("resume", run.name, "--until", "9it")
    assert output.count(f"note: {says} prepared; it is used as it was prepared") == 1


def test_a_best_pointer_never_comes_to_name_other_weights(run_cli: RunCli, place: Path) -> None:
    """The best checkpoint is deleted, and the run goes back: later another one has its name."""
    run = ("--set", "record.run_dir=run", "--set", "eval.eval_interval=2")
    run_cli("train", "tiny.yaml", *EVERY_2, *run)
    folder = place / "run" / "checkpoints"
    best = (folder / "best").read_text().strip()
    assert best == "step-8", "or the run did not learn"
    shutil.rmtree(folder / best)
    # a rate that destroys the model: what is saved at step 8 now is not the best
    run_cli("resume", "run", "--from", "4", "--set", "optimizer.lr=30")
    assert read_manifest(folder / "step-8").step == 8
    manifest = read_manifest(folder / (folder / "best").read_text().strip())
    line = ("step-2", "step-4", "step-6.1", "step-8")
    values = [read_manifest(folder / name).metrics["loss"] for name in line]
    assert (
        manifest.metrics["loss"] == min(values) < read_manifest(folder / "step-8").metrics["loss"]
    )
