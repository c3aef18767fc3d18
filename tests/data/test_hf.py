from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.hf import column_of, load_rows, load_stream

TEXTS = ["one\n  two\n", "", "null", "thrée"]
IDS = [[1, 2], [], [3], [4, 5, 6]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text_rows() -> list[dict[str, Any]]:
    return [{"text": text, "ids": ids} for text, ids in zip(TEXTS, IDS, strict=True)]


def write(kind: str, folder: Path) -> str:
    """The texts, and the ids where the format has lists, in one of the ways to keep rows."""
    table = pa.table({"text": TEXTS, "ids": IDS})
    match kind:
        case "jsonl":
            return jsonl(folder / "a.jsonl", text_rows())
        case "json":
            (folder / "a.json").write_text(json.dumps(text_rows()))
            return str(folder / "a.json")
        case "csv":
            csv_rows = ",".join(f'"{text}"' for text in TEXTS).replace(",", ",1\n")
            (folder / "a.csv").write_text(f"text,n\n{csv_rows},1\n")
            return str(folder / "a.csv")
        case "parquet":
            pq.write_table(table, folder / "a.parquet")
            return str(folder / "a.parquet")
        case "glob":
            pq.write_table(table.slice(0, 1), folder / "x-1.parquet")
            pq.write_table(table.slice(1), folder / "x-2.parquet")
            return str(folder / "x-*.parquet")
        case "arrow":
            with pa.ipc.new_stream(folder / "a.arrow", table.schema) as file:
                file.write_table(table)
            return str(folder / "a.arrow")
        case "saved":
            datasets.Dataset(table).save_to_disk(folder / "saved")
            return str(folder / "saved")
        case "splits":
            datasets.DatasetDict(train=datasets.Dataset(table)).save_to_disk(folder / "splits")
            return str(folder / "splits")
        case "hub":
            (folder / "hub" / "data").mkdir(parents=True)
            pq.write_table(table, folder / "hub/data/train-00000-of-00001.parquet")
            pq.write_table(table.slice(0, 2), folder / "hub/data/test-00000-of-00001.parquet")
            (folder / "hub" / "README.md").write_text("# Four rows\n")
            return str(folder / "hub")
    raise ValueError(kind)


KINDS = ["jsonl", "json", "csv", "parquet", "glob", "arrow", "saved", "splits", "hub"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_those_that_were_written(tmp_path: Path, kind: str) -> None:
    data = DataConfig(source=write(kind, tmp_path))
    assert load_rows(data)["text"][:] == TEXTS
    assert [row["text"] for row in load_stream(data)] == TEXTS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "csv"])
def test_lists_of_ids_are_read_too(tmp_path: Path, kind: str) -> None:
    data = DataConfig(source=write(kind, tmp_path), tokens_field="ids")
    rows = load_rows(data)
    assert rows["ids"][:] == IDS
    assert column_of(rows, "ids").to_pylist() == IDS


