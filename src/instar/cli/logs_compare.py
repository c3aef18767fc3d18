"""`instar logs compare`: runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from instar.cli.logs_output import as_text, deliver, output_options, runs_argument

if TYPE_CHECKING:
    from instar.logs.comparing.arms import By


@click.command()
@runs_argument
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="What is compared, also like `val/*`; may be given several times.  [default: losses]",
)
@click.option(
    "--at",
    "places",
    multiple=True,
    metavar="PLACE",
    help="Where: step=1000, tokens=1.5B, flops=1e15, wall=10min, active=90s, epoch=2; may be "
    "given several times.  [default: five places up to where all have come]",
)
@click.option("--x", "axis", default="step", show_default=True, help="Along what, without --at.")
@click.option(
    "--at-loss",
    "target",
    type=float,
    metavar="VALUE",
    help="Also say where each run first reaches this, and what that saves against the first.",
)
@click.option(
    "--of",
    "target_metric",
    default="val/loss",
    show_default=True,
    metavar="NAME",
    help="The metric that --at-loss means.",
)
@click.option(
    "--by",
    type=click.Choice(["run", "name", "seed"]),
    default="run",
    show_default=True,
    help="What is one side: each run, runs of one name, or runs alike but for the seed.",
)
@output_options("text", "json", "md")
def compare(
    runs: tuple[str, ...],
    metrics: tuple[str, ...],
    places: tuple[str, ...],
    axis: str,
    target: float | None,
    target_metric: str,
    by: By,
    form: str,
    as_json: bool,
    output: str | None,
    open_it: bool,
) -> int:
    """Compare RUNs at equal steps, tokens, FLOPs or time; between measurements linearly.

    Where a run has not been stands "-". Of groups (--by) the mean and the standard deviation over
    runs are told. At the end the keys in which the configs differ.
    """
    from instar.cli.logs_read import chosen, read_all
    from instar.cli.table import terminal_width
    from instar.config.errors import ConfigError
    from instar.logs.comparing.arms import arms
    from instar.logs.comparing.compare import compare as compared
    from instar.logs.comparing.compare import to_json
    from instar.logs.comparing.compare_words import markdown, text
    from instar.logs.comparing.places import axis_named, parse_place

    axis = axis_named(axis)
    at = [parse_place(place) for place in places]
    found = chosen(runs)
    if len(found) < 2 and not runs:
        raise ConfigError.one("a comparison needs two runs", hint="instar logs compare RUN RUN")
    read = read_all(found)
    sides, faults = arms([record.run for record in read.records], by)
    for fault in faults:
        click.echo(f"its config is not compared: {fault}", err=True)
    result = compared(
        sides,
        read.records,
        metrics=metrics,
        places=at,
        axis=axis,
        target=target,
        target_metric=target_metric,
    )
    if as_json or form == "json":
        said = as_text(to_json(result))
    else:
        said = "\n".join(markdown(result) if form == "md" else text(result, terminal_width()))
    deliver(said, output, open_it=open_it)
    return read.tell()
