"""Folders of rows: the splits and rows that `datasets` finds there, read as files are."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import parametrize_first

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.hf import load_rows, load_stream
from instar.data.text.prepare import prepare_dataset
from instar.data.text.streams.items import open_items


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def rows_of(name: str) -> list[dict[str, Any]]:
    return [{"text": f"{name} {number}", "n": number} for number in range(3)]


def write_jsonl(file: Path) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows_of(file.name)).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_csv(file: Path) -> None:
    with file.open("w", newline="") as csv_file:
        writer = csv.DictWriter(
            csv_file, ["text", "n"], delimiter="\t" if "tsv" in file.name else ","
        )
        writer.writeheader()
        writer.writerows(rows_of(file.name))


def write_parquet(file: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of(file.name)), file)


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_jsonl,
    ".json": lambda file: file.write_text(json.dumps(rows_of(file.name))) and None,
    ".csv": write_csv,
    ".tsv": write_csv,
    ".parquet": write_parquet,
    ".txt": lambda file: file.write_text(file.name) and None,
}
LAYOUTS = {
    "plain": ["b", "a10", "a9", "sub/c", "sub/deeper/d"],
    "names of splits": ["train-1", "train-0", "validation", "my_test_2"],
    "folders of splits": ["train/b", "train/a", "dev/a", "eval/b"],
    "shards of the hub": ["data/train-00001-of-00002", "data/train-00000-of-00002", "data/extra-00000-of-00001"],
    "hidden": [".hidden", "a", ".cache/b", "__pycache__/c"],
}  # fmt: skip


@parametrize_first("suffix", WRITERS, first=18)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_has_the_splits_and_rows_that_datasets_finds(
    tmp_path: Path, layout: str, suffix: str
) -> None:
    for name in LAYOUTS[layout]:
        file = tmp_path / "in" / f"{name}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[suffix](file)
    options = {"sample_by": "document"} if suffix == ".txt" else {}
    expected = datasets.load_dataset(str(tmp_path / "in"), **options)
    for split, rows in expected.items():
        data = DataConfig(kind="rows", source=str(tmp_path / "in"), source_split=str(split))
        assert load_rows(data)["text"][:] == rows["text"][:]
        assert [row["text"] for row in load_stream(data)] == rows["text"][:]
    with pytest.raises(ConfigError, match=f"it has: {', '.join(expected)}\n"):
        load_rows(DataConfig(source=str(tmp_path / "in"), source_split="nowhere"))


def folder_of(place: Path, kind: str, further: int) -> str:
    """Three files of rows, of which one has a further column."""
    place.mkdir()
    for number in range(3):
        row: dict[str, Any] = {"text": f"0{number}", "n": 1}
        row |= {"further": [{"x": None}] if kind == "jsonl" else 7} if number == further else {}
        file = place / f"{number}.{kind}"
        match kind:
            case "jsonl":
                file.write_text(json.dumps(row) + "\n")
            case "csv":
                file.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
            case "parquet":
                pq.write_table(pa.Table.from_pylist([row]), file)
    return str(place)


@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_further_column_in_one_file_of_a_folder_is_not_read(
    tmp_path: Path, kind: str, further: int
) -> None:
    data = DataConfig(source=folder_of(tmp_path / "in", kind, further), lanes=1)
    # digits of CSV are text, too
    assert load_rows(data)["text"][:] == ["00", "01", "02"]
    assert [row["text"] for row in load_stream(data)] == ["00", "01", "02"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_split_that_is_not_read_needs_no_text(tmp_path: Path, kind: str) -> None:
    folder_of(tmp_path / "train", kind, 3)
    folder_of(tmp_path / "other", kind, 3)
    for file in (tmp_path / "other").iterdir():
        if kind == "parquet":
            pq.write_table(pa.table({"body": ["x"]}), file)
        else:
            file.write_text('{"body": "x"}\n' if kind == "jsonl" else "body\nx\n")
    (tmp_path / "other").rename(tmp_path / "test")
    data = DataConfig(source=str(tmp_path))
    assert load_rows(data)["text"][:] == ["00", "01", "02"]
    for load in (load_rows, load_stream):
        with pytest.raises(ConfigError, match=r"test/0\.\w+(:1:| has no column 'text')"):
            load(data.model_copy(update={"source_split": "test"}))


def test_what_a_card_says_of_csv_and_json_is_heeded(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;n\na,b;1\n")
    (tmp_path / "a.json").write_text('{"data": [{"text": "within"}]}')
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: semi\n  data_files: a.csv\n  sep: ;\n---\n"
    )
    data = DataConfig(source=str(tmp_path), subset="semi")
    assert load_rows(data)["text"][:] == ["a,b"]
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: in\n  data_files: a.json\n  field: data\n---\n"
    )
    data = DataConfig(source=str(tmp_path), subset="in")
    assert load_rows(data)["text"][:] == ["within"]


def test_links_to_names_without_an_ending_are_read_by_their_own(tmp_path: Path) -> None:
    """As the cache of the hub keeps snapshots."""
    (tmp_path / "blobs").mkdir()
    write_jsonl(tmp_path / "blobs" / "x.jsonl.gz")
    (tmp_path / "blobs" / "x.jsonl.gz").rename(tmp_path / "blobs" / "0a1b")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jsonl.gz").symlink_to("../blobs/0a1b")
    for source in ("in", "in/x.jsonl.gz", "in/*"):
        rows = load_rows(DataConfig(source=str(tmp_path / source)))
        assert rows["text"][:] == [row["text"] for row in rows_of("x.jsonl.gz")]


def test_what_datasets_itself_refuses_is_said_with_file_columns_and_the_way_out(
    tmp_path: Path,
) -> None:
    folder = Path(folder_of(tmp_path / "in", "jsonl", 2))
    archive = tmp_path / "packed" / "rows.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as zip_file:
        for file in sorted(folder.iterdir()):
            zip_file.write(file, file.name)
    data = DataConfig(source=str(archive.parent), lanes=1)
    says = r"same columns.*1 new columns \({'further'}\)(.|\n)*give the files themselves"
    with pytest.raises(ConfigError, match=rf"packed.*{says}"):
        load_rows(data)
    with pytest.raises(ConfigError, match=rf"lane 0 \(rows\.zip\), item \d+.*{says}"):
        list(open_items(data).open(0))


def test_a_saved_data_set_without_splits_has_only_its_own(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    data = DataConfig(source=str(tmp_path / "saved"))
    assert load_rows(data)["text"][:] == ["a"]
    with pytest.raises(ConfigError, match="no split 'test', it has: train"):
        load_rows(data.model_copy(update={"source_split": "test"}))


def test_files_that_are_in_no_split_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("train.jsonl", "more.jsonl", "test.jsonl"):
        (folder / name).write_text('{"text": "some text"}\n' * 40)
    (folder / "notes.txt").write_text("text")
    messages: list[str] = []
    prepare_dataset(
        DataConfig(kind="rows", source=str(folder)), 1, tmp_path / "set", messages.append
    )
    assert f"left out of {folder}: more.jsonl, notes.txt" in messages
    assert f"splits of {folder} that are not trained on (data.source_split): test" in messages


def test_splits_of_a_saved_data_set_that_are_not_used_are_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["some text"] * 40})
    splits = datasets.DatasetDict({"train": rows, "validation": rows})
    splits.save_to_disk(tmp_path / "saved")
    source = str(tmp_path / "saved")
    messages: list[str] = []
    prepare_dataset(DataConfig(kind="rows", source=source), 1, tmp_path / "set", messages.append)
    message = f"splits of {source} that are not trained on (data.source_split): validation"
    assert messages.count(message) == 1


def test_a_split_that_is_held_out_is_not_called_unused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("train", "validation"):
        lines = "".join(f'{{"text": "{name} text {number}"}}\n' for number in range(40))
        (folder / f"{name}.jsonl").write_text(lines)
    messages: list[str] = []
    val = str(folder / "validation.jsonl")
    data = DataConfig(kind="rows", source=str(folder), val_source=val, tokenizer="byte")
    prepare_dataset(data, 1, tmp_path / "set", messages.append)
    assert not [text for text in messages if text.startswith("splits of")]
