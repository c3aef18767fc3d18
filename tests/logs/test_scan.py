"""Blocks and pieces of a record: what each line by itself would give, bit for bit."""

import json
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import times
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from records import lines

from instar.extensions import event_types
from instar.logs.read import scan as scanning
from instar.logs.read.columns import ABSENT, MetricTable
from instar.logs.read.record import AXES, read_record
from instar.logs.read.scan import MAX_FAULTS, Content, pieces, scan
from instar.record.events import (
    NOT_AN_EVENT,
    TRAIN_METRICS,
    Eval,
    ExtensionEvent,
    Layers,
    RecordError,
    RunStarted,
    Saved,
    Train,
    Warn,
    decode_event,
    encode_event,
    metrics,
)
from instar.record.rundir import RunDir

Expected = tuple[dict[str, list[Any]], list[bytes], list[int], int, int]


def one_by_one(text: bytes) -> Expected:
    """What whole lines hold, each decoded by itself: the measurements of each table, other events'
    lines, the numbers of lines that are no events, how many lines, and the byte behind them."""
    tables: dict[str, list[Any]] = {}
    other_lines, faults = [], []
    whole_lines = text[: text.rfind(b"\n") + 1]
    for number, line in enumerate(whole_lines.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            event = decode_event(line)
        except NOT_AN_EVENT:
            faults.append(number)
            continue
        if isinstance(event, Train):
            tables.setdefault("train", []).append(event)
        elif isinstance(event, Eval):
            tables.setdefault(f"eval {event.split}", []).append(event)
        elif isinstance(event, Layers):
            tables.setdefault("layers", []).append(event)
        elif isinstance(event, ExtensionEvent):
            tables.setdefault(event.table, []).append(event)
        else:
            other_lines.append(line)
    return tables, other_lines, faults, whole_lines.count(b"\n"), len(whole_lines)


def bits(values: Any) -> list[int]:
    integers: list[int] = np.ascontiguousarray(values, "<f8").view("<i8").tolist()
    return integers


def check(content: Content, expected: Expected) -> None:
    tables, other_lines, faults, count, end = expected
    assert list(content.events) == other_lines
    assert (content.lines, content.end, content.passed_over) == (count, end, len(faults))
    assert [number for number, _ in content.faults] == faults[:MAX_FAULTS]
    assert set(content.tables) == set(tables)
    for name, events in tables.items():
        check_table(content.tables[name], events)


def check_table(table: MetricTable, events: list[Any]) -> None:
    assert table.rows == len(events)
    for name in (*AXES, "segment"):
        expected = [getattr(event, name) for event in events]
        kind = table.axes[name].dtype.kind
        if kind == "i":
            assert table.axes[name].tolist() == expected
        else:
            assert bits(table.axes[name]) == bits(expected)
    rows = [metrics(event) for event in events]
    assert set(table.metrics) == {name for row in rows for name in row}
    for name, values in table.metrics.items():
        assert bits(values) == bits([row.get(name, ABSENT) for row in rows])
    first = {event.segment: event.step for event in reversed(events)}
    assert dict(table.first_steps) == first


class Here:
    """Stands in for `Workers`, without processes."""

    def __init__(self, open_thing: Callable[[], Any], number: int) -> None:
        self.things = [open_thing() for _ in range(number)]

    def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self.things[worker], method)(*args))
        return answer

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...


def in_all_ways(path: Path, text: bytes, block: int, piece: int) -> Iterator[Content]:
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        yield scan(path)
        patch.setattr("instar.logs.read.lines.BLOCK_BYTES", block)
        yield scan(path)
        patch.setattr(scanning, "AT_ONCE_BYTES", piece)
        yield Content().extended_by(*pieces(path, workers=1))
        patch.setattr(scanning, "WORTH_BYTES", 0)
        patch.setattr(scanning, "PIECE_BYTES", piece)
        patch.setattr(scanning, "Workers", Here)
        yield Content().extended_by(*pieces(path, workers=3))


