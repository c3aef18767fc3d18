"""Which trackers and which ways of telling a config asks for, and what is missing for them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.sections import AlertsConfig, RecordConfig, TrackersConfig
from instar.record.trackers import TRACKERS
from instar.record.trackers import tracker as module
from instar.record.trackers.mlflow import store_uri
from instar.record.trackers.tracker import configured_trackers, missing_libraries


def record(**sections: Any) -> RecordConfig:
    return RecordConfig.model_validate(sections)


def test_nothing_is_mirrored_unless_asked_for() -> None:
    assert configured_trackers(TrackersConfig()) == []
    assert missing_libraries(RecordConfig()) == []


def test_empty_braces_choose_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("record:\n  trackers: {tensorboard: {}, wandb: {project: grow}, mlflow: {}}\n")
    trackers = load_config(str(path), ["record.trackers.trackio={}"]).config.record.trackers
    assert [tracker.name for tracker in configured_trackers(trackers)] == list(TRACKERS)
    assert trackers.wandb is not None
    assert (trackers.wandb.project, trackers.wandb.mode) == ("grow", "offline")


def test_trackers_are_written_into_a_config_and_read_back_equal(tmp_path: Path) -> None:
    loaded_config = load_config(None, ["record.trackers={wandb: {tags: [a, b]}, tensorboard: {}}"])
    path = tmp_path / "run.yaml"
    path.write_text(loaded_config.to_yaml())
    assert load_config(str(path)).config == loaded_config.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trackers: {wandbb: {}}", "did you mean 'wandb'?"),
        ("trackers: {wandb: true}", "record.trackers.wandb must be a section of keys or null"),
        ("trackers: {wandb: {mode: ofline}}", "did you mean 'offline'?"),
        ("trackers: {wandb: {projekt: a}}", "did you mean 'project'?"),
        (
            "alerts: {stall: 2}",
            "record.alerts.stall must be a number greater than 0 and less than 1",
        ),
        ("alerts: {comand: a}", "did you mean 'command'?"),
        ("alerts: {nan_skips: 0}", "a whole number greater than 0 or null"),
    ],
)
def test_mistakes_are_told_with_what_was_meant(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"record:\n  {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert message in str(caught.value)
    assert f"{path}:2:" in str(caught.value)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = util.find_spec
    monkeypatch.setattr(
        module, "find_spec", lambda package: None if package == name else find(package)
    )
    (clash,) = missing_libraries(record(trackers={name: {} for name in TRACKERS}))
    assert clash.keys == (f"record.trackers.{name}",)
    assert "not installed" in clash.message
    assert f"pip install 'instar[{name}]'" in clash.hint


def test_a_database_without_its_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda p: None if p == "sqlalchemy" else find(p))
    (clash,) = missing_libraries(record(trackers={"mlflow": {"uri": "sqlite:///mlflow.db"}}))
    assert "sqlalchemy" in clash.message
    assert missing_libraries(record(trackers={"mlflow": {"uri": "mlruns"}})) == []


@pytest.mark.parametrize(
    ("alerts", "message"),
    [
        ({"command": "no-such-program --now"}, "there is no program 'no-such-program' here"),
        ({"command": ["no-such-program"]}, "there is no program"),
        ({"command": "echo 'a"}, "no closing quotation"),
    ],
)
def test_nobody_to_be_told_is_a_mistake(alerts: dict[str, Any], message: str) -> None:
    (clash,) = missing_libraries(record(alerts=alerts))
    assert message in clash.message
    assert clash.keys[0].startswith("record.alerts.")


def test_a_command_may_be_a_line_or_a_list() -> None:
    assert AlertsConfig(command="sh -c 'echo a b'").argv == ("sh", "-c", "echo a b")
    assert AlertsConfig(command=("sh", "-c", "echo a b")).argv == ("sh", "-c", "echo a b")
    assert AlertsConfig().argv == ()
    good = {"command": [sys.executable], "webhook": "http://127.0.0.1:8080/a"}
    assert missing_libraries(record(alerts=good)) == []


def test_no_tool_is_imported_before_it_starts() -> None:
    code = (
        "import json, sys; from instar.record.trackers.tracker import *;"
        "from instar.config.sections import RecordConfig;"
        "config = RecordConfig.model_validate({'trackers': {name: {} for name in TRACKERS}});"
        "configured_trackers(config.trackers), missing_libraries(config);"
        "print(json.dumps([name for name in [*TRACKERS, 'torch', 'numpy'] if name in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert json.loads(result.stdout) == []


def test_mlflow_s_store_is_a_folder_beside_the_run_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "demo-ab3cd"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri(None, run) == (tmp_path / "runs" / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert store_uri(None, run) == "http://127.0.0.1:5000"
    assert store_uri(str(tmp_path / "a"), run) == (tmp_path / "a").as_uri()
