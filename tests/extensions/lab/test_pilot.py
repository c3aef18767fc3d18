"""What the runs of a pilot are, and which of them it takes for its own; none is trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from instar.config.document import parse
from instar.config.errors import ConfigError
from instar.extensions.lab import short_runs
from instar.extensions.lab.find import training
from instar.extensions.lab.find.training import StepTime
from instar.extensions.lab.pilot import run_pilot
from instar.extensions.lab.pilot_file import read_pilot, write_json
from instar.extensions.lab.short_runs import MeasuredConfig, ShortRunRequest, prepare_measurement

Measure = Callable[..., dict[str, dict[str, Any]]]
COPY = "{name: stack_layers, value: 2, when: {at_fraction: 0.5}%s}"
TWICE = "{name: stack_layers, value: 2, repeat: 2, min_steps: 100, when: {at_fraction: 0.25}}"


@pytest.fixture
def measure(place: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs a pilot of a schedule, and returns the settings of its runs by arm, and their folders."""
    monkeypatch.chdir(place)
    folders: list[Path] = []

    def train(_: MeasuredConfig, path: str, overrides: Sequence[str], kind: str) -> Path:
        assert (path, kind) == ("tiny.yaml", "pilot")
        settings = dict(text.split("=", 1) for text in overrides)
        values = {key: parse(text, key, ())[0].data for key, text in settings.items()}
        folder = Path(values["record.run_dir"])
        folders.append(folder)
        (arm,) = {"final", "grown", "small"} & {*folder.name.split("-")}
        runs[arm] = {**values, "folder": folder.name}
        return folder

    monkeypatch.setattr(MeasuredConfig, "seconds", lambda *_: (0.01, 0.01))
    monkeypatch.setattr(short_runs, "train_or_resume", train)
    monkeypatch.setattr(short_runs, "loss_at_end", lambda _, steps: 6 - steps / 40)
    monkeypatch.setattr(short_runs, "losses_of", lambda _: ())
    runs: dict[str, dict[str, Any]] = {}

    def measure_schedule(
        schedule: str, *settings: str, steps: int | None = 40, **options: Any
    ) -> Any:
        runs.clear()
        overrides = ("train.until=[400it]", f"schedule=[{schedule}]", *settings)
        run_pilot(ShortRunRequest("tiny.yaml", overrides, steps=steps, **options))
        return dict(runs)

    return measure_schedule


@pytest.mark.parametrize(("device", "parallel"), [("cpu", 1), ("cuda", 2)])
def test_ranks_take_a_share_of_a_step_each_where_they_have_a_device_each(
    place: Path, monkeypatch: pytest.MonkeyPatch, device: str, parallel: int
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(training, "step_time", lambda *_: StepTime(4.0, 2.0, device))
    request = ShortRunRequest("tiny.yaml", ["device=auto"], world_size=2)
    seconds = prepare_measurement(request).seconds([], request.say)
    assert seconds == (4.0 / parallel, 2.0 / parallel)


def operations(run: dict[str, Any]) -> list[tuple[str, int]]:
    return [(entry["name"], entry["when"]["at_step"]) for entry in run["schedule"]]


def test_a_repeated_operation_is_carried_out_as_often(measure: Measure) -> None:
    runs = measure(f"{TWICE}, {{name: change_lr, value: 0.9, when: {{at_fraction: 0.9}}}}")
    growth_steps = [("stack_layers", 10), ("stack_layers", 20), ("change_lr", 36)]
    assert operations(runs["grown"]) == growth_steps
    assert operations(runs["final"]) == growth_steps[2:]
    assert runs["final"]["model.n_layer"] == 4 * 2


def test_an_operation_at_the_beginning_stays_there_and_one_after_the_end_is_none(
    measure: Measure,
) -> None:
    first = "{name: change_lr, value: 0.5, when: {at_step: 0}}"
    late = "{name: change_lr, value: 0.5, when: {at_step: 900}}"
    runs = measure(f"{first}, {COPY % ''}, {late}")
    assert operations(runs["grown"]) == [("change_lr", 0), ("stack_layers", 20)]
    with pytest.raises(ConfigError, match="grows the model after the end of the run"):
        measure(f"{COPY % ''}, {COPY.replace('at_fraction: 0.5', 'at_step: 900') % ''}")


def test_what_was_skipped_in_the_run_is_skipped_in_its_pilot(measure: Measure) -> None:
    skip_options = ", max_params: 1, on_failure: skip"
    runs = measure(f"{COPY % ''}, {COPY % skip_options}")
    assert operations(runs["grown"]) == [("stack_layers", 20)]


def test_the_steps_of_options_are_shortened_in_proportion(measure: Measure) -> None:
    insert = "{name: insert_layers, value: 1, mask: 50, lr: {rewarm: 80}, when: {at_step: 100}}"
    entry, _ = measure(f"{insert}, {COPY % ''}")["grown"]["schedule"]
    assert (entry["mask"], entry["lr"]) == (5, {"rewarm": 8})


def test_runs_of_other_settings_are_not_taken_for_its_own(measure: Measure, place: Path) -> None:
    def folders(schedule: str = COPY % "", *settings: str, **options: Any) -> set[str]:
        (place / "tiny.pilot.json").unlink(missing_ok=True)
        return {run["folder"] for run in measure(schedule, *settings, **options).values()}

    first = folders()
    assert folders() == first
    rate = "{name: change_lr, value: 0.5, when: {at_step: 9}}"
    for other_folders in (
        folders(COPY % "", "optimizer.lr=0.1"),
        folders(f"{rate}, {COPY % ''}"),
        folders(COPY % "", "train.until=[300it]"),
        folders(steps=80),
    ):
        assert not other_folders & first


def test_another_pilot_is_not_gone_on_with(measure: Measure, place: Path) -> None:
    messages: list[str] = []
    measure(COPY % "", seeds=(1, 2))
    assert measure(COPY % "", steps=None) == measure(COPY % "", seeds=(2, 1)) == {}
    for options in ({"steps": 60}, {"seeds": (1,)}):
        with pytest.raises(ConfigError, match="was begun with --steps 40 --seed 1 --seed 2"):
            measure(COPY % "", **options)
    # whole, it predicts other schedules too
    measure(COPY.replace("0.5", "0.6") % "", say=messages.append)
    assert "is complete, with other settings of schedule: nothing is trained" in messages[-1]
    file = place / "tiny.pilot.json"
    write_json(file, structs.replace(read_pilot(file), runs=()))
    for schedule, end, key in ((TWICE, 400, "schedule"), (COPY % "", 300, "train.until")):
        with pytest.raises(ConfigError, match=f"was begun with other settings of {key}"):
            measure(schedule, f"train.until=[{end}it]")
