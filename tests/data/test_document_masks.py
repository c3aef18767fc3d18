"""`data.document_masks`: where documents begin in a sample is what the text says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.load import load_config
from instar.data.source import IGNORED
from instar.data.text.dataset import create_dataset_files, open_data
from instar.data.text.targets import positions_after
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe

DOCUMENTS = [f"document {n}: {'word ' * (n % 7)}" + "end" * (n % 3) for n in range(60)]
CONTEXT = 24


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    Path("train.jsonl").write_text(lines)
    Path("bpe.json").write_text(train_bpe(DOCUMENTS, 280).to_json())
    return DataConfig(source="train.jsonl", tokenizer="bpe.json", path="data", document_masks=True)


def test_positions_begin_anew_where_a_document_begins(config: DataConfig) -> None:
    """Against the documents themselves, wherever windows cut them."""
    create_dataset_files(config, 0)
    data = open_data(config, 0)
    tokenizer = load_saved_tokenizer("data")
    for split, source in (
        ("train", data.train(CONTEXT, 0)[0]),
        ("val", data.held_out("val", CONTEXT)),
    ):
        ids = data.dataset.split(split).read(0, len(data.dataset.split(split))).astype(np.int64)
        text = tokenizer.decode(ids.tolist())
        documents = text.split("<|end|>")
        assert set(documents) <= set(DOCUMENTS)
        places = np.concatenate(
            [np.arange(tokenizer.encode(document).size + 1) for document in documents]
        )[: ids.size]
        columns = source.read(np.arange(len(source)))
        for row, begin in enumerate(range(0, ids.size - 1, CONTEXT)):
            size = min(CONTEXT, ids.size - 1 - begin)
            window = places[begin : begin + size]
            # a document that begins before the window begins with it
            cut = int(np.argmax(window == 0)) if (window == 0).any() else size
            expected = window - np.where(np.arange(size) < cut, window[0], 0)
            assert columns["positions"][row, :size].tolist() == expected.tolist()
            following = places[begin + 1 : begin + size + 1]
            targets = np.where(following == 0, IGNORED, ids[begin + 1 : begin + size + 1])
            assert columns["targets"][row, :size].tolist() == targets.tolist()
        assert (columns["positions"] == 0).sum() > 3 * len(source)


def test_the_weights_of_a_step_are_its_targets(config: DataConfig) -> None:
    create_dataset_files(config, 0)
    source, _ = open_data(config, 0).train(CONTEXT, 0)
    columns = source.read(np.arange(len(source)))
    measured = source.measure.weights(columns)  # type: ignore[attr-defined]
    assert measured.tolist() == (columns["targets"] != IGNORED).sum(1).tolist()
    assert measured.sum() < open_data(config, 0).dataset.split("train").offsets[-1]
    mean = open_data(config, 0).targets(CONTEXT).mean
    assert mean == pytest.approx(measured.mean())


@pytest.mark.parametrize(
    ("ends", "positions"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1, 0, 0], [0, 1, 0, 1]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 1, 0], [0, 1, 2, 0]),
        ([0, 0, 0, 1], [0, 1, 2, 3]),
    ],
)
def test_positions_after_ends(ends: list[int], positions: list[int]) -> None:
    assert positions_after(np.array([ends], dtype=bool)).tolist() == [positions]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["data.kind=rows", "data.packing=false"], "a sample is one document"),
        (["data.kind=stream", "data.val_source=train.jsonl"], "kind stream is not read so"),
        (["data.tokenizer=byte"], "the tokenizer byte has no token that ends a document"),
        (["data.tokenizer=char"], "the tokenizer char has no token that ends a document"),
    ],
)
def test_what_has_no_documents_is_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {source: train.jsonl, tokenizer: bpe, document_masks: true}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(str(path), keys)
