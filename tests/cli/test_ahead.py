"""What is forecast at a resume is the rest of what was forecast at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from instar.config.errors import ConfigError
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config
from instar.run.resume import Resume, choose_checkpoint, continuation
from instar.run.start.ahead import with_rest
from instar.run.start.launch import preflight_launch
from instar.run.start.preflight import Prepared, preflight
from instar.schedule.forecast import Forecast, Stage

Typed = Callable[..., str]

SCHEDULE = (
    "schedule=["
    "{name: freeze, value: 'blocks.0.*', when: {at_step: 2}}, "
    "{name: stack_layers, value: x4, when: {at_step: 4}}, "
    "{name: change_batch_size, value: x2, when: {at_step: 6}}, "
    "{name: set_context, value: 8, when: {at_step: 6}}, "
    "{name: widen_mlp, value: x4, when: {at_step: 7}}]"
)
KEYS = (SCHEDULE, "train.until=[9it]", "checkpoint.every_steps=1", "checkpoint.keep_last=20")


@pytest.fixture
def run(typed: Typed, place: Path) -> RunDir:
    words = [word for key in (*KEYS, "record.run_dir=run") for word in ("--set", key)]
    typed("train", "tiny.yaml", *words)
    return RunDir(place / "run")


def prepared_at(run: RunDir, step: int) -> Prepared:
    resume = Resume(run, start=str(step))
    checkpoint, _ = choose_checkpoint(resume)
    loaded_config = load_run_config(str(run.config), resuming=True)
    resumed_run = continuation(resume, loaded_config, checkpoint)
    prepared_run = preflight(resumed_run.loaded_config, 1, new=False)
    return with_rest(prepared_run, resumed_run, checkpoint, 1)


def facts(stage: Stage) -> tuple[object, ...]:
    steps = {strategy: memory.step for strategy, memory in stage.memory.items()}
    return stage.settings, stage.architecture, stage.parameters, steps, stage.batch_size


def totals(forecast: Forecast) -> tuple[int, int, int]:
    assert forecast.early is not None
    assert forecast.early == forecast.late
    return forecast.early.steps, forecast.early.samples, forecast.early.tokens


def test_the_rest_has_the_shapes_the_memory_and_the_totals_of_the_start(
    run: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    whole = preflight(load_run_config("tiny.yaml", KEYS), 1).forecast
    stages_left = {1: 6, 2: 5, 5: 4, 6: 2, 8: 1}
    for step, left in stages_left.items():
        rest = prepared_at(run, step).forecast
        begun = whole.stages[len(whole.stages) - left :]
        assert [facts(stage) for stage in rest.stages] == [facts(stage) for stage in begun], step
        assert [s.first_step for s in rest.stages[1:]] == [s.first_step for s in begun[1:]]
        # the first has done with its growth, which is not to be paid again
        assert [s.memory for s in rest.stages[1:]] == [s.memory for s in begun[1:]]
        assert totals(rest) == totals(whole)


def test_a_grown_model_that_does_not_fit_here_is_refused_before_ranks_start(
    run: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    grown = prepared_at(run, 8).forecast.stages[0].memory["ddp"].kept_bytes
    first = prepared_at(run, 1).forecast.stages[0].memory["ddp"].kept_bytes
    assert grown > 2 * first
    loaded_config = load_run_config(str(run.config), ("device=cpu",), resuming=True)
    monkeypatch.setattr("instar.run.start.preflight.host_bytes", lambda: 2 * first)
    with pytest.raises(ConfigError, match=r"needs .* for its weights, and the machine has"):
        preflight_launch(loaded_config, 1, Resume(run, start="8"), print)
