"""What is shown of a fleet, from its events and the records of its runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from recorded import start_event, train

from instar.extensions.fleet.plan import Instance
from instar.extensions.fleet.state import (
    Ended,
    FleetEvent,
    InstanceChanged,
    ProcessChanged,
    Started,
    fold_events,
)
from instar.extensions.fleet.view.live import fleet_table, title
from instar.extensions.fleet.view.reader import FleetReader
from instar.extensions.fleet.view.rows import (
    FleetView,
    RunProgress,
    fleet_json,
    fleet_overview,
    fleet_view,
)
from instar.record.events import OperationEvent, Stop
from instar.record.recorder import Recorder

PLANNED = [
    Instance(index, {"seed": index}, f"seed{index}", Path(f"runs/seed{index}"), {})
    for index in range(3)
]
EVENTS: list[FleetEvent] = [
    Started(1.0, 7, "here", "", (0, 1, 2)),
    InstanceChanged(2.0, 0, "starting"),
    InstanceChanged(2.0, 0, "running"),
    ProcessChanged(3.0, 0, "server", "healthy", 2, 11, (3,), {"http": 8000}),
    ProcessChanged(4.0, 0, "train", "running", 1, 12),
    InstanceChanged(5.0, 1, "failed", "server is unhealthy"),
]


def _view(launcher: int | None, *more: FleetEvent) -> FleetView:
    progress = {0: RunProgress(1200, 3.21, 2, 100.0)}
    status = fold_events([*EVENTS, *more])
    return fleet_view("grpo", status, launcher, PLANNED, ("server",), progress)


def test_rows_show_each_instance_and_its_processes() -> None:
    view = _view(99)
    assert [row.state for row in view.instances] == ["running", "failed", "waiting"]
    assert [row.is_service for row in view.instances[0].processes] == [True, False]
    assert title(view) == "grpo: running (1 running, 1 failed, 1 waiting)"
    assert list(fleet_table(view, 40.0)) == [
        ("0", "seed0", "running", "1,200", "3.210", "1m00", "2", "1", ""),
        ("", "  server", "healthy", "", "", "", "", "", "GPU 3, http 8000, attempt 2"),
        ("", "  train", "running", "", "", "", "", "", ""),
        ("1", "seed1", "failed", "", "", "", "", "", "server is unhealthy"),
        ("2", "seed2", "waiting", "", "", "", "", "", ""),
    ]


def test_nothing_runs_without_a_launcher() -> None:
    view = _view(None)
    assert view.state == "launcher died"
    assert [row.state for row in view.instances] == ["stopped", "failed", "waiting"]
    assert [row.state for row in view.instances[0].processes] == ["ended", "ended"]
    assert view.instances[0].eta_s(40.0) is None
    assert _view(None, Ended(9.0, 75)).state == "stopped"
    assert _view(None, Ended(9.0, 4)).state == "failed"


def test_a_fleet_of_which_a_part_succeeds_later_has_not_succeeded() -> None:
    """`up`, in which instance 0 fails, a stop, and `resume --only 1`."""
    events: list[FleetEvent] = [
        Started(1.0, 7, "here", "", (0, 1)),
        InstanceChanged(2.0, 0, "failed"),
        InstanceChanged(3.0, 1, "stopped"),
        Ended(3.0, 75),
        Started(4.0, 8, "here", "", (1,)),
        InstanceChanged(5.0, 1, "succeeded"),
        Ended(5.0, 0),
    ]

    def state(*more: FleetEvent) -> str:
        return fleet_view("grpo", fold_events([*events, *more]), None, PLANNED[:2]).state

    assert state() == "failed"
    assert state(InstanceChanged(6.0, 0, "stopped")) == "stopped"
    assert state(InstanceChanged(6.0, 0, "pruned")) == "succeeded"
    assert fleet_view("grpo", fold_events(events[-3:]), None, PLANNED).state == "stopped"


def test_json_has_what_was_recorded_and_what_the_runs_have_reached() -> None:
    data = fleet_json(_view(99), fold_events(EVENTS), 40.0)
    json.dumps(data)
    assert list(data["instances"]) == ["0", "1", "2"]
    first = data["instances"]["0"]
    assert (first["phase"], first["step"], first["eta_s"]) == ("running", 1200, 60.0)
    assert first["processes"]["server"]["ports"] == {"http": 8000}
    assert data["instances"]["2"]["phase"] == "waiting"
    assert fleet_overview(_view(99)) == {
        "fleet": "grpo",
        "state": "running",
        "instances": 3,
        "succeeded": 0,
        "failed": 1,
        "launcher": 99,
    }


def test_runs_that_differ_in_their_seed_alone_have_a_mean() -> None:
    """Of each value of the matrix, over those that have succeeded."""
    losses = {0: 1.0, 1: 2.0, 2: 9.0, 3: 4.0, 4: 5.0}
    instances = [
        Instance(n, {"seed": n % 3, "model.n_layer": n // 3}, f"r{n}", Path(f"runs/r{n}"), {})
        for n in losses
    ]
    events: list[FleetEvent] = [
        InstanceChanged(2.0, n, "failed" if n == 2 else "succeeded") for n in losses
    ]
    progress = {n: RunProgress(10, loss, 0, None) for n, loss in losses.items()}
    status = fold_events([Started(1.0, 7, "here", "", tuple(losses)), *events])
    view = fleet_view("seeds", status, None, instances, (), progress)
    assert [mean.text for mean in view.means] == [
        "seeds n_layer=0: loss 1.5000 ±0.71 over 2 runs",
        "seeds n_layer=1: loss 4.5000 ±0.71 over 2 runs",
    ]
    assert fleet_json(view, status, 9.0)["means"][0]["loss"] == 1.5
    assert _view(99).means == ()


def _folder(path: Path, spec: dict[str, object]) -> Path:
    folder = path / "fleets" / "two"
    folder.mkdir(parents=True)
    fleet_record = {"format": "instar-fleet/1", "spec": spec, "configs": {}, "gpus": None}
    (folder / "fleet.json").write_text(json.dumps(fleet_record | {"cwd": str(path)}))
    (folder / "state.jsonl").write_text(
        '{"kind":"started","time":1.0,"pid":1,"host":"h","boot":"","instances":[0]}\n'
        '{"kind":"instance","time":1.0,"instance":0,"phase":"running"}\n'
    )
    return folder


SPEC = {"name": "two", "matrix": {"seed": [1, 2]}, "jobs": {"job": {"command": ["true"]}}}


def test_a_run_is_read_again_when_its_record_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = FleetReader(_folder(tmp_path, SPEC))
    assert [instance.progress for instance in reader.read().instances] == [None, None]
    run = tmp_path / "runs" / "two-0"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text("train:\n  until: [40it, 3ep]\n")
    with Recorder(run / "events.jsonl") as record:
        record.write(start_event())
        record.write(train(10, 4.0))
        first = reader.read().instances[0].progress
        assert first is not None
        assert (first.step, first.loss, first.operations) == (10, 4.0, 0)
        assert first.ends_at is not None
        assert first.ends_at >= time.time() - 1.0
        record.write(OperationEvent(step=10, name="widen_mlp", value=32))
        record.write(train(20, 3.0))
        second = reader.read().instances[0].progress
        assert second is not None
        assert (second.step, second.loss, second.operations) == (20, 3.0, 1)
        record.write(Stop(step=20, reason="SIGINT", resumable=True))
        last = reader.read().instances[0].progress
        assert last is not None
        assert last.ends_at is None


def test_trials_that_cannot_be_ranked_with_the_best_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space = {"eval.eval_iters": {"choices": [1, 2]}}
    spec = {**SPEC, "search": {"trials": 3, "space": space}, "run_name": "t${index}"}
    del spec["matrix"]
    folder = _folder(tmp_path, spec)
    with (folder / "state.jsonl").open("a") as file:
        for index, samples in enumerate(("4", "4", "8")):
            checkpoints = tmp_path / "runs" / f"t{index}" / "checkpoints"
            (checkpoints / "step-4").mkdir(parents=True)
            (checkpoints / "latest").write_text("step-4\n")
            basis = {"evaluated samples": samples, "vocabulary": "26"}
            (checkpoints / "step-4" / "state.json").write_text(json.dumps({"basis": basis}))
            events = (
                {"kind": "trial", "values": {"eval.eval_iters": 1}},
                {"kind": "evaluation", "step": 4, "value": 3.0 - index},
                {"kind": "instance", "phase": "succeeded"},
            )
            lines = (json.dumps({"time": 2.0, "instance": index, **event}) for event in events)
            file.writelines(f"{line}\n" for line in lines)
    view = FleetReader(folder).read(runs=False)
    assert view.best is not None
    assert view.best.instance == 2
    assert view.best_lines[1:] == (
        "held-out values of t0, t1 are not comparable with those of t2: evaluated samples 8 → 4",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"matrix": {str(key): list(range(1000)) for key in range(9)}},
        {"matrix": {"seed": list(range(2000))}, "run_name": "x" * 100_000},
        {"run_name": "${nothing}"},
        {"name": 3},
    ],
    ids=["combinations", "characters", "variable", "type"],
)
def test_a_file_that_cannot_be_expanded_leaves_what_was_recorded(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    view = FleetReader(_folder(tmp_path, SPEC | changes)).read()
    assert [instance.index for instance in view.instances] == [0]
    assert view.state == "launcher died"
