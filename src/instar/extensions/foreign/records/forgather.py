"""`trainer_logs.json` of forgather: a list of records, of which it writes the end when training ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instar.extensions.foreign.records.files import read_head, read_text, run_name
from instar.extensions.foreign.records.table import RecordTable

FILE = "trainer_logs.json"
_HEAD = re.compile(rb'\s*\[\s*\{[^{}]*"global_step"\s*:')
_BETWEEN = re.compile(r"[\s,\[]*")


def find_trainer_logs(path: Path) -> list[Path]:
    """Return the log at a path: the file, or that of a folder."""
    file = path / FILE if path.is_dir() else path
    return [file] if file.is_file() and _HEAD.match(read_head(file)) else []


def read_trainer_logs(path: Path) -> Iterator[RecordTable]:
    """Yield the run of a log, as far as that goes.

    Raises:
        ConfigError: it cannot be read.
    """
    table = RecordTable(run_name(path, FILE), "forgather", "forgather's trainer_logs.json")
    text, place = read_text(path), 0
    decoder = json.JSONDecoder()
    while True:
        if between := _BETWEEN.match(text, place):
            place = between.end()
        if text[place : place + 1] == "]":
            break
        try:
            entry, place = decoder.raw_decode(text, place)
        except ValueError:
            _tell_cut(table, text, place)
            break
        values: dict[str, Any] = entry if isinstance(entry, dict) else {}
        step, time = values.pop("global_step", None), values.pop("timestamp", None)
        table.add(step, values, time)
    yield table


def _tell_cut(table: RecordTable, text: str, place: int) -> None:
    """Say how far a log goes that has no end: its run goes on, was killed, or the file is damaged."""
    line = text.count("\n", 0, place) + 1
    rest_bytes = len(text[place:].encode())
    table.end_reason = "its record has no end: it was still written, or the run was killed"
    table.remarks.append(
        f"read up to line {line:,}, where it is cut off ({rest_bytes:,} bytes left out)"
    )
