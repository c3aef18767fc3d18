"""Makes runs of the records of other tools: each a folder with a record of its own, which appears when it is complete."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError, shorten_text
from instar.extensions.foreign.records.convert import Curves, run_events
from instar.extensions.foreign.records.formats import FORMATS, find_records
from instar.extensions.foreign.records.names import Naming, name_metrics
from instar.extensions.foreign.records.table import RecordTable
from instar.record.atomic import atomic_dir, check_new
from instar.record.events import encode_event
from instar.record.progress import track_items
from instar.record.rundir import RunDir, new_id
from instar.record.trackers.tracker import flat_config

MAX_CONFIG_BYTES = 1 << 16
_MAX_NAME = 60


@dataclass(frozen=True)
class ImportedRun:
    """A run that was made of a record."""

    path: Path
    source: Path
    origin: str
    """what was read, as `Lightning's metrics.csv`"""
    naming: Naming
    notes: tuple[str, ...]
    """what was left out, or is odd"""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "run": str(self.path),
            "source": str(self.source),
            "from": self.origin,
            "metrics": self.naming.metrics,
            "axes": self.naming.axes,
            "notes": self.notes,
        }


def import_runs(
    paths: Sequence[Path],
    out_dir: Path,
    *,
    to: Path | None = None,
    format_name: str | None = None,
    loss: str | None = None,
    val: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[ImportedRun]:
    """Make a run of each run in the records at these paths, and yield it. One without numbers is left out.

    Args:
        out_dir: where runs are made, named after their sources.
        to: the folder of the one run there is, in place of that.
        format_name: of `FORMATS`; None: recognised by the contents.
        loss, val: metrics that are the losses, if not by their names.
        say: told what is left out.

    Raises:
        ConfigError: a record is not recognised or cannot be read, has no such metric, none has a number, or
            there are several runs for one folder.
        WriteError: a folder is not new, or cannot be written.
    """
    records = [
        (name, record)
        for path in paths
        for name, files in [find_records(path, format_name)]
        for record in files
    ]
    tables: Iterable[tuple[Path, RecordTable]] = (
        (record, table)
        for name, record in records
        for table in track_items(FORMATS[name].read(record), f"reading {record}", "runs")
    )
    if to is not None:
        check_new(to)
        tables = list(islice(tables, 2))
        if len(tables) > 1:
            hint = f"leave it out: each has a folder of its own in {out_dir} then"
            raise ConfigError.of("it is the folder of one run, and there are several", "--to", hint)
    is_empty, error = True, ConfigError.of(f"there is no run in {', '.join(map(str, paths))}")
    for record, table in tables:
        if curves := table.curves():
            folder = to or _new_folder(table.name, out_dir)
            yield _import_run(table, curves, record, folder, loss, val)
            is_empty = False
        else:  # it ended before its first number, and is no reason to leave out the others
            text = f"{record} has no number at a step"
            say(f"{text}: left out")
            error = ConfigError.of(text, hint=" and ".join(table.notes()))
    if is_empty:
        raise error


def _new_folder(name: str, out_dir: Path) -> Path:
    """Return the folder of a new run whose name is not trusted."""
    word = re.sub(r"[^\w.+]+", "-", name, flags=re.ASCII).strip("-.")[:_MAX_NAME] or "imported"
    while (folder := out_dir / f"{word}-{new_id()}").exists():
        pass
    return folder


def _import_run(
    table: RecordTable,
    curves: Curves,
    source: Path,
    folder: Path,
    loss: str | None,
    val: str | None,
) -> ImportedRun:
    naming = name_metrics(curves, table.tool, loss, val)
    table.config = dict(flat_config(table.config))
    if len(json.dumps(table.config)) > MAX_CONFIG_BYTES:
        table.config = {}
        table.remarks.append(f"its config has more than {MAX_CONFIG_BYTES:,} bytes: left out")
    events = run_events(table, curves, naming, RunDir(folder).id)
    with atomic_dir(folder) as temporary, RunDir(temporary).events.open("wb") as file:
        for event in track_items(events, f"writing {folder}", "events"):
            file.write(encode_event(event, event.time, 1))
        file.flush()
        os.fsync(file.fileno())
    notes = tuple(shorten_text(note) for note in table.notes(naming.axes.values()))
    return ImportedRun(folder, source, table.origin, naming, notes)
