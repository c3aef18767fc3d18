from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ways

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.source import TokenWindows
from instar.data.text import prepare as module
from instar.data.text.dataset import TokenData, create_dataset_files, open_data
from instar.data.text.documents import open_rows, read_row_index
from instar.data.text.origin import default_path
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import TokenDataset, open_dataset
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe

TEXTS = [
    f"Document {number}: "
    + "some words, "
    + "and more  of them\n    indented\n" * (number % 7)
    + ("naïve café 再见" if number % 3 else "null")
    for number in range(80)
]
TEXTS[5], TEXTS[30] = "", "\n".join(f"a line of a long document, {n}" for n in range(400))
HELD_OUT = {"val_fraction": 0.15, "test_fraction": 0.1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def ensure_rows(data: DataConfig, seed: int) -> TokenDataset:
    return open_rows(prepare_dataset(data, seed))


def train_rows(rows: TokenDataset) -> list[int]:
    """The rows of the training split."""
    return read_row_index(rows.path, rows.tokenizer_fingerprint).rows.tolist()


def write(kind: str, folder: Path, columns: dict[str, Any]) -> str:
    """Columns in one of the ways to keep rows."""
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            rows = pa.table(columns).to_pylist()
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "parquet":
            pq.write_table(pa.table(columns), path, row_group_size=17)
        case "csv":
            fields = ('"' + text.replace('"', '""') + '"' for text in columns["text"])
            path.write_text("text\n" + "".join(f"{text}\n" for text in fields))
        case "text":
            path.mkdir()
            for number, text in enumerate(columns["text"]):
                (path / f"{number:03d}.txt").write_text(text)
        case "saved":
            datasets.Dataset.from_dict(columns).save_to_disk(
                path, num_shards=min(3, *map(len, columns.values()))
            )
    return str(path)


def windows(dataset: Any, split: str, context: int = 16) -> list[list[int]]:
    source = TokenWindows(dataset.split(split), context)
    return source.read(np.arange(len(source)))["targets"].tolist()


def other_shards(folder: Path, data: DataConfig) -> TokenDataset:
    """The token shards of the same documents, prepared from JSON lines."""
    if not data.source.endswith(".text"):
        source = write("jsonl", folder, {"text": TEXTS})
        data = data.model_copy(update={"source": source})
    return open_dataset(
        prepare_dataset(data.model_copy(update={"kind": "tokens"}), 3, folder / "shards")
    )


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "text", "saved"])
def test_packed_rows_are_the_token_shards_of_the_same_documents(
    tmp_path: Path, kind: str, tokenizer: str
) -> None:
    data = DataConfig(
        kind="rows",
        source=write(kind, tmp_path, {"text": TEXTS}),
        path=str(tmp_path / "set"),
        tokenizer=tokenizer,
        vocab_size=300,
        **HELD_OUT,
    )
    rows = ensure_rows(data, 3)
    other = other_shards(tmp_path, data)
    assert rows.tokenizer_fingerprint == other.tokenizer_fingerprint
    assert rows.vocab_size == other.vocab_size
    for split in ("train", "val", "test"):
        assert windows(rows, split) == windows(other, split)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_packed_ids_are_the_token_shards_of_the_same_documents(tmp_path: Path, kind: str) -> None:
    (tmp_path / "val.txt").write_text("held out " * 50)
    bpe = train_bpe(TEXTS, 300)
    (tmp_path / "bpe.json").write_text(bpe.to_json())
    texts = DataConfig(
        source=write("jsonl", tmp_path, {"text": TEXTS}),
        tokenizer=str(tmp_path / "bpe.json"),
        val_source=str(tmp_path / "val.txt"),
    )
    other = open_dataset(prepare_dataset(texts, 3, tmp_path / "shards"))
    ids = [[*bpe.encode(text).tolist(), bpe.end_id] if text else [] for text in TEXTS]
    held_out = [bpe.encode("held out " * 50).tolist()]
    (tmp_path / "v").mkdir()
    data = texts.model_copy(
        update={
            "kind": "rows",
            "source": write(kind, tmp_path, {"ids": ids}),
            "val_source": write(kind, tmp_path / "v", {"ids": held_out}),
            "tokens_field": "ids",
            "path": str(tmp_path / "set"),
        }
    )
    rows = ensure_rows(data, 3)
    train, expected = rows.split("train"), other.split("train")
    assert len(train) == len(expected) + 1  # the user ended the last document too
    assert np.array_equal(train.read(0, len(expected)), expected.read(0, len(expected)))
    assert np.array_equal(
        rows.split("val").read(0, len(rows.split("val"))),
        other.split("val").read(0, len(other.split("val"))),
    )


