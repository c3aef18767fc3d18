"""Damaged records, ten thousand in `make torture`: each is read, or refused as what it is; nothing else is raised."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import parametrize_first
from figures import times
from needed import delta_events

from instar.logs.query.tail import Follower
from instar.logs.read.reader_cache import cached_summary
from instar.logs.read.record import AXES, RunRecord, read_record
from instar.record.events import (
    Alert,
    Asked,
    Eval,
    Failed,
    Layers,
    OperationEvent,
    RecordError,
    RunFinished,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Train,
    Warn,
    encode_event,
)
from instar.record.rundir import RunDir

FILES = times(2_000, 10_000)
SHARES = 4
PLACE = {"samples": 20, "tokens": 2560, "epoch": 0.25, "flops": 1e9, "wall_s": 3.5, "active_s": 3.0}

TRAIN = [
    Train(step=s, loss=5.0 / s, lr=1e-3, grad_norm=0.5, extra={"scale": 8.0}, **PLACE)
    for s in range(1, 5)
]
OTHER = [
    Eval(step=4, split="val", loss=2.0, standard_error=0.1, extra={"acc": 0.5}, **PLACE),
    *delta_events(
        step=4, number=1, anchor=True, size_bytes=9, seconds=0.1, stall_s=0.0, density=0.5
    ),
    Layers(step=4, grad_norm={"head": 1.0}, update_ratio={"head": float("nan")}),
    OperationEvent(step=4, name="widen_mlp", value=[3, {"a": None}], architecture={"n_layer": 2}),
    Asked(step=4, id="3f", by="ann", outcome="refused", operation="widen_mlp", value=[3, {"a": 1}]),
    Saved(step=4, path="runs/r/checkpoints/step-4", reason="every 4 steps", size_bytes=10**9),
    Skip(step=5),
    Warn(message="slow → disk", step=5),
    Alert(step=6, name="stall", message="no progress"),
    Failed(message="rank 1 died", rank=1, step=7),
    Stop(step=8, reason="SIGTERM", resumable=True),
    RunFinished(step=8, loss=1.0),
]
RECORD = [
    encode_event(event, 1.7e9 + number, segment)
    for segment, start in ((1, 0), (2, 2))
    for number, event in enumerate(
        [
            RunStarted(run_id="r7f3a", step=start, resumed_from=f"step-{start}"),
            *TRAIN[start:],
            *OTHER,
        ]
    )
]
WHOLE = b"".join(RECORD)
TOKENS = (
    *(b"NaN", b"-Infinity", b'"NaN"', b"null", b"true", b"[]", b"{}", b'""', b"-1", b"1e308", b"1e999"),
    *(b"9223372036854775808", b"-9223372036854775809", b"1" * 400, b'"' + b"x" * 300 + b'"'),
    *(b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\0" * 40, b"\n", b"\r\n", b"\n\n\n", b"{" * 300),
    *(b'{"v":2,"kind":"train"}\n', b'{"v":1,"kind":"train"}\n', b'{"a":1}\n', b"\xef\xbb\xbf", b","),
)  # fmt: skip

Mutation = Callable[[random.Random, bytes], bytes]


def flip(draw: random.Random, text: bytes) -> bytes:
    content = bytearray(text)
    for _ in range(draw.choice((1, 2, 8, 64))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def cut(draw: random.Random, text: bytes) -> bytes:
    begin, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    return draw.choice((text[:begin], text[begin:], text[:begin] + text[end:]))


def splice(draw: random.Random, text: bytes) -> bytes:
    place, begin = draw.randrange(len(text)), draw.randrange(len(WHOLE))
    return text[:place] + WHOLE[begin : begin + draw.randrange(500)] + text[place:]


def swap(draw: random.Random, text: bytes) -> bytes:
    parts = text.split(b"\n")
    draw.shuffle(parts)
    return b"\n".join(parts)


def token(draw: random.Random, text: bytes) -> bytes:
    """Put something where a value stands, or anywhere."""
    place = draw.randrange(len(text))
    value = text.find(b":", place) + 1
    end = min(
        (at for at in (text.find(b",", value), text.find(b"}", value)) if at > 0), default=value
    )
    if value and draw.random() < 0.8:
        return text[:value] + draw.choice(TOKENS) + text[end:]
    return text[:place] + draw.choice(TOKENS) + text[place:]


def noise(draw: random.Random, text: bytes) -> bytes:
    place = draw.randrange(len(text))
    return text[:place] + draw.randbytes(draw.choice((1, 100, 5000))) + text[place:]


MUTATIONS: tuple[Mutation, ...] = (flip, cut, splice, swap, token, token, noise)


def read_or_refused(run: RunDir) -> RunRecord | RecordError:
    try:
        return read_record(run)
    except RecordError as error:
        return error


@pytest.mark.repeated
@parametrize_first("share", range(SHARES), first=2)
def test_damaged_records_are_read_or_refused(share: int, tmp_path: Path) -> None:
    draw = random.Random(share)
    run = RunDir(tmp_path)
    num_refused = 0
    for _ in range(FILES // SHARES):
        text = WHOLE
        for _ in range(draw.choice((1, 1, 2, 4))):
            text = draw.choice(MUTATIONS)(draw, text) or WHOLE[:1]
        run.events.write_bytes(text)
        summary = cached_summary(run)
        events = Follower(run.events).poll()
        record = read_or_refused(run)
        if isinstance(record, RecordError):
            num_refused += 1
            assert str(run.events) in str(record)
            assert events == []
            assert summary.fault
            continue
        assert not summary.fault
        assert len(record.faults) <= 6
        length = 0
        for metric in record.metrics:
            series = record.series(metric)
            length += len(series)
            for name in AXES:
                assert series.axis(name).shape == series.value.shape
                assert np.isfinite(series.axis(name)).all() or name == "epoch"
            assert len(series.current()) == series.is_current.sum()
        assert length + len(record.events) >= len(events)
    assert num_refused < FILES // SHARES // 4
