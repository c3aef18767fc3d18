"""Trackers that hang, fail or never end, beside a training that must not notice."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import redacted_error
from instar.record.events import (
    Asked,
    Event,
    Placed,
    RecordError,
    RunFinished,
    RunStarted,
    Skip,
    Stop,
    Train,
    Warn,
    read_events,
)
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.record.trackers.sink import TrackerSink
from instar.record.trackers.tracker import (
    Ids,
    Note,
    Outcome,
    TrackedRun,
    event_note,
    flat_config,
    outcome,
)

START = RunStarted(run_id="ab3cd")
WAIT_S = 10.0


class Faithful:
    """Takes what comes."""

    where = "here"
    secrets: tuple[str, ...] = ("https://me:SECRET@host.org/a/PATH?key=QUERY",)

    def __init__(self, name: str = "faithful") -> None:
        self.name = name
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        self.run: TrackedRun | None = None

    def start(self, run: TrackedRun) -> None:
        self.run = run

    def take(self, event: Event) -> None:
        self.events.append(event)

    def flush(self) -> None: ...

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Broken(Faithful):
    """Raises at one place, and what it raises may be meant to end a process."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__("broken")
        self.at, self.error = at, error

    def _do(self, at: str) -> None:
        if at == self.at:
            raise self.error

    def start(self, run: TrackedRun) -> None:
        self._do("start")
        super().start(run)

    def take(self, event: Event) -> None:
        if isinstance(event, Placed) and event.step == 5:
            self._do("take")
        super().take(event)

    def flush(self) -> None:
        self._do("flush")

    def finish(self, outcome: Outcome) -> None:
        self._do("finish")
        super().finish(outcome)


class Hanging(Faithful):
    """Waits at one place until it is let go."""

    def __init__(self, at: str) -> None:
        super().__init__("hanging")
        self.at = at
        self.go = threading.Event()
        self.ended = threading.Event()

    def start(self, run: TrackedRun) -> None:
        if self.at == "start":
            self.go.wait(WAIT_S)
        super().start(run)

    def take(self, event: Event) -> None:
        if self.at == "take":
            self.go.wait(WAIT_S)
        super().take(event)

    def finish(self, outcome: Outcome) -> None:
        if self.at == "finish":
            self.go.wait(WAIT_S)
        super().finish(outcome)
        self.ended.set()


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun.live(tmp_path, {"model": {"n_layer": 2}})


@pytest.fixture
def hanging(request: pytest.FixtureRequest) -> Iterator[Hanging]:
    tracker = Hanging(request.param)
    yield tracker
    tracker.go.set()


def train(sink: TrackerSink, steps: int) -> None:
    sink.write(START)
    for step in range(1, steps + 1):
        sink.write(Train(step=step, loss=1.0 / step))
    sink.write(Stop(step=steps, reason="done"))
    sink.write(RunFinished(step=steps))


def steps_of(events: Iterator[Event] | list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Train)]


def test_every_event_is_recorded_and_reaches_every_tracker_in_order(
    run: TrackedRun, tmp_path: Path
) -> None:
    trackers = [Faithful("one"), Faithful("two")]
    sink = TrackerSink(Recorder(tmp_path / "e"), trackers, run, pytest.fail)
    train(sink, 500)
    sink.sync()
    sink.close()
    events = list(read_events(tmp_path / "e"))
    assert steps_of(events) == list(range(1, 501))
    for tracker in trackers:
        assert [type(event) for event in tracker.events] == [type(event) for event in events]
        assert steps_of(tracker.events) == list(range(1, 501))
        assert tracker.outcome == "finished"
        assert tracker.run is run
        assert all(
            abs(copy.time - original.time) < 1.0
            for copy, original in zip(tracker.events, events, strict=True)
        )


@pytest.mark.parametrize(
    "error", [ValueError("no\n such thing"), SystemExit(3)], ids=["error", "exit"]
)
@pytest.mark.parametrize("at", ["start", "take", "finish"])
def test_a_tracker_that_fails_is_told_once_and_harms_nobody(
    run: TrackedRun, tmp_path: Path, at: str, error: BaseException
) -> None:
    messages: list[str] = []
    broken, other = Broken(at, error), Faithful()
    sink = TrackerSink(Recorder(tmp_path / "e"), [broken, other], run, messages.append)
    train(sink, 50)
    sink.close()
    events = list(read_events(tmp_path / "e"))
    assert steps_of(events) == steps_of(other.events) == list(range(1, 51))
    (message,) = messages
    assert [event.message for event in events if isinstance(event, Warn)] == [message]
    assert message.startswith("broken failed at ")
    assert type(error).__name__ in message
    assert f"instar logs export {run.folder} --to broken" in message
    assert "\n" not in message
    if at == "take":
        assert steps_of(broken.events) == [step for step in range(1, 51) if step != 5]