def test_ids_are_held_out_by_whole_documents(tmp_path: Path) -> None:
    ids = [[number % 250] * (number % 5 + 1) for number in range(200)]
    data = DataConfig(
        kind="rows",
        source=write("parquet", tmp_path, {"ids": ids}),
        tokens_field="ids",
        path=str(tmp_path / "set"),
        **HELD_OUT,
    )
    rows = ensure_rows(data, 3)
    splits = {
        name: rows.split(name).read(0, len(rows.split(name))).tolist()
        for name in ("train", "val", "test")
    }
    assert sorted(itertools.chain(*splits.values())) == sorted(itertools.chain(*ids))
    assert 0.1 < len(splits["val"]) / sum(map(len, ids)) < 0.2
    assert splits["train"] == [token for number in train_rows(rows) for token in ids[number]]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(
        kind="rows",
        source=write("jsonl", tmp_path, {"text": TEXTS}),
        path=str(tmp_path / "set"),
        tokenizer="bpe",
        vocab_size=300,
        **HELD_OUT,
    )


def test_training_needs_the_shards_alone(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = windows(ensure_rows(config, 3), "train")
    Path(config.source).unlink()
    shutil.rmtree(tmp_path / "cache")
    messages: list[str] = []
    assert windows(open_rows(prepare_dataset(config, 3, say=messages.append)), "train") == before
    assert "rows.jsonl is not there; the tokens in" in messages[0]

    def never(*_: Any) -> Any:
        raise AssertionError("the rows were read")

    monkeypatch.setattr(module, "load_rows", never)
    monkeypatch.setattr("instar.data.text.documents._encode_parts", never)
    assert windows(open_rows(config.path or ""), "train") == before


def save_texts(folder: Path, kind: str, texts: list[bytes]) -> DataConfig:
    """A folder of `save_to_disk` whose texts are of an Arrow type."""
    features = datasets.Features({"text": datasets.Value(kind)})
    values = [text.decode() for text in texts] if kind == "string" else texts
    datasets.Dataset.from_dict({"text": values}, features).save_to_disk(folder / kind)
    return DataConfig(kind="rows", source=str(folder / kind), path=str(folder / f"set-{kind}"))


def test_texts_may_be_kept_as_bytes(tmp_path: Path) -> None:
    texts = [text.encode() for text in TEXTS]
    kinds = ("string", "binary", "large_binary")
    rows = [ensure_rows(save_texts(tmp_path, kind, texts), 3) for kind in kinds]
    assert len({set_.fingerprint for set_ in rows}) == 1
    assert windows(rows[0], "train") == windows(rows[1], "train") == windows(rows[2], "train")
    with pytest.raises(ConfigError, match=r"'text' of .*binary is not UTF-8 text") as refusal:
        ensure_rows(save_texts(tmp_path / "other", "binary", [*texts, b"\xff\xfe"]), 3)
    assert refusal.value.problems[0].key == "data.text_field"


@pytest.mark.parametrize(
    ("kind", "fingerprint"),
    [
        ("rows of text", "b0d3a84c1b2a5a28119ce021e0cf5a5d"),
        ("rows of ids", "cc28253dc4e5fd40f09ed3be3bfb0cc6"),
        ("a mixture of rows", "fe5e5136cd152be11635a69982400e8a"),
    ],
)
def test_checkpoints_know_rows_by_the_same_fingerprint_in_every_version(
    tmp_path: Path, kind: str, fingerprint: str
) -> None:
    data = ways.config(ways.make_rows(tmp_path), kind, path=str(tmp_path / "set"))
    create_dataset_files(data, ways.SEED)
    assert open_data(data, ways.SEED).fingerprint == fingerprint


def test_what_is_prepared_is_left_as_it_is(config: DataConfig) -> None:
    first = ensure_rows(config, 3)
    times = {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()}
    assert ensure_rows(config, 3).fingerprint == first.fingerprint
    assert {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()} == times
    assert set(times) >= {"dataset.json", "tokenizer.json", "index-train.safetensors"}


def test_copied_rows_are_the_same_rows(config: DataConfig) -> None:
    before = ensure_rows(config, 3)
    os.utime(config.source, (1, 1))
    after = ensure_rows(config, 3)
    assert after.fingerprint == before.fingerprint
    assert windows(after, "train") == windows(before, "train")


@pytest.mark.parametrize("field", [None, "ids"])
@pytest.mark.parametrize(
    "change", [lambda rows: rows[:-1], lambda rows: [*rows, rows[0]], lambda rows: rows[::-1]]
)
def test_other_rows_are_refused(
    tmp_path: Path, field: str | None, change: Callable[[list[Any]], list[Any]]
) -> None:
    ids = [[number % 256] * 5 for number in range(100)]
    columns = {"text": [f"word {number}" for number in range(100)], "ids": ids}
    data = DataConfig(
        kind="rows",
        source=write("parquet", tmp_path, columns),
        path=str(tmp_path / "set"),
        tokens_field=field,
    )
    prepare_dataset(data, 3)
    write("parquet", tmp_path, {name: change(rows) for name, rows in columns.items()})
    os.utime(data.source, (1, 1))
    with pytest.raises(ConfigError, match=r"have changed .*since .*set was prepared"):
        prepare_dataset(data, 3)


def test_the_fingerprint_tells_rows_tokenizer_and_seed(tmp_path: Path, config: DataConfig) -> None:
    def fingerprint_of(seed: int, **change: Any) -> str:
        path = str(tmp_path / f"set-{seed}-{len(change)}-{change}"[:60])
        return ensure_rows(config.model_copy(update=change | {"path": path}), seed).fingerprint

    first = fingerprint_of(1)
    fingerprints = [
        fingerprint_of(2),
        fingerprint_of(1, tokenizer="byte"),
        fingerprint_of(1, vocab_size=310),
    ]
    assert len({first, *fingerprints}) == 4
    assert fingerprint_of(1, text_field="text") == first


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "foreign"])
def test_a_damaged_index_is_named(config: DataConfig, damage: str) -> None:
    file = prepare_dataset(config, 3) / "index-train.safetensors"
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:-5])
    elif damage == "flipped":
        content[-20] ^= 1
        file.write_bytes(content)
    elif damage == "foreign":
        shutil.copy(file.parent / "val-00000.safetensors", file)
    with pytest.raises(ConfigError, match=r"index-train\.safetensors: "):
        open_rows(file.parent)


