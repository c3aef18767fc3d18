import os
from pathlib import Path

from instar.record.control import Inbox, ask


def commands(inbox: Inbox) -> list[str]:
    return [request.command for request in inbox.requests()]


def test_a_request_is_there_until_it_is_answered(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    inbox = Inbox(folder)
    assert commands(inbox) == []
    request = ask(folder, "save")
    assert commands(inbox) == ["save"]
    assert not request.answered()
    inbox.answer("save")
    assert request.answered()
    assert commands(inbox) == []


def test_an_answer_is_to_requests_of_its_kind(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    stop = ask(inbox.folder, "stop")
    saves = [ask(inbox.folder, "save") for _ in range(2)]
    inbox.answer("save")
    assert all(save.answered() for save in saves)
    assert not stop.answered()
    assert commands(inbox) == ["stop"]


def test_a_request_within_the_grain_of_the_disks_clock_is_seen(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    ask(inbox.folder, "save")
    date = inbox.folder.stat().st_mtime_ns
    inbox.requests()
    ask(inbox.folder, "stop")
    os.utime(inbox.folder, ns=(date, date))
    assert sorted(commands(inbox)) == ["save", "stop"]


def test_a_request_taken_back_is_not_seen(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    ask(inbox.folder, "stop").withdraw()
    assert commands(inbox) == []


def test_other_files_are_nobodys_requests(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "control")
    ask(inbox.folder, "save")
    for name in ("x.tmp", "rm -rf", ".save", "save"):
        (inbox.folder / name).touch()
    assert commands(inbox) == ["save"]
