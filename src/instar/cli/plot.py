"""Runs as pictures: `instar logs plot`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal, cast

import click

from instar.api.runs import read_all, selected_groups
from instar.cli.output import (
    WIDTH,
    as_text,
    deliver,
    json_format_option,
    open_file,
    report_faults,
    runs_argument,
    terminal_width,
)
from instar.config.errors import ConfigError, without_filter
from instar.extensions import how_to_install, plot_in
from instar.logs.plot.chart import Chart
from instar.logs.plot.compose import LOSS_CURVES, ChartRequest, compose
from instar.logs.plot.picture import picture
from instar.logs.plot.terminal import TerminalSize, terminal
from instar.logs.query.alignment import axis_named, place_on
from instar.logs.query.groups import By
from instar.logs.read.record import AXES, RunRecord
from instar.record.atomic import replace_file

FORMATS = ("png", "svg", "pdf", "html", "text", "json")
_HEIGHT = 24
_SUFFIXES = {f".{form}": form for form in FORMATS} | {".htm": "html", ".txt": "text"}


@click.command()
@runs_argument
@click.option(
    "--metrics", metavar="NAMES", help="Metrics, each in its own panel, e.g. loss,grad_norm."
)
@click.option("--loss-curves", is_flag=True, help="Training and validation loss; the default.")
@click.option("--compare", is_flag=True, help="Overlay runs; without RUN, all of them.")
@click.option(
    "--by",
    type=click.Choice(["run", "name", "seed"]),
    help="Draw single runs, or mean and standard deviation of runs of one name, or that differ only in "
    "the seed.  [default: run; of a fleet, groups that its matrix makes]",
)
@click.option(
    "-x",
    "--x",
    "axis",
    default="step",
    show_default=True,
    metavar="AXIS",
    help="step, samples, tokens, epoch, flops, wall, active or time.",
)
@click.option("--from", "start", metavar="X", help="Begin at this place, such as 20M or 10min.")
@click.option("--to", "end", metavar="X", help="End at this place.")
@click.option(
    "--smooth",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    metavar="WEIGHT",
    help="Weight of an exponential moving average, 0 to 1; the raw curve is drawn behind it.",
)
@click.option("--log", is_flag=True, help="A logarithmic y axis.")
@click.option("--log-x", is_flag=True, help="A logarithmic x axis.")
@click.option("--lr", is_flag=True, help="The learning rate on a second y axis.")
@click.option(
    "--clip",
    type=click.FloatRange(50, 100, min_open=True),
    metavar="PERCENT",
    help="Clip the y axis to this percentile of the values and its opposite.",
)
@click.option("--marks/--no-marks", default=True, help="Operations, checkpoints, resumes, alerts.")
@click.option(
    "-o", "--output", metavar="FILE", help="Write a .png, .svg, .pdf, .html, .txt, .json."
)
@click.option("-e", "--open", "open_it", is_flag=True, help="Open the picture.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: by FILE's suffix.")
@json_format_option
def plot(
    runs: tuple[str, ...],
    metrics: str | None,
    loss_curves: bool,
    compare: bool,
    by: By | None,
    axis: str,
    start: str | None,
    end: str | None,
    smooth: float,
    log: bool,
    log_x: bool,
    lr: bool,
    clip: float | None,
    marks: bool,
    output: str | None,
    open_it: bool,
    form: str | None,
    as_json: bool,
) -> int:
    """Draw curves of the latest run, or of each RUN, overlaid.

    A RUN may also be a fleet, such as fleets/NAME: mean and standard deviation over its seeds.
    Without -o or -e, draws in the terminal. Operations are marked, superseded steps are faint, and
    the best value of a validation metric has a ring.
    """
    form = _form(form, output, as_json=as_json, open_it=open_it)
    if form == "html" and plot_in(form) is None:
        remedy = how_to_install("plots", form)
        raise ConfigError.of(f"no extension draws {form}", "--format", remedy)
    x = axis_named(axis, AXES, "--x")
    groups = selected_groups(runs, every=compare)
    request = ChartRequest(
        panels=_panels(metrics, loss_curves=loss_curves),
        axis=x,
        weight=smooth,
        log=log,
        log_x=log_x,
        lr=lr,
        clip=clip,
        start=None if start is None else place_on(x, start, "--from"),
        end=None if end is None else place_on(x, end, "--to"),
        marks=marks,
        by=by or "run",
        group_names={} if by else groups,
    )
    read = read_all([*groups])
    _deliver(read.records, request, form, output, open_it=open_it)
    return report_faults(read.faults)


def _form(form: str | None, output: str | None, *, as_json: bool, open_it: bool) -> str:
    """Return the output format: --format, else by FILE's suffix, else text; a picture to open."""
    if as_json or form:
        return form or "json"
    if output is None or output == "-":
        return "png" if open_it else "text"
    suffix = Path(output).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise ConfigError.of(
        f"{output} has no suffix of a known format",
        where="-o",
        hint="use .png, .svg, .pdf, .html, .txt or .json, or --format",
    )


