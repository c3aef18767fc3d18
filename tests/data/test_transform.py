from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosted import Numbers
from samples import same

from instar.config.errors import ConfigError
from instar.config.user_code.named import load_named
from instar.data.columns import Ragged, ragged_names
from instar.data.source import InMemorySource
from instar.data.user_source import Transformed, examples_of, sample_generator

SOURCE = Numbers(40)
Sample = dict[str, Any]


def noisy(sample: Sample, generator: np.random.Generator) -> Sample:
    nodes = sample["graph"]["nodes"]
    nodes += generator.normal(size=nodes.shape).astype(np.float32)
    return {"number": sample["number"], "noise": generator.random(), "nodes": nodes}


def test_each_sample_is_transformed() -> None:
    ids = np.array([3, 8, 7])
    columns = Transformed(SOURCE, lambda sample, _: {"twice": 2 * sample["number"]}, 0).read(ids)
    assert same(columns, {"twice": 2 * ids})


def test_what_is_drawn_depends_on_the_sample_alone() -> None:
    source = Transformed(SOURCE, noisy, seed=1)
    batch = source.read(np.array([5, 6, 7, 5]), epoch=2)
    single = source.read(np.array([7]), epoch=2)
    nodes, nodes_alone = batch["nodes"], single["nodes"]
    assert isinstance(nodes, Ragged)
    assert isinstance(nodes_alone, Ragged)
    assert isinstance(batch["noise"], np.ndarray)
    assert isinstance(single["noise"], np.ndarray)
    assert batch["noise"][2] == single["noise"][0]
    assert np.array_equal(nodes[2:3].flat, nodes_alone.flat)
    assert batch["noise"][0] == batch["noise"][3]
    assert np.array_equal(nodes[0:1].flat, nodes[3:4].flat)
    for other in (
        source.read(np.array([7]), epoch=3),
        Transformed(SOURCE, noisy, 2).read(np.array([7]), 2),
    ):
        assert np.asarray(other["noise"])[0] != single["noise"][0]


def test_columns_are_ragged_as_in_the_source_and_where_results_vary() -> None:
    words = Ragged(np.arange(9), np.array([0, 3, 6, 9]))
    source = InMemorySource({"words": words, "x": np.zeros((3, 4))})

    def crop(sample: Sample, _: object) -> Sample:
        return {**sample, "x": sample["x"][: sample["words"][0]], "y": sample["x"], "n": 1}

    for function, expected in ((crop, {"words", "x"}), (lambda sample, _: sample, {"words"})):
        for ids in ([0], [1, 1], [2, 0, 1]):
            samples = Transformed(source, function, 0)
            assert ragged_names(samples.read(np.array(ids))) == expected
    crops = Transformed(source, crop, 0, examples=lambda: examples_of(source, np.array([0])))
    with pytest.raises(
        ValueError, match="crop made samples that do not fit: sample 1: x has 3 row"
    ):
        crops.read(np.array([0, 1]))


def test_the_source_is_asked_for_the_same_epoch() -> None:
    columns = Transformed(SOURCE, lambda sample, _: sample, 0).read(np.array([4, 5]), epoch=9)
    assert same(columns, SOURCE.read(np.array([4, 5]), epoch=9))


def test_length_and_weights_are_the_sources() -> None:
    source = Transformed(SOURCE, noisy, 0)
    assert len(source) == 40
    assert source.weights(np.array([1, 2, 7])) == SOURCE.weights(np.array([1, 2, 7]))
    fingerprints = {
        samples.fingerprint for samples in (SOURCE, source, Transformed(SOURCE, noisy, 1))
    }
    assert len(fingerprints) == 3


def test_an_error_in_the_function_names_the_sample() -> None:
    def picky(sample: Sample, _: object) -> Sample:
        if sample["number"] == 17:
            raise KeyError("nothing like it")
        return sample

    with pytest.raises(KeyError, match="nothing like it") as error:
        Transformed(SOURCE, picky, 0).read(np.array([3, 17]), epoch=2)
    assert "picky, of sample 17 in epoch 2" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "sample 17 is a NoneType"),
        ({"y": 1}, "sample 17 has y, the first one x"),
        ({"x": 1.5}, "sample 17: x is float64"),
        ({"x": "text"}, "sample 17: x is 'text', which is no array of numbers"),
    ],
)
def test_a_result_that_does_not_fit_names_the_sample(result: Any, message: str) -> None:
    def odd(sample: Sample, _: object) -> Any:
        return result if sample["number"] == 17 else {"x": 1}

    with pytest.raises(ValueError, match=rf"odd made samples that do not fit: {message}"):
        Transformed(SOURCE, odd, 0).read(np.array([3, 17]))


def test_generators_are_the_same_again_and_unrelated_otherwise() -> None:
    places = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(500)]
    values = np.array([sample_generator(*place).random(4) for place in places])
    assert np.array_equal(values, [sample_generator(*place).random(4) for place in places])
    assert np.unique(values).size == values.size
    assert abs(float(values.mean()) - 0.5) < 5 * (1 / 12 / values.size) ** 0.5
    neighbours = np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]
    assert abs(float(neighbours)) < 5 / len(places) ** 0.5


def test_generators_never_change_between_versions() -> None:
    values = sample_generator(1337, 2, 10**12).integers(0, 2**63, 2)
    assert values.tolist() == DRAWN


DRAWN = [4689580259979330655, 1264415291177491213]


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_function_in_the_current_directory_is_found(working_directory: Path) -> None:
    (working_directory / "my_data.py").write_text(
        "def augment(sample, generator):\n    return 'augmented'\n"
    )
    (working_directory / "my_package").mkdir()
    (working_directory / "my_package" / "inner.py").write_text("class Make:\n    pass\n")
    assert load_named("my_data:augment", key="data.transform")(None, None) == "augmented"
    assert load_named("my_package.inner:Make", key="data.source").__name__ == "Make"


@pytest.mark.parametrize(
    "name", ["augment", "my_data:", ":augment", "my data:augment", "a:b:c", ""]
)
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form module:function") as error:
        load_named(name, key="data.transform")
    assert error.value.problems[0].key == "data.transform"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_dat:augment", "there is no module 'my_dat'"),
        ("my_dat.inner:augment", "there is no module 'my_dat'"),
        ("my_data:augmnt", "my_data has no 'augmnt'; did you mean 'augment'"),
        ("my_data:limit", "my_data:limit is not callable: its type is int"),
        ("my_broken:augment", "my_broken cannot be imported: ZeroDivisionError: division by zero"),
        ("my_typo:augment", "my_typo cannot be imported: SyntaxError"),
        ("my_needy:augment", "my_needy cannot be imported: No module named 'not_there'"),
    ],
)
def test_what_is_wrong_is_said(working_directory: Path, name: str, message: str) -> None:
    (working_directory / "my_data.py").write_text(
        "limit = 5\ndef augment(sample, generator):\n    return sample\n"
    )
    (working_directory / "my_broken.py").write_text("1 / 0\n")
    (working_directory / "my_typo.py").write_text("def augment(:\n")
    (working_directory / "my_needy.py").write_text("import not_there\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_named(name, key="data.transform")
    assert error.value.problems[0].where == "data.transform"