counts = st.one_of(st.integers(0, 200), st.integers(0, 2**63 - 1))
numbers = st.one_of(
    st.floats(), st.floats(-10, 10, width=32), st.sampled_from([0.0, -0.0, 1e-7, 1e22, math.nan])
)
finite = st.floats(0, 1e300)
names = st.one_of(
    st.sampled_from(["scale", *TRAIN_METRICS, '"loss":1,', "val/loss", "}\n{"]), st.text(max_size=3)
)
layer_values = st.dictionaries(names, numbers, max_size=2)
places: dict[str, Any] = {
    "step": counts,
    "samples": counts,
    "tokens": counts,
    "epoch": numbers,
    "flops": finite,
    "wall_s": finite,
    "active_s": finite,
}
trains = st.builds(
    Train,
    **places,
    loss=numbers,
    grad_norm=st.none() | numbers,
    lr=st.none() | numbers,
    tokens_per_s=st.none() | numbers,
    mfu=st.none() | numbers,
    data_wait=st.none() | numbers,
    memory_bytes=st.none() | counts,
    extra=st.just({}) | layer_values,
)
evals = st.builds(
    Eval,
    **places,
    split=st.sampled_from(["val", "test"]),
    loss=numbers,
    extra=layer_values,
    errors=layer_values,
)
FIELDS = {
    "delta": {
        "number": counts,
        "anchor": st.booleans(),
        "size_bytes": counts,
        "seconds": numbers,
        "stall_s": numbers,
        "density": st.none() | numbers,
        "overlap": st.none() | numbers,
        "layers": layer_values,
    },
    "foreign": {"values": layer_values},
}
"""of the events of extensions"""
of_extensions = [st.builds(kind, **places, **FIELDS[name]) for name, kind in event_types().items()]
other_events = st.one_of(
    evals,
    st.builds(Layers, **places, grad_norm=layer_values, update_ratio=layer_values),
    *of_extensions,
    st.builds(RunStarted, run_id=st.text(max_size=3), step=counts),
    st.builds(Saved, step=counts, path=st.text(max_size=5)),
    st.builds(Warn, message=st.text(max_size=5)),
)
NUMBERS = [
    *(None, True, "NaN", "-Infinity", "nan", "5", "5.0", "1e3", "x", "", [], {}, {"loss": 1}),
    *(5, 5.0, 5.5, -1, -0.0, 2**63 - 1, 2**63, 10**400, 1e-320, 253402300800.0, 1e300, 1.1e300),
]
TWO_IN_ONE = b'{"v":1,"kind":"train","step":1,"loss":1}{"v":1,"kind":"train","step":2,"loss":1}'
ONE_IN_TWO = b'{"v":1,"kind":"train",\n"step":1,"loss":1}'
LOST = [
    *(b"", b" ", b"\0" * 9, b"text", b"1", b"[]", b"{}", b"\xff", b"{", b'{"v":2,"kind":"train"}'),
    *(b'{"v":1,"kind":"new","time":1}', b'{"v":1,"kind":"train"}', b'{"loss":1}', b"{" * 2000),
    *(TWO_IN_ONE, ONE_IN_TWO),
    b'{"v":1,"kind":"train","step":1,"loss":1,"extra":{}\n{"a":1}}',
    b' {"v":1,"kind":"train","step":1,"loss":1} \r',
    b'{"kind":"train","loss":"NaN","v":1,"step":1,"step":2,"more":[{"loss":3}]}',
    b'{"v":1,"kind":"train","step":1,"loss":2.0000000000000001e-5,"lr":1E+2}',
    b'{"v":1,"kind":"train","step":01,"loss":.5}',
]


@st.composite
def foreign(draw: st.DrawFn) -> bytes:
    """A step as another program, or a mistaken one, might write it."""
    line = json.loads(encode_event(draw(trains), 1.0, 1))
    for key in draw(st.lists(st.sampled_from([*line]), max_size=2)):
        line[key] = draw(st.sampled_from(NUMBERS))
    keys = draw(st.permutations(list(line))) if draw(st.booleans()) else list(line)
    text = json.dumps({key: line[key] for key in keys}, allow_nan=draw(st.booleans()) or True)
    return text.encode()


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    line = bytearray(encode_event(draw(trains | other_events), 1.0, 1)[:-1])
    place = draw(st.integers(0, len(line) - 1))
    match draw(st.integers(0, 2)):
        case 0:
            line[place] = draw(st.integers(0, 255))
        case 1:
            del line[place:]
        case _:
            line[place:place] = draw(st.sampled_from([b"0", b"-", b".", b",", b'"', b" ", b"\n"]))
    return bytes(line)


