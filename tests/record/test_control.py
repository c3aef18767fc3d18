import os
from pathlib import Path

import pytest

from instar.record.control import Inbox, send_request


def commands(inbox: Inbox) -> list[str]:
    return [request.command for request in inbox.requests()]


def test_a_request_is_there_until_it_is_answered(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    inbox = Inbox(folder)
    assert commands(inbox) == []
    request = send_request(folder, "save")
    assert commands(inbox) == ["save"]
    assert not request.is_answered()
    assert inbox.is_requested("save")
    inbox.answer("save")
    assert request.is_answered()
    assert commands(inbox) == []


def test_an_answer_is_to_requests_of_its_kind(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    stop = send_request(inbox.folder, "stop")
    saves = [send_request(inbox.folder, "save") for _ in range(2)]
    assert inbox.is_requested("save")
    assert inbox.is_requested("stop")
    inbox.answer("save")
    assert all(save.is_answered() for save in saves)
    assert not stop.is_answered()
    assert commands(inbox) == ["stop"]


def test_a_request_within_the_grain_of_the_disks_clock_is_seen(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    send_request(inbox.folder, "save")
    date = inbox.folder.stat().st_mtime_ns
    inbox.requests()
    send_request(inbox.folder, "stop")
    os.utime(inbox.folder, ns=(date, date))
    assert sorted(commands(inbox)) == ["save", "stop"]


def test_a_request_taken_back_is_not_seen(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    send_request(inbox.folder, "stop").withdraw()
    assert commands(inbox) == []


def test_other_files_are_nobodys_requests(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    send_request(inbox.folder, "save")
    for name in ("x.tmp", "rm -rf", ".save", "save"):
        (inbox.folder / name).touch()
    assert commands(inbox) == ["save"]


def test_an_answer_is_not_to_requests_that_came_after_it_was_begun(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    first = send_request(inbox.folder, "save")
    assert inbox.is_requested("save")
    second = send_request(inbox.folder, "save")
    inbox.answer("save")
    assert first.is_answered()
    assert not second.is_answered()
    assert inbox.is_requested("save")


def test_a_request_that_cannot_be_removed_is_answered_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(tmp_path / "control")
    (inbox.folder / "0.save").mkdir(parents=True)
    assert inbox.is_requested("save")
    inbox.answer("save")
    assert not inbox.is_requested("save")
    assert "cannot be removed" in caplog.text
    send_request(inbox.folder, "save")
    assert inbox.is_requested("save")


def test_requests_that_cannot_be_read_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "control").write_text("not a folder")
    inbox = Inbox(tmp_path / "control")
    assert not inbox.is_requested("save")
    assert not inbox.is_requested("stop")
    inbox.clear()
    assert caplog.text.count("requests cannot be read") == 1


def test_the_folder_of_requests_is_open_to_whom_the_runs_folder_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    before = os.umask(0o077)
    try:
        send_request(tmp_path / "control", "save")
    finally:
        os.umask(before)
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o770


def test_a_control_folder_that_is_a_link_holds_no_requests(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "game.save").touch()
    (tmp_path / "control").symlink_to(target)
    inbox = Inbox(tmp_path / "control")
    assert inbox.requests() == []
    inbox.clear()
    assert (target / "game.save").exists()


def test_no_request_is_put_into_what_a_control_folder_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir(0o700)
    (tmp_path / "control").symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic|directory"):
        send_request(tmp_path / "control", "stop")
    assert not [*target.iterdir()]
    assert target.stat().st_mode & 0o777 == 0o700