@pytest.mark.parametrize("hanging", ["start", "take", "finish"], indirect=True)
def test_a_tracker_that_hangs_holds_up_neither_training_nor_its_end(
    run: TrackedRun, tmp_path: Path, hanging: Hanging
) -> None:
    messages: list[str] = []
    other = Faithful()
    sink = TrackerSink(
        Recorder(tmp_path / "e"),
        [hanging, other],
        run,
        messages.append,
        queue_events=20,
        close_wait_s=0.2,
        end_wait_s=0.4,
    )
    began = time.monotonic()
    train(sink, 15)
    sink.close()
    assert time.monotonic() - began < 0.4 + 2.0
    assert steps_of(list(read_events(tmp_path / "e"))) == list(range(1, 16))
    assert steps_of(other.events) == list(range(1, 16))
    waiting, message = messages
    assert waiting.endswith("of 18 events; waiting for at most 0 s")
    assert message.startswith("hanging was too slow for this run: it lacks ")
    assert "has not ended yet" in message
    hanging.go.set()
    assert hanging.ended.wait(WAIT_S)


@pytest.mark.parametrize("hanging", ["start"], indirect=True)
def test_a_tracker_that_starts_after_a_short_run_has_ended_loses_nothing(
    run: TrackedRun, tmp_path: Path, hanging: Hanging
) -> None:
    """As wandb on a busy machine, whose service takes long to start."""

    def warn(message: str) -> None:
        assert message == "hanging has taken 0 of 44 events; waiting for at most 45 s"
        hanging.go.set()

    sink = TrackerSink(Recorder(tmp_path / "e"), [hanging], run, warn, close_wait_s=0.1)
    train(sink, 41)
    sink.close()
    assert hanging.go.is_set()
    assert steps_of(hanging.events) == list(range(1, 42))
    assert hanging.outcome == "finished"


@pytest.mark.parametrize("hanging", ["start"], indirect=True)
def test_a_run_that_is_to_stop_waits_no_longer_for_a_tracker(
    run: TrackedRun, tmp_path: Path, hanging: Hanging
) -> None:
    messages: list[str] = []
    sink = TrackerSink(Recorder(tmp_path / "e"), [hanging], run, messages.append, close_wait_s=0.1)
    sink.write(START)
    sink.write(Stop(step=1, reason="SIGTERM", resumable=True))
    began = time.monotonic()
    sink.close()
    assert time.monotonic() - began < 5.0
    assert len(messages) == 1


@pytest.mark.parametrize("hanging", ["take"], indirect=True)
def test_a_full_queue_leaves_out_and_counts(
    run: TrackedRun, tmp_path: Path, hanging: Hanging
) -> None:
    messages: list[str] = []
    sink = TrackerSink(
        Recorder(tmp_path / "e"),
        [hanging],
        run,
        messages.append,
        queue_events=10,
        close_wait_s=WAIT_S,
    )
    train(sink, 100)
    threading.Timer(0.1, hanging.go.set).start()
    sink.close()
    lacking = 103 - len(hanging.events)
    assert 10 <= len(hanging.events) <= 12
    assert messages == [
        f"hanging was too slow for this run: it lacks {lacking} of 103 events; afterwards: "
        f"instar logs export {run.folder} --to hanging"
    ]


def test_what_cannot_be_recorded_is_not_mirrored(run: TrackedRun) -> None:
    class Full:
        def write(self, event: Event) -> None:
            raise RecordError(f"no space left for {event}")

        def sync(self) -> None: ...
        def close(self) -> None: ...

    tracker = Faithful()
    sink = TrackerSink(Full(), [tracker], run, pytest.fail)
    with pytest.raises(RecordError):
        sink.write(START)
    sink.close()
    assert tracker.events == []


def test_a_run_of_which_nothing_was_written_is_no_tracker_s(
    run: TrackedRun, tmp_path: Path
) -> None:
    tracker = Faithful()
    TrackerSink(Recorder(tmp_path / "e"), [tracker], run, pytest.fail).close()
    assert tracker.run is None


