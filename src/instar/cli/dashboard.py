"""`instar dashboard`: a live page over a folder of runs."""

from __future__ import annotations

from pathlib import Path

import click

from instar.config.errors import ConfigError


@click.command()
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), help="0: any free one.  [default: 8787]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--token", help="Asked of every visitor; made up for an address beyond this machine.")
@click.option("-e", "--open", "opens", is_flag=True, help="Open the page in a browser.")
def dashboard(folder: Path, port: int | None, host: str, token: str | None, opens: bool) -> None:
    """Show runs live in a browser: the runs in DIR (default: runs), or one run.

    Nothing is written and nothing is controlled. Only this machine can open the page, unless
    --host says otherwise. Ctrl-C ends it.
    """
    try:
        from instar.logs.dashboard.serve import serve, take
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError.one(
            f"the dashboard needs {name}", hint="pip install 'instar[dashboard]'"
        ) from error
    if folder.exists() and not folder.is_dir():
        raise ConfigError.one(f"{folder} is not a folder", hint="name a folder of runs, or a run")
    address = take(host, port, token)
    if not folder.exists():
        click.echo(f"{folder} is not there yet; its runs will be shown as they appear", err=True)
    click.echo(address.url)
    click.echo(f"Shows {folder}, read-only. Ctrl-C ends it.", err=True)
    if opens:
        import webbrowser

        webbrowser.open(address.url)
    serve(folder, address)
