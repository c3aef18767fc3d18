from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import dense, ragged_arrays, same

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged, cut, pick
from instar.extensions.graphs import arrays as module
from instar.extensions.graphs.arrays import holds_arrays, open_arrays, write_arrays

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,3}", fullmatch=True)
EVERYTHING, NOTHING = 1 << 40, 0
"""What `in_memory_bytes` may be: all is read at once, or nothing is."""
EVERY = times(97, 23)
"""of the bytes of a file, which is changed there"""


@pytest.fixture
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few samples take several chunks and files."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 48)
    monkeypatch.setattr(module, "_CHUNKS_PER_FILE", 2)


@st.composite
def stored(draw: st.DrawFn) -> tuple[Columns, list[Columns]]:
    """Columns that can be stored, and the same in blocks."""
    samples = draw(st.integers(0, 6))
    leaf = st.one_of(dense(samples), ragged_arrays(samples))
    whole = draw(st.dictionaries(NAMES, leaf, min_size=1, max_size=3))
    cuts = sorted([0, samples, *draw(st.lists(st.integers(0, samples), max_size=3))])
    return whole, [cut(whole, begin, end) for begin, end in itertools.pairwise(cuts)]


def graphs(samples: int, seed: int = 0) -> Columns:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 5, samples)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return {
        "x": Ragged(generator.standard_normal((offsets[-1], 2)).astype(np.float32), offsets),
        "y": generator.integers(0, 9, samples),
    }


def written(folder: Path, samples: int = 40) -> Path:
    whole = graphs(samples)
    write_arrays(folder, [cut(whole, 0, 7), cut(whole, 7, samples)], {"made": "for a test"})
    return folder


def ids(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.usefixtures("_small_files")
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=stored(), data=st.data(), limit=st.sampled_from([EVERYTHING, NOTHING]))
def test_what_is_written_is_read_however_it_came_in_blocks(
    made: tuple[Columns, list[Columns]], data: st.DataObject, limit: int
) -> None:
    whole, blocks = made
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(Path(folder) / "blocks", blocks, {})
        write_arrays(Path(folder) / "whole", [whole], {})
        arrays = open_arrays(Path(folder) / "blocks", limit)
        assert arrays.fingerprint == open_arrays(Path(folder) / "whole", limit).fingerprint
        samples = len(next(iter(whole.values())))
        assert len(arrays) == samples
        some = st.lists(st.integers(0, samples - 1), max_size=6) if samples else st.just([])
        chosen = ids(*data.draw(some))
        assert same(arrays.read(chosen), pick(whole, chosen))
        assert arrays.weights(chosen) == len(chosen)
        for name, column in whole.items():
            if isinstance(column, Ragged):
                assert same(arrays.sizes(name), column.sizes)
            else:
                assert same(arrays.column(name), np.ascontiguousarray(column))


@pytest.mark.parametrize("limit", [EVERYTHING, NOTHING])
@pytest.mark.parametrize("outside", [-1, 40, 1 << 40])
def test_samples_outside_are_refused(tmp_path: Path, limit: int, outside: int) -> None:
    arrays = open_arrays(written(tmp_path / "store"), limit)
    with pytest.raises(IndexError, match="which has 40"):
        arrays.read(ids(3, outside))


def test_the_fingerprint_is_that_of_the_samples(tmp_path: Path) -> None:
    columns = graphs(9)
    for name, block in (("one", columns), ("two", columns), ("other", graphs(9, seed=1))):
        write_arrays(tmp_path / name, [block], {"name": name})
    one, two, other = (open_arrays(tmp_path / name) for name in ("one", "two", "other"))
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert [arrays.about for arrays in (one, two)] == [{"name": "one"}, {"name": "two"}]


def test_columns_are_asked_for_by_name_and_kind(tmp_path: Path) -> None:
    arrays = open_arrays(written(tmp_path / "store"))
    with pytest.raises(ConfigError, match="no dense column 'x', there are: y"):
        arrays.column("x")
    with pytest.raises(ConfigError, match="no ragged column 'y', there are: x"):
        arrays.sizes("y")


