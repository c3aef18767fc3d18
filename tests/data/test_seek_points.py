"""A stream that is opened far from its beginning gives the same samples, and reads little for it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import parametrize_first
from forks import forks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ways import Way, config, make_rows, rows_of, take_steps

from instar.config.language import DataConfig
from instar.data.text.streams import seek_points
from instar.data.text.streams.index import count_lanes, open_stream
from instar.data.text.streams.samples import DocumentStream, PackedStream, StreamChanged
from instar.data.text.streams.seek_points import START, SeekPoint, SeekPoints
from instar.data.text.streams.source import OpenStreamSource
from instar.data.text.tokenizer import TOKENIZER_FILE, ByteTokenizer

FILES, ROWS, CONTEXT = 20, 40, 16
WHOLE = 10_000
TEXTS = [f"document {number} " * (number % 5) for number in range(FILES * ROWS)]
encode_count = 0


@pytest.fixture(autouse=True)
def close_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points every few documents, written at once."""
    monkeypatch.setattr(PackedStream, "spacing", 500)
    monkeypatch.setattr(DocumentStream, "spacing", 12)
    monkeypatch.setattr(seek_points, "_SAVE_EVERY_S", 0.0)
    monkeypatch.setattr("instar.data.text.streams.samples._BATCH_CHARACTERS", 200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder, beside Parquet files."""
    for file in range(FILES):
        write(tmp_path, file, TEXTS[file * ROWS : (file + 1) * ROWS])
    place = tmp_path / "data"
    place.mkdir()
    (place / TOKENIZER_FILE).write_text(ByteTokenizer().to_json())
    return place


def write(folder: Path, file: int, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    path = folder / f"part-{file:02}.parquet"
    pq.write_table(table, path, row_group_size=7, compression="none", use_dictionary=False)


def stream(folder: Path, **fields: Any) -> DataConfig:
    source = str(folder.parent / "*.parquet")
    config_fields = {
        "kind": "stream",
        "source": source,
        "lanes": 2,
        "order": "sequential",
        **fields,
    }
    return DataConfig(**config_fields)


def read(
    data: DataConfig,
    folder: Path,
    start: int,
    stop: int | None = None,
    *,
    context: int = CONTEXT,
    use_sizes: bool = False,
) -> list[Any]:
    """Rows at 15 positions, or at those before `stop`, as a process that starts anew reads them."""
    source, order = open_stream(data, folder, context, seed=3, use_sizes=use_sizes)
    rows: list[Any] = []
    step = 5 if stop is None else 100
    try:
        for begin in range(start, stop or start + 15, step):
            end = order.samples_per_epoch
            if isinstance(source, OpenStreamSource):
                end = source.explore(begin, begin + step)
            if begin >= end:
                break
            columns = source.read(order.indices(0, begin, min(begin + step, end)))
            rows += zip(columns["inputs"].tolist(), columns["targets"].tolist(), strict=True)  # type: ignore[union-attr]
    finally:
        source.close()
    return rows


def unusable(folder: Path, *files: int) -> None:
    """Files of the same size that cannot be read."""
    for file in files:
        path = folder / f"part-{file:02}.parquet"
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("how", ["read", "counted"])
def test_a_stream_opened_far_within_opens_only_the_files_there(
    folder: Path, packing: bool, how: str
) -> None:
    data = stream(folder, packing=packing)
    rows = read(data, folder, 0, WHOLE)
    far = len(rows) - 40
    if how != "read":
        remove_points(folder)
        (folder / "lanes.json").unlink()
        count_lanes(data, folder)
    unusable(folder.parent, *range(1, 8), *range(10, 18))
    for use_sizes in {False, how != "read"}:
        assert read(data, folder, far, use_sizes=use_sizes) == rows[far : far + 15]
    with pytest.raises(pa.ArrowInvalid):
        read(data, folder, len(rows) // 4)


def remove_points(folder: Path) -> None:
    for file in (folder / seek_points.POINTS_FOLDER).iterdir():
        file.unlink()


def texts() -> Iterator[str]:
    yield from TEXTS


class Counting(ByteTokenizer):
    def encode_batch(self, texts: Any) -> Any:
        global encode_count
        encode_count += len(texts)
        return super().encode_batch(texts)


def test_items_of_a_function_are_skipped_without_tokenizing_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instar.data.text.streams.index.load_saved_tokenizer", lambda _: Counting())
    data = stream(folder, kind="python", source=f"{__name__}:texts")
    rows = read(data, folder, 0, WHOLE)
    before = encode_count
    assert before >= sum(map(bool, TEXTS))
    far = len(rows) * 9 // 10
    assert read(data, folder, far) == rows[far : far + 15]
    assert encode_count - before < 100


@parametrize_first("packing", [True, False], first=1)
@parametrize_first("kind", ["stream", "python"], first=1)
def test_points_hold_for_any_context(folder: Path, packing: bool, kind: str) -> None:
    source = f"{__name__}:texts" if kind == "python" else stream(folder).source
    data = stream(folder, kind=kind, source=source, packing=packing)
    read(data, folder, 0, WHOLE)
    (folder / "lanes.json").unlink()
    other = folder.parent / "without points"
    other.mkdir()
    (other / TOKENIZER_FILE).write_text(ByteTokenizer().to_json())
    for context in (3, 61):
        rows = read(data, other, 0, WHOLE, context=context)
        (other / "lanes.json").unlink()
        for start in range(0, len(rows), len(rows) // 7):
            actual = read(data, folder, start, context=context)
            assert actual == rows[start : start + 15]


@pytest.mark.torture
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(
        ["a stream", "a shuffled stream", "a stream, a document a sample", "an iterable"]
    ),
    cursor=st.integers(0, 400),
    ranks=st.integers(1, 4),
    is_dispatched=st.booleans(),
)
def test_a_run_goes_on_anywhere_with_any_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    cursor: int,
    ranks: int,
    is_dispatched: bool,
) -> None:
    place = tmp_path_factory.getbasetemp() / "any" / kind
    if not place.exists():
        place.mkdir(parents=True)
        make_rows(place)
    data = config(place, kind, path=str(place / "data"))
    way = Way(ranks, "dispatched" if is_dispatched or kind == "an iterable" else "sharded")
    steps = take_steps(data, Way(1), 30)
    rows = [row for batches in steps for row in rows_of(batches[0])]
    plans = [batches[0].plan for batches in steps]
    epoch_samples = next(plan.cursor for plan in plans if plan.epoch)
    cursor %= epoch_samples
    (batches,) = take_steps(data, way, 1, cursor)
    expected = rows[cursor : cursor + batches[0].plan.count]
    assert sorted(row for batch in batches for row in rows_of(batch) if row) == sorted(expected)


def test_another_document_at_a_point_is_an_error(folder: Path) -> None:
    data = stream(folder)
    rows = read(data, folder, 0, WHOLE)
    for file in range(FILES):
        path = folder.parent / f"part-{file:02}.parquet"
        path.write_bytes(path.read_bytes().replace(b"document", b"DOCUMENT"))
    assert read(data, folder, 0) != rows[:15]
    with pytest.raises(StreamChanged, match=r"lane \d \(part-\d+.parquet\), item \d+ is not what"):
        read(data, folder, len(rows) - 100)


def test_a_lane_that_begins_otherwise_the_next_time_is_an_error(folder: Path) -> None:
    data = stream(folder, kind="python", source=f"{__name__}:begins_otherwise")
    source, order = open_stream(data, folder, CONTEXT, seed=3, use_sizes=False)
    assert isinstance(source, OpenStreamSource)
    source.explore(0, 5)
    source._samples._caches[0].first = 10**6
    with pytest.raises(StreamChanged, match="begins_otherwise, item 0 is not what it was"):
        source.read(order.indices(0, 0, 5))


def begins_otherwise() -> Iterator[str]:
    global encode_count
    encode_count += 1
    yield from (f"{encode_count} {number}" for number in range(100))


def test_a_run_that_begins_anew_replaces_the_points_of_an_older_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a function says nothing of what it returns."""
    data = stream(folder, kind="python", source=f"{__name__}:texts")
    read(data, folder, 0, WHOLE)
    (folder / "lanes.json").unlink()
    other_texts = [TEXTS[0], *(text * 2 for text in TEXTS[1:])]
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", other_texts)
    rows = read(data, folder, 0, 900)
    assert read(data, folder, 850) == rows[850:865]


@parametrize_first(
    "spoil",
    [
        lambda content: content[:0],
        lambda content: content[:-30],
        lambda content: b"\xff" + content[1:],
        lambda content: content + b" " * (1 << 23),
        lambda content: edit_points(content, lambda points: points.reverse()),
        lambda content: edit_points(content, lambda points: points[3].__setitem__(0, 7)),
        lambda content: edit_points(content, lambda points: points[3].__setitem__(1, -1)),
        lambda content: edit_points(content, lambda points: points[3].__setitem__(3, "x")),
        lambda content: content.replace(b"seek-points/1", b"seek-points/9"),
        lambda content: content.replace(b'"fingerprint":"', b'"fingerprint":"other'),
    ],
    first=3,
)
def test_a_file_that_is_damaged_or_of_something_else_is_as_good_as_none(
    folder: Path, spoil: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    data = stream(folder)
    rows = read(data, folder, 0, WHOLE)
    files = sorted((folder / seek_points.POINTS_FOLDER).iterdir())
    assert [file.name for file in files] == ["lane-0.json", "lane-1.json"]
    for file in files:
        file.write_bytes(spoil(file.read_bytes()))
    far = len(rows) - 40
    with caplog.at_level(logging.WARNING):
        assert read(data, folder, far) == rows[far : far + 15]
    assert len(caplog.records) == 1
    assert read(data, folder, far) == rows[far : far + 15]


def edit_points(content: bytes, edit: Callable[[Any], object]) -> bytes:
    record = json.loads(content)
    edit(record["points"])
    return json.dumps(record).encode()


def test_a_file_that_is_a_pipe_or_a_link_is_not_read(folder: Path, tmp_path: Path) -> None:
    data = stream(folder)
    rows = read(data, folder, 0, WHOLE)
    files = sorted((folder / seek_points.POINTS_FOLDER).iterdir())
    files[1].rename(tmp_path / "elsewhere.json")
    files[1].symlink_to(tmp_path / "elsewhere.json")
    files[0].unlink()
    os.mkfifo(files[0])
    assert read(data, folder, len(rows) // 4) == rows[len(rows) // 4 :][:15]
    unusable(folder.parent, 15)
    with pytest.raises(pa.ArrowInvalid):
        read(data, folder, len(rows) - 40)


def test_a_folder_that_cannot_be_written_to_is_done_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = stream(folder)
    (folder / seek_points.POINTS_FOLDER).write_text("a file")
    rows = read(data, folder, 0, WHOLE)
    assert len(caplog.records) == 1
    far = len(rows) - 40
    assert read(data, folder, far) == rows[far : far + 15]


def test_a_killed_process_has_left_its_points(folder: Path) -> None:
    data = stream(folder)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from instar.config.language import DataConfig\n"
        "from instar.data.text.streams import seek_points, samples\n"
        "from instar.data.text.streams.index import open_stream\n"
        "samples.PackedStream.spacing, seek_points._SAVE_EVERY_S = 500, 0.0\n"
        "data = DataConfig.model_validate_json(sys.argv[1])\n"
        "source, order = open_stream(data, Path(sys.argv[2]), 16, 3, use_sizes=False)\n"
        "source.explore(0, 1000)\n"
        "source.read(order.indices(0, 0, 1000))\n"
        "print('read', flush=True)\n"
        "input()\n"
    )
    words = [forks().python, "-c", code, data.model_dump_json(), str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"read\n"
        running.send_signal(signal.SIGKILL)
    unusable(folder.parent, 1, 2, 3, 10, 11, 12)
    assert len(read(data, folder, 960)) == 15


def test_points_are_as_far_apart_as_a_fraction_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seek_points, "_FINENESS", 64)
    points = SeekPoints(tmp_path, "this", spacing=1000)
    points.begin(0, START)
    for row in range(20_000):
        points.note(0, SeekPoint(row * 500, 0, row, row))
    lane_points = points._lanes[0].points
    gaps = [other.offset - previous.offset for previous, other in pairwise(lane_points)]
    assert gaps[:60] == [1000] * 60
    assert gaps[-1] > 100_000
    for gap, point in zip(gaps, lane_points, strict=False):
        assert gap <= max(1000, point.offset / 60 + 500)
    assert len(lane_points) < 500
    points.save()
    assert SeekPoints(tmp_path, "this", 1000).before(0, 10**8) == lane_points[-1]
    assert SeekPoints(tmp_path, "another", 1000).before(0, 10**8) == START


def test_what_an_older_stream_had_beyond_the_end_is_forgotten(tmp_path: Path) -> None:
    points = SeekPoints(tmp_path, "this", spacing=1)
    for offset in range(0, 100, 10):
        points.note(0, SeekPoint(offset, 0, offset, 1))
    points.end(0, 55)
    assert points.before(0, 1000).offset == 50


def test_a_short_pass_keeps_what_another_process_has_saved_meanwhile(tmp_path: Path) -> None:
    """A rank without samples in a step reads one of another rank's lane."""
    far, near = (SeekPoints(tmp_path, "this", spacing=1) for _ in range(2))
    for points in (near, far):
        points.begin(0, START)
        points.note(0, SeekPoint(0, 0, 0, 1))
    for offset in range(10, 100, 10):
        far.note(0, SeekPoint(offset, 0, offset, 1))
    near.note(0, SeekPoint(5, 0, 5, 1))
    near.save()
    points_on_disk = SeekPoints(tmp_path, "this", spacing=1)
    assert [points_on_disk.before(0, offset).offset for offset in (9, 19, 1000)] == [5, 10, 90]


def test_a_pass_to_the_end_forgets_what_the_file_has_beyond_it(tmp_path: Path) -> None:
    older, newer = (SeekPoints(tmp_path, "this", spacing=1) for _ in range(2))
    older.begin(0, START)
    for offset in range(0, 100, 10):
        older.note(0, SeekPoint(offset, 0, offset, 1))
    newer.begin(0, START)
    newer.note(0, SeekPoint(0, 0, 0, 2))
    newer.note(0, SeekPoint(7, 0, 1, 2))
    newer.end(0, 8)
    newer.save()
    assert SeekPoints(tmp_path, "this", spacing=1).before(0, 1000) == SeekPoint(7, 0, 1, 2)


def test_a_worker_saves_its_points_when_the_stream_is_closed(folder: Path) -> None:
    """All of it is read within a second, of which only the first point is saved at once."""
    for file in range(FILES):
        write(folder.parent, file, ["many words " * 10_000])
    read(stream(folder, lanes=1, workers=1), folder, 0, WHOLE, context=1 << 14)
    record = json.loads((folder / seek_points.POINTS_FOLDER / "lane-0.json").read_text())
    assert len(record["points"]) > FILES // 4
