"""What is encoded comes back bit for bit, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from instar.extensions.delta.format.encoding import (
    BlockDelta,
    Coding,
    EncodingError,
    Words,
    apply_block,
    changed_mask,
    compress,
    decompress,
    encode_block,
)

CODINGS = [Coding(floating, absolute) for floating in (False, True) for absolute in (False, True)]
coding_of_all = pytest.mark.parametrize("coding", CODINGS, ids=str)


def pairs(dtype: str) -> st.SearchStrategy[tuple[Words, Words]]:
    """Blocks of words, and others of which some differ."""

    def other(old: Words) -> st.SearchStrategy[tuple[Words, Words]]:
        mask = arrays(bool, old.size, elements=st.booleans())
        new = arrays(dtype, old.size)
        return st.tuples(mask, new).map(lambda pair: (old, np.where(pair[0], pair[1], old)))

    return st.integers(0, 40).flatmap(lambda size: arrays(dtype, size)).flatmap(other)


@coding_of_all
@given(pair=st.sampled_from(["<u1", "<u2", "<u4", "<u8"]).flatmap(pairs))
def test_what_is_applied_is_what_was_encoded(coding: Coding, pair: tuple[Words, Words]) -> None:
    old, new = pair
    words = old.copy()
    difference = encode_block(old, new, coding)
    if difference is None:
        assert np.array_equal(old, new)
    else:
        assert difference.n_changed == np.count_nonzero(old != new)
        apply_block(difference, words, coding)
    assert np.array_equal(words, new)


def test_bits_are_compared_not_values() -> None:
    old = np.array([0.0, -0.0, np.nan, 1.0], np.float32).view(np.uint32)
    new = old.copy()
    new[0], new[2] = 0x80000000, 0x7FC00001  # -0, and a NaN with a payload
    words = old.copy()
    difference = encode_block(old, new, Coding(True))
    assert difference is not None
    apply_block(difference, words, Coding(True))
    assert difference.n_changed == 2
    assert np.array_equal(words, new)


def test_a_step_of_one_unit_is_one_byte_whatever_the_sign_and_exponent() -> None:
    floats = np.array([1.0, -1.0, 2.0**-126, -(2.0**100), 0.0, 1.9999999] * 100, np.float32)
    new = np.nextafter(floats, np.float32(np.inf)).view(np.uint32)
    difference = encode_block(floats.view(np.uint32), new, Coding(True))
    assert difference is not None
    assert len(difference.values) == 1


def weight_drift(share: float, size: int = 1 << 18) -> tuple[Words, Words]:
    """bf16 weights, and the same with steps of one unit at random places."""
    chance = np.random.default_rng(0)
    old = (chance.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old.copy()
    mask = chance.random(size) < share
    new[mask] += chance.choice(np.array([1, 65535], "<u2"), np.count_nonzero(mask))
    return old, new


@pytest.mark.parametrize(
    ("share", "min_ratio"), [(0.002, 500), (0.012, 124), (0.075, 27), (0.5, 7)]
)
def test_small_drift_is_small(share: float, min_ratio: float) -> None:
    old, new = weight_drift(share)
    difference = encode_block(old, new, Coding(True))
    assert difference is not None
    assert old.nbytes / difference.size_bytes > min_ratio


@pytest.mark.parametrize("absolute", [False, True])
def test_many_changes_are_dense_and_few_are_not(absolute: bool) -> None:
    sparse, dense = (
        encode_block(*weight_drift(0.1), Coding(True, absolute)),
        encode_block(*weight_drift(1), Coding(True)),
    )
    assert sparse is not None
    assert dense is not None
    assert sparse.gaps is not None
    assert dense.gaps is None


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_changed_words_are_known_without_the_words(share: float) -> None:
    old, new = weight_drift(share, 1000)
    difference = encode_block(old, new, Coding(True))
    assert difference is not None
    assert np.array_equal(changed_mask(difference, 1000), old != new)


def test_new_words_can_be_written_twice_and_over_some_of_themselves() -> None:
    old, new = weight_drift(0.05, 1000)
    coding = Coding(True, absolute=True)
    difference = encode_block(old, new, coding)
    assert difference is not None
    words = np.concatenate([new[:300], old[300:]])
    for _ in range(2):
        apply_block(difference, words, coding)
        assert np.array_equal(words, new)


FOREIGN = {
    "more changes than words": BlockDelta(9, (b"\0" * 9,), (b"\1" * 9,)),
    "a place after the end": BlockDelta(2, (b"\7\1",), (b"\1\1",)),
    "too many planes": BlockDelta(1, (b"\0",), (b"\1",) * 3),
    "a plane of another length": BlockDelta(2, (b"\0",), (b"\1\1",)),
    "not compressed": BlockDelta(8, None, (b"zstd?",)),
    "larger than it must be": BlockDelta(8, None, (compress(bytes(1 << 30)),)),
}


@pytest.mark.parametrize("difference", FOREIGN.values(), ids=FOREIGN)
def test_what_does_not_fit_a_block_is_refused_and_changes_nothing(difference: BlockDelta) -> None:
    words = np.arange(8, dtype="<u2")
    with pytest.raises(EncodingError):
        apply_block(difference, words, Coding(False))
    assert np.array_equal(words, np.arange(8))


def test_incompressible_bytes_are_kept_as_they_are() -> None:
    raw = np.random.default_rng(0).bytes(1000)
    assert compress(raw) == raw
    assert decompress(raw, 1000) == raw
