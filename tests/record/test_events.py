import json
import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from needed import delta_events

from instar.record.events import (
    Asked,
    Eval,
    Event,
    OperationEvent,
    RecordError,
    RunFinished,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Train,
    Unrecognised,
    Warn,
    decode_event,
    encode_event,
    from_words,
    read_events,
    to_words,
)

ONE_OF_EACH = [
    RunStarted(run_id="r7f3a", versions={"torch": "2.13"}, machine={"cores": 2, "cpu": None}),
    Train(step=10, tokens=5120, loss=3.9, lr=3e-4, grad_norm=0.8, extra={"loss_scale": 1024.0}),
    Eval(step=10, split="val", loss=3.41, eval_tokens=65536, standard_error=0.003, best=True),
    OperationEvent(step=10, name="widen_mlp", value=3072, proof={"max_logit_diff": 2e-6}),
    OperationEvent(step=11, name="change_lr", value=0.5, id="3f0c00000000", by="ann"),
    Asked(step=11, id="3f0c00000000", by="ann", outcome="waits", operation="widen", value={"a": 2}),
    Saved(step=10, path="checkpoints/step-10", size_bytes=10**12),
    *delta_events(
        step=10, number=3, anchor=False, size_bytes=9, seconds=0.1, stall_s=0, density=0.01
    ),
    Skip(step=11, consecutive=2),
    Warn(message="slow → disk", step=11),
    Stop(step=12, reason="SIGINT", resumable=True),
    RunFinished(step=12, best_loss=3.41, best_step=10),
]

numbers = st.floats(allow_nan=True, allow_infinity=True)
free_form = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).filter(lambda value: not _says_a_word(value))


def _says_a_word(value: object) -> bool:
    return any(f'"{word}"' in json.dumps(value) for word in ("NaN", "Infinity", "-Infinity"))


def same(first: object, other: object) -> bool:
    return repr(first) == repr(other)  # unlike ==, it holds a NaN equal to a NaN


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_every_kind_comes_back_as_it_was_written(event: Event) -> None:
    expected = msgspec.structs.replace(event, time=1.5, segment=3)
    assert decode_event(encode_event(event, now=1.5, segment=3)) == expected


def test_a_line_is_one_json_object_with_version_and_kind_first() -> None:
    line = encode_event(ONE_OF_EACH[1], now=1.0, segment=1)
    assert line.startswith(b'{"v":1,"kind":"train","time":1.0,"segment":1,"step":10')
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1


def test_a_newline_in_a_message_stays_within_its_line() -> None:
    assert encode_event(Warn(message="one\ntwo"), 0, 0).count(b"\n") == 1


