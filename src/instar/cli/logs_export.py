"""`instar logs export`: runs as tables, and in other tools."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from instar.cli.logs_output import as_text, runs_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from instar.config.record import TrackersConfig
    from instar.logs.reading.record import RunRecord
    from instar.trackers.rows import Rows
    from instar.trackers.tracker import Tracker

TABLES = ("csv", "parquet", "jsonl")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@click.command()
@runs_argument
@click.option(
    "--to",
    required=True,
    type=click.Choice([*TRACKERS, *TABLES]),
    help="A tool, or a kind of file: a row for each step, and of jsonl an event for each line.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR|FILE",
    help="Where to. A table goes to stdout without it, a tool's run to where the tool has its own.",
)
@click.option("--superseded", is_flag=True, help="With what a resumed run has superseded.")
@click.option("--json", "as_json", is_flag=True, help="Say as JSON what was written.")
def export(
    runs: tuple[str, ...], to: str, output: str | None, superseded: bool, as_json: bool
) -> int:
    """Hand the record of each RUN to another tool, or write it as a table.

    A RUN is a folder, an id, a name (all runs of that name), a pattern, a file in a run, a folder
    of runs, or `latest`, which is the default. Nothing is sent anywhere: W&B's run is written for
    `wandb sync`. A run that is exported twice is there twice.
    """
    from instar.cli.logs_read import chosen, read_all

    found = chosen(runs)
    write = _tracker_writer(to, output) if to in TRACKERS else _table_writer(to, output, len(found))
    if output is None and to in TABLES and as_json:
        raise _usage("--json says what was written, and nothing is", "name a place with -o")
    read = read_all(found)
    written = [write(record, superseded) for record in read.records]
    for record in read.records:
        for fault in record.faults:
            click.echo(fault, err=True)
    if as_json:
        click.echo(as_text(written))
    elif output is not None or to in TRACKERS:
        for each in written:
            click.echo(each["where"])
    return read.tell()


Written = dict[str, Any]


def _usage(message: str, hint: str) -> Exception:
    from instar.config.errors import ConfigError

    return ConfigError.one(message, hint=hint)


def _last_steps(record: RunRecord, superseded: bool) -> dict[int, int]:
    from instar.logs.reading.lineage import Lineage

    if superseded:
        return {}
    lineage = Lineage()
    for logged in record.events:
        lineage.take(logged.event)
    return lineage.limits()


def _tracker_writer(to: str, output: str | None) -> Callable[[RunRecord, bool], Written]:
    from instar.config.errors import ConfigError, Problem
    from instar.config.record import RecordConfig
    from instar.trackers.configured import missing
    from instar.trackers.replay import replay
    from instar.trackers.tracker import TrackedRun

    plain = _settings(to, output, {})
    if clashes := missing(RecordConfig(trackers=plain)):
        raise ConfigError(
            *(Problem(f"--to {to}: {each.message}", hint=each.hint) for each in clashes)
        )

    def write(record: RunRecord, superseded: bool) -> Written:
        config = _config(record)
        tracker = _tracker(_settings(to, output, config))
        run = TrackedRun.replayed(record.run.path, config)
        events = replay(tracker, run, record.run.events, _last_steps(record, superseded))
        return _written(record, to, tracker.where, events=events)

    return write


def _tracker(settings: TrackersConfig) -> Tracker:
    from instar.trackers.configured import configured

    (tracker,) = configured(settings)
    return tracker


def _config(record: RunRecord) -> dict[str, Any]:
    """The run's config as far as it can be read, nested."""
    from instar.config.document import parse

    try:
        text = record.run.config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    value, _ = parse(text, str(record.run.config))
    plain = value.plain() if value is not None and value.readable() else {}
    return plain if isinstance(plain, dict) else {}


def _settings(to: str, output: str | None, config: dict[str, Any]) -> TrackersConfig:
    """The one tracker, as the run itself had it, but in `output` and offline."""
    from pydantic import ValidationError

    from instar.config.record import TrackersConfig

    own: Any = config
    for key in ("record", "trackers", to):
        own = own.get(key) if isinstance(own, dict) else None
    own = own if isinstance(own, dict) else {}
    over: dict[str, Any] = {"mode": "offline"} if to == "wandb" else {}
    if output is not None and to == "mlflow":
        over["uri"] = str(Path(output).absolute() / "mlruns")
    elif output is not None:
        over["dir"] = str(Path(output).absolute())
    try:
        return TrackersConfig.model_validate({to: own | over})
    except ValidationError:  # a config of another version
        return TrackersConfig.model_validate({to: over})


def _table_writer(to: str, output: str | None, runs: int) -> Callable[[RunRecord, bool], Written]:
    if output is None and (runs > 1 or to == "parquet"):
        what = f"{runs} runs" if runs > 1 else "parquet"
        raise _usage(f"{what} cannot go to stdout", "name a folder with -o DIR")
    put = _PUT[to]

    def write(record: RunRecord, superseded: bool) -> Written:
        if output is None:
            # Python has none where it was closed before it began
            stdout = sys.stdout.buffer if sys.stdout is not None else io.BytesIO()
            return _written(record, to, "-", rows=put(record, superseded, stdout))
        path = Path(output)
        if runs > 1 or path.suffix != f".{to}":
            path = path / f"{record.run.path.absolute().name}.{to}"
        aside = path.with_name(f"{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                rows = put(record, superseded, file)
            aside.replace(path)
        except OSError as error:
            raise _usage(f"cannot write {path}: {error.strerror}", "choose another -o") from error
        finally:
            with suppress(OSError):
                aside.unlink()
        return _written(record, to, str(path), rows=rows)

    return write


def _written(record: RunRecord, to: str, where: str, **count: int) -> Written:
    return {"run": str(record.run.path), "to": to, "where": where, **count}


def _put_jsonl(record: RunRecord, superseded: bool, file: BinaryIO) -> int:
    from instar.trackers.replay import kept_lines

    count = 0
    for _, line in kept_lines(record.run.events, _last_steps(record, superseded)):
        file.write(line)
        count += 1
    return count


def _put_csv(record: RunRecord, superseded: bool, file: BinaryIO) -> int:
    """A cell without a value is empty; one that is no number says NaN, Infinity or -Infinity."""
    import csv

    rows = _rows(record, superseded)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(rows.columns)
        writer.writerows(zip(*(rows.texts(name) for name in rows.columns), strict=True))
        text.flush()
    finally:
        text.detach()
    return len(rows)


def _put_parquet(record: RunRecord, superseded: bool, file: BinaryIO) -> int:
    """A cell without a value is null; NaN and infinities are as they are."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise _usage(
            "--to parquet needs the library `pyarrow`, which is not installed",
            "install the extra: pip install 'instar[hf]', or write csv",
        ) from None
    rows = _rows(record, superseded)
    columns = {
        name: pa.array(rows.values[name], mask=~rows.there[name] if name in rows.there else None)
        for name in rows.columns
    }
    pq.write_table(pa.table(columns), file)
    return len(rows)


_PUT: dict[str, Callable[[RunRecord, bool, BinaryIO], int]] = {
    "csv": _put_csv,
    "parquet": _put_parquet,
    "jsonl": _put_jsonl,
}


def _rows(record: RunRecord, superseded: bool) -> Rows:
    from instar.trackers.rows import rows_of

    series: Sequence[Any] = [record.series(name) for name in record.metrics]
    return rows_of(series if superseded else [each.current() for each in series])
