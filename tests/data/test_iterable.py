from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.columns import Ragged
from instar.data.text.streams.items import FunctionLane, RowLanes, open_items
from instar.data.text.streams.samples import TokenLanes
from instar.data.text.tokenizer import ByteTokenizer


def lane(items: RowLanes | FunctionLane, number: int = 0, part: int = 0, row: int = 0) -> list[Any]:
    """A lane's texts, or its ids as lists."""
    contents: list[Any] = []
    for _, _, batch in items.open(number, part, row):
        if isinstance(batch, Ragged):
            ends = np.cumsum(batch.sizes)
            contents += [ids.tolist() for ids in np.split(batch.flat, ends[:-1])]
        else:
            contents += batch
    return contents


def tokens_of(data: DataConfig) -> TokenLanes:
    return TokenLanes(open_items(data), ByteTokenizer(), ids=False)


def parquet(folder: Path, *files: list[Any], name: str = "text", kind: Any = None) -> str:
    for number, rows in enumerate(files):
        table = pa.table({"id": list(range(len(rows))), name: pa.array(rows, kind)})
        pq.write_table(table, folder / f"part-{number:02d}.parquet")
    return str(folder / "*.parquet")


def stream_of(folder: Path, *files: list[Any], name: str = "text", **options: Any) -> Any:
    source = parquet(folder, *files, name=name, **options)
    return datasets.load_dataset("parquet", data_files=source, split="train", streaming=True)


def rows(stream: Any, *, lanes: int = 8, field: str = "text", ids: bool = False) -> RowLanes:
    return RowLanes(stream, "rows", field, ids=ids, lanes=lanes)


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), lanes=st.integers(1, 8))
def test_lanes_end_to_end_are_the_stream(tmp_path: Path, sizes: list[int], lanes: int) -> None:
    for old in tmp_path.glob("*.parquet"):
        old.unlink()
    texts = [[f"{file}.{row}" for row in range(size)] for file, size in enumerate(sizes)]
    items = rows(stream_of(tmp_path, *texts, kind=pa.string()), lanes=lanes)
    assert items.lanes == min(lanes, len(sizes))
    lane_texts = [lane(items, number) for number in range(items.lanes)]
    assert [text for part in lane_texts for text in part] == [
        text for part in texts for text in part
    ]
    assert [lane(items, number) for number in range(items.lanes)] == lane_texts
    # whole files, neighbours, the first lanes with one more
    per_lane = np.array_split(np.arange(len(sizes)), items.lanes)
    assert [len(part) for part in lane_texts] == [
        sum(sizes[file] for file in files) for files in per_lane
    ]


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.csv", "rows.arrow"])
def test_rows_of_other_formats_are_read(tmp_path: Path, file: str) -> None:
    texts = ["one", "", 'with "quotes"', "two\nlines", "ä"]
    dataset = datasets.Dataset.from_dict({"text": texts})
    path = tmp_path / file
    if path.suffix == ".jsonl":
        dataset.to_json(path)
    elif path.suffix == ".csv":
        dataset.to_csv(path)
    else:
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_stream(sink, dataset.features.arrow_schema) as out,
        ):
            out.write_table(dataset.data.table)
    tokens = tokens_of(DataConfig(kind="stream", source=str(path)))
    documents = [bytes(ids.tolist()).decode() for *_, batch in tokens.open(0) for ids in batch]
    assert documents == [text for text in texts if text]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 3)]
)
def test_ids_are_read_from_lists_of_any_integers(tmp_path: Path, kind: pa.DataType) -> None:
    ids = [[row, row + 1, 7] for row in range(600)]
    stream = stream_of(tmp_path, ids[:300], ids[300:], name="ids", kind=kind)
    items = rows(stream, lanes=1, field="ids", ids=True)
    assert lane(items) == ids


def test_a_folder_of_save_to_disk_is_a_stream_of_lanes(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"text {row}" for row in range(50)]})
    dataset.save_to_disk(tmp_path / "saved")
    data = DataConfig(kind="stream", source=str(tmp_path / "saved"), lanes=3)
    tokens = tokens_of(data)
    assert tokens.lanes == 3
    assert sum(len(batch) for number in range(3) for *_, batch in tokens.open(number)) == 50


def test_a_generator_is_read_row_by_row() -> None:
    def generate(parts: list[int]) -> Iterator[dict[str, Any]]:
        for part in parts:
            yield from ({"text": f"{part}.{row}", "row": row} for row in range(3))

    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": [0, 1]})
    items = rows(stream)
    assert [lane(items, number) for number in range(2)] == [
        ["0.0", "0.1", "0.2"],
        ["1.0", "1.1", "1.2"],
    ]


def test_a_stream_that_is_mapped_is_read_through_its_function(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, ["a", "b"], ["c"]).map(lambda row: {"text": row["text"].upper()})
    items = rows(stream)
    assert [lane(items, number) for number in range(2)] == [["A", "B"], ["C"]]


def test_a_stream_that_is_shuffled_or_shared_already_is_refused(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, ["a", "b"], ["c"])
    shuffled_stream = stream.shuffle(seed=1, buffer_size=2)
    for unfit in (shuffled_stream, shuffled_stream.map(lambda row: row), shuffled_stream.take(2)):
        with pytest.raises(ConfigError, match="rows is already shuffled"):
            rows(unfit)
    stream.set_epoch(1)
    with pytest.raises(ConfigError, match="rows is already shuffled"):
        rows(stream)
    shared = split_dataset_by_node(stream_of(tmp_path, ["a"]), 0, 2)
    with pytest.raises(ConfigError, match="rows is already shared out among nodes"):
        rows(shared)


