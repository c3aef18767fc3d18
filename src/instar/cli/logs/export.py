"""What `instar logs events` and `instar logs export` do: to stdout, to a table, or to a tracker as the run itself would
have sent it."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
from pydantic import ValidationError

from instar.api.selection import selected_runs
from instar.cli.output import Output, as_text, packs_output, report_faults
from instar.config.document import parse
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.files import read_regular
from instar.config.sections import RecordConfig, TrackersConfig
from instar.logs.read.extract import FilteredEvent, Rows, check_kinds, filter_events, rows_of
from instar.logs.read.record import RunRecord, read_all
from instar.logs.read.segments import SegmentTree
from instar.logs.text.format_event import EventFormatter
from instar.record.atomic import atomic_file, sync_file
from instar.record.events import event_kind, event_kinds
from instar.record.imported import imported_start
from instar.record.progress import track_items
from instar.record.rundir import RunDir
from instar.record.trackers import TRACKERS
from instar.record.trackers.sink import current_lines, replay_record
from instar.record.trackers.tracker import TrackedRun, configured_trackers, missing_libraries

EventsByRun = Iterable[tuple[RunDir, Iterable[FilteredEvent]]]
Written = dict[str, Any]


@packs_output()
def write_events(
    runs: tuple[str, ...],
    kinds: tuple[str, ...],
    from_step: int | None,
    to_step: int | None,
    superseded: bool,
    output: Output,
) -> None:
    """Print events of runs."""
    run_dirs, seen_kinds = selected_runs(runs), set[str]()

    def filter_run(run: RunDir) -> Iterator[FilteredEvent]:
        for entry in filter_events(
            run, kinds, from_step=from_step, to_step=to_step, superseded=superseded
        ):
            seen_kinds.add(event_kind(entry.event))
            yield entry

    events_by_run: EventsByRun = ((run, filter_run(run)) for run in run_dirs)
    # kinds of a newer Instar, or misspelt: look into the records
    if not set(kinds) <= event_kinds().keys():
        events_by_run = [(run, list(filter_run(run))) for run in run_dirs]
        check_kinds(kinds, seen_kinds)
    format_events = {"text": _text, "jsonl": _lines, "json": _json}[output.form]
    output.deliver(
        format_events(events_by_run, many_runs=len(run_dirs) > 1, with_superseded=superseded)
    )


def _text(events_by_run: EventsByRun, *, many_runs: bool, with_superseded: bool) -> Iterator[str]:  # noqa: ARG001

    for number, (run, events) in enumerate(events_by_run):
        if many_runs:
            yield from ["", str(run.path)][number == 0 :]
        formatter = EventFormatter(run.path)
        for entry in events:
            mark = "  (superseded)" if entry.is_superseded else ""
            yield from (f"{line}{mark}" for line in formatter.every(entry.event))


def _lines(events_by_run: EventsByRun, *, many_runs: bool, with_superseded: bool) -> Iterator[str]:
    for run, events in events_by_run:
        for entry in events:
            if many_runs or with_superseded:
                yield json.dumps(
                    _object(run, entry, many_runs, with_superseded), separators=(",", ":")
                )
            else:
                yield entry.line.decode("utf-8", "backslashreplace")


def _json(events_by_run: EventsByRun, *, many_runs: bool, with_superseded: bool) -> Iterator[str]:
    texts = (
        json.dumps(_object(run, entry, many_runs, with_superseded))
        for run, events in events_by_run
        for entry in events
    )
    yield f"[{', '.join(texts)}]"


def _object(
    run: RunDir, entry: FilteredEvent, many_runs: bool, with_superseded: bool
) -> dict[str, Any]:
    as_dict: dict[str, Any] = {"run": str(run.path)} if many_runs else {}
    as_dict |= json.loads(entry.line)
    return as_dict | ({"superseded": entry.is_superseded} if with_superseded else {})


def export_runs(
    runs: tuple[str, ...], to: str, output: str | None, superseded: bool, as_json: bool
) -> int:
    """Send records to a tracker, or write them as tables."""

    run_dirs = selected_runs(runs)
    if output is not None and to in (*_WRITERS, "tensorboard"):
        _check_names(run_dirs)
    write = (
        _tracker_writer(to, output) if to in TRACKERS else _table_writer(to, output, len(run_dirs))
    )
    if output is None and to not in TRACKERS and as_json:
        raise ConfigError.of(
            "--json describes written files, but there is none", hint="name one with -o"
        )
    read = read_all(run_dirs)
    records = track_items(read.records, f"exporting to {to}", "runs", len(read.records))
    exports = [write(record, superseded) for record in records]
    for record in read.records:
        for fault in record.faults:
            click.echo(fault, err=True)
    if as_json:
        click.echo(as_text(exports))
    elif output is not None or to in TRACKERS:
        for entry in exports:
            click.echo(entry["where"])
            if to == "mlflow" and entry["where"].startswith("file:"):
                store = shlex.quote(entry["where"].partition(" ")[0])
                command = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {store}"
                click.echo(f"open it with: {command}", err=True)
    return report_faults(read.faults)


def _check_names(runs: Sequence[RunDir]) -> None:
    """Raise ConfigError if what is written of two runs would have one name."""
    names = Counter(run.path.absolute().name for run in runs)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ConfigError.of(
            f"several runs have folders named {', '.join(repeated)}, and would be written to one place",
            "-o",
            "export them one at a time, each to a folder of its own",
        )


def _last_steps(record: RunRecord, with_superseded: bool) -> dict[int, int]:
    if with_superseded:
        return {}
    lineage = SegmentTree()
    for event in record.events:
        lineage.take(event.event)
    return lineage.limits()


def _tracker_writer(to: str, output: str | None) -> Callable[[RunRecord, bool], Written]:
    check_tracker(to, output)

    def write(record: RunRecord, with_superseded: bool) -> Written:
        where, events = replay_run(record, to, output, _last_steps(record, with_superseded))
        return _export_facts(record, to, where, events=events)

    return write


def _table_writer(to: str, output: str | None, runs: int) -> Callable[[RunRecord, bool], Written]:
    if output is None and (runs > 1 or to == "parquet"):
        what = f"{runs} runs" if runs > 1 else "parquet"
        raise ConfigError.of(f"{what} cannot go to stdout", hint="name a folder with -o DIR")
    write_rows = _WRITERS[to]

    def write(record: RunRecord, with_superseded: bool) -> Written:
        if output is None and sys.stdout is not None and sys.stdout.isatty():
            buffer = io.BytesIO()
            rows = write_rows(record, with_superseded, buffer)
            click.echo(buffer.getvalue().decode("utf-8", "replace"), nl=False)
            return _export_facts(record, to, "-", rows=rows)
        if output is None:
            # sys.stdout is None if it was closed before Python started
            stdout = sys.stdout.buffer if sys.stdout is not None else io.BytesIO()
            return _export_facts(record, to, "-", rows=write_rows(record, with_superseded, stdout))
        path = Path(output)
        if runs > 1 or path.suffix != f".{to}":
            path = path / f"{record.run.path.absolute().name}.{to}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as temporary:
                with temporary.open("wb") as file:
                    rows = write_rows(record, with_superseded, file)
                sync_file(temporary)
        except OSError as error:
            raise ConfigError.of(
                f"cannot write {path}: {error.strerror}", hint="choose another -o"
            ) from error
        return _export_facts(record, to, str(path), rows=rows)

    return write


def _export_facts(record: RunRecord, to: str, where: str, **count: int) -> Written:
    return {"run": str(record.run.path), "to": to, "where": where, **count}


def _write_jsonl(record: RunRecord, with_superseded: bool, file: BinaryIO) -> int:
    count = 0
    for _, line in current_lines(record.run.events, _last_steps(record, with_superseded)):
        file.write(line)
        count += 1
    return count


def _write_csv(record: RunRecord, with_superseded: bool, file: BinaryIO) -> int:
    """Write CSV; missing values are empty, non-finite numbers are NaN, Infinity or -Infinity."""
    rows = _rows(record, with_superseded)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(rows.columns)
        cells = zip(*(rows.texts(name) for name in rows.columns), strict=True)
        writer.writerows(track_items(cells, f"writing {record.run.path}", "rows", len(rows)))
        text.flush()
    finally:
        text.detach()
    return len(rows)


def _write_parquet(record: RunRecord, with_superseded: bool, file: BinaryIO) -> int:
    """Write Parquet; missing values are null, NaN and infinities are kept."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError.of(
            "--to parquet needs the library `pyarrow`, which is not installed",
            hint="install the extra: pip install 'instar[hf]', or write csv",
        ) from None
    rows = _rows(record, with_superseded)
    columns = {
        name: pa.array(
            rows.values[name], mask=~rows.is_measured[name] if name in rows.is_measured else None
        )
        for name in rows.columns
    }
    pq.write_table(pa.table(columns), file)
    return len(rows)


