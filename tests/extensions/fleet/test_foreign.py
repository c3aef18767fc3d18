"""Folders of fleets that somebody else made: reading them neither runs, blocks nor reaches out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from fleets import FleetPlace

from instar.config.errors import ConfigError
from instar.extensions.fleet import folder as folders
from instar.extensions.fleet.folder import FolderLock, launcher_pid, seen_launcher
from instar.extensions.fleet.state import (
    FOLDERS,
    Started,
    StateLog,
    boot_id,
    fold_events,
    read_fleet_events,
    read_result,
    result_path,
)
from instar.processes.identity import ProcessName

KEPT = {
    "format": "instar-fleet/1",
    "spec": {"name": "theirs", "jobs": {"job": {"command": ["touch", "was-run"]}}},
    "configs": {},
    "gpus": None,
    "cwd": "/",
}


def _foreign_fleet(place: FleetPlace) -> Path:
    path = place.path / "fleets" / "theirs"
    (path / "logs" / "theirs-0").mkdir(parents=True)
    (path / "fleet.json").write_text(json.dumps(KEPT))
    lines = [
        '{"kind":"started","time":1.0,"pid":1,"host":"h","boot":"","instances":[0]}',
        '{"kind":"instance","time":1.0,"instance":0,"phase":"running","reason":"\\u001b[31mred \\u202eabc"}',
        '{"kind":"instance","time":1.0,"instance":0,"phase":"dancing"}',
        "[" * 100_000,
        '{"kind":"ended","time":2.0,"code":0,"other":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"kind":"ended","time":2.0,"code":0,"other":' + "[" * 201 + "]" * 201 + "}",
        '{"kind":"process","time":1.0,"instance":0,"process":"job","phase":"running","attempt":1}',
        '{"kind":"inst',
    ]
    (path / "state.jsonl").write_text("\n".join(lines))
    return path


def test_a_foreign_state_is_read_as_far_as_it_makes_sense(place: FleetPlace) -> None:
    status = fold_events(read_fleet_events(_foreign_fleet(place)))
    assert status.instances[0].phase == "running"
    assert status.instances[0].processes["job"].attempt == 1
    code, output = place.run("status", "theirs")
    assert code == 0
    assert "launcher died" in output
    assert "\x1b" not in output
    assert not (place.path / "was-run").exists()
    code, output = place.run("status", "theirs", "--json")
    assert json.loads(output)["instances"]["0"]["reason"] == "\x1b[31mred \u202eabc"
    assert not {"\x1b", "\u202e"} & {*output}


def test_logs_that_block_or_lead_elsewhere_are_refused(place: FleetPlace) -> None:
    logs = _foreign_fleet(place) / "logs" / "theirs-0"
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
    path = _foreign_fleet(place)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(path / "fleet.json", 23456, -1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        folders.reopen_fleet(path)


def test_another_users_fleet_file_is_not_run_unasked(place: FleetPlace) -> None:
    path = place.write("name: f\njobs: {job: {command: [touch, was-run]}}\n")
    os.chown(path, 23456, -1)
    code, output = place.run("up", "fleet.yaml")
    assert code == 2
    assert "it belongs to another user, user 23456" in output
    assert not (place.path / "fleets").exists()
    assert place.run("plan", "fleet.yaml")[0] == 0
    assert place.run("up", "fleet.yaml", "--trust-code")[0] == 0
    assert (place.path / "was-run").exists()


def test_a_damaged_file_is_named(place: FleetPlace) -> None:
    path = _foreign_fleet(place)
    (path / "fleet.json").write_text('{"format": 1')
    code, output = place.run("resume", "theirs")
    assert code == 2
    assert "not a fleet that was started" in output


def test_down_signals_no_process_but_the_launcher(place: FleetPlace) -> None:
    path = _foreign_fleet(place)
    code = "import signal; signal.signal(2, signal.SIG_DFL); signal.pause()"
    victim = subprocess.Popen([sys.executable, "-c", code])
    try:
        with closing(FolderLock(path, 0.0)):
            start_time = psutil.Process(victim.pid).create_time()
            for text in (
                str(victim.pid),
                str(ProcessName(victim.pid, start_time, platform.node())),
            ):
                (path / "lock").write_text(text)
                code, output = place.run("down", "theirs", "--kill")
                assert code == 2
                assert "its launcher is not known" in output
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_who_may_only_read_a_fleet_cannot_open_its_locks(tmp_path: Path) -> None:
    for name in ("lock", "trees"):
        (tmp_path / name).touch(0o644)
    with closing(FolderLock(tmp_path, 0.0)):
        for name in ("lock", "trees"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_without_locks_a_fleet_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"file system has no locks .*another file system"):
        FolderLock(tmp_path, 0.0)
    assert launcher_pid(tmp_path) is None


def test_a_launcher_whose_lock_may_not_be_read_is_found_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    start_event = Started(time.time(), os.getpid(), socket.gethostname(), boot_id(), ())
    changes: list[tuple[dict[str, object], int | None]] = [
        ({}, os.getpid()),
        ({"boot": "earlier"}, None),
        ({"time": 1.0}, None),
        ({"pid": -1}, None),
        ({"host": "elsewhere"}, 0),
    ]
    for change, launcher in changes:
        with closing(StateLog(tmp_path)) as log:
            log.write(msgspec.structs.replace(start_event, **change))
        assert seen_launcher(tmp_path) == launcher, change
    os.utime(tmp_path / "state.jsonl", (1.0, 1.0))
    assert seen_launcher(tmp_path) is None


@pytest.mark.parametrize("name", FOLDERS)
def test_a_fleet_whose_folder_is_a_link_is_not_run(
    place: FleetPlace, tmp_path: Path, name: str
) -> None:
    path = _foreign_fleet(place)
    link_target = tmp_path / "mine"
    link_target.mkdir()
    if name == "logs":
        shutil.rmtree(path / "logs")
    (path / name).symlink_to(link_target)
    with pytest.raises(ConfigError, match=f"{name}: a symbolic link"):
        FolderLock(path, 0.0)
    assert not [*link_target.iterdir()]


def test_nothing_is_asked_where_a_link_leads(place: FleetPlace, tmp_path: Path) -> None:
    path = _foreign_fleet(place)
    with closing(FolderLock(path, 0.0)):
        (path / "control").symlink_to(tmp_path)
        code, output = place.run("stop", "theirs", "0")
        assert code == 2
        assert "cannot ask" in output
        assert not (tmp_path / "0.stop").exists()


def test_jobs_that_another_users_fleet_names_are_not_cancelled(
    place: FleetPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _foreign_fleet(place)
    (path / "slurm").mkdir()
    jobs = path / "slurm" / "jobs.jsonl"
    jobs.write_text('{"job": "1", "instances": [0]}')
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folders.check_own(path)  # all are root's
    for fleet_path in (path, path / "fleet.json", jobs.parent, jobs):
        os.chown(fleet_path, 23456, -1)
        with pytest.raises(ConfigError, match="another user, user 23456"):
            folders.check_own(path)
        os.chown(fleet_path, 0, -1)


@pytest.mark.parametrize("content", ["[" * 2_000_000, '{"format": ' + "[" * 300 + "]" * 300 + "}"])
def test_files_of_a_fleet_that_are_nested_too_deep_are_refused(
    place: FleetPlace, content: str
) -> None:
    path = _foreign_fleet(place)
    (path / "fleet.json").write_text(content)
    with pytest.raises(ConfigError, match="nested more than 200 levels deep"):
        folders.reopen_fleet(path)
    (path / "results" / "theirs-0").mkdir(parents=True)
    result = result_path(path, "theirs-0", "job", 1)
    result.write_text(content)
    assert read_result(result) is None
