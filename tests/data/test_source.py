from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.source import IGNORED, TokenWindows

MakeSplit = Any


def test_targets_are_the_inputs_one_token_on(make_split: MakeSplit) -> None:
    batch = TokenWindows(make_split(13), context=4).read(np.array([2, 0]))
    assert batch["inputs"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]


def test_what_the_ragged_last_window_lacks_is_ignored(make_split: MakeSplit) -> None:
    windows = TokenWindows(make_split(11), context=4)
    batch = windows.read(np.array([2, 1]))
    assert batch["inputs"].tolist() == [[8, 9, 0, 0], [4, 5, 6, 7]]
    assert batch["targets"].tolist() == [[9, 10, IGNORED, IGNORED], [5, 6, 7, 8]]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), context=st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_exactly_once(
    make_split: MakeSplit, sizes: list[int], context: int
) -> None:
    split = make_split(*sizes, name="val")
    if len(split) < 2:
        return
    windows = TokenWindows(split, context)
    indices = np.random.default_rng(0).permutation(len(windows))
    batch = windows.read(indices)
    real = batch["targets"] != IGNORED
    assert sorted(batch["targets"][real].tolist()) == list(range(1, len(split)))
    assert np.array_equal(batch["inputs"][real] + 1, batch["targets"][real])
    assert windows.weights(indices) == real.sum()


def test_weights_count_the_real_targets_of_any_choice(make_split: MakeSplit) -> None:
    windows = TokenWindows(make_split(11), context=4)
    assert [windows.weights(np.array(ids)) for ids in ([0, 1], [2], [2, 2, 0], [])] == [8, 2, 8, 0]


def test_arrays_are_contiguous_int64(make_split: MakeSplit) -> None:
    for array in TokenWindows(make_split(50, 50), context=8).read(np.arange(5)).values():
        assert array.dtype == np.int64
        assert array.shape == (5, 8)
        assert array.flags.c_contiguous


def test_a_stride_gives_every_full_window(make_split: MakeSplit) -> None:
    windows = TokenWindows(make_split(4, 6), context=4, stride=1)
    batch = windows.read(np.arange(len(windows)))
    assert batch["inputs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["targets"][-1].tolist() == [6, 7, 8, 9]
    assert windows.weights(np.arange(6)) == 24


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_is_refused(make_split: MakeSplit, index: int) -> None:
    with pytest.raises(IndexError):
        TokenWindows(make_split(11), context=4).read(np.array([0, index]))


@pytest.mark.parametrize(
    ("name", "tokens", "stride"), [("train", 8, None), ("val", 8, 1), ("val", 1, None)]
)
def test_a_split_shorter_than_a_context_is_refused(
    make_split: MakeSplit, name: str, tokens: int, stride: int | None
) -> None:
    with pytest.raises(ConfigError, match=rf"the {name} split has {tokens} tokens"):
        TokenWindows(make_split(tokens, name=name), context=8, stride=stride)


def test_a_short_held_out_split_is_one_ragged_window(make_split: MakeSplit) -> None:
    windows = TokenWindows(make_split(3, name="val"), context=8)
    assert len(windows) == 1
    assert windows.weights(np.array([0])) == 2


def test_fingerprints_tell_windows_apart(make_split: MakeSplit) -> None:
    split = make_split(50)
    fingerprints = {TokenWindows(split, *args).fingerprint for args in ((8,), (9,), (8, 1))}
    assert len(fingerprints) == 3
