"""Reading what stands in a record: sound, superseded, damaged."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import lines, make_run

from instar.config.errors import ConfigError
from instar.logs.read.record import RunRecord, read_record
from instar.logs.read.segments import SegmentTree
from instar.record.events import (
    Eval,
    Event,
    Layers,
    OperationEvent,
    RecordError,
    RunStarted,
    Saved,
    Stop,
    Train,
    Unrecognised,
    Warn,
    encode_event,
    read_events,
)
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir


def line(event: Event, segment: int = 1) -> bytes:
    return encode_event(event, now=1.5, segment=segment)


def train(step: int, loss: float = 1.0) -> bytes:
    return line(Train(step=step, loss=loss))


def reading(folder: Path, *parts: bytes) -> RunRecord:
    run = RunDir(folder)
    run.events.write_bytes(b"".join(parts))
    return read_record(run)


def steps(record: RunRecord, metric: str = "loss") -> list[int]:
    return record.series(metric).step.tolist()


def test_made_lines_have_the_form_that_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", 40, rewinds=1)
    events = list(read_events(run.events))
    content = b"".join(encode_event(event, event.time, event.segment) for event in events)
    assert content == run.events.read_bytes()


def test_every_metric_is_a_column_with_its_axes(tmp_path: Path) -> None:
    place = {"step": 10, "samples": 20, "tokens": 30, "epoch": 0.5, "flops": 1e9, "wall_s": 2.0}
    with Recorder(tmp_path / "events.jsonl", clock=lambda: 99.0) as recorder:
        recorder.write(RunStarted(run_id="r"))
        recorder.write(Train(loss=3.0, lr=0.1, extra={"scale": 8.0}, **place))
        recorder.write(Train(step=11, loss=2.0, extra={"other": 1.0}))
        recorder.write(Eval(step=11, split="val", loss=2.5, standard_error=0.1, extra={"acc": 0.7}))
        recorder.write(Layers(step=11, grad_norm={"head": 1.0}, update_ratio={"head": 1e-3}))
        recorder.write(Stop(step=11, reason="done"))
    record = read_record(RunDir(tmp_path))
    assert record.metrics == (
        *("loss", "lr", "scale", "other"),
        *("val/loss", "val/loss:error", "val/acc", "grad_norm/head", "update_ratio/head"),
    )
    series = record.series("scale")
    assert (series.value.tolist(), series.step.tolist(), series.samples.tolist()) == (
        [8],
        [10],
        [20],
    )
    assert [series.axis(axis)[0] for axis in ("tokens", "epoch", "flops", "wall_s")] == [
        30,
        0.5,
        1e9,
        2,
    ]
    assert series.time.tolist() == [99.0]
    assert record.series("loss").value.tolist() == [3, 2]
    assert record.series("other").step.tolist() == [11]
    assert record.series("val/acc").value.tolist() == [0.7]
    assert [type(entry.event) for entry in record.events] == [RunStarted, Stop]
    assert record.end == (tmp_path / "events.jsonl").stat().st_size


def test_a_metric_that_is_not_there_is_named_with_what_was_meant(tmp_path: Path) -> None:
    record = reading(tmp_path, train(1))
    assert "val" not in record
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        record.series("los")


def test_values_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 1.0]
    record = reading(tmp_path, *(train(step, value) for step, value in enumerate(values)))
    assert np.array_equal(record.series("loss").value, values, equal_nan=True)


def test_a_torn_last_line_is_passed_over_in_silence(tmp_path: Path) -> None:
    text = train(1) + train(2)
    for cut in range(len(train(1)), len(text)):
        record = reading(tmp_path, text[:cut])
        assert steps(record) == [1]
        assert record.faults == ()
        assert record.end == len(train(1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (train(5)[:40] + b"\n", "not a whole line of JSON"),
        (train(5)[:40] + train(6), "not a whole line of JSON"),
        (b"\0" * 30 + b"\n", "30 NUL bytes"),
        (b'{"v":1,"kind":"\xff\xfe"}\n', "UTF-8"),
        (b'{"loss":3.0,"step":5}\n', "JSON, but not an event"),
        (b"[1,2]\n", "JSON, but not an event"),
        (b"Traceback (most recent call last):\n", "not a whole line of JSON"),
        (b'{"v":2,"kind":"train","step":5,"loss":1.0}\n', "newer Instar: version 2"),
        (b'{"v":1,"kind":"train","step":"five","loss":1.0}\n', "step"),
        (b'{"v":1,"kind":"train","step":99999999999999999999,"loss":1.0}\n', "step"),
        (b'{"v":1,"kind":"train","step":-5,"loss":1.0}\n', "step"),
        (b'{"v":1,"kind":"train","step":5,"loss":1.0,"wall_s":"NaN"}\n', "wall_s"),
        (b'{"v":1,"kind":"train","step":5,"loss":1.0,"time":1e300}\n', "time"),
        (b'{"v":1,"kind":"train","step":5,"loss":1e999}\n', "out of range"),
        (b'{"v":1,"kind":"checkpoint","step":5,"path":"x","size_bytes":1%s}\n' % (b"0" * 5000), "range"),
        (b'{"v":1,"kind":"operation","step":5,"name":"x","value":%s}\n' % (b"[" * 5000), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_line_that_is_no_event_is_passed_over_and_told_of(
    bad: bytes, message: str, tmp_path: Path
) -> None:
    record = reading(tmp_path, train(1), bad, train(9))
    assert steps(record) == [1, 9]
    (fault,) = record.faults
    assert fault.startswith(f"{tmp_path / 'events.jsonl'}:2: ")
    assert message in fault


def test_two_events_in_one_line_are_a_fault_whatever_follows(tmp_path: Path) -> None:
    two_events = line(Warn(message="a"))[:-1] + line(Warn(message="b"))
    record = reading(tmp_path, train(1), two_events, b"\n", line(Warn(message="c")), train(2))
    assert steps(record) == [1, 2]
    assert [getattr(entry.event, "message", "") for entry in record.events] == ["c"]
    assert len(record.faults) == 1


def test_of_many_such_lines_the_first_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    record = reading(tmp_path, train(1), b"x\n" * 1000, train(9))
    assert [":2: " in record.faults[0], ":6: " in record.faults[4]] == [True, True]
    assert record.faults[5:] == (f"{tmp_path / 'events.jsonl'}: 995 more lines like these",)


def test_what_a_newer_instar_adds_is_kept_or_ignored(tmp_path: Path) -> None:
    mutation = b'{"v":1,"kind":"mutation","time":3.0,"segment":1,"gene":"NaN"}\n'
    field = b'{"v":1,"kind":"train","step":2,"loss":1.0,"mood":"good"}\n'
    record = reading(tmp_path, train(1), mutation, b"\n  \r\n", field)
    assert steps(record) == [1, 2]
    assert record.faults == ()
    (entry,) = record.events
    assert isinstance(entry.event, Unrecognised)
    assert (entry.event.name, entry.event.time) == ("mutation", 3.0)


@pytest.mark.parametrize("content", [b"", b"{", train(1)[:60], train(1)[:-1]])
def test_a_record_without_anything_is_empty(content: bytes, tmp_path: Path) -> None:
    record = reading(tmp_path, content)
    assert (record.metrics, record.events, record.faults) == ((), (), ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 5000, "NUL bytes"),
        (b"\n\n", "blank lines"),
        (
            b'{"step":1,"train_loss":2.0}\n{"step":2,"train_loss":1.0}\n',
            "with keys step, train_loss",
        ),
        (b"step,loss\n1,2.0\n", "text"),
        (b"\x1f\x8b\x08\x00", "compressed"),
        (b"PK\x03\x04\x00\x00", "a binary file"),
        (b"\xff\xfe\xfd\n", "a binary file"),
        (b'{"v":2,"kind":"train","step":1}\n', "newer Instar: version 2, this one reads 1"),
        (b'{"epochs": [1,\n2]}', "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_without_any_event_is_refused_with_what_it_looks_like(
    content: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match="is not the record of a run") as error:
        reading(tmp_path, content)
    assert message in str(error.value)


def test_a_record_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        read_record(RunDir(tmp_path))
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(RecordError, match="directory"):
        read_record(RunDir(tmp_path))


def test_clocks_that_jump_back_change_nothing(tmp_path: Path) -> None:
    parts = [encode_event(Train(step=s, loss=1.0), now=100.0 - s, segment=1) for s in range(5)]
    assert steps(reading(tmp_path, *parts)) == [0, 1, 2, 3, 4]


def test_a_line_of_any_length_is_passed_over(tmp_path: Path) -> None:
    record = reading(tmp_path, train(1), b"x" * (70 << 20), b"\n", train(2))
    assert steps(record) == [1, 2]
    assert len(record.faults) == 1
    assert record.end == (tmp_path / "events.jsonl").stat().st_size


def start(segment: int, step: int, resumed_from: str | None = None) -> bytes:
    return line(RunStarted(run_id="r", step=step, resumed_from=resumed_from), segment)


def segment_of(number: int, first: int, last: int) -> bytes:
    return b"".join(line(Train(step=s, loss=float(number)), number) for s in range(first, last + 1))


def test_what_a_later_segment_superseded_is_masked_and_can_be_had(tmp_path: Path) -> None:
    record = reading(
        tmp_path, start(1, 0), segment_of(1, 1, 80), start(2, 50), segment_of(2, 51, 120),
        start(3, 75), line(OperationEvent(step=75, name="x"), 2), segment_of(3, 76, 100),
    )  # fmt: skip
    series = record.series("loss")
    assert series.current().step.tolist() == list(range(1, 101))
    assert series.current().value.tolist() == [1.0] * 50 + [2.0] * 25 + [3.0] * 25
    old_series = series.take(~series.is_current)
    assert old_series.step.tolist() == [*range(51, 81), *range(76, 121)]


def test_a_run_descends_from_the_segment_that_saved_its_checkpoint(tmp_path: Path) -> None:
    def saved_line(segment: int, step: int, name: str) -> bytes:
        return line(Saved(step=step, path=f"/runs/r/checkpoints/{name}"), segment)

    parts = [
        *(
            start(1, 0),
            segment_of(1, 1, 80),
            saved_line(1, 50, "step-50"),
            saved_line(1, 75, "step-75"),
        ),
        *(start(2, 50, "step-50"), segment_of(2, 51, 120), saved_line(2, 75, "step-75.1")),
    ]
    first = reading(tmp_path, *parts, start(3, 75, "step-75"), segment_of(3, 76, 90))
    assert first.series("loss").current().value.tolist() == [1.0] * 75 + [3.0] * 15
    second = reading(tmp_path, *parts, start(3, 75, "step-75.1"), segment_of(3, 76, 90))
    assert second.series("loss").current().value.tolist() == [1.0] * 50 + [2.0] * 25 + [3.0] * 15
    assert [entry.is_current for entry in second.of(Saved)] == [True, False, True]


def test_a_segment_whose_beginning_was_lost_still_supersedes(tmp_path: Path) -> None:
    torn_line = start(2, 50)[:30] + b"\n"
    record = reading(tmp_path, start(1, 0), segment_of(1, 1, 80), torn_line, segment_of(2, 51, 90))
    assert record.series("loss").current().step.tolist() == list(range(1, 91))


def test_a_record_without_any_start_is_read(tmp_path: Path) -> None:
    assert reading(tmp_path, train(1), train(2)).series("loss").is_current.all()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int | None, int]]:
    """Segments: the step from which one goes on, which one's checkpoint that is (None: not
    said), and its last step; checkpoints are after every step."""
    segments: list[tuple[int, int | None, int]] = [(0, None, draw(st.integers(0, 20)))]
    for number in range(1, draw(st.integers(1, 6))):
        parent = draw(st.integers(0, number - 1))
        begin = draw(st.integers(segments[parent][0], segments[parent][2]))
        names_parent = draw(st.booleans()) and begin > segments[parent][0]
        if not names_parent:
            begin = draw(st.integers(0, segments[-1][2]))
        segments.append((begin, parent if names_parent else None, begin + draw(st.integers(0, 20))))
    return segments


@given(histories())
def test_one_curve_descends_from_the_newest_segment(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int | None, int]]
) -> None:
    parts, rows = [], []
    for number, (begin, parent, end) in enumerate(history, 1):
        name = None if parent is None else f"{parent + 1}-{begin}"
        parts.append(start(number, begin, name))
        for step in range(begin + 1, end + 1):
            parts.append(line(Train(step=step, loss=float(number)), number))
            parts.append(line(Saved(step=step, path=f"c/{number}-{step}"), number))
            rows.append((step, number))
    record = reading(tmp_path_factory.mktemp("run"), *parts)
    if "loss" not in record:
        assert rows == []
        return
    series = record.series("loss")
    assert list(zip(series.step.tolist(), series.segment.tolist(), strict=True)) == rows
    current = series.current()
    # plainly: each step of the newest segment, then of what it grew out of, as far as it did
    expected: dict[int, int] = {}
    place: int | None = len(history) - 1
    upto = history[-1][2]
    while place is not None:
        begin, parent, end = history[place]
        expected |= dict.fromkeys(range(begin + 1, min(end, upto) + 1), place + 1)
        upto = min(upto, begin)
        place = parent if parent is not None else place - 1 if place else None
    assert dict(zip(current.step.tolist(), current.segment.tolist(), strict=True)) == expected
    assert (np.diff(current.step) > 0).all()


def test_a_lineage_without_anything_limits_nothing() -> None:
    assert SegmentTree().limits() == {}


def test_spikes_and_rewinds_of_a_made_run_are_there(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines(2000, 3, spikes=4, rewinds=3)))
    loss = read_record(RunDir(tmp_path)).series("loss").current()
    assert loss.step.tolist() == list(range(1, 2001))
    assert (loss.value > 50).sum() == 4


def test_a_warning_has_no_place_and_always_counts(tmp_path: Path) -> None:
    record = reading(tmp_path, start(1, 0), line(Warn(message="x", step=9)), start(2, 0))
    assert [entry.is_current for entry in record.events] == [True, True, True]
