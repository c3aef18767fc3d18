from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from splits import split_of

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.columns import Ragged
from instar.data.source import IGNORED, TokenWindows
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import open_dataset
from instar.data.text.streams.items import Items
from instar.data.text.streams.reader import Chunk, HostedLanes, LaneReader, StreamUnfit
from instar.data.text.streams.samples import (
    DocumentStream,
    Note,
    PackedStream,
    StreamChanged,
    TokenLanes,
)
from instar.data.text.streams.seek_points import START, SeekPoint, SeekPoints
from instar.data.text.streams.source import LaneOrder, LaneSamples, OpenStreamSource, StreamSource
from instar.data.text.tokenizer import END, ByteTokenizer, load_saved_tokenizer, train_bpe

Lengths = tuple[int, ...]
lengths_of_lanes = st.lists(st.integers(0, 25), min_size=1, max_size=4).map(tuple)


class ListItems:
    """Items in lanes, some at a time."""

    fingerprint = "given"

    def __init__(self, *lanes: Sequence[Any], at_a_time: int = 3) -> None:
        self.lanes, self._lanes, self._at_a_time = len(lanes), lanes, at_a_time

    def open(self, lane: int, part: int = 0, row: int = 0) -> Iterator[tuple[int, int, Items]]:
        items = self._lanes[lane]
        for begin in range(row, len(items), self._at_a_time):
            batch = list(items[begin : begin + self._at_a_time])
            if isinstance(batch[0], str):
                yield part, begin, batch
            else:
                ends = np.cumsum([0, *map(len, batch)], dtype=np.int64)
                ids = np.concatenate([np.array(document, np.int64) for document in batch])
                yield part, begin, Ragged(ids, ends)

    def place(self, lane: int, part: int, row: int) -> str:
        return f"lane {lane}, part {part}, item {row}"


