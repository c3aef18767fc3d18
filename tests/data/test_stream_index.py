from __future__ import annotations

import importlib
import json
import linecache
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.order import UNKNOWN
from instar.data.source import IGNORED
from instar.data.text.streams import index as stream_index
from instar.data.text.streams.index import count_lanes, open_stream
from instar.data.text.streams.samples import DocumentLane, PackedLane, StreamChanged
from instar.data.text.streams.source import OpenStreamSource, StreamSource
from instar.data.text.tokenizer import TOKENIZER_FILE, ByteTokenizer

SIZES = (40, 7, 25, 0, 33)
CONTEXT = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of documents of different lengths, and a place for what is counted of them."""
    rng = np.random.default_rng(1)
    for file, size in enumerate(SIZES):
        texts = ["x" * int(rng.integers(0, 30)) + str(row) for row in range(size)]
        lines = [msgspec.json.encode({"text": text}) + b"\n" for text in texts]
        (tmp_path / f"rows-{file}.jsonl").write_bytes(b"".join(lines) or b"\n")
    place = tmp_path / "data"
    place.mkdir()
    (place / TOKENIZER_FILE).write_text(ByteTokenizer().to_json())
    return place


def config(folder: Path, **fields: Any) -> DataConfig:
    source = str(folder.parent / "rows-*.jsonl")
    return DataConfig(**{"kind": "stream", "source": source, "shuffle_window": 8, **fields})


def epoch_of(data: DataConfig, folder: Path, *, use_sizes: bool, step: int = 7) -> Iterator[Any]:
    """Columns and weight of every step of an epoch."""
    source, order = open_stream(data, folder, CONTEXT, seed=3, use_sizes=use_sizes)
    start, end = 0, order.samples_per_epoch
    while start < end:
        if isinstance(source, OpenStreamSource):
            end = source.explore(start, start + step)
        ids = order.indices(0, start, min(start + step, end))
        yield ids, source.read(ids), source.weights(ids)
        start += step
    source.close()


def as_lists(steps: Iterator[Any]) -> list[Any]:
    return [
        (ids.tolist(), columns["inputs"].tolist(), columns["targets"].tolist(), weight)
        for ids, columns, weight in steps
    ]


@settings(deadline=None)
@given(tokens=st.integers(0, 60), context=st.integers(1, 9))
def test_the_targets_of_a_packed_lane_are_all_its_tokens_but_one(tokens: int, context: int) -> None:
    lane = PackedLane(tokens, context)
    numbers = np.arange(lane.samples)
    assert lane.total(numbers) == max(0, tokens - 1)
    assert all(0 < lane.total(numbers[k : k + 1]) <= context for k in range(lane.samples))


def test_the_targets_of_documents_end_with_the_context() -> None:
    lane = DocumentLane(np.array([2, 5, 9], dtype=np.uint32), context=4)
    assert [lane.total(np.array([number])) for number in range(3)] == [1, 4, 4]
    assert lane.total(np.array([], dtype=np.int64)) == 0


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_counted_or_not_a_stream_gives_the_same_steps_and_weights(
    folder: Path, packing: bool, order: str
) -> None:
    data = config(folder, packing=packing, order=order)
    first_steps = as_lists(epoch_of(data, folder, use_sizes=False))
    (folder / stream_index.LANES_FILE).unlink()
    count_lanes(data, folder)
    steps = as_lists(epoch_of(data, folder, use_sizes=True))
    assert steps == first_steps == as_lists(epoch_of(data, folder, use_sizes=False))
    ids = sorted(id_ for step in steps for id_ in step[0])
    assert len(set(ids)) == len(ids) > 40
    for _, _, targets, weight in steps:
        assert weight == np.count_nonzero(np.array(targets) != IGNORED)


@pytest.mark.torture
def test_the_number_of_workers_changes_nothing(folder: Path) -> None:
    serial, one_worker, two_workers = (config(folder, workers=number) for number in range(3))
    steps = as_lists(epoch_of(one_worker, folder, use_sizes=False))
    lanes_content = (folder / stream_index.LANES_FILE).read_bytes()
    (folder / stream_index.LANES_FILE).unlink()
    count_lanes(two_workers, folder)
    assert (folder / stream_index.LANES_FILE).read_bytes() == lanes_content
    assert steps == as_lists(epoch_of(serial, folder, use_sizes=True))


def test_counting_says_what_it_does_and_is_done_once(folder: Path) -> None:
    messages: list[str] = []
    count_lanes(config(folder), folder, messages.append)
    assert "read once to the end, 5 lanes" in messages[0]
    assert len(messages) == 2 + 5
    record = json.loads((folder / stream_index.LANES_FILE).read_text())
    assert messages[-1] == f"counted: {sum(record['counts']):,} tokens"
    assert record["counts"][3] == 0
    messages.clear()
    count_lanes(config(folder), folder, messages.append)
    assert messages == []


def test_another_context_needs_no_counting_anew(folder: Path) -> None:
    data = config(folder)
    count_lanes(data, folder)
    for context in (5, 50):
        source, order = open_stream(data, folder, context, seed=3, use_sizes=True)
        ids = order.indices(0, 0, order.samples_per_epoch)
        targets = source.read(ids)["targets"]
        assert isinstance(targets, np.ndarray)
        assert source.weights(ids) == np.count_nonzero(targets != IGNORED)


def test_what_was_counted_of_another_stream_is_not_used(folder: Path) -> None:
    data = config(folder)
    with pytest.raises(ConfigError, match=r"were not counted.*dispatched"):
        open_stream(data, folder, CONTEXT, seed=3, use_sizes=True)
    count_lanes(data, folder)
    other_configs = [
        config(folder, lanes=2),
        config(folder, packing=False),
        config(folder, text_field="t"),
    ]
    for other in other_configs[:2]:
        with pytest.raises(ConfigError, match="were not counted"):
            open_stream(other, folder, CONTEXT, seed=3, use_sizes=True)
    with (folder.parent / "rows-0.jsonl").open("ab") as file:
        file.write(b'{"text": "one more"}\n')
    with pytest.raises(ConfigError, match="were not counted, or it has changed"):
        open_stream(data, folder, CONTEXT, seed=3, use_sizes=True)
    source, order = open_stream(data, folder, CONTEXT, seed=3, use_sizes=False)
    assert isinstance(source, OpenStreamSource)
    assert (order.samples_per_epoch, order.certain) == (UNKNOWN, 0)


def test_data_that_changed_without_another_size_is_noticed_when_a_lane_ends(folder: Path) -> None:
    data = config(folder, lanes=1)
    count_lanes(data, folder)
    file = folder.parent / "rows-4.jsonl"
    lines = file.read_bytes().splitlines()
    short, size = b"\n".join([*lines[:-20], b""]), file.stat().st_size
    file.write_bytes(short + b"\n" * (size - len(short)))
    source, order = open_stream(data, folder, CONTEXT, seed=3, use_sizes=True)
    assert isinstance(source, StreamSource)
    assert order.samples_per_epoch == len(source)
    way_out = r"lane 0 ended after .*; if it was changed on purpose, delete .*lanes\.json"
    with pytest.raises(StreamChanged, match=way_out):
        source.read(order.indices(0, 0, len(source)))


def test_another_version_of_a_function_or_a_saved_set_is_counted_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    module, saved_folder = folder.parent / "changing.py", folder.parent / "saved"
    kinds = (("python", "changing:texts", 1), ("stream", str(saved_folder), 2))
    for kind, source, lanes in kinds:
        data = config(folder, kind=kind, source=source, lanes=lanes)
        for n in (40, 60, 30):
            module.write_text(f"N = {n}\ndef texts():\n    return map(str, range(N))\n")
            sys.modules.pop("changing", None)
            linecache.clearcache()
            importlib.invalidate_caches()
            shutil.rmtree(saved_folder, ignore_errors=True)
            rows = datasets.Dataset.from_dict({"text": [*map(str, range(n))]})
            rows.save_to_disk(saved_folder)
            steps = as_lists(epoch_of(data, folder, use_sizes=False))
            (folder / stream_index.LANES_FILE).rename(folder / "before.json")
            assert steps == as_lists(epoch_of(data, folder, use_sizes=False))


def test_a_damaged_record_is_named(folder: Path) -> None:
    (folder / stream_index.LANES_FILE).write_text('{"format": "instar-lanes/1"}')
    with pytest.raises(ConfigError, match=r"lanes\.json: not a record of lanes.*delete it"):
        count_lanes(config(folder), folder)


def test_a_stream_without_samples_is_not_counted(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the stream has no samples"):
        count_lanes(config(folder, kind="python", source=f"{__name__}:short_texts"), folder)
    assert not (folder / stream_index.LANES_FILE).exists()


def test_what_a_worker_meets_is_told_here(folder: Path) -> None:
    (folder.parent / "rows-2.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(ConfigError, match=r"rows-2\.jsonl:2: the field 'text' is not text"):
        count_lanes(config(folder, workers=1), folder)


def test_a_worker_knows_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from instar.config.language import DataConfig\n"
        "from instar.data.text.streams.index import _worker\n"
        "data = DataConfig(kind='stream', source=sys.argv[1])\n"
        "assert _worker(data, Path(sys.argv[2]), 16).fetch(0, 0, 1).samples\n"
        "assert 'datasets' in sys.modules and 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code, config(folder).source, str(folder)]
    subprocess.run(words, check=True)


def short_texts() -> list[str]:
    return ["", "a"]
