"""Event files of TensorBoard, read by its package: scalars alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instar.config.files import check_regular
from instar.data.text.files import names_text
from instar.extensions.foreign.records.files import (
    missing_package,
    read_head,
    run_name,
    unreadable,
)
from instar.extensions.foreign.records.table import RecordTable

PACKAGE = "tensorboard"
_PATTERN = "*tfevents*"
_MAGIC, _MAGIC_WITHIN = b"brain.Event:", 64
_FRAME_BYTES = 16
"""of a record, beside its content"""
_KINDS = {
    "image": "image",
    "images": "image",
    "histo": "histogram",
    "histograms": "histogram",
    "audio": "audio clip",
    "text": "text",
    "hparams": "hparams value",
}
"""what is no scalar, by the name of its field or plugin"""


def find_event_logs(path: Path) -> list[Path]:
    """Return the logs at a path, one for each run: a file, a folder of files, or the folders in it."""
    if path.is_file():
        return [path] if _MAGIC in read_head(path, _MAGIC_WITHIN) else []
    if any(path.glob(_PATTERN)):
        return [path]
    return sorted({file.parent for file in path.glob(f"*/{_PATTERN}")})


def read_event_log(path: Path) -> Iterator[RecordTable]:
    """Yield the run of an event file, or of the files in a folder, in the order of their names.

    Raises:
        ConfigError: they cannot be read, or the package is not installed.
    """
    try:
        from tensorboard.compat.proto import event_pb2
    except ImportError:
        raise missing_package(PACKAGE, path) from None
    table = RecordTable(run_name(path, path.name), "tensorboard", "TensorBoard's event files")
    plugins: dict[str, str] = {}
    for file in [path] if path.is_file() else sorted(path.glob(_PATTERN)):
        for content in _contents(file, table):
            try:
                event = event_pb2.Event.FromString(content)
            except Exception:  # of protobuf, whose errors are not the same in its versions
                table.left_out["damaged event"] += 1
                continue
            if event.session_log.status == event_pb2.SessionLog.START:
                table.restart(event.step)
            scalars = _scalars(event.summary, plugins, table)
            if scalars:
                table.add(event.step, scalars, event.wall_time)
    if within := sorted({file.parent for file in path.glob(f"*/**/{_PATTERN}")}):
        names = names_text([str(folder.relative_to(path)) for folder in within])
        table.remarks.append(
            f"logs in folders within left out, to import each by its path: {names}"
        )
    yield table


def _contents(file: Path, table: RecordTable) -> Iterator[bytes]:
    """Yield the records of a file up to one that is cut off or has another checksum, and say so."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    try:
        check_regular(file)
        size = file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error
    end = 0
    try:
        for content in RawEventFileLoader(str(file)).Load():
            end += len(content) + _FRAME_BYTES
            yield content
    except (MemoryError, OverflowError):  # for a record of the length that a damaged file says
        pass
    if end < size:
        table.remarks.append(
            f"{file.name} is cut off or damaged: read up to byte {end:,} of {size:,}"
        )


def _scalars(summary: Any, plugins: dict[str, str], table: RecordTable) -> Mapping[str, float]:
    """Return the scalars of a summary by tag, and count the rest; `plugins`: those of tags so far."""
    scalars: dict[str, float] = {}
    for value in summary.value:
        if value.HasField("metadata"):  # the first of a tag
            plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
        kind = value.WhichOneof("value")
        plugin = plugins.get(value.tag, "")
        if kind == "simple_value":
            scalars[value.tag] = value.simple_value
        elif kind == "tensor" and plugin == "scalars" and not value.tensor.tensor_shape.dim:
            scalars[value.tag] = _scalar(value.tensor)
        else:
            table.left_out[_KINDS.get(plugin) or _KINDS.get(kind or "", "tensor")] += 1
    return scalars


def _scalar(tensor: Any) -> Any:
    """Return the number of a tensor without dimensions; None for what is none."""
    from tensorboard.util.tensor_util import make_ndarray

    try:
        return make_ndarray(tensor).item()
    except (TypeError, ValueError):
        return None