class Numbered:
    """Sample j of lane k is the number j · L + k; how often lanes were opened is counted.

    Every `spacing`th sample is a seek point, if there are any."""

    fingerprint = "numbered"

    def __init__(
        self, lengths: Lengths, fails_at: int | None = None, spacing: int | None = None
    ) -> None:
        self.lengths, self.lanes, self.fails_at = lengths, len(lengths), fails_at
        self.spacing = spacing
        self.open_counts = [0] * len(lengths)
        self.samples_read = 0
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_alive = 0

    def open(self, lane: int, seek: SeekPoint, note: Note) -> Generator[Sample, None, int]:
        self.open_counts[lane] += 1
        for number in range(seek.offset, self.lengths[lane]):
            if number * self.lanes + lane == self.fails_at:
                raise OSError("the disk is gone")
            if self.spacing and number % self.spacing == 0:
                note(SeekPoint(number, 0, number, 1))
            sample = Sample(number * self.lanes + lane)
            self.samples_read += 1
            self.alive.add(sample)
            self.most_alive = max(self.most_alive, len(self.alive))
            yield sample
        return self.lengths[lane]

    def first_after(self, offset: int) -> int:
        return offset

    def offset_of(self, sample: int) -> int:
        return sample

    def samples(self, count: int) -> int:
        return count

    def measure(self, lane: int, note: Note) -> int:
        return sum(1 for _ in self.open(lane, START, note))

    def weight_of(self, sample: Sample) -> float:
        return float(sample.id + 1)

    def columns(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        return {"id": np.array([sample.id for sample in samples], dtype=np.int64)}


class Sample:
    def __init__(self, id_: int) -> None:
        self.id = id_


class Later:
    """A worker without a process: what is asked is read at once."""

    def __init__(self, stream: Numbered) -> None:
        self.reader = reader_of(stream)

    def ask(self, lane: int, begin: int, count: int) -> Future[Chunk]:
        future: Future[Chunk] = Future()
        try:
            future.set_result(self.reader.fetch(lane, begin, count))
        except Exception as error:
            future.set_exception(error)
        return future


def reader_of(stream: Numbered, folder: Path = Path("nowhere")) -> LaneReader:
    return LaneReader(stream, SeekPoints(folder, stream.fingerprint, 1))


def samples_of(
    stream: Numbered,
    keep: int = 4,
    *,
    fetch_ahead: int = 0,
    is_counted: bool = False,
    window: int = 1,
) -> LaneSamples:
    lanes = (
        HostedLanes(Later(stream).ask, lambda: None, fetch_ahead)
        if fetch_ahead
        else reader_of(stream)
    )
    counts: list[int | None] = [*stream.lengths] if is_counted else [None] * stream.lanes
    return LaneSamples(stream, lanes, counts, keep, window)


def ids_of(samples: LaneSamples, *ids: int) -> list[int]:
    return [sample.id for sample in samples.take(np.array(ids, dtype=np.int64))]


def lane_of(stream: PackedStream | DocumentStream, lane: int = 0) -> dict[str, np.ndarray]:
    return stream.columns(list(stream.open(lane)))


def windows_of(tokens: Sequence[int], context: int) -> dict[str, np.ndarray]:
    """As token shards of these tokens give them; none of fewer than two."""
    split = split_of(np.array(tokens, dtype=np.uint16), name="val")
    if len(tokens) < 2:
        return PackedStream(TokenLanes(ListItems([]), ByteTokenizer(), ids=False), context).columns(
            []
        )
    windows = TokenWindows(split, context)
    return windows.read(np.arange(len(windows)))


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype == np.int64
        assert actual[name].tolist() == array.tolist(), name


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_a_packed_lane_gives_the_windows_of_prepared_token_shards(
    tmp_path: Path, tokenizer: str
) -> None:
    text = [f"document {n} says {'word ' * (n % 7)}" for n in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"text": document}) + b"\n" for document in text))
    data = DataConfig(source=str(file), tokenizer=tokenizer, vocab_size=280)
    folder = prepare_dataset(data, seed=1, path=tmp_path / "prepared")
    dataset = open_dataset(folder)
    loaded_tokenizer = load_saved_tokenizer(folder)
    split = dataset.split("train")
    train_text = loaded_tokenizer.decode(split.read(0, len(split)).tolist())
    documents = train_text.split("\n" if loaded_tokenizer.end_id is None else END)
    assert len(documents) > 200
    windows = TokenWindows(split, context=48)
    actual = lane_of(
        PackedStream(TokenLanes(ListItems(documents), loaded_tokenizer, ids=False), 48)
    )
    assert_same(actual, windows.read(np.arange(len(windows))))


@settings(deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab\n", max_size=9), max_size=12),
    context=st.integers(1, 9),
    at_a_time=st.integers(1, 5),
)
def test_any_documents_are_packed_as_token_shards_pack_them(
    texts: list[str], context: int, at_a_time: int
) -> None:
    lanes = TokenLanes(ListItems(texts, at_a_time=at_a_time), ByteTokenizer(), ids=False)
    end_to_end = "\n".join(text for text in texts if text).encode()
    assert_same(lane_of(PackedStream(lanes, context)), windows_of(list(end_to_end), context))


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 255), max_size=12), max_size=12),
    context=st.integers(1, 9),
    at_a_time=st.integers(1, 5),
)
def test_documents_of_ids_have_nothing_between_them(
    rows: list[list[int]], context: int, at_a_time: int
) -> None:
    lanes = TokenLanes(ListItems(rows, at_a_time=at_a_time), ByteTokenizer(), ids=True)
    end_to_end = [token for row in rows for token in row]
    assert_same(lane_of(PackedStream(lanes, context)), windows_of(end_to_end, context))


def test_lanes_are_packed_apart_and_may_be_empty() -> None:
    lanes = TokenLanes(ListItems(["abcd"], [], ["ab", "c"]), ByteTokenizer(), ids=False)
    stream = PackedStream(lanes, 3)
    assert [[bytes(ids.tolist()) for ids in stream.open(lane)] for lane in range(3)] == [
        [b"abcd"],
        [],
        [b"ab\nc"],
    ]


