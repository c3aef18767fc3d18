"""`instar logs tail`: how a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from instar.cli.logs_output import as_text, json_option

if TYPE_CHECKING:
    from instar.record.rundir import RunDir


@click.command()
@click.argument("run", default="latest")
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="How many of the last events, or lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends; Ctrl-C ends it too.")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank said, not the events.")
@json_option
def tail(run: str, count: int, follow: bool, rank: int | None, as_json: bool) -> None:
    """Show the last events of RUN as the console shows them, or a rank's log.

    What a resumed run has superseded is shown too: it is what happened.
    """
    from instar.cli.logs_read import OUT_DIR
    from instar.config.errors import ConfigError
    from instar.logs.find import find_runs

    if as_json and (follow or rank is not None):
        raise ConfigError.one(
            f"--json does not go with {'-f' if follow else '--rank'}",
            hint="for lines as they come: tail -f RUN/events.jsonl",
        )
    runs = find_runs([run], OUT_DIR)
    found = runs[-1]
    if len(runs) > 1:
        click.echo(f"{len(runs)} runs are meant by {run!r}; this is {found.path}", err=True)
    if rank is not None:
        _log(found, rank, count, follow)
    elif as_json:
        _json(found, count)
    else:
        _events(found, count, follow)


def _events(run: RunDir, count: int, follow: bool) -> None:
    from instar.cli.table import terminal_width
    from instar.logs.telling.tail import follow as added
    from instar.logs.telling.tail import last_events, unit_of
    from instar.logs.telling.told import Teller

    teller = Teller(run.path, terminal_width(), unit_of(run.events))
    with _readable(run.events):
        events, end = last_events(run.events, max(count, 1))
    for event in events if count else ():
        for line in teller.lines(event):
            click.echo(line)
    for new in added(run, events, end) if follow else ():
        for event in new:
            for line in teller.lines(event):
                click.echo(line)


def _log(run: RunDir, rank: int, count: int, follow: bool) -> None:
    from instar.config.errors import ConfigError
    from instar.logs.telling.tail import follow_log, last_lines

    path = run.log(rank)
    if not path.is_file():
        there = sorted(
            int(p.stem[5:]) for p in run.logs.glob("rank_*.log") if p.stem[5:].isdecimal()
        )
        hint = f"there are ranks {_spans(there)}" if there else "no rank has said anything yet"
        raise ConfigError.one(f"there is no log of rank {rank} in {run.logs}", hint=hint)
    with _readable(path):
        lines, end = last_lines(path, count)
    for line in lines:
        click.echo(line.decode("utf-8", "replace"))
    for added in follow_log(run, path, end) if follow else ():
        for line in added:
            click.echo(line.decode("utf-8", "replace"))


def _json(run: RunDir, count: int) -> None:
    import msgspec

    from instar.logs.telling.tail import last_events
    from instar.record.events import to_words

    with _readable(run.events):
        events, _ = last_events(run.events, max(count, 1))
    click.echo(as_text(to_words(msgspec.to_builtins(events if count else []))))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    from instar.record.events import RecordError

    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _spans(numbers: list[int]) -> str:
    """`0 to 3, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
