"""What `instar logs tail` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from instar.api.selection import RUNS
from instar.cli.output import as_text, terminal_width
from instar.config.errors import ConfigError
from instar.logs.query.runs import find_runs
from instar.logs.query.tail import follow_log, follow_record, last_events, last_lines, unit_of
from instar.logs.text.format_event import EventFormatter
from instar.record.events import RecordError, to_words
from instar.record.rundir import RunDir


def show_tail(run: str, count: int, follow: bool, rank: int | None, as_json: bool) -> None:
    """Print the last events of a run or the last lines of a rank's log, and follow them."""
    if as_json and (follow or rank is not None):
        raise ConfigError.of(
            f"--json cannot be combined with {'-f' if follow else '--rank'}",
            hint="to follow JSON lines: tail -f RUN/events.jsonl",
        )
    runs = find_runs([run], RUNS)
    run_dir = runs[-1]
    if len(runs) > 1:
        click.echo(f"{run!r} matches {len(runs)} runs; showing {run_dir.path}", err=True)
    if rank is not None:
        _tail_log(run_dir, rank, count, follow)
    elif as_json:
        _tail_json(run_dir, count)
    else:
        _tail_events(run_dir, count, follow)


def _tail_events(run: RunDir, count: int, follow: bool) -> None:
    formatter = EventFormatter(run.path, terminal_width(), unit_of(run.events))
    with _readable(run.events):
        events, end = last_events(run.events, max(count, 1))
    for event in events if count else ():
        for line in formatter.lines(event):
            click.echo(line)
    for new in follow_record(run, events, end) if follow else ():
        for event in new:
            for line in formatter.lines(event):
                click.echo(line)


def _tail_log(run: RunDir, rank: int, count: int, follow: bool) -> None:
    path = run.log(rank)
    if not path.is_file():
        ranks = sorted(
            int(p.stem[5:]) for p in run.logs.glob("rank_*.log") if p.stem[5:].isdecimal()
        )
        hint = f"ranks with a log: {_spans(ranks)}" if ranks else "no rank has written a log yet"
        raise ConfigError.of(f"rank {rank} has no log in {run.logs}", hint=hint)
    with _readable(path):
        lines, end = last_lines(path, count)
    for line in lines:
        click.echo(line.decode("utf-8", "replace"))
    for new_lines in follow_log(run, path, end) if follow else ():
        for line in new_lines:
            click.echo(line.decode("utf-8", "replace"))


def _tail_json(run: RunDir, count: int) -> None:
    with _readable(run.events):
        events, _ = last_events(run.events, max(count, 1))
    click.echo(as_text(to_words(msgspec.to_builtins(events if count else []))))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _spans(numbers: list[int]) -> str:
    """Format ascending numbers as ranges: `0 to 3, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