event_lines = st.builds(
    lambda event, time, segment: encode_event(event, time, segment)[:-1],
    trains | trains | other_events,
    st.floats(0, 2e11),
    st.integers(1, 3),
)
any_line = st.one_of(
    event_lines, event_lines, event_lines, foreign(), damaged_lines(), st.sampled_from(LOST)
)
records = st.builds(
    lambda parts, tail: b"".join(part + b"\n" for part in parts) + tail,
    st.lists(any_line, max_size=12),
    st.sampled_from([b"", b"{", b'{"v":1,"kind":"train","step":1,"loss":1}']),
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=records, block=st.integers(1, 3000), piece=st.integers(1, 3000))
@example(b"\n".join(LOST) + b"\n", 100, 300)
@example(TWO_IN_ONE + b"\n" + ONE_IN_TWO + b"\n", 3000, 3000)
def test_any_record_is_read_as_line_by_line(
    tmp_path: Path, text: bytes, block: int, piece: int
) -> None:
    expected = one_by_one(text)
    for content in in_all_ways(tmp_path / "events.jsonl", text, block, piece):
        check(content, expected)


def test_every_odd_value_in_every_field_is_read_as_line_by_line(tmp_path: Path) -> None:
    fields = {"v": 1, "kind": "train", "time": 1.0, "segment": 1, "step": 3, "samples": 1}
    fields |= {"tokens": 1, "epoch": 0.5, "flops": 1.0, "wall_s": 1.0, "active_s": 1.0, "loss": 2.0}
    fields |= {"lr": 0.1, "memory_bytes": 1, "extra": {"a": 1.0}}
    sound = json.dumps(fields).encode() + b"\n"
    for key in fields:
        for value in NUMBERS:
            odd = json.dumps(fields | {key: value}).encode() + b"\n"
            text = sound + odd + sound
            for content in in_all_ways(tmp_path / "events.jsonl", text, 1 << 18, 1 << 18):
                check(content, one_by_one(text))


@pytest.mark.repeated
def test_bytes_of_a_real_record_changed_at_random_are_read_as_line_by_line(tmp_path: Path) -> None:
    original = b"".join(lines(60, 3, evals=6, rewinds=2))
    draw = random.Random(5)
    for _ in range(times(100, 300)):
        text = bytearray(original)
        for _ in range(draw.choice((1, 5, 50))):
            text[draw.randrange(len(text))] = draw.choice(b'0123456789.-eE+,:{}[]"\n \0')
        for content in in_all_ways(tmp_path / "events.jsonl", bytes(text), 2000, 3000):
            check(content, one_by_one(bytes(text)))


def test_a_metric_that_was_measured_as_nan_is_there(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    steps = [Train(step=s, loss=1.0, lr=math.nan if s == 3 else None) for s in range(1, 6)]
    path.write_bytes(b"".join(encode_event(step, 1.0, 1) for step in steps))
    lr = read_record(RunDir(tmp_path)).series("lr")
    assert lr.step.tolist() == [3]
    assert np.isnan(lr.value).all()


def test_a_record_with_more_places_for_numbers_than_it_could_fill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instar.logs.read.scan.CELLS", 1 << 16)
    monkeypatch.setattr("instar.logs.read.cache.CELLS", 1 << 16)
    path = tmp_path / "events.jsonl"
    wide = encode_event(Train(step=0, loss=1.0, extra={f"m{n}": 1.0 for n in range(500)}), 1.0, 1)
    path.write_bytes(
        wide + b"".join(encode_event(Train(step=n, loss=1.0), 1.0, 1) for n in range(20))
    )
    assert len(scan(path).tables["train"].metrics) == 501
    varied_lines = [
        encode_event(Train(step=n, loss=1.0, extra={f"m{n}": 1.0}), 1.0, 1) for n in range(5000)
    ]
    path.write_bytes(b"".join(varied_lines))
    with pytest.raises(RecordError, match=r"metrics of [\d,]+ measurements are more"):
        scan(path)
    later = [encode_event(Train(step=n, loss=1.0), 1.0, 1) for n in range(5000)]
    path.write_bytes(wide + b"".join(later))
    with pytest.raises(RecordError, match=r"metrics of [\d,]+ measurements are more"):
        scan(path)
