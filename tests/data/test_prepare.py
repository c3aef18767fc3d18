from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.split import divide
from instar.data.text import prepare as preparing
from instar.data.text.origin import default_path
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import TokenDataset, open_dataset
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe, train_char
from instar.data.text.verify import verify_tokens


def ensure_dataset(data: DataConfig, seed: int) -> TokenDataset:
    return open_dataset(prepare_dataset(data, seed))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A hundred documents, each a word of its own."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"word{n:03d}"}) + "\n" for n in range(100)))
    return path


def texts_of(folder: Path) -> dict[str, str]:
    dataset, tokenizer = open_dataset(folder), load_saved_tokenizer(folder)
    return {
        name: tokenizer.decode(split.read(0, len(split)).tolist())
        for name, split in dataset.splits.items()
    }


@pytest.mark.parametrize(
    ("tokenizer", "separator"), [("byte", "\n"), ("char", "\n"), ("bpe", "<|end|>")]
)
def test_documents_are_split_whole_and_kept_apart(
    tmp_path: Path, rows: Path, tokenizer: Any, separator: str
) -> None:
    data = DataConfig(
        source=str(rows), tokenizer=tokenizer, vocab_size=300, val_fraction=0.2, test_fraction=0.1
    )
    folder = prepare_dataset(data, seed=5, path=tmp_path / "set")
    words = {name: text.split(separator) for name, text in texts_of(folder).items()}
    assert {name: len(documents) for name, documents in words.items()} == {
        "train": 70,
        "val": 20,
        "test": 10,
    }
    documents = [word for split in words.values() for word in split]
    if tokenizer != "char":  # held-out characters may be unknown
        assert sorted(documents) == [f"word{n:03d}" for n in range(100)]
    verify_tokens(open_dataset(folder))


def test_the_seed_alone_decides_who_is_held_out(tmp_path: Path, rows: Path) -> None:
    data = DataConfig(source=str(rows))
    held_out = [
        texts_of(prepare_dataset(data, seed, tmp_path / name))["val"]
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    ]
    assert held_out[0] == held_out[1] != held_out[2]
    assert open_dataset(tmp_path / "a").fingerprint == open_dataset(tmp_path / "b").fingerprint


def test_one_document_is_split_by_position(tmp_path: Path) -> None:
    text = "".join(f"{number:04d}\n" for number in range(1000))
    (tmp_path / "one.txt").write_text(text)
    data = DataConfig(source=str(tmp_path / "one.txt"), val_fraction=0.1, test_fraction=0.2)
    assert texts_of(prepare_dataset(data, 1, tmp_path / "set")) == {
        "train": text[:3500],
        "val": text[3500:4000],
        "test": text[4000:],
    }


def test_without_a_test_fraction_there_is_no_test_split(tmp_path: Path, rows: Path) -> None:
    folder = prepare_dataset(DataConfig(source=str(rows), test_fraction=0.0), 1, tmp_path / "set")
    assert list(open_dataset(folder).splits) == ["train", "val"]


@pytest.mark.parametrize(
    ("sizes", "val", "test", "expected"),
    [
        ([1, 1], 0.25, 0.25, {"train": 1, "val": 1, "test": 0}),
        ([3] * 5, 0.02, 0.2, {"train": 12, "val": 0, "test": 3}),
        ([1000] * 1000, 0.0005, 0.0005, {"train": 999_000, "val": 500, "test": 500}),
    ],
)
def test_a_share_of_less_than_a_byte_of_each_document_is_one_of_all_end_to_end(
    sizes: list[int], val: float, test: float, expected: dict[str, int]
) -> None:
    parts = divide(np.array(sizes, dtype=np.int64), val, test, 0)
    assert {name: int(np.diff(rows[:, 1:]).sum()) for name, rows in parts.items()} == expected


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60).filter(any),
    val=st.floats(0.01, 0.4),
    test=st.floats(0.0, 0.4),
    seed=st.integers(0, 2**63 - 1),
)
def test_splits_are_disjoint_and_together_everything(
    sizes: list[int], val: float, test: float, seed: int
) -> None:
    document_sizes = np.array(sizes, dtype=np.int64)
    coverage = [np.zeros(size, dtype=int) for size in sizes]
    for parts in divide(document_sizes, val, test, seed).values():
        assert np.all(np.diff(parts[:, 0]) > 0)
        for document, begin, end in parts:
            coverage[document][begin:end] += 1
    assert all((document == 1).all() for document in coverage)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=400),
    val=st.floats(0.02, 0.3),
    test=st.floats(0.02, 0.3),
    seed=st.integers(0, 1000),
)
def test_splits_have_nearly_the_sizes_asked_for(
    sizes: list[int], val: float, test: float, seed: int
) -> None:
    document_sizes = np.array(sizes, dtype=np.int64)
    parts = divide(document_sizes, val, test, seed)
    for name, share in (("train", 1 - val - test), ("val", val), ("test", test)):
        size = int((parts[name][:, 2] - parts[name][:, 1]).sum())
        assert abs(size - share * document_sizes.sum()) <= max(
            0.5 * share * document_sizes.sum(), 1
        )


