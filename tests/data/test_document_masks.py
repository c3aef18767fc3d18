"""`data.document_masks`: where documents begin in a sample is what the text says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.config.language import DataConfig, MixturePart
from instar.config.load import load_config
from instar.config.schema import EvalSet
from instar.data.columns import Ragged
from instar.data.loader import LocalReader, ReadRequest, StepKey
from instar.data.source import IGNORED
from instar.data.text.dataset import create_dataset_files, open_data, open_sets
from instar.data.text.targets import documents_between
from instar.data.text.tokenizer import load_saved_tokenizer, named_tokenizer, train_bpe

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


def with_mixture(config: DataConfig, weights: Sequence[float | None] = (None, None)) -> DataConfig:
    parts = tuple(
        MixturePart(source="train.jsonl", name=name, weight=weight)
        for name, weight in zip(("one", "two"), weights, strict=True)
    )
    return config.model_copy(update={"source": "stdlib", "mixture": parts})


@pytest.mark.parametrize("is_mixed", [False, True], ids=["one source", "a mixture"])
def test_weights_are_the_targets(config: DataConfig, is_mixed: bool) -> None:
    """Of a step, of a held-out split, and on the mean."""
    config = with_mixture(config) if is_mixed else config
    create_dataset_files(config, 0)
    data = open_data(config, 0)
    train, _ = data.train(CONTEXT, 0)
    for source in (train, data.held_out("val", CONTEXT)):
        numbers = np.arange(len(source))
        columns = source.read(numbers)
        targets = (columns["targets"] != IGNORED).sum(1)
        assert source.weights(numbers) == targets.sum()
        ends = (columns["positions"] == 0).sum() - len(source)
        assert 0 < ends <= targets.size * CONTEXT - targets.sum()
    weights = train.measure.weights(train.read(np.arange(len(train))))  # type: ignore[attr-defined]
    assert data.targets(CONTEXT).mean == pytest.approx(weights.mean())


def test_columns_of_a_transform_stay(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("adds.py").write_text(
        "import numpy as np\n"
        "def adds(sample, _):\n"
        "    return {**sample, 'positions': np.full_like(sample['inputs'], 7), 'mark': np.ones(1)}\n"
    )
    monkeypatch.syspath_prepend(".")
    transform_config = config.model_copy(update={"transform": "adds:adds"})
    create_dataset_files(transform_config, 0)
    columns = open_data(transform_config, 0).train(CONTEXT, 0)[0].read(np.arange(4))
    plain = open_data(config, 0).train(CONTEXT, 0)[0].read(np.arange(4))
    assert columns["mark"].tolist() == [[1.0]] * 4
    assert columns["positions"].tolist() == plain["positions"].tolist()


@pytest.mark.parametrize("is_mixed", [False, True], ids=["random windows", "a mixture"])
def test_each_draw_of_a_sample_is_transformed_anew(
    config: DataConfig, is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("shakes.py").write_text(
        "def shakes(sample, generator):\n    return {**sample, 'noise': generator.random(1)}\n"
    )
    monkeypatch.syspath_prepend(".")
    random = config.model_copy(update={"order": "random"})
    plain = with_mixture(config, (9, 1)) if is_mixed else random
    create_dataset_files(plain, 0)
    columns = []
    for transform in ("shakes:shakes", None):
        data = open_data(plain.model_copy(update={"transform": transform}), 0)
        source, order = data.train(CONTEXT, 0)
        draws = order.indices(1, 0, order.samples_per_epoch)
        columns.append(source.read(draws, 1))
        assert source.weights(draws) > 0
    transformed, untransformed = columns
    assert np.unique(transformed.pop("noise")).size == len(transformed["inputs"])
    for name in ("inputs", "targets", "positions"):
        np.testing.assert_array_equal(transformed[name], untransformed[name])
    if is_mixed:
        samples = np.asarray(untransformed["inputs"])
        assert len(np.unique(samples, axis=0)) < len(samples)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_its_own_samples_once(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    create_dataset_files(config, 0)
    source, order = open_data(config, 0).train(CONTEXT, 0)
    read: list[int] = []
    real = type(source).read

    def counting_read(self: Any, indices: Any, epoch: int = 0) -> Any:
        read.extend(indices.tolist())
        return real(self, indices, epoch)

    monkeypatch.setattr(type(source), "read", counting_read)
    key = StepKey(0, 4, 4)
    LocalReader(source, order, ranks, range(1), "rank 0").read(ReadRequest(1, key, False))
    assert len(read) == 4 // ranks


def test_ids_of_llm_c_begin_with_the_token(config: DataConfig) -> None:
    """Which is the first of a document then, and no target of the document before."""
    as_ids_of_llm_c("train.bin", DOCUMENTS)
    config = config.model_copy(update={"source": "train.bin"})
    create_dataset_files(config, 0)
    columns = open_data(config, 0).train(CONTEXT, 0)[0].read(np.arange(1))
    inputs, targets, positions = (columns[name][0] for name in ("inputs", "targets", "positions"))
    tokenizer = named_tokenizer("bpe.json")
    assert tokenizer is not None
    end, first = tokenizer.end_id, 1 + tokenizer.encode(DOCUMENTS[0]).size
    assert inputs[0] == inputs[first] == end
    assert positions[: first + 2].tolist() == [*range(first), 0, 1]
    assert targets[first - 1] == IGNORED
    assert targets[first] == inputs[first + 1]
    assert (targets == end).sum() == 0


def as_ids_of_llm_c(path: str, texts: list[str]) -> None:
    tokenizer = named_tokenizer("bpe.json")
    assert tokenizer is not None
    ids = [np.array([tokenizer.end_id, *tokenizer.encode(text)], np.uint16) for text in texts]
    np.concatenate(ids).tofile(path)


def test_each_source_of_a_mixture_has_documents_of_its_own_form(config: DataConfig) -> None:
    """Where the token begins the documents of the one and ends those of the other, each is read as alone."""
    as_ids_of_llm_c("train.bin", DOCUMENTS)
    sources = ("train.jsonl", "train.bin")
    parts = tuple(MixturePart(source=source, name=source) for source in sources)
    mixture = config.model_copy(update={"source": "stdlib", "mixture": parts, "path": "mixed"})
    create_dataset_files(mixture, 0)
    data = open_data(mixture, 0)
    train, held_out = data.train(CONTEXT, 0)[0], data.held_out("val", CONTEXT)
    begin = begin_held_out = 0
    for source in sources:
        alone_config = config.model_copy(update={"source": source, "path": f"{source}-alone"})
        create_dataset_files(alone_config, 0)
        dataset = open_data(alone_config, 0)
        samples, held_samples = dataset.train(CONTEXT, 0)[0], dataset.held_out("val", CONTEXT)
        for mixed_source, source_alone, first in (
            (train, samples, begin),
            (held_out, held_samples, begin_held_out),
        ):
            numbers = np.arange(len(source_alone))
            columns, expected = mixed_source.read(first + numbers), source_alone.read(numbers)
            for name in ("inputs", "targets", "positions"):
                np.testing.assert_array_equal(np.asarray(columns[name]), expected[name])
        begin, begin_held_out = begin + len(samples), begin_held_out + len(held_samples)
    assert (begin, begin_held_out) == (len(train), len(held_out))


def test_text_that_is_held_out_beside_ids_has_its_own_form(config: DataConfig) -> None:
    """Named by `val_source`, or as a set of `eval.sets`."""
    as_ids_of_llm_c("train.bin", DOCUMENTS)
    keys = {"source": "train.bin", "val_source": "train.jsonl", "path": "ids"}
    ids = config.model_copy(update=keys)
    create_dataset_files(ids, 0)
    of_val_source = open_data(ids, 0).held_out("val", CONTEXT)
    sets = [EvalSet(name="text", source="train.jsonl")]
    set_config = config.model_copy(update={"source": "train.bin", "path": "alone"})
    create_dataset_files(set_config, 0, sets=sets)
    of_set = open_data(set_config, 0).windows_of(
        open_sets(set_config, 0, sets)["text"], "val", CONTEXT
    )
    tokenizer = named_tokenizer("bpe.json")
    assert tokenizer is not None
    for source in (of_val_source, of_set):
        columns = source.read(np.arange(len(source)))
        inputs, positions = (np.asarray(columns[name]) for name in ("inputs", "positions"))
        after_an_end = inputs[:, :-1] == tokenizer.end_id
        assert after_an_end.any()
        np.testing.assert_array_equal(positions[:, 1:] == 0, after_an_end)


def without_edge(kind: str) -> dict[str, object]:
    tokenizer = named_tokenizer("bpe.json")
    assert tokenizer is not None
    match kind:
        case "one token on both sides":
            return {"bos": "<|end|>"}
        case "ids without an end":
            ids = np.concatenate([tokenizer.encode(text) for text in DOCUMENTS])
            ids.astype(np.uint16).tofile("train.bin")
            return {"source": "train.bin"}
    content = json.loads(Path("bpe.json").read_text())
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|end|>"]
    content["model"]["vocab"] = {
        token: number for number, token in enumerate(content["model"]["vocab"])
    }
    Path("plain.json").write_text(json.dumps(content))
    return {"tokenizer": "plain.json"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one token on both sides", "one token of the tokenizer begins and ends a document"),
        ("ids without an end", "which ends a document, is not among the first"),
        ("a tokenizer without an end", "no token of the tokenizer ends a document"),
    ],
)
def test_documents_that_nothing_tells_apart_are_refused(
    kind: str, message: str, config: DataConfig
) -> None:
    config = config.model_copy(update=without_edge(kind))
    create_dataset_files(config, 0)
    with pytest.raises(ConfigError, match=message):
        open_data(config, 0)


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
    columns = documents_between(np.array([ends, ends], dtype=bool))
    assert np.asarray(columns["positions"]).tolist() == [positions, positions]
    sizes = columns["documents"]
    assert isinstance(sizes, Ragged)
    begins = [*np.flatnonzero(np.array(positions) == 0).tolist(), len(positions)]
    assert sizes[1:2].flat.tolist() == np.diff(begins).tolist()
    assert sizes.flat.sum() == 2 * len(positions)


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
