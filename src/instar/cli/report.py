"""`instar report`: all of a run, or of several, on one page."""

from __future__ import annotations

from pathlib import Path

import click

from instar.cli.logs_output import as_text, deliver, launch, runs_argument
from instar.cli.options import json_option
from instar.config.errors import ConfigError

BESIDE = "report.html"


@click.command()
@runs_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Default: report.html, in the run's folder; of several runs, here.",
)
@click.option("-e", "--open", "open_it", is_flag=True, help="Open it in a browser.")
@json_option
def report(runs: tuple[str, ...], output: Path | None, open_it: bool, as_json: bool) -> int:
    """Write a page about the latest run, or about each RUN side by side.

    Curves with the operations marked, what these did and whether the function was kept, stages,
    checkpoints, warnings, the final test, config and environment: one file of HTML that asks no
    network for anything and can be sent to anybody. --json says on stdout what was written.
    """
    from instar.checkpoint.disk import replace_file
    from instar.cli.logs_read import chosen, read_all
    from instar.logs.reporting.report import report_html
    from instar.logs.telling.summary import summarize, to_json

    read = read_all(chosen(runs))
    if not read.records:
        return read.tell()
    default = read.records[0].run.report if len(read.records) == 1 else Path(BESIDE)
    path = output or default
    content = report_html(read.records).encode("utf-8", "backslashreplace")
    try:
        replace_file(path, content)
    except OSError as error:
        raise ConfigError.one(f"cannot write {path}: {error.strerror}", where="-o") from error
    summaries = [to_json(summarize(record)) for record in read.records] if as_json else []
    said = {"path": str(path), "size_bytes": len(content), "runs": summaries}
    deliver(as_text(said) if as_json else str(path), None)
    if open_it:
        launch(path)
    return read.tell()