def test_max_bytes_takes_whole_documents_from_all_over(tmp_path: Path, rows: Path) -> None:
    data = DataConfig(source=str(rows), max_bytes=7 * 30 + 3, val_fraction=0.2)
    words = " ".join(texts_of(prepare_dataset(data, 1, tmp_path / "set")).values()).split()
    numbers = sorted(int(word[4:]) for word in words if len(word) == 7)
    assert len(numbers) == 30
    assert numbers[0] < 25
    assert numbers[-1] > 75
    assert sum(map(len, words)) == 7 * 30 + 3


def test_bpe_is_trained_on_no_more_than_a_sample(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(source=str(rows), tokenizer="bpe", vocab_size=400)
    prepare_dataset(data, 1, tmp_path / "whole")
    monkeypatch.setattr(preparing, "_BPE_SAMPLE_BYTES", 7)
    prepare_dataset(data, 1, tmp_path / "sampled")
    full_set, small_set = (open_dataset(tmp_path / name) for name in ("whole", "sampled"))
    assert 257 < small_set.vocab_size < full_set.vocab_size


def test_held_out_characters_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abcab" * 20 + "xyz\n" * 5)
    data = DataConfig(
        source=str(tmp_path / "one.txt"), tokenizer="char", val_fraction=0.1, test_fraction=0.05
    )
    texts = texts_of(prepare_dataset(data, 1, tmp_path / "set"))
    assert "<unk>" in texts["val"]
    assert "<unk>" not in texts["train"]


def test_a_prepared_set_is_opened_again_and_not_made_again(tmp_path: Path, rows: Path) -> None:
    data = DataConfig(source=str(rows), path=str(tmp_path / "set"))
    first = ensure_dataset(data, 1)
    made_at = (tmp_path / "set" / "dataset.json").stat().st_mtime_ns
    second = ensure_dataset(data, 1)
    assert (tmp_path / "set" / "dataset.json").stat().st_mtime_ns == made_at
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": "stdlib"}, "source='.*', not 'stdlib'"),
        ({"tokenizer": "char"}, "tokenizer='byte', not 'char'"),
        ({"max_bytes": 100}, "max_bytes=None, not 100"),
        ({"val_fraction": 0.1}, "val_fraction=0.05, not 0.1"),
        ({"text_field": "body"}, "text_field='text', not 'body'"),
    ],
)
def test_a_set_made_otherwise_is_refused_by_name(
    tmp_path: Path, rows: Path, change: dict[str, Any], says: str
) -> None:
    data = DataConfig(source=str(rows), path=str(tmp_path / "set"))
    prepare_dataset(data, 1)
    with pytest.raises(ConfigError, match=says):
        ensure_dataset(data.model_copy(update=change), 1)


