"""The transaction log of a run of W&B, `run-*.wandb`: records of its protocol in LevelDB's log format, which its package has
no reader of."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instar.config.files import open_regular
from instar.extensions.foreign.records.files import (
    missing_package,
    parse_json,
    read_head,
    unreadable,
)
from instar.extensions.foreign.records.names import STEPS
from instar.extensions.foreign.records.table import RecordTable

PACKAGE = "wandb"
_MAGIC, _MAGIC_BYTES = b":W&B", 7
_BLOCK_BYTES, _HEADER = 1 << 15, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
MAX_RECORD_BYTES = 1 << 26
_INTERNAL = ("_step", "_timestamp", "_wandb")


def find_offline_runs(path: Path) -> list[Path]:
    """Return the logs at a path: a file, those in a run's folder, or in the folders of runs in it."""
    if path.is_file():
        return [path] if read_head(path, _MAGIC_BYTES).startswith(_MAGIC) else []
    files = sorted(path.glob("*.wandb")) or sorted(
        file for file in path.glob("*run-*/*.wandb") if not file.parent.is_symlink()
    )
    return [file for file in files if file.is_file()]


def read_offline_run(path: Path) -> Iterator[RecordTable]:
    """Yield the run of a log.

    Raises:
        ConfigError: it cannot be read, or the package is not installed.
    """
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise missing_package(PACKAGE, path) from None
    table = RecordTable(path.stem, "wandb", "W&B's offline run")
    table.end_reason = "its record has no end: it was still written, or the run was killed"
    for content in _contents(path, table):
        try:
            record = Record.FromString(content)
        except Exception:  # of protobuf, whose errors are not the same in its versions
            table.left_out["damaged record"] += 1
            continue
        match record.WhichOneof("record_type"):
            case "run":
                table.name = record.run.display_name or record.run.run_id or table.name
                table.start_time = record.run.start_time.ToSeconds() or None
                _read_config(record.run.config, table)
            case "config":
                _read_config(record.config, table)
            case "metric":
                _read_direction(record.metric, table)
            case "history":
                _read_history(record.history, table)
            case "stats":
                table.left_out["row of system statistics"] += 1
            case "exit":
                code = record.exit.exit_code
                table.end_reason = f"it ended with exit code {code}" if code else ""
    table.use_step(STEPS)
    yield table


def _read_config(config: Any, table: RecordTable) -> None:
    for item in config.update:
        key = item.key or ".".join(item.nested_key)
        if key and not key.startswith("_"):
            try:
                table.config[key] = parse_json(item.value_json)
            except ValueError:
                table.left_out["config value"] += 1


def _read_direction(metric: Any, table: RecordTable) -> None:
    """Take from `define_metric` of which values a metric's summary is made: its lowest or its highest."""
    if metric.summary.max != metric.summary.min:
        table.better[metric.name] = "max" if metric.summary.max else "min"


def _read_history(history: Any, table: RecordTable) -> None:
    """Add a row; of nested values each is a metric, unless they describe a file, a table or a histogram."""
    values: dict[str, Any] = {}
    for item in history.item:
        name, *inner = item.nested_key or [item.key]
        value = _value(item)
        if inner:
            nested = values.setdefault(name, {})
            if isinstance(nested, dict):
                nested[".".join(inner)] = value
        else:
            values[name] = value
    row: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "_type" not in value:
            row |= {f"{name}.{inner}": number for inner, number in value.items()}
        else:
            row[name] = value
    step, time, _ = (row.pop(name, None) for name in _INTERNAL)
    table.add(history.step.num if step is None else step, row, time)


def _value(item: Any) -> Any:
    """Return the value of an item, which has a field of its type in newer versions; None for what is none."""
    fields = item.ListFields()
    for field, value in fields:
        if field.name in ("boolean", "integer", "number", "text"):
            return value
        if field.name in ("value_json", "json"):
            try:
                return parse_json(value)
            except ValueError:
                return None
    return None


def _contents(path: Path, table: RecordTable) -> Iterator[bytes]:
    """Yield the records of a log up to one that is cut off or has another checksum, and say so."""
    parts: list[bytes] = []
    try:
        with open_regular(path) as file:
            place = 0
            while block := file.read(_BLOCK_BYTES):
                start = _MAGIC_BYTES if place == 0 else 0
                for kind, part in _parts(block, start):
                    if kind is None or sum(map(len, parts)) > MAX_RECORD_BYTES:
                        table.remarks.append(f"cut off or damaged after byte {place:,}")
                        return
                    parts = [part] if kind in (_FULL, _FIRST) else [*parts, part]
                    if kind in (_FULL, _LAST):
                        yield b"".join(parts)
                        parts = []
                place += len(block)
        if parts:
            table.remarks.append("the last record is cut off and left out")
    except OSError as error:
        raise unreadable(path, error) from error


def _parts(block: bytes, place: int) -> Iterator[tuple[int | None, bytes]]:
    """Yield the kind and the content of each part of a block; the kind is None for a damaged one."""
    while len(block) - place >= _HEADER.size:
        checksum, size, kind = _HEADER.unpack_from(block, place)
        place += _HEADER.size
        part = block[place : place + size]
        place += size
        if not (checksum or size or kind):  # the rest of the block is empty
            return
        crc = zlib.crc32(part, zlib.crc32(bytes([kind])))
        is_sound = len(part) == size and checksum == crc and _FULL <= kind <= _LAST
        yield (kind if is_sound else None), part
