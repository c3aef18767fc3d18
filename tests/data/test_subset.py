"""`data.train_subset`: a part of the training split, of any source with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import parametrize_first
from hypothesis import given, settings
from hypothesis import strategies as st
from pretrained import TEXT
from splits import split_of
from ways import CONTEXT, KINDS, SEED, Way, config, invariants, make_rows, take_steps

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.load import load_config
from instar.config.schema import SamplesConfig
from instar.data.columns import leaves
from instar.data.order import Int64Array
from instar.data.sample_set import SampleSet
from instar.data.source import IGNORED
from instar.data.split import subset_of
from instar.data.text.dataset import DataSet, create_dataset_files, open_data
from instar.data.text.selection import SelectedTokens, training_text
from instar.data.text.tokenizer import train_bpe
from instar.data.user_sets import sample_set

N = 500
NUMBER = np.arange(N)
COLUMNS = {"number": NUMBER, "side": (NUMBER % 10 == 3).astype(int)}


def open_samples(samples: Any = COLUMNS, **data: Any) -> Any:
    return sample_set(lambda: samples, samples, (), SamplesConfig(**data), seed=data.pop("seed", 5))


def train_numbers(dataset: SampleSet) -> set[int]:
    source, order = dataset.train(1)
    columns = source.read(order.indices(0, 0, order.samples_per_epoch))
    return set(dict(leaves(columns))["number"].tolist())  # type: ignore[union-attr]


# ---- samples ----


def test_a_subset_is_of_the_training_split_and_held_out_samples_stay() -> None:
    full, tenth, hundred = (
        open_samples(),
        open_samples(train_subset=0.1),
        open_samples(train_subset=100),
    )
    assert [dataset.size("train") for dataset in (full, tenth, hundred)] == [400, 40, 100]
    assert train_numbers(tenth) < train_numbers(hundred) < train_numbers(full)
    for split in ("val", "test"):
        assert tenth.held_out(split).fingerprint == full.held_out(split).fingerprint
    assert len({dataset.fingerprint for dataset in (full, tenth, hundred)}) == 3
    other = sample_set(lambda: COLUMNS, COLUMNS, (), SamplesConfig(train_subset=0.1), seed=6)
    assert isinstance(other, SampleSet)
    assert train_numbers(other) != train_numbers(tenth)
    # random, not the first ones
    assert max(train_numbers(tenth)) > 400
    assert tenth.drawing == "data.train_subset 0.1: 40 of 400 samples of the training split"
    assert full.drawing == ""


def test_a_subset_has_the_classes_of_the_whole_where_splits_have() -> None:
    shares = []
    for stratify in (None, "side"):
        numbers = train_numbers(open_samples(train_subset=0.1, stratify=stratify))
        shares.append(sum(number % 10 == 3 for number in numbers))
    assert shares[1] == 4 != shares[0]


def test_what_is_drawn_more_often_is_drawn_of_the_subset() -> None:
    for data in ({"balance": "side", "stratify": "side"}, {"sample_weights": "side"}):
        dataset, plain = (
            open_samples(train_subset=0.5, **data),
            open_samples(train_subset=0.5, **data),
        )
        assert train_numbers(dataset) <= set(plain.splits["train"].tolist())
        assert dataset.drawing.startswith(
            "data.train_subset 0.5: 200 of 400 samples of the training"
        )
        assert "; " in dataset.drawing


def test_splits_of_ones_own_have_a_subset_too() -> None:
    parts = {"train": {"number": NUMBER}, "val": {"number": NUMBER[:9]}}
    dataset = open_samples(parts, train_subset=0.2, test=50)
    assert [dataset.size(name) for name in ("train", "val", "test")] == [90, 9, 50]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_subset": 401}, "401 samples, and the training split has 400; fewer"),
        ({"train_subset": 1e-4}, "0.0001 of 400 samples of the training split is none; a larger"),
        (
            {"train_subset": 3, "balance": "side"},
            "class 1 of column 'side' has no training sample: all are held out or unused",
        ),
    ],
)
def test_a_subset_that_cannot_be_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_samples(**data)


def test_an_iterable_has_no_subset() -> None:
    parts = {"train": iter([(1.0, 2)] * 9), "val": [(1.0, 2)]}
    with pytest.raises(ConfigError, match=r"data\.train_subset needs random access, and an iterab"):
        open_samples(parts, train_subset=0.1)


@settings(deadline=None)
@given(total=st.integers(1, 300), data=st.data(), seed=st.integers(0, 2**40))
def test_larger_subsets_have_all_of_smaller_ones(total: int, data: Any, seed: int) -> None:
    small, large = sorted(data.draw(st.tuples(*[st.integers(1, total)] * 2)))
    subset, superset = (subset_of(total, size, seed, "samples") for size in (small, large))
    assert subset.size == small
    assert np.all(np.diff(subset) > 0)
    assert np.isin(subset, superset).all()
    assert subset_of(total, total, seed, "samples").tolist() == list(range(total))


# ---- text ----


@settings(deadline=None)
@given(
    size=st.integers(1, 60),
    edges=st.lists(st.integers(0, 60), max_size=12),
    data=st.data(),
)
def test_selected_tokens_are_those_of_the_stretches(size: int, edges: list[int], data: Any) -> None:
    tokens = np.arange(100, 100 + size, dtype=np.uint16)
    split = split_of(tokens[: size // 2], tokens[size // 2 :]) if size > 1 else split_of(tokens)
    cuts = np.sort(np.minimum(edges[: len(edges) // 2 * 2], size)).astype(np.int64).reshape(-1, 2)
    selection = SelectedTokens.of(split, cuts[:, 0], cuts[:, 1])
    expected = np.concatenate([np.empty(0, np.uint16), *(tokens[a:b] for a, b in cuts.tolist())])
    assert len(selection) == expected.size
    start = data.draw(st.integers(0, expected.size))
    stop = data.draw(st.integers(start, expected.size))
    np.testing.assert_array_equal(selection.read(start, stop), expected[start:stop])
    length = data.draw(st.integers(1, max(1, expected.size)))
    starts = np.arange(max(0, expected.size - length + 1), dtype=np.int64)[::-1]
    expected_windows = [expected[at : at + length] for at in starts.tolist()]
    np.testing.assert_array_equal(
        selection.windows(starts, length),
        np.reshape(expected_windows, (len(expected_windows), length)),
    )
    for wrong in (expected.size - length + 1, -1):
        with pytest.raises(IndexError):
            selection.windows(np.array([wrong], dtype=np.int64), length)
    with pytest.raises(IndexError):
        selection.read(0, expected.size + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rows(tmp_path_factory.mktemp("rows"))


def text(data: DataConfig) -> DataSet:
    create_dataset_files(data, SEED)
    return open_data(data, SEED)


INDEXED = {
    name: fields for name, fields in KINDS.items() if fields.get("kind") not in ("stream", "python")
}


@parametrize_first("kind", INDEXED, first=2)
def test_any_kind_with_an_index_has_a_subset_on_any_ranks(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    path = {} if "mixture" in KINDS[kind] else {"path": str(tmp_path / "data")}
    full_text = text(config(folder, kind, **path))
    data = config(folder, kind, **path, train_subset=0.3)
    part = text(data)
    total, samples = full_text.train_samples(CONTEXT), part.train_samples(CONTEXT)
    assert total is not None
    assert samples == pytest.approx(0.3 * total, rel=0.4)
    assert part.fingerprint == full_text.fingerprint
    assert len(part.held_out("val", CONTEXT)) == len(full_text.held_out("val", CONTEXT))
    if kind != "random windows":  # whose samples are the places where one may begin
        assert part.train(CONTEXT, 1)[1].samples_per_epoch == samples
    steps = [invariants(batches) for batches in take_steps(data, Way(1), 12)]
    for way in (Way(3), Way(2, "dispatched"), Way(2, workers=1)):
        assert [invariants(batches) for batches in take_steps(data, way, 12)] == steps
    assert part.drawing.startswith("data.train_subset 0.3: ")


@pytest.mark.parametrize("packing", [True, False])
def test_whole_rows_are_chosen(folder: Path, packing: bool, tmp_path: Path) -> None:
    full_text, part = (
        text(
            config(
                *(folder, "rows of text"),
                path=str(tmp_path / "data"),
                packing=packing,
                val_source=None,
                **more,
            )
        )
        for more in ({}, {"train_subset": 20})
    )
    sizes = full_text.dataset.document_sizes
    assert sizes is not None
    split = full_text.dataset.split("train")
    tokens = split.read(0, len(split))
    documents = np.split(tokens, np.cumsum(sizes)[:-1])
    subset_documents = documents_of(part)
    assert len(subset_documents) == 20
    whole_texts = [document.tobytes() for document in documents]
    assert all(document.tobytes() in whole_texts for document in subset_documents)
    if not packing:
        assert part.train_samples(500) == sum(document.size >= 2 for document in subset_documents)
    assert part.drawing.endswith(f"20 of {sizes.size} documents of the training split")


def documents_of(part: Any) -> list[Any]:
    split, sizes = part.text.split, part.text.document_sizes
    return np.split(split.read(0, len(split)), np.cumsum(sizes)[:-1])


def test_the_text_is_the_same_with_any_context(folder: Path, tmp_path: Path) -> None:
    part = text(config(folder, "tokens", path=str(tmp_path / "data"), train_subset=1000))
    targets: list[Int64Array] = []
    for context in (8, 16, 64, 100):
        source, order = part.train(context, 1)
        columns = source.read(np.arange(order.samples_per_epoch))
        all_targets = np.asarray(columns["targets"]).ravel()
        targets.append(all_targets[all_targets != IGNORED])
    assert all(np.array_equal(text_targets, targets[0]) for text_targets in targets)
    assert targets[0].size == 999
    assert part.train_tokens(16) == 1000


def test_stretches_come_from_all_over_the_text() -> None:
    tokens = (np.arange(300_000) // 10_000).astype(np.uint16)
    data = DataConfig(train_subset=0.1)
    selection = training_text(split_of(tokens), None, data, 5).split
    assert len(selection) == 30_000
    read = selection.read(0, len(selection))
    assert np.all(np.diff(read.astype(int)) >= 0)
    assert np.unique(read).size >= 6
    more = training_text(split_of(tokens), None, DataConfig(train_subset=0.2), 5).split
    assert isinstance(selection, SelectedTokens)
    assert isinstance(more, SelectedTokens)
    places = [
        {
            p
            for b, n in zip(s.begins.tolist(), np.diff(s.offsets).tolist(), strict=True)
            for p in range(b, b + n)
        }
        for s in (selection, more)
    ]
    assert places[0] < places[1]
    other = training_text(split_of(tokens), None, data, 6).split
    assert other.fingerprint != selection.fingerprint


@pytest.mark.parametrize("packing", [True, False])
def test_whole_conversations_are_chosen(tmp_path: Path, packing: bool) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe([TEXT], 280).to_json())
    chats = [
        [
            {"role": "user", "content": f"{n} squared?"},
            {"role": "assistant", "content": f"{n * n}, of course"},
        ]
        for n in range(40)
    ]
    lines = (json.dumps({"messages": messages}) + "\n" for messages in chats)
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    fields = {
        "kind": "chat",
        "source": str(tmp_path / "chats.jsonl"),
        "path": str(tmp_path / "tokens"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "packing": packing,
    }
    full_text, part = (
        text(DataConfig.model_validate({**fields, **more})) for more in ({}, {"train_subset": 7})
    )
    assert part.drawing == "data.train_subset 7: 7 of 36 conversations of the training split"
    full_source, seven = (dataset.train_source(200) for dataset in (full_text, part))
    assert full_source is not None
    assert seven is not None
    rows = {
        is_full: [
            [token for token in row.tolist() if token != IGNORED]
            for row in np.asarray(source.read(np.arange(len(source)))["targets"])
        ]
        for is_full, source in ((False, seven), (True, full_source))
    }
    if packing:
        sizes = {key: sum(map(len, targets)) for key, targets in rows.items()}
        assert 0 < sizes[False] < sizes[True] / 3
        return
    assert len(seven) == 7
    assert all(row in rows[True] for row in rows[False])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["data.kind=stream", "data.source=x", "data.val_source=y"],
            "data.train_subset chooses from data with an index, and kind stream is read from its",
        ),
        (
            ["data.kind=python", "data.source=m:f", "data.val_source=y"],
            "data.train_subset chooses from data with an index, and kind python is read from its",
        ),
        (
            ["data.mixture=[{source: a}, {source: b}]", "data.train_subset=9"],
            "data.train_subset must be a share where data.mixture has several sources",
        ),
        (
            ["data.document_masks=true", "data.tokenizer=t.json"],
            "data.train_subset cuts kind tokens anywhere, and data.document_masks needs docu",
        ),
        (["data.train_subset=0"], "data.train_subset must be"),
        (["data.train_subset=1.5"], "data.train_subset must be"),
        (["data.train_subset=-3"], "data.train_subset must be"),
    ],
)
def test_contradictions_are_found_in_the_config(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["data.train_subset=0.5", *keys])
