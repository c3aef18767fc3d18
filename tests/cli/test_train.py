"""`instar train`, `resume` and `sample` as a person types them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import psutil
import pytest
from needed import needs

from instar.config.errors import ConfigError
from instar.config.sections import RecordConfig
from instar.extensions import built_in
from instar.logs.read.cache import load_columns
from instar.processes.identity import ProcessName
from instar.record.events import Warn, encode_event
from instar.record.rundir import RunDir, check_run_dir, create_run_dir

Instar = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_leaves_everything_it_should(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run", "--set", "record.report=true")
    run = place / "run"
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert names == {
        "run.yaml",
        "start.json",
        "tokenizer.json",
        "events.jsonl",
        "lock",
        *(["report.html"] if "board" in built_in() else []),
        "logs/rank_0.log",
        "checkpoints/best",
        "checkpoints/latest",
        "checkpoints/line",
        "checkpoints/step-8/manifest.json",
        "checkpoints/step-8/model.safetensors",
        "checkpoints/step-8/optimizer.safetensors",
        "checkpoints/step-8/rng/rank-0.safetensors",
        "checkpoints/step-8/state.json",
    }
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    # of the steps behind the last whole interval there is a line too
    assert kinds == [
        "run_started", "train", "eval", "train", "sample", "checkpoint", "stop", "run_finished"
    ]  # fmt: skip


def test_a_run_with_a_long_record_leaves_its_columns(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run", "--until", "4it")
    run = RunDir(place / "run")
    assert not (run.path / "columns").exists()
    with run.events.open("ab") as file:
        file.writelines(encode_event(Warn(message="x" * 1000), 1.0, 1) for _ in range(1100))
    instar("resume", "run", "--until", "8it")
    columns = load_columns(run.events, run.path / "columns", portable=True)
    assert columns is not None
    assert columns.end == run.events.stat().st_size
    assert columns.tables["train"].axes["step"].max() == 8


def test_the_resolved_config_trains_the_same_run_again(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=one")
    instar("train", "one/run.yaml", "--set", "record.run_dir=two")
    weights = "checkpoints/step-8/model.safetensors"
    assert (place / "one" / weights).read_bytes() == (place / "two" / weights).read_bytes()


def test_a_resumed_run_ends_as_one_that_never_stopped(instar: Instar, place: Path) -> None:
    course = ["--set", "learning_rate.lr_decay_iters=8", "--set", "train.ema=0.9"]
    instar("train", "tiny.yaml", *course, "--set", "record.run_dir=whole")
    instar("train", "tiny.yaml", *course, "--set", "record.run_dir=parts", "--until", "3it")
    instar("resume", "parts", "--until", "8it")
    for component in ("model", "optimizer", "ema"):
        file = f"checkpoints/step-8/{component}.safetensors"
        assert (place / "whole" / file).read_bytes() == (place / "parts" / file).read_bytes()
    lines = (place / "parts" / "events.jsonl").read_text().splitlines()
    starts = [e for e in map(json.loads, lines) if e["kind"] == "run_started"]
    assert [(event["segment"], event["step"]) for event in starts] == [(1, 0), (2, 3)]


def test_a_run_refuses_to_go_on_with_other_data(instar: Instar, place: Path) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    text = (place / "squares.txt").read_text()
    (place / "squares.txt").write_text(text[: len(text) // 2])
    for file in (place / "tokens").iterdir():
        file.unlink()
    (place / "tokens").rmdir()
    error = instar("resume", "run", "--until", "9it", code=3).stderr
    assert "trained with another data (fingerprint" in error
    assert "--allow data" in error
    instar("resume", "run", "--until", "9it", "--allow", "data", "--allow", "tokenizer")


def test_a_model_speaks_the_same_words_for_the_same_seed(instar: Instar) -> None:
    instar("train", "tiny.yaml", "--set", "record.run_dir=run")
    ask = ("sample", "run", "--prompt", "7 squared", "--tokens", "30")
    first, same, other = instar(*ask), instar(*ask), instar(*ask, "--seed", "5")
    assert first.stdout.startswith("7 squared")
    assert first.stdout == same.stdout != other.stdout


def test_a_dry_run_says_what_would_be_and_starts_nothing(instar: Instar, place: Path) -> None:
    forecast = instar("train", "tiny.yaml", "--dry-run", "--nproc", "2").stdout
    parts = ("2 layers × 32 wide", "parameters", "FLOPs per token", "memory", "tokens")
    for word in (*parts, "strategies", "ddp", "fsdp"):
        assert word in forecast
    assert "torchrun --nproc_per_node=2 -m instar.train tiny.yaml" in forecast
    assert forecast.endswith("Nothing was started.\n")
    assert not (place / "runs").exists()
    facts = json.loads(instar("train", "tiny.yaml", "--dry-run", "--json").stdout)
    assert facts["steps"] == 8
    # the tests' processor has no bf16 units, see conftest.py
    assert "no bf16 units" in facts["precision"]
    bf16_forecast = instar("train", "tiny.yaml", "--dry-run", "--set", "precision=bf16").stdout
    assert re.search(r"^precision +bf16$", bf16_forecast, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("modle.n_embd=3", "unknown key 'modle'; did you mean 'model'?"),
        ("train.batch_size=0", "train.batch_size must be"),
        ("train.batch_size=two", "train.batch_size must be"),
        ("model.n_embd=31", "divisible"),
        ("data.source=nothing.txt", "nothing.txt"),
        ("data.source=empty.txt", "empty.txt"),
        ("device=cuda", "cuda:0 does not exist"),
        ("model.context=100000", "a context of 100,000"),
        ("record.out_dir=squares.txt", "is a file, not a folder"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_started(
    instar: Instar, place: Path, change: str, message: str
) -> None:
    (place / "empty.txt").write_text("")
    arguments = ["--set", change]
    if "source" in change:
        arguments += ["--set", "data.path=elsewhere"]
    result = instar("train", "tiny.yaml", *arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "Nothing was started." in result.stderr
    assert not (place / "runs").exists()


def test_a_preset_trains_in_fp32_on_a_processor_without_bf16_units(
    instar: Instar, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    sets = ("preset=fast", "train.until=[1it]", "record.run_dir=run")
    instar("train", "tiny.yaml", *(word for key in sets for word in ("--set", key)))
    config_text = (place / "run" / "run.yaml").read_text(encoding="utf-8")
    assert re.search(r"^precision: fp32 +# auto: this processor has no", config_text, re.MULTILINE)


def test_devices_that_are_not_there_are_refused(instar: Instar, place: Path) -> None:
    result = instar("train", "tiny.yaml", "--devices", "0,1", code=2)
    assert "devices 0,1 were requested, but this host has no GPU" in result.stderr
    assert result.stderr.count("this host has no GPU") == 1
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--devices", "0"], ["--set", "device=cuda"], ["--nproc", "2", "--set", "device=cuda"]],
)
def test_devices_are_looked_for_before_data_are_prepared(
    instar: Instar, place: Path, arguments: list[str]
) -> None:
    result = instar("train", "tiny.yaml", "--set", "data.path=elsewhere", *arguments, code=2)
    assert "GPU" in result.stderr
    assert not (place / "elsewhere").exists()


def test_samples_of_no_run(instar: Instar) -> None:
    assert "no run in runs" in instar("sample", "latest", code=2).stderr


def all_paths(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.mark.parametrize(
    "change",
    [
        "data.kind=tokens",
        "train.until=[3ep]",
        "test.at_end=true",
        "data.tokenizer=bpe",
    ],
)
def test_a_dry_run_writes_nothing_and_says_what_would_be_prepared(
    instar: Instar, place: Path, change: str
) -> None:
    before = all_paths(place)
    best = ["--set", "test.weights=last"]
    result = instar("train", "tiny.yaml", "--dry-run", "--set", change, *best)
    assert "which a run would prepare" in result.stderr
    assert "2 layers × 32 wide" in result.stdout
    assert all_paths(place) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [("data.source=nothing.txt", "nothing.txt"), ("data.val_source=nothing.txt", "nothing.txt")],
)
def test_a_dry_run_names_a_source_that_is_not_there(
    instar: Instar, place: Path, change: str, says: str
) -> None:
    before = all_paths(place)
    assert says in instar("train", "tiny.yaml", "--dry-run", "--set", change, code=2).stderr
    assert all_paths(place) == before


@needs("graphs")
def test_a_dry_run_of_generated_graphs_writes_nothing(instar: Instar, place: Path) -> None:
    before = all_paths(place)
    result = instar("train", "--dry-run", "--set", "task=graph")
    assert "a run would generate" in result.stderr
    assert all_paths(place) == before


def test_of_two_starts_on_one_folder_one_is_told_who_has_it(tmp_path: Path) -> None:
    record = RecordConfig(run_dir=str(tmp_path / "run"))
    run = create_run_dir(record, "first")
    parent = psutil.Process(os.getppid())
    name = ProcessName(parent.pid, parent.create_time(), platform.node())
    run.lock.write_text(f"{name}\n")
    for look in (create_run_dir, check_run_dir):
        with pytest.raises(ConfigError, match=f"process {os.getppid()} has started a run there"):
            look(record, "second")


def leave_config(run: RunDir) -> None:
    """What every start leaves in its folder before it lets go of the lock."""
    run.config.write_text("name: first\n")


def test_of_starts_at_the_same_moment_one_has_the_folder(tmp_path: Path) -> None:
    for turn in range(30):
        messages = started_together(RecordConfig(run_dir=str(tmp_path / f"run-{turn}")))
        refusals = [message for message in messages if message]
        assert len(messages) - len(refusals) == 1
        assert all(
            re.search("has started a run|holds another run", message) for message in refusals
        )


def started_together(record: RecordConfig) -> list[str]:
    """What each of eight starts is told; "" for one that has the folder."""
    ready, messages = Barrier(8), list[str]()

    def start() -> None:
        ready.wait()
        try:
            create_run_dir(record, "same", leave_config)
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))

    threads = [Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return messages


def test_a_folder_that_a_dead_process_claimed_is_not_said_to_be_held(tmp_path: Path) -> None:
    record = RecordConfig(run_dir=str(tmp_path / "run"))
    run = create_run_dir(record, "first", leave_config)
    with subprocess.Popen(["true"]) as process:
        pass
    run.lock.write_text(f"{process.pid}\n")
    with pytest.raises(ConfigError, match="holds another run"):
        check_run_dir(record, "second")
