"""Every kind of data takes the same files for rows, and reads the same texts from them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.split import whole_documents
from instar.data.text.chat import conversations
from instar.data.text.corpus import open_corpus
from instar.data.text.dataset import create_dataset_files
from instar.data.text.documents import Documents
from instar.data.text.hf import column_of, load_rows
from instar.data.text.streams.items import open_items

TEXTS = [f"row {number} of text é" for number in range(12)]
EXPECTED = ["", *TEXTS]
"""with a null, which is an empty document"""


def of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def texts(first: str | None = None) -> list[dict[str, Any]]:
    return [{"text": text} for text in (first, *TEXTS)]


ROWS = texts()
SPLIT = [ROWS[:5], ROWS[5:9], ROWS[9:]]


def parquet(place: Path, kind: pa.DataType | None = None, empty: bool = False) -> None:
    for number, rows in enumerate(SPLIT):
        values = [row["text"] for row in rows]
        if kind is not None and "binary" in str(kind):
            values = [None if value is None else value.encode() for value in values]
        column = pa.array(values, pa.string() if kind is None or "dict" in str(kind) else kind)
        table = pa.table({"text": column.cast(kind) if kind is not None else column})
        if number == 1 and not empty:
            table = table.append_column("further", pa.array([[1]] * len(table)))
        pq.write_table(table, place / f"p{number}.parquet")
    if empty:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), place / "p0a.parquet")


def lines(place: Path) -> None:
    for number, rows in enumerate(SPLIT):
        further = {"further": [number, {"deep": None}]} if number == 1 else {}
        (place / f"p{number}.jsonl").write_bytes(of([row | further for row in rows]))


def write_packed(ending: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda place: (place / f"p.jsonl.{ending}").write_bytes(pack(of(ROWS))) and None


def write_as_python(place: Path) -> None:
    """Rows as `json.dumps` writes them: NaN and what is infinite in keys that are not read, halves of characters."""
    further = {"score": float("nan"), "bounds": [float("inf"), -float("inf")], "tag": "\ud800"}
    content = of([row | further for row in ROWS])
    content = content.replace(b"-Infinity", b"-1e999")
    (place / "p.jsonl").write_bytes(content)


FILES: dict[str, Callable[[Path], Any]] = {
    "an empty Parquet shard": lambda place: parquet(place, empty=True),
    "a further column in Parquet": parquet,
    "large strings": lambda place: parquet(place, pa.large_string()),
    "string views": lambda place: parquet(place, pa.string_view()),
    "bytes": lambda place: parquet(place, pa.binary()),
    "dictionaries": lambda place: parquet(place, pa.dictionary(pa.int32(), pa.string())),
    "a further key in JSON lines": lines,
    "a byte order mark": lambda place: (place / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + of(ROWS)),
    "a JSON array": lambda place: (place / "p.json").write_text(json.dumps(ROWS, indent=1)),
    "JSON lines named .json": lambda place: (place / "p.json").write_bytes(of(ROWS)),
    "what Python writes as JSON": write_as_python,
    "gzip": write_packed("gz", gzip.compress),
    "bzip2": write_packed("bz2", bz2.compress),
    "xz": write_packed("xz", lzma.compress),
    "zstandard": write_packed("zst", zstandard.compress),
}


def tokens(source: str) -> list[str]:
    corpus = open_corpus(source, "text")
    every = whole_documents(np.arange(len(corpus.sizes)), corpus.sizes)
    return ["".join(pieces) for pieces in corpus.texts(every)]


def rows(source: str) -> list[str]:
    column = column_of(load_rows(DataConfig(kind="rows", source=source)), "text")
    return [text or "" for text in column.to_pylist()]


def stream(source: str) -> list[str]:
    items = open_items(DataConfig(kind="stream", source=source, val_source=source, lanes=1))
    return [text for _, _, batch in items.open(0) for text in batch if isinstance(text, str)]


READERS = {"tokens": tokens, "rows": rows, "stream": stream}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("files", FILES)
def test_kinds_read_the_same_rows(tmp_path: Path, files: str, kind: str) -> None:
    (tmp_path / "in").mkdir()
    FILES[files](tmp_path / "in")
    assert READERS[kind](str(tmp_path / "in" / "p*")) == EXPECTED
    assert READERS[kind](str(tmp_path / "in")) == EXPECTED


@pytest.mark.parametrize("files", ["p.jsonl", "p.json"])
@pytest.mark.parametrize("kind", ["tokens", "stream"])
def test_halves_of_characters_are_question_marks(tmp_path: Path, files: str, kind: str) -> None:
    content = '{"text": "a\\ud800b\\ud83d\\ude00", "score": NaN}'
    (tmp_path / files).write_text(f"[{content}]" if files == "p.json" else content)
    assert READERS[kind](str(tmp_path / files)) == ["a?b😀"]


@pytest.mark.parametrize(
    "files", ["a byte order mark", "a JSON array", "what Python writes as JSON", "gzip"]
)
def test_conversations_are_read_from_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    monkeypatch.setitem(globals(), "ROWS", [{"messages": turns}] * 7)
    FILES[files](tmp_path)
    (file,) = tmp_path.iterdir()
    assert len(list(conversations(str(file), DataConfig(kind="chat")))) == 7


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("ending", PACKERS)
def test_a_packed_file_that_is_cut_or_damaged_is_named(
    tmp_path: Path, ending: str, kind: str
) -> None:
    """Wherever it is cut: no row is lost without a word."""
    file = tmp_path / f"p.jsonl.{ending}"
    parts = [
        PACKERS[ending](of([{"text": f"{number} {text}"} for text in TEXTS])) for number in (0, 1)
    ]
    file.write_bytes(b"".join(parts))
    assert len(READERS[kind](str(file))) == 2 * len(TEXTS)
    damaged_bytes = bytearray(parts[0])
    damaged_bytes[len(damaged_bytes) // 2] ^= 255
    cuts = (1, len(parts[0]) // 2, len(parts[0]) - 1)
    for content in (
        *(parts[0] + parts[1][:cut] for cut in cuts),
        parts[1][:9],
        bytes(damaged_bytes),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"p\.jsonl\.{ending}"):
            READERS[kind](str(file))


BAD: dict[str, tuple[str, bytes]] = {
    "a row without the text": ("p.jsonl", of([*ROWS, {"body": "x"}])),
    "a number": ("p.jsonl", of([*ROWS, {"text": 3}])),
    "a list": ("p.jsonl", of([*ROWS, {"text": ["a"]}])),
    "no JSON": ("p.jsonl", of(ROWS) + b"{"),
    "JSON nested deep": (
        "p.jsonl",
        of(ROWS) + b'{"text": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    ),
    "JSON without rows": ("p.json", b'"a text"'),
    "an array of texts": ("p.json", b'["a", "b"]'),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_row_is_refused_by_every_kind_at_its_place(
    tmp_path: Path, case: str, kind: str
) -> None:
    name, content = BAD[case]
    file = tmp_path / "in" / name
    file.parent.mkdir()
    file.write_bytes(content)
    for source in (file, file.parent):
        with pytest.raises(ConfigError, match=rf"{name}"):
            READERS[kind](str(source))


@pytest.mark.parametrize("column", [{"body": ["x"]}, {"text": [1]}])
@pytest.mark.parametrize("kind", READERS)
def test_a_shard_without_the_text_is_named(
    tmp_path: Path, kind: str, column: dict[str, Any]
) -> None:
    parquet(tmp_path)
    pq.write_table(pa.table(column), tmp_path / "p3.parquet")
    # a stream opens a file when it reads it
    expected = (ConfigError, pa.ArrowException) if kind == "stream" else ConfigError
    with pytest.raises(expected) as error:
        READERS[kind](str(tmp_path / "p*"))
    message = " ".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert "p3.parquet" in message
    assert "text" in message if "body" in column else "holds int64" in message


def test_a_stream_with_an_empty_shard_is_counted_for_ranks(tmp_path: Path) -> None:
    parquet(tmp_path, empty=True)
    (tmp_path / "held.txt").write_text("held out text\n" * 9)
    data = DataConfig(
        kind="stream",
        source=str(tmp_path / "p*.parquet"),
        val_source=str(tmp_path / "held.txt"),
        path=str(tmp_path / "set"),
        lanes=2,
    )
    messages: list[str] = []
    create_dataset_files(data, 1, world_size=2, say=messages.append)
    count = len("\n".join(TEXTS).encode())
    assert messages[-1] == f"counted: {count - 1:,} tokens"  # without a separator between the lanes


def test_ids_of_json_lines_are_those_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(of([{"ids": [1, 2], "x": 1}, {"ids": []}, {"ids": [3]}]))
    data = DataConfig(kind="rows", source=str(tmp_path / "p.jsonl"), tokens_field="ids")
    assert column_of(load_rows(data), "ids").to_pylist() == [[1, 2], [], [3]]
    assert Documents(ids=column_of(load_rows(data), "ids")).sizes.tolist() == [16, 0, 8]
