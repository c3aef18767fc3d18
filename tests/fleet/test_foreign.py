"""Folders of fleets that somebody else made: reading them neither runs, blocks nor reaches out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fleets import FleetPlace

from instar.config.errors import ConfigError
from instar.fleet import folder as folders
from instar.fleet.state import fold, read_events

KEPT = {
    "format": "instar-fleet/1",
    "spec": {"name": "theirs", "jobs": {"job": {"command": ["touch", "was-run"]}}},
    "configs": {},
    "gpus": None,
    "cwd": "/",
}


def _theirs(place: FleetPlace) -> Path:
    path = place.path / "fleets" / "theirs"
    (path / "logs" / "theirs-0").mkdir(parents=True)
    (path / "fleet.json").write_text(json.dumps(KEPT))
    lines = [
        '{"kind":"started","time":1.0,"pid":1,"host":"h","boot":"","instances":[0]}',
        '{"kind":"instance","time":1.0,"instance":0,"phase":"running","reason":"\\u001b[31mred"}',
        '{"kind":"instance","time":1.0,"instance":0,"phase":"dancing"}',
        "[" * 100_000,
        '{"kind":"process","time":1.0,"instance":0,"process":"job","phase":"running","attempt":1}',
        '{"kind":"inst',
    ]
    (path / "state.jsonl").write_text("\n".join(lines))
    return path


def test_a_foreign_state_is_read_as_far_as_it_makes_sense(place: FleetPlace) -> None:
    found = fold(read_events(_theirs(place)))
    assert found.instances[0].phase == "running"
    assert found.instances[0].processes["job"].attempt == 1
    code, output = place.run("status", "theirs")
    assert code == 0
    assert "launcher died" in output
    assert "\x1b" not in output
    assert not (place.path / "was-run").exists()


def test_logs_that_block_or_lead_elsewhere_are_refused(place: FleetPlace) -> None:
    logs = _theirs(place) / "logs" / "theirs-0"
    os.mkfifo(logs / "job.log")
    code, output = place.run("logs", "theirs")
    assert code in (2, 4)
    assert "not a regular file" in output
    (logs / "job.log").unlink()
    (logs / "job.log").symlink_to("/etc/hostname")
    code, output = place.run("logs", "theirs")
    assert code in (2, 4)
    assert "symbolic link" in output


def test_another_users_fleet_is_not_resumed(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _theirs(place)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(path / "fleet.json", 23456, -1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        folders.reopen(path)


def test_a_damaged_file_is_named(place: FleetPlace) -> None:
    path = _theirs(place)
    (path / "fleet.json").write_text('{"format": 1')
    code, output = place.run("resume", "theirs")
    assert code == 2
    assert "not a fleet that was started" in output
