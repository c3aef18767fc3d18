"""What `instar logs plot` does."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

import click

from instar.api.selection import selected_groups
from instar.cli.logs.commands import FORMATS
from instar.cli.output import (
    WIDTH,
    Output,
    as_text,
    open_file,
    packs_output,
    report_faults,
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
from instar.logs.read.record import AXES, RunRecord, read_all
from instar.record.atomic import replace_file

_HEIGHT = 24
_SUFFIXES = {f".{form}": form for form in FORMATS} | {".htm": "html", ".txt": "text"}


def _choose_picture(form: str | None, path: str | None, as_json: bool, open_it: bool) -> Output:
    """Choose the format: --format, else by FILE's suffix, else text; a picture to open. `-o -` is stdout."""
    is_dash, path = path == "-", None if path == "-" else path
    if not form:
        default = "json" if as_json else "png" if open_it else "text"
        form = default if as_json or path is None else _form_of(path)
    return Output(form, path, open_it and not (is_dash and form not in ("text", "json")))


def _form_of(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise ConfigError.of(
        f"{path} has no suffix of a known format",
        where="-o",
        hint="use .png, .svg, .pdf, .html, .txt or .json, or --format",
    )


@packs_output(_choose_picture)
def plot_runs(
    runs: tuple[str, ...],
    metrics: str | None,
    loss_curves: bool,
    compare: bool,
    by: By | None,
    axis: str,
    output: Output,
    **look: Any,
) -> int:
    """Draw curves of runs."""
    if output.form == "html" and plot_in(output.form) is None:
        remedy = how_to_install("plots", output.form)
        raise ConfigError.of(f"no extension draws {output.form}", "--format", remedy)
    x = axis_named(axis, AXES, "--x")
    groups = selected_groups(runs, every=compare)
    for name, option in (("start", "--from"), ("end", "--to")):
        if look[name] is not None:
            look[name] = place_on(x, look[name], option)
    request = ChartRequest(
        panels=_panels(metrics, loss_curves=loss_curves),
        axis=x,
        by=by or "run",
        group_names={} if by else groups,
        **look,
    )
    read = read_all([*groups])
    _deliver(read.records, request, output)
    return report_faults(read.faults)


def _panels(metrics: str | None, *, loss_curves: bool) -> tuple[tuple[str, ...], ...]:
    names = [name.strip() for name in (metrics or "").split(",")]
    panels = tuple((name,) for name in dict.fromkeys(filter(None, names)))
    return (*LOSS_CURVES, *panels) if loss_curves or not panels else panels


def _deliver(records: tuple[RunRecord, ...], request: ChartRequest, output: Output) -> None:
    """Draw the chart and write it to its destination."""
    chart = compose(records, request)
    if output.form == "json":
        output.deliver(as_text(chart.to_dict()))
    elif output.form != "text":
        _write(_draw(chart, records, request, output.form), output)
    elif output.path is None and not output.open_it:
        with without_filter(sys.stdout):
            # already in stdout's encoding
            click.echo(terminal(chart, _screen(to_stdout=True)), color=True)
    else:
        output.deliver(terminal(chart, _screen(to_stdout=output.path is None)))


def _draw(chart: Chart, records: tuple[RunRecord, ...], request: ChartRequest, form: str) -> bytes:
    if form == "html":
        page: str = plot_in(form)(records, chart, request)
        return page.encode("utf-8", "backslashreplace")

    return picture(chart, cast(Literal["png", "svg", "pdf"], form))


def _write(data: bytes, output: Output) -> None:
    """Write atomically to FILE; without it to stdout, or to a new file that is opened."""
    if output.path is not None:
        path = Path(output.path)
    elif output.open_it:
        path = Path(tempfile.mkdtemp(prefix="instar-")) / f"plot.{output.form}"
    elif terminal_width() is None:
        sys.stdout.buffer.write(data)
        return
    else:
        raise ConfigError.of(
            f"a terminal cannot show {output.form}", hint="name a file with -o FILE"
        )
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device
        else:
            replace_file(path, data)
    except OSError as error:
        raise ConfigError.of(f"cannot write {path}: {error.strerror}", where="-o") from error
    click.echo(f"wrote {path}", err=True)
    if output.open_it:
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
