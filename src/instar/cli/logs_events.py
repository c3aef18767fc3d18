"""`instar logs events`: what happened, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from instar.cli.logs_output import output_options, runs_argument

if TYPE_CHECKING:
    from instar.logs.reading.sift import Sifted
    from instar.record.rundir import RunDir

    Each = Iterable[tuple[RunDir, Iterable[Sifted]]]


@click.command()
@runs_argument
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only train, eval, operation, checkpoint, …; may be given several times.",
)
@click.option("--from-step", type=click.IntRange(min=0), metavar="N", help="Not before this step.")
@click.option("--to-step", type=click.IntRange(min=0), metavar="N", help="Not after this step.")
@click.option("--superseded", is_flag=True, help="Also what a resumed run has gone back behind.")
@output_options("text", "jsonl", "json")
def events(
    runs: tuple[str, ...],
    kinds: tuple[str, ...],
    from_step: int | None,
    to_step: int | None,
    superseded: bool,
    form: str,
    as_json: bool,
    output: str | None,
    open_it: bool,
) -> None:
    """Print the events of each RUN: as text, as JSON lines (jsonl) or as one JSON document.

    JSON lines of a single run are those of its record, byte for byte; of several runs, or with
    --superseded, what they are of is added.
    """
    from instar.cli.logs_output import deliver
    from instar.cli.logs_read import chosen
    from instar.logs.reading.sift import KINDS, check_kinds, kind_of, sift

    found, met = chosen(runs), set[str]()

    def sifted(run: RunDir) -> Iterator[Sifted]:
        for one in sift(run, kinds, from_step=from_step, to_step=to_step, superseded=superseded):
            met.add(kind_of(one.event))
            yield one

    each: Each = ((run, sifted(run)) for run in found)
    if not set(kinds) <= set(KINDS):  # of a newer Instar, or a slip: the records tell
        each = [(run, list(sifted(run))) for run in found]
        check_kinds(kinds, met)
    told = {"text": _text, "jsonl": _lines, "json": _json}["json" if as_json else form]
    deliver(told(each, many=len(found) > 1, superseded=superseded), output, open_it=open_it)


def _text(each: Each, *, many: bool, superseded: bool) -> Iterator[str]:  # noqa: ARG001
    from instar.logs.telling.told import Teller

    for number, (run, found) in enumerate(each):
        if many:
            yield from ["", str(run.path)][number == 0 :]
        teller = Teller(run.path)
        for one in found:
            mark = "  (superseded)" if one.superseded else ""
            yield from (f"{line}{mark}" for line in teller.every(one.event))


def _lines(each: Each, *, many: bool, superseded: bool) -> Iterator[str]:
    for run, found in each:
        for one in found:
            if many or superseded:
                yield json.dumps(_object(run, one, many, superseded), separators=(",", ":"))
            else:
                yield one.line.decode("utf-8", "backslashreplace")


def _json(each: Each, *, many: bool, superseded: bool) -> Iterator[str]:
    before = "["
    for run, found in each:
        for one in found:
            yield f"{before}{json.dumps(_object(run, one, many, superseded))}"
            before = ","
    yield "]" if before == "," else "[]"


def _object(run: RunDir, one: Sifted, many: bool, superseded: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"run": str(run.path)} if many else {}
    said |= json.loads(one.line)
    return said | ({"superseded": one.superseded} if superseded else {})