@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("limit", [EVERYTHING, NOTHING])
def test_whatever_file_is_missing_or_cut_short_is_named(tmp_path: Path, limit: int) -> None:
    store = written(tmp_path / "store")
    files = [file for file in store.rglob("*") if file.is_file() and file.parent != store]
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(ConfigError, match=f"{file}: .* bytes, .* were written"):
            open_arrays(store, limit)
        file.unlink()
        with pytest.raises(ConfigError, match=f"{file}: the file is missing"):
            open_arrays(store, limit)
        file.write_bytes(content)
    assert len(open_arrays(store, limit)) == 40


@pytest.mark.repeated
@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("limit", [EVERYTHING, NOTHING])
def test_no_changed_byte_is_read(tmp_path: Path, limit: int) -> None:
    store = written(tmp_path / "store")
    whole = open_arrays(store).read(np.arange(40))
    for file in sorted(file for file in store.rglob("*") if file.parent != store):
        if not file.is_file():
            continue
        content = file.read_bytes()
        # zarr.json says of an array what the record says, and how it is coded
        for at in range(0, len(content), EVERY if file.name != module.RECORD_FILE else 4 * EVERY):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            try:
                read = open_arrays(store, limit).read(np.arange(40))
            except ConfigError as error:
                assert "damaged" in str(error)  # noqa: PT017
            else:
                assert same(read, whole)
        file.write_bytes(content)


def edited(store: Path, **changes: Any) -> None:
    file = store / module.RECORD_FILE
    content = json.loads(file.read_text())
    content["attributes"]["instar"] |= changes
    file.write_text(json.dumps(content))


def test_a_folder_without_a_whole_record_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        open_arrays(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no zarr\.json"):
        open_arrays(tmp_path)
    for content in ("", "{}", "[]", '{"attributes": {"instar": {"format": 1}}}', '{"attributes"'):
        (tmp_path / module.RECORD_FILE).write_text(content)
        with pytest.raises(ConfigError, match="not the record of an array store"):
            open_arrays(tmp_path)


def test_a_record_that_was_edited_is_refused(tmp_path: Path) -> None:
    store = written(tmp_path / "store")
    edited(store, fingerprint="0" * 32)
    with pytest.raises(ConfigError, match="the fingerprint is not that of the arrays"):
        open_arrays(store)
    edited(store, format="instar-arrays/9")
    with pytest.raises(ConfigError, match="format 'instar-arrays/9' is not"):
        open_arrays(store)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        write_arrays(tmp_path, [graphs(3)], {})
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    def blocks() -> Any:
        yield graphs(30)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_arrays(tmp_path / "store", blocks(), {})
    assert not holds_arrays(tmp_path / "store")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"y": ids(1)}, "block 1 has y, the first one x, x.offsets, y"),
        (graphs(2) | {"y": np.zeros(2)}, "block 1 has y as float64"),
        (graphs(2) | {"y": ids(1)}, "different lengths"),
        (graphs(2) | {"x": np.zeros((2, 2), np.float32)}, "block 1 has x, y, the first one"),
        (graphs(2) | {"y": np.array(["a", "b"])}, "block 1 has y as <U1"),
        (graphs(2) | {"z": {"a": ids(1, 2)}}, "block 1 has 'z'"),
        (graphs(2) | {"a.b": ids(1, 2)}, "block 1 has 'a.b'"),
    ],
)
def test_blocks_that_do_not_go_together_are_named(
    tmp_path: Path, second: Columns, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        write_arrays(tmp_path / "store", [graphs(2), second], {})
    with pytest.raises(ValueError, match="no samples to write"):
        write_arrays(tmp_path / "store", [], {})
    assert not list(tmp_path.iterdir())


def test_any_zarr_library_reads_the_columns(tmp_path: Path) -> None:
    import zarr

    group = zarr.open_group(written(tmp_path / "store"), mode="r")
    x = graphs(40)["x"]
    assert isinstance(x, Ragged)
    assert same(np.asarray(group["x"]), x.values)
    assert same(np.asarray(group["x.offsets"]), x.offsets)