@pytest.mark.parametrize("pattern", ["", "*.txt", "[b]1.txt"])
def test_a_text_file_is_one_document(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b1.txt", "b2.txt"):
        (folder / name).write_text(f"{name}\n\n  second line", encoding="utf-8-sig")
    data = DataConfig(source=str(folder / pattern))
    expected = ["b1.txt\n\n  second line", "b2.txt\n\n  second line"]
    expected = expected[:1] if "[" in pattern else expected
    assert load_rows(data)["text"][:] == expected
    assert [row["text"] for row in load_stream(data)] == expected


def test_a_name_may_look_like_a_pattern(tmp_path: Path) -> None:
    data = DataConfig(source=jsonl(tmp_path / "a[1].jsonl", [{"text": "x"}]))
    assert load_rows(data)["text"][:] == ["x"]


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    assert load_rows(DataConfig(source=str(tmp_path / "a.jsonl.gz")))["text"][:] == ["x"]


def test_another_split_and_a_share_of_one(tmp_path: Path) -> None:
    source = write("hub", tmp_path)
    assert load_rows(DataConfig(source=source, source_split="test"))["text"][:] == TEXTS[:2]
    assert load_rows(DataConfig(source=source, source_split="train[:50%]"))["text"][:] == TEXTS[:2]
    joint_rows = load_rows(DataConfig(source=source, source_split="test+train"))
    assert joint_rows["text"][:] == TEXTS[:2] + TEXTS


def test_a_subset_is_chosen_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    jsonl(folder / "en.jsonl", [{"text": "hello"}])
    jsonl(folder / "de.jsonl", [{"text": "hallo"}])
    card = "---\nconfigs:\n"
    for name in ("en", "de"):
        card += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    (folder / "README.md").write_text(f"{card}---\n")
    for load in (load_rows, load_stream):
        assert next(iter(load(DataConfig(source=str(folder), subset="de"))))["text"] == "hallo"
        with pytest.raises(ConfigError, match=r"data\.subset: BuilderConfig 'fr'.*'en', 'de'"):
            load(DataConfig(source=str(folder), subset="fr"))


def test_rows_that_change_are_loaded_anew(tmp_path: Path) -> None:
    data = DataConfig(source=jsonl(tmp_path / "a.jsonl", [{"text": "old"}]))
    before = load_rows(data)
    assert load_rows(data)._fingerprint == before._fingerprint
    jsonl(tmp_path / "a.jsonl", [{"text": "new"}])
    os.utime(tmp_path / "a.jsonl", (1, 1))
    after = load_rows(data)
    assert after["text"][:] == ["new"]
    assert after._fingerprint != before._fingerprint


def test_a_chosen_order_of_rows_is_the_columns() -> None:
    rows = datasets.Dataset.from_dict({"text": list("abc")}).select([2, 0])
    assert column_of(rows, "text").to_pylist() == ["c", "a"]


@pytest.mark.parametrize("load", [load_rows, load_stream])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_field": "body"}, r"data\.text_field: .* no column 'body' \(columns: text, ids\)"),
        ({"tokens_field": "tokens"}, r"data\.tokens_field: .* no column 'tokens'"),
        ({"text_field": "ids"}, r"the column 'ids' of .* holds list<.*int64>, not text"),
        ({"tokens_field": "text"}, "the column 'text' of .* holds string, not lists of token ids"),
        ({"source_split": "val"}, r"data\.source_split: .* no split 'val', it has: train"),
    ],
)
def test_what_the_rows_do_not_have_is_named(
    tmp_path: Path, load: Any, change: dict[str, Any], says: str
) -> None:
    for kind in ("hub", "splits", "parquet"):
        data = DataConfig(source=write(kind, tmp_path))
        with pytest.raises(ConfigError, match=says):
            load(data.model_copy(update=change))


@pytest.mark.parametrize("load", [load_rows, load_stream])
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing.jsonl", "there is no file or folder .*nothing.jsonl"),
        ("*.json", r"no file matches .*\*.json"),
        ("a/b/c", "there is no file or folder .*a/b/c"),
        ("a.pdf", "a.pdf: rows are not read from files like this; known are .parquet"),
        ("mixed/*", "the files are of several kinds: .csv, .jsonl"),
        ("bad.parquet", "bad.parquet cannot be loaded: .*Parquet"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("nothing_here", "nothing_here"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, load: Any, source: str, says: str) -> None:
    (tmp_path / "mixed").mkdir()
    for name in ("a.pdf", "mixed/a.csv", "mixed/b.jsonl", "bad.parquet"):
        (tmp_path / name).write_text("text\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "nothing_here").mkdir()
    with pytest.raises(ConfigError, match=says):
        load(DataConfig(source=str(tmp_path / source)))


def test_a_damaged_row_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: this line is not JSON"):
        load_rows(DataConfig(source=str(tmp_path / "a.jsonl")))


def test_a_truncated_arrow_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    source = write("saved", tmp_path)
    (file,) = Path(source).glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_rows(DataConfig(source=source))


@pytest.mark.parametrize("source", ["someone/rows", "rows"])
def test_without_a_network_a_name_on_the_hub_is_said_to_be_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not a file or folder here, and the hub cannot be"):
        load_rows(DataConfig(source=source))


@pytest.mark.parametrize("source", ["json", "text", "parquet"])
def test_the_name_of_a_format_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    write("jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no file or folder"):
        load_rows(DataConfig(source=source))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'instar\[hf\]'"):
        load_rows(DataConfig(source="rows"))


def test_the_library_says_nothing_and_is_left_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verbosity = datasets.utils.logging.get_verbosity()
    bars = datasets.utils.are_progress_bars_disabled()
    load_rows(DataConfig(source=write("hub", tmp_path)))
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ConfigError):
        load_rows(DataConfig(source=str(tmp_path / "bad.jsonl")))
    assert capfd.readouterr() == ("", "")
    assert datasets.utils.logging.get_verbosity() == verbosity
    assert datasets.utils.are_progress_bars_disabled() == bars
    assert logging.getLogger("huggingface_hub").level <= logging.WARNING
