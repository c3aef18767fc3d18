"""`metrics.csv` of Lightning's CSVLogger: a row for each call of the logger, with the columns of all of them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from instar.config.errors import ConfigError
from instar.extensions.foreign.records.files import read_head, read_lines, run_name
from instar.extensions.foreign.records.table import RecordTable

FILE, STEP = "metrics.csv", "step"


def find_tables(path: Path) -> list[Path]:
    """Return the table at a path: the file, or that of a folder. The logger sorts its columns; by another name than the
    logger's only such a table is one."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        return []
    line = read_head(file).partition(b"\n")[0].decode("utf-8", "replace")
    columns: list[str] = []
    with suppress(csv.Error):
        columns = next(csv.reader([line.rstrip("\r")]), [])
    is_named = file.name == FILE or columns == sorted(columns)
    return [file] if STEP in columns and len(columns) > 1 and is_named else []


def read_table(path: Path) -> Iterator[RecordTable]:
    """Yield the run of a table.

    Raises:
        ConfigError: it is no table with a column of steps, or cannot be read.
    """
    table = RecordTable(run_name(path, FILE), "lightning", "Lightning's metrics.csv")
    try:
        reader = csv.DictReader(_complete_lines(path, table))
        if STEP not in (reader.fieldnames or ()):
            raise ConfigError.of(f"{path} has no column {STEP!r}")
        for row in reader:
            values = {name or "no column": text for name, text in row.items() if text}
            table.add(values.pop(STEP, None), values)
    except csv.Error as error:
        raise ConfigError.of(f"{path}:{reader.line_num}: {error}") from error
    yield table


def _complete_lines(path: Path, table: RecordTable) -> Iterator[str]:
    """Yield the lines of a file but for a last one without an end, whose number may be cut off."""
    for line in read_lines(path):
        if line.endswith("\n"):
            yield line
        else:
            table.remarks.append("the last line is cut off and left out")