def test_a_folder_made_otherwise_is_refused(config: DataConfig) -> None:
    prepare_dataset(config, 3)
    for change, says in (
        ({"kind": "tokens"}, "kind='rows', not 'tokens'"),
        ({"text_field": "body"}, "text_field='text', not 'body'"),
        ({"source_split": "test"}, "source_split='train', not 'test'"),
        ({"val_source": "x.txt"}, "val_source=None, not 'x.txt'"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare_dataset(config.model_copy(update=change), 3)


def test_too_few_documents_to_hold_some_out_ask_for_a_val_source(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one document " * 20)
    data = DataConfig(kind="rows", source=str(tmp_path / "one.txt"), path=str(tmp_path / "set"))
    with pytest.raises(ConfigError, match=r"data\.val_source: .* too few or too unequal"):
        prepare_dataset(data, 3)
    assert not (tmp_path / "set").exists()
    data = data.model_copy(update={"val_source": data.source})
    rows = ensure_rows(data, 3)
    assert bytes(rows.split("train").read(0, 8).tolist()) == b"only one"
    total = sum(len(rows.split(name)) for name in ("val", "test"))
    assert total == len(rows.split("train")) == 360


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer": "bpe", "tokens_field": "ids"}, "bpe tokenizer cannot be trained on token"),
        ({"tokenizer": "nothing.json"}, r"no tokenizer: 'nothing\.json'; give byte, char, bpe, "),
        ({"tokens_field": "ids"}, "row 3 of .*: the token 999 .* has 256 tokens"),
        ({"text_field": "blank"}, "the rows of .* are all empty"),
    ],
)
def test_what_cannot_be_prepared_is_said(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    columns = {"text": ["a"] * 5, "ids": [[1], [2], [3], [999], [5]], "blank": [""] * 5}
    data = DataConfig(kind="rows", source=write("parquet", tmp_path, columns))
    with pytest.raises(ConfigError, match=says):
        prepare_dataset(data.model_copy(update=change), 3, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_what_is_prepared_is_said(config: DataConfig) -> None:
    messages: list[str] = []
    prepare_dataset(config, 3, say=messages.append)
    assert "79 documents" in messages[0]
    assert messages[-1].startswith("tokens: train ")


def test_some_bytes_are_whole_documents(tmp_path: Path, config: DataConfig) -> None:
    write("jsonl", tmp_path, {"text": [f"word {number:03d}" for number in range(200)]})
    rows = ensure_rows(config.model_copy(update={"max_bytes": 300, "tokenizer": "byte"}), 3)
    words = [
        bytes(rows.split(name).read(0, len(rows.split(name))).tolist()).split(b"\n")
        for name in ("train", "val", "test")
    ]
    assert len({*itertools.chain(*words)}) == 38  # of eight bytes each
    assert {*map(len, itertools.chain(*words))} == {8}


def test_documents_are_samples_without_packing(config: DataConfig) -> None:
    rows = ensure_rows(config, 3)
    data = config.model_copy(update={"packing": False})
    samples, _ = TokenData(data, 3, rows).samples(32, 3)
    tokenizer = load_saved_tokenizer(rows.path)
    assert len(samples) == len(train_rows(rows))
    batch: Any = samples.read(np.arange(len(samples)))
    for row, number in enumerate(train_rows(rows)):
        expected = [*tokenizer.encode(TEXTS[number]).tolist(), tokenizer.end_id][:33]
        valid = batch["targets"][row] >= 0
        assert batch["targets"][row][valid].tolist() == expected[1:]


def test_the_default_folder_tells_kinds_apart() -> None:
    ways = [
        DataConfig(source="a.jsonl"),
        DataConfig(source="a.jsonl", kind="rows"),
        DataConfig(source="a.jsonl", kind="rows", tokens_field="ids"),
        DataConfig(source="a.jsonl", kind="rows", source_split="test"),
        DataConfig(source="a.jsonl", kind="rows", subset="en"),
        DataConfig(source="a.jsonl", val_source="b.jsonl"),
    ]
    assert len({default_path(data, 1) for data in ways}) == len(ways)


def test_no_rank_needs_torch_to_open_rows(tmp_path: Path) -> None:
    source = write("saved", tmp_path, {"text": TEXTS})
    program = (
        "import sys; from instar.config.language import DataConfig\n"
        "from instar.data.text.prepare import prepare_dataset\n"
        "from instar.data.text.documents import open_rows\n"
        "data = DataConfig(kind='rows', source=sys.argv[1], path=sys.argv[2])\n"
        "prepare_dataset(data, 1)\n"
        "open_rows(sys.argv[2]).split('train').read(0, 100)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(
        [sys.executable, "-c", program, source, tmp_path / "set"], env=environment, check=True
    )