def test_without_packing_a_document_is_a_sample_cut_off_and_filled_up() -> None:
    tokenizer = train_bpe(["abc"], 300)
    end = tokenizer.end_id
    texts = ["ab", "", "abcd", "a"]
    lanes = TokenLanes(ListItems(texts), tokenizer, ids=False)
    stream = DocumentStream(lanes, 3)
    ab, abc = tokenizer.encode("ab").tolist(), tokenizer.encode("abcd").tolist()
    assert [ids.tolist() for ids in stream.open(0)] == [
        [*ab, end],
        [*abc, end][:4],
        [*tokenizer.encode("a").tolist(), end],
    ]
    columns = lane_of(
        DocumentStream(TokenLanes(ListItems(["ab", "x"]), ByteTokenizer(), ids=False), 4)
    )
    assert columns["inputs"].tolist() == [[97, 98, 0, 0], [120, 0, 0, 0]]
    assert columns["targets"].tolist() == [[98, 10, IGNORED, IGNORED], [10, *[IGNORED] * 3]]


def test_an_id_that_is_not_in_the_vocabulary_is_named_after_the_documents_before_it() -> None:
    rows = [[1, 2], [3], [4, 256, 5], [6]]
    for bad in (256, -1):
        rows[2][1] = bad
        documents = TokenLanes(ListItems(rows, at_a_time=4), ByteTokenizer(), ids=True).open(0)
        assert [document.tolist() for document in next(documents)[2]] == [[1, 2], [3]]
        with pytest.raises(ConfigError, match=rf"lane 0, part 0, item 2: token {bad} is not in"):
            next(documents)


def test_a_long_document_is_tokenised_as_it_is_prepared(tmp_path: Path) -> None:
    """In pieces of 2^20 characters, or what is between them would be merged otherwise."""
    text = "ab " * 400_000
    (tmp_path / "long.txt").write_text(text)
    tokenizer = train_bpe(["ab ab ab"] * 9, 270)
    ((_, _, documents),) = TokenLanes(ListItems([text]), tokenizer, ids=False).open(0)
    pieces = [text[: 1 << 20], text[1 << 20 :]]
    expected = np.concatenate(tokenizer.encode_batch(pieces))
    assert np.array_equal(documents[0], expected)


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_of_lanes,
    window=st.integers(1, 9),
    step=st.integers(1, 13),
    fetch_ahead=st.integers(0, 5),
)
@example(lengths=(0, 0, 0, 9), window=4, step=1, fetch_ahead=2)
def test_a_shuffled_epoch_is_read_once_and_every_sample_comes_once(
    lengths: Lengths, window: int, step: int, fetch_ahead: int
) -> None:
    stream, order = Numbered(lengths), LaneOrder(lengths, seed=2, window=window)
    samples = samples_of(
        stream, 2 * window, fetch_ahead=fetch_ahead, is_counted=True, window=window
    )
    source = StreamSource(samples, ())
    for epoch in range(2):
        for start in range(0, order.samples_per_epoch, step):
            stop = min(start + step, order.samples_per_epoch)
            ids = order.indices(epoch, start, stop)
            assert source.read(ids, epoch)["id"].tolist() == ids.tolist()
        assert all(open_count <= epoch + 1 for open_count in stream.open_counts)


def test_what_was_just_read_is_at_hand_and_what_is_behind_it_is_read_again() -> None:
    stream = Numbered((1000,))
    samples = samples_of(stream, keep=10)
    samples.take(np.arange(400, 501))
    assert ids_of(samples, 491, 500) == [491, 500]
    assert stream.open_counts == [1]
    assert ids_of(samples, 290) == [290]
    assert stream.open_counts == [2]


