from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import columns, same

from instar.data.broadcast import decode_columns, encode_columns
from instar.data.columns import Columns, Ragged, leaves

GRAPH = {
    "label": np.arange(3, dtype=np.int16),
    "graph": {
        "nodes": Ragged(np.arange(20, dtype=np.float32).reshape(10, 2), np.array([1, 4, 4, 9])),
        "nothing": np.empty((3, 0, 2)),
    },
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(deadline=None)
@given(
    batch=st.integers(0, 4).flatmap(columns),
    meta=st.dictionaries(st.text(max_size=3), JSON, max_size=3),
)
def test_what_was_encoded_is_decoded(batch: Columns, meta: dict[str, object]) -> None:
    decoded_meta, decoded_batch = decode_columns(encode_columns(batch, meta))
    assert decoded_meta == meta
    assert same(decoded_batch, batch)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
def test_any_buffer_is_decoded(kind: type) -> None:
    assert same(decode_columns(kind(encode_columns(GRAPH, {})))[1], GRAPH)


def test_decoded_arrays_are_aligned_views() -> None:
    frame = encode_columns(GRAPH, {})
    for _, column in leaves(decode_columns(frame)[1]):
        for array in (column.values, column.offsets) if isinstance(column, Ragged) else (column,):
            assert np.shares_memory(array, frame) or not array.size
            assert (array.ctypes.data - frame.ctypes.data) % 64 == 0
            assert array.flags.writeable


def test_only_what_is_used_of_a_ragged_column_is_sent() -> None:
    column = Ragged(np.zeros(10**6), np.array([5, 7]))
    assert encode_columns({"x": column}, {}).size < 1000


def test_a_frame_has_no_bytes_of_other_things() -> None:
    """What lies between arrays is zero, not what the memory held before."""
    frames = [
        encode_columns({"x": np.ones(70_000 + 1, dtype=np.int8)}, {"a": "b"}) for _ in range(3)
    ]
    assert len({frame.tobytes() for frame in frames}) == 1
    assert not frames[0][-15:].any()


def test_every_frame_that_is_cut_off_or_too_long_is_refused() -> None:
    frame = encode_columns(GRAPH, {"steps": [1, 2]})
    for length in range(frame.size):
        with pytest.raises(ValueError, match="a frame of"):
            decode_columns(frame[:length])
    with pytest.raises(ValueError, match=f"should have {frame.size}"):
        decode_columns(np.concatenate([frame, frame]))


def test_damage_to_the_header_and_the_offsets_is_found() -> None:
    frame = encode_columns(GRAPH, {"steps": [1, 2]})
    header = 24 + int(frame[8:16].view(np.uint64)[0])
    nodes = decode_columns(frame)[1]["graph"]["nodes"]
    offsets = nodes.offsets.ctypes.data - frame.ctypes.data
    for place in (*range(header), *range(offsets, offsets + nodes.offsets.nbytes)):
        damaged_frame = frame.copy()
        damaged_frame[place] ^= 0x81
        with pytest.raises(ValueError, match=r"frame|damaged"):
            decode_columns(damaged_frame)


def test_objects_and_text_are_refused() -> None:
    for array in (np.array([{}], dtype=object), np.array(["text"])):
        with pytest.raises(ValueError, match="x is of type"):
            encode_columns({"x": array}, {})


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_columns({}, {"loss": float("nan")})


def test_nothing_of_a_frame_is_more_than_json_and_numbers() -> None:
    frame = encode_columns({"x": np.arange(2)}, {"error": "ValueError: …"})
    length = int(frame[8:16].view(np.uint64)[0])
    assert json.loads(frame[24 : 24 + length].tobytes()) == {
        "meta": {"error": "ValueError: …"},
        "columns": {"x": ["<i8", [2]]},
    }