def test_a_path_may_be_spelled_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("texts", "elsewhere"):
        Path(folder).mkdir()
    for name in ("a.txt", "held.txt"):
        Path("texts", name).write_text("some text\n" * 50)
    tokenizer_folder = prepare_dataset(
        DataConfig(source="texts/a.txt", tokenizer="bpe", vocab_size=260), 1, "tok"
    )
    Path("link").symlink_to("texts")
    fields = {
        "source": "texts/a.txt",
        "val_source": "texts/held.txt",
        "tokenizer": str(tokenizer_folder),
    }
    first = ensure_dataset(DataConfig(**fields, path=str(tmp_path / "set")), 1)
    ways = [
        {"source": "./texts/../texts/a.txt", "val_source": "link/held.txt"},
        {"source": str(tmp_path / "texts" / "a.txt"), "tokenizer": "tok/tokenizer.json"},
        {"source": "link/a.txt", "tokenizer": "../" + tmp_path.name + "/tok"},
    ]
    for way in ways:
        data = DataConfig(**fields | way, path=str(tmp_path / "set"))
        assert ensure_dataset(data, 1).fingerprint == first.fingerprint
    # from another folder, too, for what was read is remembered by where it was
    monkeypatch.chdir("elsewhere")
    relative_fields = {
        "source": "../texts/a.txt",
        "val_source": "../texts/held.txt",
        "tokenizer": "../tok",
    }
    assert ensure_dataset(DataConfig(**relative_fields, path=str(tmp_path / "set")), 1)
    with pytest.raises(ConfigError, match="was made otherwise: source="):
        ensure_dataset(
            DataConfig(
                **relative_fields | {"source": "../texts/held.txt"}, path=str(tmp_path / "set")
            ),
            1,
        )


def test_a_named_set_serves_every_seed(tmp_path: Path, rows: Path) -> None:
    data = DataConfig(source=str(rows), path=str(tmp_path / "set"))
    assert ensure_dataset(data, 1).fingerprint == ensure_dataset(data, 2).fingerprint


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="is not a data set"):
        prepare_dataset(DataConfig(source=str(rows)), 1, tmp_path / "set")
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["thesis.tex"]


def test_an_empty_folder_may_be_used(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "set").mkdir()
    folder = prepare_dataset(DataConfig(source=str(rows)), 1, tmp_path / "set")
    assert "train" in open_dataset(folder).splits


def test_a_text_too_short_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    with pytest.raises(ConfigError, match=r"too short: its val split would have [01] tokens"):
        prepare_dataset(DataConfig(source=str(tmp_path / "a.txt")), 1, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_each_way_to_make_a_set_has_a_folder_of_its_own() -> None:
    ways = [
        (DataConfig(), 1),
        (DataConfig(), 2),
        (DataConfig(max_bytes=1_000_000), 1),
        (DataConfig(tokenizer="bpe"), 1),
        (DataConfig(tokenizer="bpe", vocab_size=512), 1),
        (DataConfig(source="books/*.txt", val_fraction=0.1), 1),
        (DataConfig(source="../books"), 1),
    ]
    paths = [default_path(data, seed) for data, seed in ways]
    assert len(set(paths)) == len(paths)
    stems = [path.rpartition("-")[0] for path in paths]
    assert stems == [
        "data/stdlib-byte",
        "data/stdlib-byte",
        "data/stdlib-byte-1000000",
        "data/stdlib-bpe-4096",
        "data/stdlib-bpe-512",
        "data/text-byte",
        "data/books-byte",
    ]


def test_what_does_not_count_does_not_change_the_folder() -> None:
    plain = default_path(DataConfig(), 1)
    assert default_path(DataConfig(vocab_size=99, text_field="x", prefetch=False), 1) == plain


def test_two_processes_at_once_end_with_one_valid_set(tmp_path: Path, rows: Path) -> None:
    program = (
        "import sys; from instar.config.language import DataConfig\n"
        "from instar.data.text.prepare import prepare_dataset\n"
        "from instar.data.text.shards import open_dataset\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "data = DataConfig(source=sys.argv[1], path=sys.argv[2])\n"
        "print(open_dataset(prepare_dataset(data, 1)).fingerprint)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, rows, tmp_path / "set"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.readline()
    outputs = [racer.communicate("go\n", timeout=60)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == outputs[1] == open_dataset(tmp_path / "set").fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "set"]


def test_a_saved_tokenizer_is_used_as_it_is(tmp_path: Path, rows: Path) -> None:
    tokenizer = train_bpe(["word000 word001"] * 20, 270)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text(tokenizer.to_json())
    data = DataConfig(source=str(rows), tokenizer=str(tmp_path / "mine"), vocab_size=9999)
    folder = prepare_dataset(data, 1, tmp_path / "set")
    dataset = open_dataset(folder)
    assert dataset.tokenizer_fingerprint == tokenizer.fingerprint
    assert dataset.vocab_size == tokenizer.vocab_size
    assert sum(text.count("word") for text in texts_of(folder).values()) == 100
    assert default_path(data, 1).startswith("data/rows-mine-")
    assert default_path(data.model_copy(update={"tokenizer": "a/b.json"}), 1)[:12] == "data/rows-b-"


def test_a_tokenizer_that_changed_since_is_refused_and_one_that_is_gone_is_not(
    tmp_path: Path, rows: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(train_char(["word0123456789"]).to_json())
    data = DataConfig(source=str(rows), tokenizer=str(file), path=str(tmp_path / "set"))
    prepare_dataset(data, 1)
    file.write_text(train_char(["word"]).to_json())
    with pytest.raises(ConfigError, match=r"mine\.json is not the tokenizer that made"):
        prepare_dataset(data, 1)
    file.unlink()
    assert ensure_dataset(data, 1).tokenizer == "char"


def test_a_tokenizer_that_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    data = DataConfig(source="nothing", tokenizer="gpt2")
    with pytest.raises(ConfigError, match="no tokenizer: 'gpt2'"):
        prepare_dataset(data, 1, tmp_path / "set")


@pytest.mark.parametrize(
    ("val", "test", "sizes"), [(0.05, 0.05, [20, 20]), (0.3, 0.1, [30, 10]), (0.2, 0.0, [40])]
)
def test_what_is_held_out_may_have_a_source_of_its_own(
    tmp_path: Path, rows: Path, val: float, test: float, sizes: list[int]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"held{n:02d}"}) + "\n" for n in range(40)))
    data = DataConfig(source=str(rows), val_source=str(other), val_fraction=val, test_fraction=test)
    words = {
        name: text.split("\n")
        for name, text in texts_of(prepare_dataset(data, 5, tmp_path / "set")).items()
    }
    assert words.pop("train") == [f"word{n:03d}" for n in range(100)]
    assert [len(documents) for documents in words.values()] == sizes
    held_out = [word for documents in words.values() for word in documents]
    assert sorted(held_out) == [f"held{n:02d}" for n in range(40)]


