"""What the commands of `instar logs` have in common: which form, into which file, opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from instar.cli.options import Command
from instar.config.errors import ConfigError

WIDTH = 80
"""columns where there is no terminal"""

runs_argument = click.argument("runs", nargs=-1, metavar="[RUN]...")
json_option = click.option("--json", "as_json", is_flag=True, help="The same as --format json.")


def output_options(*formats: str) -> Callable[[Command], Command]:
    """--format, --json, -o and -e, passed on as `form`, `as_json`, `output` and `open_it`."""

    def add(command: Command) -> Command:
        for option in reversed(
            (
                click.option(
                    "--format",
                    "form",
                    type=click.Choice(formats),
                    default=formats[0],
                    show_default=True,
                    help="What is written.",
                ),
                json_option,
                click.option("-o", "--output", metavar="FILE", help="Write into FILE, not stdout."),
                click.option("-e", "--open", "open_it", is_flag=True, help="Open FILE, see -o."),
            )
        ):
            command = option(command)
        return command

    return add


def deliver(text: str | Iterable[str], output: str | None, *, open_it: bool = False) -> None:
    """Print text, or lines as they come, or write them into a file, and open that.

    Raises:
        ConfigError: the file cannot be written or opened, or none was named to be opened.
    """

    lines = text.splitlines() if isinstance(text, str) else text
    if output is None:
        if open_it:
            raise ConfigError.one(
                "-e opens a file, and there is none", hint="name one with -o FILE"
            )
        for line in lines:
            click.echo(line)
        return
    path = Path(output)
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError.one(f"cannot write {path}: {error.strerror}", where="-o") from error
    click.echo(f"wrote {path}", err=True)
    if open_it:
        launch(path)


def launch(path: Path) -> None:
    """Open a file with whatever this system opens such files with.

    Raises:
        ConfigError: it has nothing for them.
    """
    try:
        failed = click.launch(str(path), wait=True) != 0
    except OSError:
        failed = True
    if failed:
        raise ConfigError.one(f"nothing here opens {path}", hint="it is written; copy it elsewhere")


def as_text(data: Any) -> str:
    """`data`, made of what JSON can say, as one document."""
    import json

    return json.dumps(data, indent=2)  # ASCII: what any stdout can say