def test_a_write_costs_little_more_with_four_trackers(run: TrackedRun) -> None:
    class Nowhere:
        def write(self, event: Event) -> None: ...
        def sync(self) -> None: ...
        def close(self) -> None: ...

    sink = TrackerSink(Nowhere(), [Faithful(str(n)) for n in range(4)], run, pytest.fail)
    event = Train(step=1, loss=1.0, lr=1e-3, tokens_per_s=1e5)
    sink.write(START)
    durations = []
    for _ in range(2000):
        began = time.perf_counter()
        sink.write(event)
        durations.append(time.perf_counter() - began)
    sink.close()
    assert statistics.median(durations) < 80e-6  # 4 × 20 µs


@given(st.lists(st.sampled_from(["start", "stop", "interrupt", "finish", "skip"]), max_size=8))
def test_a_run_has_ended_well_only_if_it_said_so_since_it_last_started(names: list[str]) -> None:
    events: dict[str, Event] = {
        "start": START,
        "stop": Stop(step=1, reason="2000it"),
        "interrupt": Stop(step=1, reason="SIGTERM", resumable=True),
        "finish": RunFinished(step=1),
        "skip": Skip(step=1),
    }
    actual: Outcome = "finished"
    for name in names:
        actual = outcome(actual, events[name])
    last = names[len(names) - names[::-1].index("start") :] if "start" in names else names
    expected = "finished" if "start" not in names or {"stop", "finish"} & set(last) else "crashed"
    assert actual == ("stopped" if "interrupt" in last else expected)


def test_ids_are_kept_in_the_run_s_folder_for_the_place_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "trackers.json"
    Ids(path).keep("wandb", "me/instar", "x1")
    Ids(path).keep("mlflow", "file:///a", "y1")
    assert Ids(path).get("wandb", "me/instar") == "x1"
    assert Ids(path).get("wandb", "me/other") is None
    assert Ids(path).get("mlflow", "file:///a") == "y1"
    path.write_text("{torn")
    assert Ids(path).get("wandb", "me/instar") is None
    Ids(None).keep("wandb", "me/instar", "x2")
    assert Ids(None).get("wandb", "me/instar") is None


def test_a_note_says_who_asked_for_what() -> None:
    request = Asked(step=7, id="3f", by="ann", outcome="refused", operation="freeze", reason="none")
    text = "7 ann asked for freeze: refused: none (3f)"
    assert event_note(request) == Note("asked", 7, "freeze", text)


def test_a_config_is_flat_and_says_nothing_of_folders_and_addresses() -> None:
    config = {
        "name": "demo",
        "preset": [],
        "train": {"until": ["9it"], "clip": 1.0},
        "record": {"alerts": {"webhook": "https://example.org/secret"}},
    }
    assert flat_config(config) == {
        "name": "demo",
        "preset": "[]",
        "train.until": '["9it"]',
        "train.clip": 1.0,
    }


@pytest.mark.parametrize(
    "message",
    [
        "no answer from https://me:SECRET@host.org/a/PATH?key=QUERY",
        "nonnumeric port: 'SECRET@host.org'",
        "can't send '/a/PATH'",
        "HTTPConnectionPool(host='host.org', port=80): Max retries exceeded with url: /a/PATH?key=QUERY",
        "bad key ENVSECRET",
        "see ftp://you:SECRET@other.org/x",
    ],
)
def test_what_a_tracker_says_is_recorded_without_secrets(
    tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "ENVSECRET")
    warnings: list[str] = []
    run = RunDir(tmp_path)
    with closing(Recorder(run.events)) as recorder:
        tracker = Broken("start", RuntimeError(message))
        sink = TrackerSink(recorder, [tracker], TrackedRun.live(tmp_path, {}), warnings.append)
        sink.write(START)
        sink.close()
    text = run.events.read_text() + "".join(warnings)
    assert "broken failed at starting" in text
    for secret in ("SECRET", "PATH", "QUERY"):
        assert secret not in text


def test_a_text_in_which_a_secret_cannot_be_told_from_words_is_not_shown() -> None:
    text = redacted_error(RuntimeError("cannot reach a"), ["https://u:a@host/"], {})
    assert text == "its text is not shown, since it may hold a secret"