def test_a_set_with_another_val_source_is_refused_by_name(tmp_path: Path, rows: Path) -> None:
    data = DataConfig(source=str(rows), val_source=str(rows), path=str(tmp_path / "set"))
    prepare_dataset(data, 1)
    for val_source in (None, "other.txt"):
        with pytest.raises(ConfigError, match=r"val_source='.*rows\.jsonl', not "):
            prepare_dataset(data.model_copy(update={"val_source": val_source}), 1)


def test_a_val_source_too_short_is_named(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "val.txt").write_text("x")
    data = DataConfig(source=str(rows), val_source=str(tmp_path / "val.txt"), test_fraction=0.0)
    with pytest.raises(ConfigError, match=r"data\.val_source: .*val\.txt is too short: its val"):
        prepare_dataset(data, 1, tmp_path / "set")


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_a_source_too_short_to_hold_anything_out_is_named(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "words.txt").write_text("To be or not\n")
    data = DataConfig(source=str(tmp_path / "words.txt"), tokenizer=tokenizer)
    with pytest.raises(
        ConfigError, match=r"data\.source: .*words\.txt is too short: its \w+ split"
    ):
        prepare_dataset(data, 1, tmp_path / "set")


def test_a_long_document_is_the_same_tokens_wherever_it_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instar.data.text.tokenizer._PIECE_CHARACTERS", 50)
    monkeypatch.setattr("instar.data.text.corpus._PIECE_BYTES", 64)
    text = "def one():\n\n    return  'naïve'\n\n" * 30 + "        last"
    tokenizer = train_bpe([text], 300)
    (tmp_path / "bpe.json").write_text(tokenizer.to_json())
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    tokens = []
    for name in ("a.txt", "a.jsonl"):
        data = DataConfig(
            source=str(tmp_path / name),
            val_source=str(tmp_path / "a.txt"),
            tokenizer=str(tmp_path / "bpe.json"),
        )
        dataset = open_dataset(prepare_dataset(data, 1, tmp_path / f"set-{name}"))
        tokens.append(dataset.split("train").read(0, len(dataset.split("train"))).tolist())
    assert tokens[0] == tokens[1]
    assert tokenizer.decode(tokens[0]) == text