def test_a_lane_is_read_from_a_seek_point_on_where_there_is_one() -> None:
    stream = Numbered((1000,), spacing=10)
    samples = samples_of(stream, window=5)
    assert ids_of(samples, 903) == [903]
    assert stream.samples_read == 904
    for number, at_most in ((903, 0), (447, 8), (3, 4), (902, 3), (888, 9)):
        before = stream.samples_read
        assert ids_of(samples, number) == [number]
        assert stream.samples_read - before <= at_most
    assert stream.open_counts == [5]


def test_as_many_as_were_asked_for_at_once_are_kept_twice() -> None:
    """Or steps read ahead, and read again because a size has changed, would cost the whole lane."""
    stream = Numbered((1000,))
    samples = samples_of(stream, keep=2)
    for first in range(0, 900, 50):
        samples.take(np.arange(first, first + 50))
    assert ids_of(samples, 850) == [850]
    assert ids_of(samples, 800) == [800]
    assert stream.open_counts == [1]


@pytest.mark.parametrize("fetch_ahead", [0, 16])
def test_memory_stays_bounded(fetch_ahead: int) -> None:
    stream = Numbered((4000, 4000))
    order = LaneOrder(stream.lengths, seed=1, window=32)
    samples = samples_of(stream, keep=64, fetch_ahead=fetch_ahead, is_counted=True, window=32)
    for start in range(0, 8000, 16):
        samples.take(order.indices(0, start, start + 16))
    samples.take(np.array([0, 1]))  # a seek through nearly all
    samples.take(np.array([7990, 7991]))
    assert stream.most_alive <= 2 * (64 + 32 + 2 * fetch_ahead)


@pytest.mark.parametrize(("later", "what"), [(7, "ended after 7 samples"), (9, "goes on")])
@pytest.mark.parametrize("fetch_ahead", [0, 1, 20])
def test_another_length_the_next_time_is_an_error(later: int, what: str, fetch_ahead: int) -> None:
    stream = Numbered((8,))
    samples = samples_of(stream, keep=2, fetch_ahead=fetch_ahead)
    samples.read({0: range(19, 20)})
    assert samples.counts == [8]
    stream.lengths = (later,)
    assert ids_of(samples, 0) == [0]
    with pytest.raises(StreamChanged, match=f"lane 0 {what}, .* it had 8"):
        samples.take(np.array([7]))


def test_a_sample_outside_the_stream_is_refused() -> None:
    samples = samples_of(Numbered((5, 3)))
    with pytest.raises(IndexError, match="sample 3 of lane 1, which has 3"):
        samples.take(np.array([7]))
    with pytest.raises(IndexError, match="sample -1"):
        samples.take(np.array([-1]))


def test_all_lanes_are_asked_for_before_the_first_is_waited_for() -> None:
    """So that workers read them side by side, also when a run goes on far within a stream."""
    stream = Numbered((500, 500, 500))
    requests: list[tuple[int, int, int]] = []
    reader = Later(stream)

    def ask(lane: int, begin: int, count: int) -> Future[Chunk]:
        requests.append((lane, begin, count))
        return reader.ask(lane, begin, count)

    lanes = HostedLanes(ask, lambda: None, fetch_ahead=7)
    samples = LaneSamples(stream, lanes, [None] * 3, keep=4)
    ids_of(samples, 1200, 1201, 1202)
    assert requests[:3] == [(0, 400, 1), (1, 400, 1), (2, 400, 1)]
    assert requests[3:] == [(0, 401, 7), (1, 401, 7), (2, 401, 7)]


@pytest.mark.parametrize("fetch_ahead", [0, 3, 50])
def test_what_comes_before_a_failure_is_still_read_and_the_failure_stays(fetch_ahead: int) -> None:
    stream = Numbered((20,), fails_at=12)
    samples = samples_of(stream, keep=4, fetch_ahead=fetch_ahead)
    assert ids_of(samples, 8) == [8]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            samples.take(np.arange(8, 13))
    assert ids_of(samples, 9, 10, 11) == [9, 10, 11]
    assert stream.open_counts == [1]
    assert ids_of(samples, 2) == [2]


