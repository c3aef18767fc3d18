"""`instar report` and `instar dashboard`."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from instar.cli.options import json_option
from instar.cli.output import as_text, open_file, report_faults, runs_argument
from instar.config.errors import ConfigError
from instar.extensions import catalog
from instar.record.atomic import replace_file

REPORT_OF_SEVERAL = "report.html"


@click.command()
@runs_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Default: report.html in the run's folder; for several runs, in the working directory.",
)
@click.option("-e", "--open", "open_it", is_flag=True, help="Open it in a browser.")
@json_option
def report(runs: tuple[str, ...], output: Path | None, open_it: bool, as_json: bool) -> int:
    """Write the latest run, or several RUNs side by side, as one self-contained HTML page.

    A RUN may also be a fleet, such as fleets/NAME: mean and standard deviation over its seeds.
    It is the dashboard's page with its data inside: curves, operations with their proofs, stages,
    checkpoints, warnings, the final test, config and environment. It makes no network requests.
    --json prints a summary of what was written.
    """
    # not for the completion of RUNs
    from instar.api.selection import selected_groups
    from instar.extensions.board.report import report_html
    from instar.logs.query.summary import summarize, summary_to_json
    from instar.logs.read.record import read_all

    groups = selected_groups(runs)
    read = read_all([*groups])
    if not read.records:
        return report_faults(read.faults)
    default = read.records[0].run.report if len(read.records) == 1 else Path(REPORT_OF_SEVERAL)
    path = output or default
    content = report_html(read.records, groups).encode("utf-8", "backslashreplace")
    try:
        replace_file(path, content)
    except OSError as error:
        raise ConfigError.of(f"cannot write {path}: {error.strerror}", where="-o") from error
    summaries = [summary_to_json(summarize(record)) for record in read.records] if as_json else []
    as_dict = {"path": str(path), "size_bytes": len(content), "runs": summaries}
    click.echo(as_text(as_dict) if as_json else str(path))
    if open_it:
        open_file(path)
    return report_faults(read.faults)


@click.command()
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), help="0: any free one.  [default: 8787]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--token", help="Access token of the page.  [default: random]")
@click.option(
    "--read-only/--no-read-only",
    default=None,
    help="Whether the page cannot ask running runs for operations.  [default: only if --host is not this machine's loopback]",
)
@click.option("-e", "--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def dashboard(
    folder: Path,
    port: int | None,
    host: str,
    token: str | None,
    read_only: bool | None,
    opens: bool,
    as_json: bool,
) -> None:
    """Show runs live in a browser: the runs in DIR (default: runs), or one run; and the fleets in the
    folder `fleets` beside DIR.

    It is reachable only from this machine, unless --host is set, and only with the printed address, which
    contains a token. Whoever has it may ask the running runs of its user for operations, unless it is
    read-only; nothing else can be changed there. Ctrl-C ends it.
    """
    try:
        from instar.extensions.board.server import bind, serve_dashboard
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError.of(
            f"the dashboard needs {name}", hint="pip install 'instar[dashboard]'"
        ) from error
    if folder.exists() and not folder.is_dir():
        raise ConfigError.of(f"{folder} is not a folder", hint="name a folder of runs, or a run")
    address = bind(host, port, token)
    if not folder.exists():
        click.echo(f"{folder} does not exist yet; its runs will be shown as they appear", err=True)
    click.echo(as_text({"url": address.url}) if as_json else address.url)
    if read_only is None:
        read_only = not address.is_loopback
    how = ", read-only" if read_only else "; its running runs can be asked for operations"
    click.echo(f"Shows {folder}{how}. Ctrl-C ends it.", err=True)
    if opens:
        webbrowser.open(address.url_once)
    serve_dashboard(folder, address, catalog("fleets"), read_only=read_only)