@pytest.mark.parametrize(
    ("number", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_a_non_finite_number_is_a_word_in_the_file_and_a_number_again(
    number: float, word: str
) -> None:
    line = encode_event(Train(step=1, loss=number, grad_norm=number, extra={"x": number}), 0, 0)
    values = json.loads(line, parse_constant=pytest.fail)
    assert (values["loss"], values["grad_norm"], values["extra"]["x"]) == (word, word, word)
    event = decode_event(line)
    assert isinstance(event, Train)
    assert same([event.loss, event.grad_norm, event.extra["x"]], [number] * 3)


def test_a_message_that_says_nan_stays_a_message() -> None:
    assert decode_event(encode_event(Warn(message="NaN"), 0, 0)) == Warn(message="NaN")


@given(free_form)
def test_free_form_values_survive(value: object) -> None:
    event = decode_event(encode_event(OperationEvent(step=1, name="x", value=value), 0, 0))
    assert isinstance(event, OperationEvent)
    assert same(event.value, value)
    assert same(from_words(to_words(value)), value)


@given(st.text(st.characters()))
def test_any_text_can_be_recorded(text: str) -> None:
    event = decode_event(encode_event(Warn(message=text), 0, 0))
    assert isinstance(event, Warn)
    assert event.message == text.encode("utf-8", "backslashreplace").decode()


def test_numpy_scalars_are_numbers() -> None:
    line = encode_event(Train(step=np.int64(3), loss=np.float32("nan"), lr=np.float64(0.5)), 0, 0)
    event = decode_event(line)
    assert isinstance(event, Train)
    assert same((event.step, event.loss, event.lr), (3, math.nan, 0.5))


def test_what_json_would_change_in_silence_is_refused() -> None:
    with pytest.raises(TypeError, match="keys are strings, not 0"):
        to_words({"layers": {0: 1.0}})
    with pytest.raises(TypeError, match="no form for set"):
        to_words({1, 2})


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


GOOD = encode_event(Train(step=1, loss=1.0), 0, 1)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    for cut in range(1, len(GOOD) - 1):
        path = write(tmp_path / "events.jsonl", GOOD, GOOD[:cut])
        assert len(list(read_events(path))) == 1


def test_a_last_line_that_only_lacks_its_newline_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", GOOD, GOOD[:-1])
    assert len(list(read_events(path))) == 2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (GOOD[:20] + b"\n", "malformed"),
        (b"\n", "truncated"),
        (b"[]\n", "array"),
        (b"\x00\x00\n", "malformed"),
        (b'{"v":1,"kind":"warning","message":"\xff"}\n', "decode"),
        (b'{"v":1,"kind":"train","step":1}\n', "loss"),
        (b'{"v":1,"kind":"train","step":1,"loss":"much"}\n', "loss"),
        (b'{"v":2,"kind":"train","step":1,"loss":1}\n', "version 2; this Instar reads 1"),
        (b'{"step":1,"loss":1}\n', "version None"),
        (b'{"v":1,"kind":"train","step":' + b"[" * 100_000 + b"\n", ""),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: bytes, reason: str) -> None:
    path = write(tmp_path / "events.jsonl", GOOD, broken, GOOD)
    with pytest.raises(RecordError, match=rf"events\.jsonl:2: not an event.*{reason}"):
        list(read_events(path))


def test_a_kind_of_a_newer_instar_is_handed_on() -> None:
    line = b'{"v":1,"kind":"verdict","time":5.0,"segment":2,"step":7,"ratio":"Infinity"}\n'
    event = decode_event(line)
    assert event == Unrecognised(
        name="verdict",
        fields={"v": 1, "kind": "verdict", "step": 7, "ratio": math.inf},
        time=5,
        segment=2,
    )


def test_a_field_of_a_newer_instar_is_ignored() -> None:
    assert decode_event(b'{"v":1,"kind":"train","step":1,"loss":2,"mood":"good"}') == Train(
        step=1, loss=2
    )


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*No such file"):
        list(read_events(tmp_path / "events.jsonl"))


def test_ten_thousand_damaged_records_are_read_or_refused_by_line(tmp_path: Path) -> None:
    content = b"".join(encode_event(event, 0, 1) for event in ONE_OF_EACH)
    chance, read, refusals = random.Random(7), 0, 0
    path = tmp_path / "events.jsonl"
    for _ in range(10_000):
        path.write_bytes(damage(content, chance))
        try:
            read += all(isinstance(event, Event) for event in read_events(path))
        except RecordError as error:
            refusals += f"{path}:" in str(error)
        path.unlink()  # quicker than to truncate it
    assert read + refusals == 10_000
    assert min(read, refusals) > 100


def damage(content: bytes, chance: random.Random) -> bytes:
    buffer = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(buffer) + 1)
        match chance.randrange(4):
            case 0:
                buffer[at : at + 1] = chance.randbytes(1)
            case 1:
                del buffer[at : at + chance.randint(1, 200)]
            case 2:
                buffer[at:at] = chance.randbytes(chance.randint(1, 20))
            case 3:
                buffer[at:at] = buffer[:at]
    return bytes(buffer)
