"""A local project of trackio: an SQLite database with a row of JSON for each call of its `log`."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from instar.config.errors import ConfigError
from instar.config.files import check_regular
from instar.extensions.foreign.records.files import parse_json, read_head, unreadable
from instar.extensions.foreign.records.names import STEPS
from instar.extensions.foreign.records.table import RecordTable
from instar.record.atomic import scratch_folder

_MAGIC = b"SQLite format 3\0"
_COLUMNS = {"run_name", "step", "metrics", "timestamp"}
MAX_CELL_BYTES = 1 << 24


def find_projects(path: Path) -> list[Path]:
    """Return the databases at a path: the file, or those of a folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.db"))
    return [file for file in files if _is_project(file)]


def _is_project(file: Path) -> bool:
    if not file.is_file() or read_head(file, len(_MAGIC)) != _MAGIC:
        return False
    with suppress(sqlite3.Error), _connect(file) as connection:
        return _columns(connection) >= _COLUMNS
    return False


def read_project(path: Path) -> Iterator[RecordTable]:
    """Yield the runs of a project, in the order in which they began.

    Raises:
        ConfigError: it is not one, is damaged, or cannot be read.
    """
    try:
        with _connect(path) as connection:
            columns = _columns(connection)
            if not columns >= _COLUMNS:
                raise ConfigError.of(f"{path} has no table `metrics` of trackio")
            key = "run_id" if "run_id" in columns else "run_name"
            query = f"SELECT {key}, run_name FROM metrics GROUP BY {key} ORDER BY MIN(id)"
            for run_id, name in connection.execute(query).fetchall():
                table = RecordTable(str(name), "trackio", f"trackio's project {path.stem}")
                _read_run(connection, key, run_id, table)
                table.use_step(STEPS)
                yield table
    except sqlite3.Error as error:
        raise ConfigError.of(f"{path} is damaged: {error}") from error


def _read_run(connection: sqlite3.Connection, key: str, run_id: object, table: RecordTable) -> None:
    query = f"SELECT step, timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY timestamp, id"
    for step, timestamp, metrics in connection.execute(query, [run_id]):
        values = _json_object(metrics)
        if values is None:
            table.left_out["damaged row"] += 1
        else:
            table.add(step, values, _seconds(timestamp))
    with suppress(sqlite3.Error):  # older projects have no configs
        query = f"SELECT config FROM configs WHERE {key} = ?"
        for (config,) in connection.execute(query, [run_id]):
            values = _json_object(config) or {}
            table.config = {name: values[name] for name in values if not name.startswith("_")}


def _columns(connection: sqlite3.Connection) -> set[str]:
    """Return the columns of the metrics; none of what is no table, such as a view, which may compute for ever."""
    query = "SELECT sql FROM sqlite_master WHERE name = 'metrics' AND sql LIKE 'CREATE TABLE%'"
    if connection.execute(query).fetchone() is None:
        return set()
    return {row[1] for row in connection.execute("PRAGMA table_info(metrics)")}


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to read it, without a trace beside it: where its last writes are in a file of their own, a copy."""
    try:
        check_regular(path)
        with ExitStack() as stack:
            log = path.with_name(f"{path.name}-wal")
            options = "mode=ro&immutable=1"
            if log.is_file() and log.stat().st_size:
                check_regular(log)
                folder = stack.enter_context(scratch_folder("trackio"))
                for file in (path, log):
                    shutil.copyfile(file, folder / file.name)
                path, options = folder / path.name, "mode=rw"
            uri = f"file:{quote(str(path.absolute()))}?{options}"
            connection = stack.enter_context(closing(sqlite3.connect(uri, uri=True)))
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    except OSError as error:
        raise unreadable(path, error) from error


def _json_object(text: object) -> dict[str, Any] | None:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        value = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(timestamp: object) -> float | None:
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(timestamp)).timestamp()
    return None