_WRITERS: dict[str, Callable[[RunRecord, bool, BinaryIO], int]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
}


def _rows(record: RunRecord, with_superseded: bool) -> Rows:
    series: Sequence[Any] = [record.series(name) for name in record.metrics]
    return rows_of(series if with_superseded else [column.current() for column in series])


def check_tracker(to: str, output: str | None) -> None:
    """Raise ConfigError if the library of a tracker is not installed."""
    settings = _settings(to, output, {})
    if problems := missing_libraries(RecordConfig(trackers=settings)):
        raise ConfigError(
            *(
                ConfigProblem((), f"--to {to}: {problem.message}", problem.hint)
                for problem in problems
            )
        )


def replay_run(
    record: RunRecord, to: str, output: str | None, last_steps: Mapping[int, int]
) -> tuple[str, int]:
    """Send the events of a record to a tracker; return where they are, and their number.

    Args:
        last_steps: of the stretches of the run, see `SegmentTree.limits`; empty: all events.
    """
    config = _config(record)
    (tracker,) = configured_trackers(_settings(to, output, config))
    run = TrackedRun.from_record(record.run.path, config)
    events = replay_record(tracker, run, record.run.events, last_steps)
    return tracker.where, events


def _config(record: RunRecord) -> dict[str, Any]:
    """Return the run's nested config as far as it can be read; if it belongs to another user,
    without the section `record`, which sets where trackers write."""
    try:
        is_own = record.run.config.stat().st_uid == os.geteuid()
        text = read_regular(record.run.config).decode("utf-8", "replace")
    except OSError:
        start = imported_start(record.run)
        config = (start and start.imported_config) or {}
        return {key: value for key, value in config.items() if not isinstance(value, dict)}
    document, _ = parse(text, str(record.run.config))
    plain = document.data if document is not None and not document.unreadable else {}
    plain = plain if isinstance(plain, dict) else {}
    return plain if is_own else {key: plain[key] for key in plain if key != "record"}


def _settings(to: str, output: str | None, config: dict[str, Any]) -> TrackersConfig:
    """Return the settings of one tracker, as in the run, but offline and writing to `output`."""
    section: Any = config
    for key in ("record", "trackers", to):
        section = section.get(key) if isinstance(section, dict) else None
    section = section if isinstance(section, dict) else {}
    over: dict[str, Any] = {"mode": "offline"} if to == "wandb" else {}
    if output is not None and to == "mlflow":
        over["uri"] = str(Path(output).absolute() / "mlruns")
    elif output is not None:
        over["dir"] = str(Path(output).absolute())
    try:
        return TrackersConfig.model_validate({to: section | over})
    except ValidationError:  # config of another version
        return TrackersConfig.model_validate({to: over})
