from pathlib import Path

import pytest

from instar.logs.query.tail import Follower
from instar.record.events import Event, Train, Warn, encode_event
from instar.record.recorder import Recorder


def line(step: int) -> bytes:
    return encode_event(Train(step=step, loss=1.0 / step), now=float(step), segment=1)


def steps(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Train)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_each_look_gives_what_was_added_since_the_last_one(path: Path) -> None:
    with Recorder(path) as recorder:
        follower = Follower(path)
        recorder.write(Train(step=1, loss=3.0))
        assert steps(follower.poll()) == [1]
        assert follower.poll() == []
        recorder.write(Train(step=2, loss=2.0))
        recorder.write(Train(step=3, loss=1.0))
        assert steps(follower.poll()) == [2, 3]
        assert follower.offset == recorder.size


def test_a_line_cut_anywhere_comes_once_it_is_whole(path: Path) -> None:
    text = line(1) + line(2)
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        follower = Follower(path)
        before = follower.poll()
        with path.open("ab") as file:
            file.write(text[cut:])
        assert steps(before + follower.poll()) == [1, 2]


def test_it_goes_on_from_a_given_place(path: Path) -> None:
    path.write_bytes(line(1) + line(2))
    assert steps(Follower(path, len(line(1))).poll()) == [2]


def test_what_is_no_event_is_passed_over(path: Path) -> None:
    path.write_bytes(line(1) + b'{"a":1}\n\n\x00\xff\n[\n' + line(2))
    assert steps(Follower(path).poll()) == [1, 2]


def test_a_record_that_is_not_there_yet_holds_nothing(path: Path) -> None:
    follower = Follower(path)
    assert follower.poll() == []
    path.write_bytes(line(1))
    assert steps(follower.poll()) == [1]
    assert follower.restarts == 0


def test_a_record_that_was_cut_or_replaced_is_read_anew(path: Path) -> None:
    path.write_bytes(line(1) + line(2))
    follower = Follower(path)
    follower.poll()
    path.write_bytes(line(7))
    assert steps(follower.poll()) == [7]
    other = path.with_name("other")
    other.write_bytes(line(8) + line(9))
    other.rename(path)
    assert steps(follower.poll()) == [8, 9]
    assert follower.restarts == 2


def test_a_torn_line_that_a_resume_cut_off_never_shows(path: Path) -> None:
    path.write_bytes(line(1) + line(2)[:-9])
    follower = Follower(path)
    assert steps(follower.poll()) == [1]
    with Recorder(path) as recorder:
        recorder.write(Train(step=2, loss=2.0))
    events = follower.poll()
    assert isinstance(events[0], Warn)
    assert steps(events) == [2]
    assert follower.restarts == 0