def write_texts(folder: Path, texts: list[str]) -> Path:
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "texts.jsonl").write_text("".join(rows))
    return folder / "texts.jsonl"


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_documents_that_leak_between_splits_are_counted_and_one_key_removes_them(
    tmp_path: Path, kind: Literal["tokens", "rows"]
) -> None:
    copies = [f"text number {number % 50:03} of many" for number in range(200)]
    data = DataConfig(kind=kind, source=str(write_texts(tmp_path, copies)), val_fraction=0.1)
    messages: list[str] = []
    prepare_dataset(data, 1, tmp_path / "all", messages.append)
    assert any(
        " of val are trained on too, word for word; data.drop_dup" in text for text in messages
    )
    messages = []
    unique_data = data.model_copy(update={"drop_duplicates": True})
    folder = prepare_dataset(unique_data, 1, tmp_path / "once", messages.append)
    assert messages[0] == "left out 150 of 200 documents, which are there before"
    assert not any("trained on too" in text for text in messages)
    assert sorted("\n".join(texts_of(folder).values()).split("\n")) == sorted(set(copies))
    with pytest.raises(ConfigError, match="drop_duplicates=True, not False"):
        prepare_dataset(data, 1, folder)


def test_what_val_source_holds_out_is_not_trained_on(tmp_path: Path) -> None:
    source = write_texts(tmp_path, [f"text number {number}" for number in range(40)])
    (tmp_path / "held").mkdir()
    val_path = write_texts(tmp_path / "held", [f"text number {number}" for number in range(30, 60)])
    messages: list[str] = []
    data = DataConfig(source=str(source), val_source=str(val_path), test_fraction=0)
    prepare_dataset(data, 1, tmp_path / "all", messages.append)
    assert any("warning: 10 of 30 documents of val are trained on too" in text for text in messages)
    messages = []
    unique_data = data.model_copy(update={"drop_duplicates": True})
    folder = prepare_dataset(unique_data, 1, tmp_path / "once", messages.append)
    assert messages[0] == "left out 10 of 40 documents, which are there before or held out"
    assert texts_of(folder)["train"].split("\n") == [
        f"text number {number}" for number in range(30)
    ]


def test_of_few_files_each_is_held_out_from(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.txt").write_text(name * 1000)
    messages: list[str] = []
    folder = prepare_dataset(
        DataConfig(source=str(tmp_path / "texts")), 1, tmp_path / "set", messages.append
    )
    assert (
        "3 documents are too few or too unequal to hold out whole ones: their ends" in messages[0]
    )
    for name, text in texts_of(folder).items():
        assert {letter: text.count(letter) for letter in "abc"} == dict.fromkeys(
            "abc", {"train": 900, "val": 50, "test": 50}[name]
        )


def test_files_about_a_data_set_are_left_out_by_name(tmp_path: Path) -> None:
    rows = tmp_path / "hub" / "data"
    rows.mkdir(parents=True)
    write_texts(rows, [f"text number {number}" for number in range(200)])
    for name in ("README.md", "LICENSE.txt", "dataset_infos.json", "metadata.csv", "a.pdf"):
        (tmp_path / "hub" / name).write_text("about the data set\n" * 99)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hub" / "linked").symlink_to(tmp_path / "elsewhere")
    messages: list[str] = []
    folder = prepare_dataset(
        DataConfig(source=str(tmp_path / "hub")), 1, tmp_path / "set", messages.append
    )
    assert messages[0].endswith(
        "hub: LICENSE.txt, README.md, dataset_infos.json, metadata.csv, linked/ (a link) and 1 more"
    )
    assert "about" not in "".join(texts_of(folder).values())
    # the same file beside text alone is a document
    (rows / "texts.jsonl").rename(tmp_path / "hub" / "notes.txt")
    (tmp_path / "hub" / "dataset_infos.json").unlink()
    messages = []
    prepare_dataset(DataConfig(source=str(tmp_path / "hub")), 1, tmp_path / "text", messages.append)
    assert "README.md" not in messages[0]