@pytest.mark.parametrize("null", [0, 3, 299])
def test_a_null_is_an_empty_document(tmp_path: Path, null: int) -> None:
    texts: list[str | None] = [f"text {row}" for row in range(300)]
    texts[null] = None
    items = rows(stream_of(tmp_path, ["fine"], texts, kind=pa.string()))
    documents = [text for _, _, batch in items.open(1) for text in batch]
    assert documents == [text or "" for text in texts]


@pytest.mark.parametrize(
    ("bad", "what"), [(None, "nothing"), ([1, None], "a list with nothing in it")]
)
def test_ids_with_a_null_are_named_after_the_rows_before_them(
    tmp_path: Path, bad: Any, what: str
) -> None:
    ids = [[1, 2], [], [3], bad, [4]]
    stream = stream_of(tmp_path, ids, name="ids", kind=pa.list_(pa.int32()))
    batches = rows(stream, field="ids", ids=True).open(0)
    assert np.split(next(batches)[2].flat, [2])[0].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=rf"item 3: 'ids' is {what}, not a list of token ids"):
        next(batches)


def test_a_field_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, ["a"])
    with pytest.raises(ConfigError, match=r"no field 'body' \(fields: id, text\)"):
        rows(stream, field="body")
    with pytest.raises(ConfigError, match=r"item 0: 'id' is int64, not text"):
        lane(rows(stream, field="id"))
    with pytest.raises(ConfigError, match=r"item 0: 'text' is string, not a list of token ids"):
        lane(rows(stream, field="text", ids=True))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, ["a"], ["b" * 99])
    path = tmp_path / "part-01.parquet"
    path.write_bytes(path.read_bytes()[:-99])
    with pytest.raises(pa.ArrowInvalid) as error:
        lane(rows(stream), 1)
    assert any("lane 1 (part-01.parquet), item 0" in note for note in error.value.__notes__)


def test_fingerprints_tell_streams_apart(tmp_path: Path) -> None:
    first = stream_of(tmp_path, ["a", "b"], ["c"])
    sources = [rows(first), rows(first, lanes=1), rows(first, field="id")]
    longer = stream_of(tmp_path, ["a", "b"], ["c" * 50, "d"])
    sources.append(rows(longer))
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert rows(longer).fingerprint == sources[-1].fingerprint


def function(source: Any, *, ids: bool = False) -> FunctionLane:
    return FunctionLane(
        lambda: source() if callable(source) else source, "mine:make", "text", ids=ids
    )


def test_a_function_returns_any_iterable(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("a\nb\n")

    def generate() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in "ab")

    for source, expected in (
        (["a", "b"], ["a", "b"]),
        (generate, ["a", "b"]),
        (lambda: iter("ab"), ["a", "b"]),
        (lambda: file.open(), ["a\n", "b\n"]),
        ([], []),
    ):
        items = function(source)
        assert lane(items) == lane(items) == expected


def test_a_function_may_return_token_ids() -> None:
    documents = [[1, 2], np.array([3], dtype=np.uint8), {"text": (4, 5)}, []]
    assert lane(function(documents, ids=True)) == [[1, 2], [3], [4, 5], []]


def test_a_torch_loader_is_an_iterable_too() -> None:
    samples = [{"text": text} for text in ("a", "b", "c")]
    items = function(lambda: torch.utils.data.DataLoader(samples, batch_size=None))
    assert lane(items) == ["a", "b", "c"]
    tensors = function([torch.tensor([1, 2]), torch.tensor([3])], ids=True)
    assert lane(tensors) == [[1, 2], [3]]


def test_the_same_iterator_twice_is_refused() -> None:
    iterator = iter(["a"])
    items = function(iterator)
    assert lane(items) == ["a"]
    with pytest.raises(ConfigError, match=r"the same iterator again.*return a new iterable"):
        lane(items)


def test_what_is_no_iterable_is_refused() -> None:
    with pytest.raises(ConfigError, match="mine:make returned an object of type int"):
        lane(function(7))


@pytest.mark.parametrize(
    ("ids", "bad", "what"),
    [
        (False, None, "'text' is nothing, not text"),
        (False, 7, "'text' is int, not text"),
        (False, ["a"], "'text' is list, not text"),
        (False, {"body": "a"}, r"there is no field 'text' \(fields: body\)"),
        (True, None, "'text' is nothing, not a list of token ids"),
        (True, "abc", "'text' is str, not a list of token ids"),
        (True, [1.5], "'text' is list, not a list of token ids"),
        (True, [[1], [2, 3]], "'text' is list, not a list of token ids"),
        (True, [[1]], "'text' is list, not a list of token ids"),
        (True, [True], "'text' is list, not a list of token ids"),
    ],
)
def test_a_strange_item_is_named_after_those_before_it(ids: bool, bad: Any, what: str) -> None:
    good: list[Any] = [[1], [2]] if ids else ["a", "b"]
    batches = function([*good, bad, *good], ids=ids).open(0)
    assert len(next(batches)[2]) == 2
    with pytest.raises(ConfigError, match=rf"mine:make, item 2: {what}"):
        next(batches)


def test_what_the_function_raises_on_the_way_comes_after_the_items_before_it() -> None:
    def generate() -> Iterator[str]:
        yield "a"
        raise OSError("the network is gone")

    batches = function(generate).open(0)
    assert next(batches) == (0, 0, ["a"])
    with pytest.raises(OSError, match="the network is gone"):
        next(batches)


def test_a_config_names_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_stream.py").write_text("def texts():\n    return ['ab', '', 'c']\n")
    monkeypatch.syspath_prepend(tmp_path)
    tokens = tokens_of(DataConfig(kind="python", source="my_stream:texts"))
    assert [ids.tolist() for *_, batch in tokens.open(0) for ids in batch] == [[97, 98], [99]]
