"""What is forecast at a resume is the rest of what was forecast at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first

from instar.config.errors import ConfigError
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config
from instar.run.resume import Resume, choose_checkpoint, continuation
from instar.run.start.ahead import with_rest
from instar.run.start.launch import preflight_launch
from instar.run.start.preflight import Prepared, preflight
from instar.schedule.forecast import Forecast, Stage

RunCli = Callable[..., str]


def entry(name: str, value: object, when: Mapping[str, Any], **options: object) -> dict[str, Any]:
    return {"name": name, "value": value, "when": dict(when), **options}


GROWS = [
    entry("freeze", "blocks.1.*", {"at_step": 2}),
    entry("insert_layers", 2, {"at_step": 4}, where=[0, 0]),
    entry("change_batch_size", "x2", {"at_step": 6}),
    entry("widen_mlp", "x4", {"at_step": 7}),
]
WAITS = [
    entry("set_lr", 1e-4, {"at_step": 2}),
    entry("widen_mlp", "x2", {"at_step": 3}, mask=4),
    entry("insert_layers", 1, {"at_step": 4}),
    entry("change_batch_size", "x2", {"waited": 3}),
    entry("set_clip", 0.5, {"any": [{"loss_below": 99.0}, {"waited": 50}]}),
]
SHORTENS = [
    entry("set_context", 8, {"at_step": 6}),
    entry("set_batch_size", 24, {"at_fraction": 0.7}),
]
EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.keep_last=200", "eval.eval_interval=100")
RUNS: dict[str, tuple[str, ...]] = {
    "grows": (f"schedule={json.dumps(GROWS)}", "train.until=[9it]"),
    "waits": (f"schedule={json.dumps(WAITS)}", "train.until=[14it]"),
    "epochs": (
        f"schedule={json.dumps(SHORTENS)}",
        "train.until=[1.3ep]",
        "train.batch_size=48",
        "checkpoint.every_steps=3",
    ),
}


@pytest.fixture
def train(run_cli: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    monkeypatch.chdir(place)

    def train_run(*keys: str) -> RunDir:
        sets = [
            word for key in (*EVERY_STEP, *keys, "record.run_dir=run") for word in ("--set", key)
        ]
        run_cli("train", "tiny.yaml", *sets)
        return RunDir(place / "run")

    return train_run


def prepared_at(run: RunDir, step: int, *overrides: str) -> Prepared:
    resume = Resume(run, start=str(step))
    checkpoint, _ = choose_checkpoint(resume)
    loaded_config = load_run_config(str(run.config), overrides, resuming=True)
    resumed_run = continuation(resume, loaded_config, checkpoint)
    prepared_run = preflight(resumed_run.loaded_config, 1, new=False)
    return with_rest(prepared_run, resumed_run, checkpoint, 1)


def facts(stage: Stage) -> tuple[object, ...]:
    steps = {strategy: memory.step for strategy, memory in stage.memory.items()}
    # a mask says when it opens, which no forecast knows
    return stage.settings, stage.architecture.sizes(), stage.parameters, steps, stage.batch_size


def totals(forecast: Forecast) -> list[tuple[int, ...]]:
    """Steps and samples; tokens are counted in the run, and forecast by their mean."""
    cases = (forecast.early, forecast.late)
    return [(total.steps, total.samples) for total in cases if total is not None]


def flops(forecast: Forecast) -> list[int]:
    return [total.flops for total in (forecast.early, forecast.late) if total is not None]


@parametrize_first("name", RUNS, first=1)
def test_the_rest_has_the_shapes_the_memory_and_the_totals_of_the_start(
    name: str, train: Callable[..., RunDir]
) -> None:
    keys = RUNS[name]
    run = train(*keys)
    full_forecast = preflight(load_run_config("tiny.yaml", (*EVERY_STEP, *keys)), 1).forecast
    steps = sorted(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))
    assert len(steps) >= 9
    stage_counts = set()
    for step in steps[:-1]:
        remainder = prepared_at(run, step).forecast
        expected_stages = full_forecast.stages[len(full_forecast.stages) - len(remainder.stages) :]
        stage_steps = [(stage.first_step, stage.latest_step) for stage in remainder.stages[1:]]
        assert stage_steps == [
            (stage.first_step, stage.latest_step) for stage in expected_stages[1:]
        ], step
        assert [facts(stage) for stage in remainder.stages] == [
            facts(stage) for stage in expected_stages
        ], step
        # the first has done with its growth, which is not to be paid again
        assert [s.memory for s in remainder.stages[1:]] == [s.memory for s in expected_stages[1:]]
        assert totals(remainder) == totals(full_forecast), step
        assert flops(remainder) == pytest.approx(flops(full_forecast), rel=0.02), step
        stage_counts.add(len(remainder.stages))
    assert len(stage_counts) >= 3, "operations were carried out on the way"


def test_a_dry_run_of_a_resume_is_about_the_rest(
    train: Callable[..., RunDir], run_cli: RunCli
) -> None:
    remainder = prepared_at(train(*RUNS["grows"]), 5).forecast
    output = run_cli("train", "--resume", "run", "--from", "5", "--dry-run", "--json")
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    stages = [
        (stage["first_step"], stage["parameters"]["total"]) for stage in json.loads(line)["stages"]
    ]
    assert stages == [(stage.first_step, stage.parameters.total) for stage in remainder.stages]
    text = run_cli("train", "--resume", "run", "--from", "5", "--dry-run")
    assert re.search(r"^stage 1 +as the run is now\nbegins +at step 5\nshape +4 layers", text, re.M)


def test_the_end_of_the_decay_is_that_of_the_rest(train: Callable[..., RunDir]) -> None:
    """After smaller batches: by the steps that are left, not by those of the config."""
    until = ("train.until=[1ep]", "train.batch_size=48", "learning_rate.shape=ConstantLR")
    schedule = json.dumps([entry("set_batch_size", 12, {"at_step": 4})])
    run = train(f"schedule={schedule}", *until)
    changes = ("learning_rate.shape=cosine", "learning_rate.options={}", "train.until=[2ep]")
    prepared_run = prepared_at(run, 8, *changes)
    end = prepared_run.forecast.steps
    assert prepared_run.config.learning_rate.lr_decay_iters == end
    assert prepared_run.derived_values["learning_rate.lr_decay_iters"] == end
    full_run = preflight(load_run_config("tiny.yaml", (*until[1:], "train.until=[2ep]")), 1)
    assert full_run.forecast.steps is not None
    assert end is not None
    assert end > 2 * full_run.forecast.steps


def test_what_was_cancelled_is_not_ahead_and_what_was_asked_for_is(
    train: Callable[..., RunDir],
) -> None:
    too_large = entry("stack_layers", "x2", {"at_step": 90}, max_params=10)
    run = train(
        f"schedule={json.dumps([entry('set_lr', 1e-4, {'at_step': 80})])}", "train.until=[3it]"
    )
    state = run.checkpoints / "step-3" / "state.json"
    state_values = json.loads(state.read_text())
    insertion = entry("insert_layers", 1, {"at_step": 70}, on_failure="skip")
    state_values["cancelled"] = [{"number": 1, "id": "a", "by": "me"}]
    at_once = entry("set_batch_size", 24, {"at_step": 0}, on_failure="skip")
    state_values["posted"] = [
        {"id": id_, "by": "me", "step": 2, "content": content}
        for id_, content in (("b", insertion), ("c", at_once))
    ]
    state.write_text(json.dumps(state_values))
    schedule = f"schedule={json.dumps([entry('set_lr', 1e-4, {'at_step': 80}), too_large])}"
    loaded_config = load_run_config(str(run.config), ("train.until=[99it]",), resuming=True)
    checkpoint, _ = choose_checkpoint(Resume(run), check=False)
    resumed_run = continuation(Resume(run), loaded_config, checkpoint)
    prepared_run = preflight(resumed_run.loaded_config, 1, new=False)
    stages = with_rest(prepared_run, resumed_run, checkpoint, 1).forecast.stages
    assert [(stage.operation.split()[0], stage.first_step) for stage in stages[1:]] == [
        ("set_batch_size", 3),
        ("set_lr", 80),
        ("insert_layers", 80),  # what waits is behind the schedule
    ]
    # another schedule has other numbers: nothing of it was cancelled
    other = continuation(
        Resume(run), load_run_config(str(run.config), (schedule,), resuming=True), checkpoint
    )
    with pytest.raises(ConfigError, match="max_params"):
        with_rest(prepared_run, other, checkpoint, 1)


def test_a_dry_run_of_a_resume_assumes_data_that_are_not_prepared(
    train: Callable[..., RunDir], run_cli: RunCli, place: Path
) -> None:
    run = train("train.until=[3it]", "data.path=prepared", *RUNS["grows"][:1])
    whole = run_cli("train", "--resume", str(run.path), "--until", "9it", "--dry-run")
    (place / "prepared").rename(place / "elsewhere")
    output = run_cli("train", "--resume", str(run.path), "--until", "9it", "--dry-run")
    assert "which a run would prepare" in output
    assert "Nothing was started." in output
    assert [line for line in whole.splitlines() if "insert_layers" in line] == [
        line for line in output.splitlines() if "insert_layers" in line
    ]
    assert not (place / "prepared").exists()


def test_a_grown_model_that_does_not_fit_here_is_refused_before_ranks_start(
    train: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(*RUNS["grows"])
    grown_bytes = prepared_at(run, 8).forecast.stages[0].memory["ddp"].kept_bytes
    first = prepared_at(run, 1).forecast.stages[0].memory["ddp"].kept_bytes
    assert grown_bytes > 1.5 * first
    loaded_config = load_run_config(str(run.config), ("device=cpu",), resuming=True)
    monkeypatch.setattr("instar.run.start.preflight.host_bytes", lambda: 1.1 * first)
    with pytest.raises(ConfigError, match=r"needs .*, and the machine has"):
        preflight_launch(loaded_config, 1, Resume(run, start="8"), print)
