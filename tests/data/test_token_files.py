"""Files of token ids of nanoGPT and llm.c are data sets like their text; what is none is refused by name."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from nano_gpt import TEXT, ids_of, write_data

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import TokenDataset, open_dataset
from instar.data.text.tokenizer import load_saved_tokenizer

END = int(0.9 * len(TEXT))


def prepare_tokens(folder: Path, source: str | Path, **keys: object) -> TokenDataset:
    data = DataConfig(
        source=str(source), **{"tokenizer": str(folder / "squares" / "meta.pkl"), **keys}
    )
    return open_dataset(prepare_dataset(data, 0, folder / "data"))


def tokens(dataset: TokenDataset, split: str) -> list[int]:
    return dataset.split(split).read(0, len(dataset.split(split))).tolist()


def with_header(file: Path, kind: int, ids: np.ndarray, count: int | None = None) -> Path:
    """Write a file of llm.c."""
    header = struct.pack("<3i", kind, 1, ids.size if count is None else count)
    file.write_bytes(header.ljust(1024, b"\0") + ids.tobytes())
    return file


def test_ids_of_nanogpt_are_the_tokens(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "squares")
    dataset = prepare_tokens(
        tmp_path, folder / "train.bin", val_source=str(folder / "val.bin"), test_fraction=0.0
    )
    assert tokens(dataset, "train") == ids_of(TEXT[:END]).tolist()
    assert tokens(dataset, "val") == ids_of(TEXT[END:]).tolist()
    assert {*dataset.splits} == {"train", "val"}
    tokenizer = load_saved_tokenizer(dataset.path)
    assert tokenizer.decode(tokens(dataset, "val")) == TEXT[END:]
    assert tokenizer.vocab_size == len(set(TEXT))


def test_the_end_of_one_file_is_held_out(tmp_path: Path) -> None:
    """Every id is in one split, also where a share ends within one."""
    folder = write_data(tmp_path / "squares")
    dataset = prepare_tokens(tmp_path, folder / "train.bin", val_fraction=0.07, test_fraction=0.05)
    parts = [tokens(dataset, split) for split in ("train", "val", "test")]
    assert [*chain(*parts)] == ids_of(TEXT[:END]).tolist()
    assert [len(part) / END for part in parts] == pytest.approx([0.88, 0.07, 0.05], abs=1e-3)


@pytest.mark.parametrize(("kind", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_files_of_llm_c_have_a_header(kind: int, dtype: str, tmp_path: Path) -> None:
    write_data(tmp_path / "squares")
    ids = ids_of(TEXT)
    for number, part in enumerate(np.array_split(ids, 3)):
        with_header(tmp_path / f"squares_train_{number:06}.bin", kind, part.astype(dtype))
    val = with_header(tmp_path / "val.bin", kind, ids[:50].astype(dtype))
    dataset = prepare_tokens(
        tmp_path, tmp_path / "squares_train_*.bin", val_source=str(val), test_fraction=0.0
    )
    assert tokens(dataset, "train") == ids.tolist()
    assert tokens(dataset, "val") == ids[:50].tolist()


def test_text_is_held_out_beside_ids(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "squares")
    (tmp_path / "val.txt").write_text(TEXT[:300])
    dataset = prepare_tokens(
        tmp_path, folder / "train.bin", val_source=str(tmp_path / "val.txt"), test_fraction=0.0
    )
    assert tokens(dataset, "val") == ids_of(TEXT[:300]).tolist()


def damage(kind: str, folder: Path) -> Path:
    file = folder / "squares" / "train.bin"
    match kind:
        case "an id outside the vocabulary":
            np.array([1, 2, 24, 3], dtype=np.uint16).tofile(file)
        case "half an id":
            file.write_bytes(file.read_bytes()[:-1])
        case "fewer than the header says":
            with_header(file, 20240520, ids_of(TEXT), count=10**6)
        case "a folder":
            return file.parent
        case "nothing":
            file.write_bytes(b"")
    return file


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("an id outside the vocabulary", r"holds the id 24, and the vocabulary .* has 24 tokens"),
        ("half an id", r"ids have 2 each: not a file of token ids, or cut short"),
        ("fewer than the header says", r"its header says 1,000,000 ids, and [\d,]+\.0 follow"),
        ("a folder", r"no text files; token ids are read from a file or a glob, such as .*\.bin"),
        ("nothing", r"train\.bin is empty"),
    ],
)
def test_what_holds_no_ids_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    write_data(tmp_path / "squares")
    with pytest.raises(ConfigError, match=message):
        prepare_tokens(tmp_path, damage(kind, tmp_path))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_no_tokenizer_is_trained_on_ids(kind: str, tmp_path: Path) -> None:
    folder = write_data(tmp_path / "squares")
    with pytest.raises(ConfigError, match=f"a {kind} tokenizer cannot be trained on token ids"):
        prepare_tokens(tmp_path, folder / "train.bin", tokenizer=kind)
