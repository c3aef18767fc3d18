from __future__ import annotations

import ast
import builtins
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.text import corpus
from instar.data.text.corpus import open_corpus


def documents(source: str | Path, text_field: str = "text") -> list[str]:
    text_corpus = open_corpus(str(source), text_field)
    number = np.arange(text_corpus.sizes.size)
    parts = np.stack([number, np.zeros_like(number), text_corpus.sizes], axis=1)
    return ["".join(pieces) for pieces in text_corpus.texts(parts)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve\r\ntext", newline="")
    assert documents(tmp_path / "a.txt") == ["naïve\r\ntext"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufefftext".encode())
    assert documents(tmp_path / "a.txt") == ["text"]


@pytest.mark.parametrize("depth", [201, 100_000])
def test_a_line_that_is_nested_too_deep_is_named(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "x": ' + "[" * depth + "]" * depth + "}\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2.* nested more than 200 levels deep"):
        documents(path)
    # brackets in a text are none, and neither are those side by side
    path.write_text('{"text": "' + "[" * 999 + '\\"", "x": [' + "[]," * 300 + "[]]}\n")
    assert documents(path) == ["[" * 999 + '"']


def test_json_lines_are_documents_and_blank_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two \\u00e9", "more": 1}\n')
    assert documents(path) == ["one", "two é"]


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.ndjson", [{"body": "one"}, {"body": "two"}])
    assert documents(path, "body") == ["one", "two"]


def test_parquet_rows_are_documents_and_nulls_are_empty(tmp_path: Path) -> None:
    texts = [f"row {number} é" for number in range(3000)]
    texts[7] = None  # type: ignore[call-overload]
    pq.write_table(pa.table({"text": texts, "n": range(3000)}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == [text or "" for text in texts]


def test_a_folder_is_searched_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2.md", "b/1.py", "a.txt", "c.png", ".git/config.txt", "b/__pycache__/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_rows(tmp_path / "b" / "rows.jsonl", [{"text": "row 1"}, {"text": "row 2"}])
    assert documents(tmp_path) == ["a.txt", "b/1.py", "b/2.md", "row 1", "row 2"]


def test_a_glob_is_searched(tmp_path: Path) -> None:
    for name in ("x/1.txt", "x/y/2.txt", "x/3.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "**" / "*.txt") == ["x/1.txt", "x/y/2.txt"]


def test_the_standard_library_is_source_without_its_tests() -> None:
    text_corpus = open_corpus("stdlib", "text")
    assert 5e6 < text_corpus.sizes.sum() < 60e6
    largest = int(text_corpus.sizes.argmax())
    (text,) = (
        "".join(p) for p in text_corpus.texts(np.array([[largest, 0, text_corpus.sizes[largest]]]))
    )
    ast.parse(text)


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=60), cuts=st.lists(st.integers(0, 250), max_size=4))
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_parts_of_a_document_join_up_whatever_bytes_they_are_cut_at(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, text: str, cuts: list[int]
) -> None:
    text = text.replace("\ufeff", "")
    path = tmp_path_factory.getbasetemp() / f"cut.{suffix}"
    path.write_bytes((text if suffix == "txt" else json.dumps({"text": text})).encode())
    if not text:
        return
    text_corpus = open_corpus(str(path), "text")
    edges = sorted({0, *(min(cut, text_corpus.sizes[0]) for cut in cuts), text_corpus.sizes[0]})
    parts = [
        "".join(next(text_corpus.texts(np.array([[0, begin, end]]))))
        for begin, end in itertools.pairwise(edges)
    ]
    assert "".join(parts) == text


def test_a_large_file_comes_in_pieces_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PIECE_BYTES", 64)
    text = "".join(f"Zeile {number} über etwas\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    text_corpus = open_corpus(str(tmp_path / "a.txt"), "text")
    pieces = list(next(text_corpus.texts(np.array([[0, 0, text_corpus.sizes[0]]]))))
    assert "".join(pieces) == text
    assert len(pieces) > 30
    assert all(piece.endswith("\n") for piece in pieces)


def test_only_the_documents_asked_for_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(5)])
    (tmp_path / "b.txt").write_text("text")
    text_corpus = open_corpus(str(tmp_path), "text")
    parts = np.array([[1, 0, 5], [3, 2, 5], [5, 0, 4]])
    assert ["".join(pieces) for pieces in text_corpus.texts(parts)] == ["row 1", "w 3", "text"]
    assert path.exists()


def test_what_cannot_be_decoded_is_located(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 3 + "schön".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 text: byte 18 "):
        documents(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1]", "not a JSON object but a list"),
        ("{", "not JSON"),
        ('{"body": "x"}', r"'text' is missing \(keys: body\)"),
        ('{"text": 3}', "'text' is not text"),
        ('{"text": "x", "y": +1}', "not JSON"),
    ],
)
def test_a_bad_json_line_is_located(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=says) as error:
        open_corpus(str(path), "text")
    assert error.value.problems[0].where == f"{path}:3"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"body": ["x"]}, r"no column 'text' \(columns: body\)"),
        ({"text": [[1, 2]]}, "cannot read column 'text' as text"),
    ],
)
def test_a_parquet_file_without_text_is_refused(
    tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=says):
        open_corpus(str(tmp_path / "a.parquet"), "text")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not a parquet file, only its name")
    with pytest.raises(ConfigError, match="cannot read column"):
        open_corpus(str(tmp_path / "a.parquet"), "text")


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ConfigError, match=r"pip install 'instar\[hf\]'"):
        open_corpus(str(tmp_path / "a.parquet"), "text")


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    for source, says in (("no.txt", "no file or folder"), ("*.txt", "no file matches")):
        with pytest.raises(ConfigError, match=says):
            open_corpus(str(tmp_path / source), "text")


def test_a_folder_of_save_to_disk_is_told_the_kind_that_reads_it(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"no text files; .* data\.source of data\.kind: rows"):
        open_corpus(str(tmp_path), "text")
    (tmp_path / "notes.txt").write_text("a text beside it")
    assert len(open_corpus(str(tmp_path), "text").sizes) == 1
    (tmp_path / "README.md").write_text("of the data set")
    assert len(open_corpus(str(tmp_path), "text").sizes) == 1
    (tmp_path / "state.json").unlink()  # a file of Arrow among texts, as in a repository of code
    (tmp_path / "dataset_info.json").unlink()
    assert len(open_corpus(str(tmp_path), "text").sizes) == 2


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no text files") as told:
        open_corpus(str(tmp_path), "text")
    assert "did you mean" not in str(told.value)  # the folder that was named
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        open_corpus(str(tmp_path / "a.txt"), "text")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ConfigError, match="no text in its 2 files"):
        open_corpus(str(tmp_path), "text")
