"""`instar init`: a commented config to start from."""

from __future__ import annotations

import click

from instar.config import presets


@click.command()
@click.argument("kind", type=click.Choice(["gpt", "growth", "graph"]), default="gpt")
@click.argument("path", required=False)
@click.option(
    "--preset",
    "chosen",
    multiple=True,
    type=click.Choice(presets.names()),
    help="Start from ready-made settings; may be given several times, later ones win.",
)
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def init(kind: str, path: str | None, chosen: tuple[str, ...], force: bool) -> None:
    """Write a commented config to PATH (default: KIND.yaml).

    Every key is in it, with its meaning; what begins with '#key:' is at its default.
    """
    from pathlib import Path

    from instar.config.errors import ConfigError
    from instar.config.template import starter

    path = path or f"{kind}.yaml"
    text = starter(kind, path, chosen)
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError.one("the file is there already", path, "--force overwrites it") from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError.one(f"cannot be written: {said}", path) from None
    click.echo(f"wrote {path}   next: instar train {path}", err=True)
