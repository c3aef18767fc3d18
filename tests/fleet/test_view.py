"""What is shown of a fleet, from its events and the records of its runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from dashboards import started, train

from instar.fleet.plan import Instance
from instar.fleet.state import (
    Ended,
    FleetEvent,
    InstanceChanged,
    ProcessChanged,
    Started,
    fold,
)
from instar.fleet.view.reader import FleetReader
from instar.fleet.view.rows import FleetView, fleet_view, overview, to_json
from instar.fleet.view.table import table, title
from instar.logs.query.progress import RunProgress
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
    found = fold([*EVENTS, *more])
    return fleet_view("grpo", found, launcher, PLANNED, ("server",), progress)


def test_rows_show_each_instance_and_its_processes() -> None:
    view = _view(99)
    assert [each.state for each in view.instances] == ["running", "failed", "waiting"]
    assert [each.is_service for each in view.instances[0].processes] == [True, False]
    assert title(view) == "grpo: running (1 running, 1 failed, 1 waiting)"
    assert list(table(view, 40.0)) == [
        ("0", "seed0", "running", "1,200", "3.210", "1m00", "2", "1", ""),
        ("", "  server", "healthy", "", "", "", "", "", "GPU 3, http 8000, attempt 2"),
        ("", "  train", "running", "", "", "", "", "", ""),
        ("1", "seed1", "failed", "", "", "", "", "", "server is unhealthy"),
        ("2", "seed2", "waiting", "", "", "", "", "", ""),
    ]


def test_nothing_runs_without_a_launcher() -> None:
    view = _view(None)
    assert view.state == "launcher died"
    assert [each.state for each in view.instances] == ["stopped", "failed", "waiting"]
    assert [each.state for each in view.instances[0].processes] == ["ended", "ended"]
    assert view.instances[0].eta_s(40.0) is None
    assert _view(None, Ended(9.0, 75)).state == "stopped"
    assert _view(None, Ended(9.0, 4)).state == "failed"


def test_json_has_what_was_recorded_and_what_the_runs_have_reached() -> None:
    data = to_json(_view(99), fold(EVENTS), 40.0)
    json.dumps(data)
    assert list(data["instances"]) == ["0", "1", "2"]
    first = data["instances"]["0"]
    assert (first["phase"], first["step"], first["eta_s"]) == ("running", 1200, 60.0)
    assert first["processes"]["server"]["ports"] == {"http": 8000}
    assert data["instances"]["2"]["phase"] == "waiting"
    assert overview(_view(99)) == {
        "fleet": "grpo",
        "state": "running",
        "instances": 3,
        "succeeded": 0,
        "failed": 1,
        "launcher": 99,
    }


def _folder(path: Path, spec: dict[str, object]) -> Path:
    folder = path / "fleets" / "two"
    folder.mkdir(parents=True)
    kept = {"format": "instar-fleet/1", "spec": spec, "configs": {}, "gpus": None}
    (folder / "fleet.json").write_text(json.dumps(kept | {"cwd": str(path)}))
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
    assert [each.progress for each in reader.read().instances] == [None, None]
    run = tmp_path / "runs" / "two-0"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text("train:\n  until: [40it, 3ep]\n")
    with Recorder(run / "events.jsonl") as record:
        record.write(started())
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
    assert [each.index for each in view.instances] == [0]
    assert view.state == "launcher died"