def _panels(metrics: str | None, *, loss_curves: bool) -> tuple[tuple[str, ...], ...]:
    names = [name.strip() for name in (metrics or "").split(",")]
    panels = tuple((name,) for name in dict.fromkeys(filter(None, names)))
    return (*LOSS_CURVES, *panels) if loss_curves or not panels else panels


def _deliver(
    records: tuple[RunRecord, ...],
    request: ChartRequest,
    form: str,
    output: str | None,
    *,
    open_it: bool,
) -> None:
    """Draw the chart and write it to its destination."""
    chart = compose(records, request)
    to_stdout = output is None or output == "-"
    if form == "json":
        deliver(as_text(chart.to_dict()), None if to_stdout else output, open_it=open_it)
    elif form == "text":
        size = _screen(to_stdout=to_stdout)
        if to_stdout and not open_it:
            with without_filter(sys.stdout):
                click.echo(terminal(chart, size), color=True)  # already in stdout's encoding
        else:
            deliver(terminal(chart, size), None if to_stdout else output, open_it=open_it)
    else:
        _write(_draw(chart, records, request, form), form, output, open_it=open_it)


def _draw(chart: Chart, records: tuple[RunRecord, ...], request: ChartRequest, form: str) -> bytes:
    if form == "html":
        page: str = plot_in(form)(records, chart, request)
        return page.encode("utf-8", "backslashreplace")

    return picture(chart, cast(Literal["png", "svg", "pdf"], form))


def _write(data: bytes, form: str, output: str | None, *, open_it: bool) -> None:
    """Write atomically to FILE; without it to stdout, or to a new file that is opened."""
    if output is None and open_it:
        output = str(Path(tempfile.mkdtemp(prefix="instar-")) / f"plot.{form}")
    if output is None or output == "-":
        if terminal_width() is not None:
            raise ConfigError.of(f"a terminal cannot show {form}", hint="name a file with -o FILE")
        sys.stdout.buffer.write(data)
        return
    path = Path(output)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device
        else:
            replace_file(path, data)
    except OSError as error:
        raise ConfigError.of(f"cannot write {path}: {error.strerror}", where="-o") from error
    click.echo(f"wrote {path}", err=True)
    if open_it:
        open_file(path)


def _screen(*, to_stdout: bool) -> TerminalSize:
    """Return what stdout can display; a file takes everything but colours."""
    if not to_stdout:
        return TerminalSize(WIDTH, _HEIGHT)
    size = shutil.get_terminal_size((WIDTH, _HEIGHT))
    is_terminal = terminal_width() is not None
    plain = os.environ.get("TERM") == "dumb" or os.environ.get("LC_ALL") in ("C", "POSIX")
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return TerminalSize(
        max(size.columns, 20),
        max(size.lines, 12),
        colour=is_terminal and not plain and not os.environ.get("NO_COLOR"),
        ascii=plain or not encoding.startswith("utf"),
    )
