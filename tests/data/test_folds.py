"""Folds of a cross-validation: what scikit-learn promises of its own, and the test split that there was before."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import KFold, StratifiedKFold

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.source import InMemorySource
from instar.data.split import divide_folds, divide_samples
from instar.data.user_sets import sample_set


def folds_of(total: int, folds: int, **options: Any) -> list[dict[str, np.ndarray]]:
    options = {"val": 0.1, "test": 0.2, "seed": 3, **options}
    return [divide_folds(total, fold, folds, **options) for fold in range(folds)]


@given(st.integers(15, 300), st.integers(2, 10), st.integers(0, 2**32))
def test_every_sample_is_held_out_once_and_sizes_are_those_of_sklearn(
    total: int, folds: int, seed: int
) -> None:
    splits = folds_of(total, folds, seed=seed, test=0.1)
    test = splits[0]["test"]
    for split in splits:
        assert np.array_equal(split["test"], test)
        indices = np.concatenate([*split.values()])
        assert np.array_equal(np.sort(indices), np.arange(total))
    held_out = np.concatenate([split["val"] for split in splits])
    assert np.array_equal(np.sort(held_out), np.setdiff1d(np.arange(total), test))
    reference_sizes = [part.size for _, part in KFold(folds).split(np.zeros(total - test.size))]
    assert sorted(split["val"].size for split in splits) == sorted(reference_sizes)


@given(
    st.lists(st.integers(6, 30), min_size=2, max_size=5), st.integers(2, 6), st.integers(0, 2**32)
)
def test_classes_are_dealt_out_as_evenly_as_by_sklearn(
    sizes: list[int], folds: int, seed: int
) -> None:
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    splits = folds_of(classes.size, folds, seed=seed, classes=classes, test=0)
    counts = np.array(
        [np.bincount(classes[split["val"]], minlength=len(sizes)) for split in splits]
    )
    reference_counts = np.array(
        [
            np.bincount(classes[part], minlength=len(sizes))
            for _, part in StratifiedKFold(folds).split(classes, classes)
        ]
    )
    for fold_counts in (counts, counts.sum(1, keepdims=True)):
        assert np.ptp(fold_counts, axis=0).max() <= 1
    for column, their_column in zip(counts.T, reference_counts.T, strict=True):
        assert sorted(column) == sorted(their_column)


def test_the_test_split_is_that_of_a_run_without_folds() -> None:
    classes = np.arange(200) % 3
    for given_classes in (None, classes):
        before = divide_samples(200, val=0.1, test=0.2, seed=3, classes=given_classes)
        for split in folds_of(200, 5, classes=given_classes):
            assert np.array_equal(split["test"], before["test"])
            assert not np.array_equal(split["val"], before["val"])


def test_folds_are_drawn_from_the_seed_and_look_it() -> None:
    first, repeat, other = (folds_of(500, 5, seed=seed)[2]["val"] for seed in (1, 1, 2))
    assert np.array_equal(first, repeat)
    assert np.intersect1d(first, other).size < 40
    assert 200 < first.mean() < 300
    assert np.unique(np.diff(first)).size > 5


def test_more_folds_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 folds of 8 samples: some would be empty"):
        divide_folds(10, 0, 9, val=0.1, test=0.2, seed=1)
    assert folds_of(10, 8)[7]["val"].size == 1


def test_a_class_that_would_not_be_trained_is_named() -> None:
    classes = np.array([0] * 20 + [1])
    failing_folds = []
    for fold in range(5):
        with suppress(ConfigError):
            divide_folds(21, fold, 5, val=0.1, test=0, seed=1, classes=classes)
            continue
        failing_folds.append(fold)
    (fold,) = failing_folds
    with pytest.raises(ConfigError, match="class 1 has 1 sample, and all would be held out"):
        divide_folds(21, fold, 5, val=0.1, test=0, seed=1, classes=classes)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (lambda: {"train": columns(20), "val": columns(5)}, "the samples come with one"),
        (lambda: {"train": iter([{"x": 1.0}]), "val": columns(5)}, "an iterable is read forward"),
    ],
)
def test_sets_that_have_their_own_split_are_refused(samples: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_set(samples, samples(), (), SamplesConfig(folds=4), 1)


def test_a_test_set_of_ones_own_is_in_no_fold() -> None:
    def samples() -> dict[str, Any]:
        return {"train": columns(20), "test": columns(6)}

    held_out = []
    for fold in range(4):
        data = SamplesConfig(folds=4, fold=fold)
        dataset = sample_set(samples, samples(), (), data, 1)
        assert dataset.size("test") == 6
        assert (dataset.size("train"), dataset.size("val")) == (15, 5)
        held_out += dataset.held_out("val").read(np.arange(5))["x"].tolist()  # type: ignore[union-attr]
    assert sorted(held_out) == list(range(20))


def columns(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.float32(number)} for number in range(count)]  # type: ignore[dict-item]


CONFIG = """\
task: rows:Rows
data: {folds: 5, fold: 1}
"""
TASK = """\
import numpy as np
from torch import nn
from instar.custom import CustomTask

class Rows(CustomTask):
    def samples(self):
        return {"x": np.zeros((50, 2), "f4")}

    def module(self, shape):
        return nn.Linear(2, 2)

    def loss(self, model, batch):
        return model(batch["x"]).square().mean(1)
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.fold=5"], "data.fold 5: 5 folds are 0 to 4"),
        (["data.folds=null"], "data.fold 1 is one of data.folds, which is not set"),
        (["data.val=0.2"], "data.val 0.2 and data.folds both say what the validation split is"),
        (["data.folds=1"], "data.folds must be"),
        (["data.fold=-1"], "data.fold must be"),
        ([], ""),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instar.config.load import load_config

    (tmp_path / "rows.py").write_text(TASK)
    (tmp_path / "rows.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if message:
        with pytest.raises(ConfigError) as error:
            load_config("rows.yaml", changes)
        assert message in str(error.value)
        return
    run_config = load_config("rows.yaml")
    (tmp_path / "again.yaml").write_text(run_config.to_yaml())
    assert load_config("again.yaml").config == run_config.config
    assert json.loads(run_config.to_json())


def test_stratified_folds_read_the_column(tmp_path: Path) -> None:
    del tmp_path
    source = InMemorySource({"kind": np.repeat([0, 1], 20), "x": np.arange(40.0)})
    data = SamplesConfig(folds=4, fold=2, stratify="kind", test=0)
    dataset = sample_set(lambda: source, source, (), data, 1)
    kinds = dataset.held_out("val").read(np.arange(10))["kind"]
    assert np.bincount(np.asarray(kinds)).tolist() == [5, 5]