@settings(deadline=None, max_examples=80)
@given(
    lengths=lengths_of_lanes.filter(any),
    window=st.integers(1, 9),
    step=st.integers(1, 13),
    fetch_ahead=st.integers(0, 5),
)
def test_an_open_stream_gives_what_a_counted_one_gives_and_finds_its_end(
    lengths: Lengths, window: int, step: int, fetch_ahead: int
) -> None:
    stream, order = Numbered(lengths), LaneOrder([None] * len(lengths), seed=2, window=window)
    ends: list[Sequence[int]] = []
    samples = samples_of(stream, 2 * max(window, step), fetch_ahead=fetch_ahead, window=window)
    source = OpenStreamSource(samples, order, ends.append)
    closed_order = LaneOrder(lengths, seed=2, window=window)
    for epoch in range(2):
        start, going_on = 0, True
        while going_on:
            end = source.explore(start, start + step)
            stop = min(start + step, end)
            ids = order.indices(epoch, start, stop)
            assert ids.tolist() == closed_order.indices(epoch, start, stop).tolist()
            assert source.read(ids, epoch)["id"].tolist() == ids.tolist()
            assert source.weights(ids) == (ids + 1).sum()
            going_on = end > start + step
            start = stop
        assert start == end == order.samples_per_epoch == sum(lengths)
    assert max(stream.open_counts) <= 2
    assert ends == [[*lengths]]


@settings(deadline=None, max_examples=80)
@given(
    lengths=lengths_of_lanes.filter(any),
    window=st.integers(1, 9),
    step=st.integers(1, 13),
    start=st.integers(0, 120),
    spacing=st.integers(1, 7),
)
def test_an_open_stream_may_begin_anywhere_also_beyond_its_end(
    lengths: Lengths, window: int, step: int, start: int, spacing: int
) -> None:
    """As a run that goes on in an epoch whose length is not known here."""
    stream, order = (
        Numbered(lengths, spacing=spacing),
        LaneOrder([None] * len(lengths), 2, window),
    )
    samples = samples_of(stream, 2 * window, window=window)
    source = OpenStreamSource(samples, order)
    closed_order = LaneOrder(lengths, seed=2, window=window)
    end = source.explore(start, start + step)
    if start >= closed_order.samples_per_epoch:
        assert end == order.samples_per_epoch == closed_order.samples_per_epoch
    stop = min(start + step, end)
    if start < stop:
        ids = order.indices(0, start, stop)
        assert ids.tolist() == closed_order.indices(0, start, stop).tolist()
        assert source.read(ids)["id"].tolist() == ids.tolist()


def test_the_end_of_an_epoch_is_known_when_the_last_step_fills_up_to_it() -> None:
    """Or the next step would be planned in an epoch that is over."""
    order = LaneOrder([None] * 2, window=4)
    source = OpenStreamSource(samples_of(Numbered((8, 8)), keep=8), order)
    assert source.explore(0, 8) >= 9
    assert source.explore(8, 16) == 16 == order.samples_per_epoch


def test_going_on_far_within_a_stream_holds_few_samples() -> None:
    stream = Numbered((3000, 10, 3000))
    order = LaneOrder([None] * 3, seed=1, window=8)
    source = OpenStreamSource(samples_of(stream, keep=16, window=8), order)
    source.explore(5000, 5016)
    ids = order.indices(0, 5000, 5016)
    assert source.read(ids)["id"].tolist() == ids.tolist()
    assert max(stream.open_counts) == 1
    assert stream.most_alive < 3 * (16 + 8 + 16)


def test_a_stream_without_samples_is_refused() -> None:
    source = OpenStreamSource(samples_of(Numbered((0, 0))), LaneOrder([None] * 2))
    with pytest.raises(StreamUnfit, match="the stream has no samples"):
        source.explore(0, 4)
