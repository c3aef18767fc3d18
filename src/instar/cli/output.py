"""Output of commands: tables, named values, JSON and files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, cast, get_args

import click

from instar.cli import completion
from instar.cli.options import Command
from instar.config.errors import ConfigError, visible, without_filter
from instar.logs.text.stdout import ENCODING, align_columns, columns_that_fit
from instar.record.atomic import replace_file
from instar.record.events import to_words
from instar.record.format import to_ascii

_GAP = 2
_MIN_CELL = 12
"""Minimal width in columns of a cell whose text is wrapped."""
MIN_WIDTH = 20
"""Minimal width in columns for wrapping text."""
WIDTH = 80
"""Width in columns without a terminal."""
json_format_option = click.option(
    "--json", "as_json", is_flag=True, help="The same as --format json."
)
runs_argument = click.argument(
    "runs", nargs=-1, metavar="[RUN]...", shell_complete=completion.run_names
)
PictureKind = Literal["png", "svg", "pdf"]


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table; the first column is never wrapped.

    Escape codes are printed only if stdout is a terminal and NO_COLOR is unset; without a terminal,
    nothing is wrapped or cut.

    Args:
        rows: each with as many cells as there are headers.
        right: headers of right-aligned columns.
        optional: headers of columns that are omitted on a narrow terminal, in this order.
    """
    if terminal_width() is not None:
        _draw(headers, rows, right, optional)
        return

    numbers = [number for number, header in enumerate(headers) if header in right]
    for line in align_columns([[*map(as_shown, row)] for row in (headers, *rows)], numbers):
        click.echo(line)


def as_shown(text: str) -> str:
    """Return `text` as stdout will encode it, so that its width can be measured."""
    text = visible(text)
    if text.isascii() or getattr(sys.stdout, "encoding", None) != ENCODING:
        return text

    return to_ascii(text)


def terminal_width() -> int | None:
    """Return the columns of stdout's terminal; None (unlimited) if stdout is not a terminal."""
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # stdout is closed
        return None
    return shutil.get_terminal_size().columns if is_terminal else None


def _draw(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    optional: Sequence[str],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    columns = columns_that_fit(headers, rows, optional, console.width)
    fixed_columns = [number for number in columns if number == 0 or headers[number] in right]
    if not _has_room(headers, rows, fixed_columns, columns, console.width):
        _stack(headers, rows, columns, console.width)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in columns:
        table.add_column(
            as_shown(headers[number]),
            overflow="fold",
            no_wrap=number == 0 or headers[number] in right,
            justify="right" if headers[number] in right else "left",
        )
    for row in rows:
        table.add_row(*(Text(as_shown(row[number])) for number in columns))
    with without_filter(sys.stdout):
        console.print(table)


def _has_room(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    fixed_columns: Collection[int],
    columns: Sequence[int],
    width: int,
) -> bool:
    """Return whether the wrappable columns have enough room next to the others."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    min_width = sum(widths[n] if n in fixed_columns else min(widths[n], _MIN_CELL) for n in columns)
    return min_width + _GAP * (len(columns) - 1) <= width


def _stack(
    headers: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], width: int
) -> None:
    """Print each row as lines of header and wrapped cell."""
    if headers[columns[0]]:
        click.echo(headers[columns[0]])
    for row in rows:
        click.echo(row[columns[0]])
        for number in columns[1:]:
            if row[number]:
                text = f"{headers[number]} {row[number]}".lstrip()
                for line in textwrap.wrap(
                    text, width, initial_indent="  ", subsequent_indent="    "
                ):
                    click.echo(line)


def print_named(texts: Iterable[tuple[str, str]], indent: int) -> None:
    """Print names and texts, the texts in a second column, indented by `indent`."""
    width = terminal_width()
    for name, text in texts:
        lines = [text]
        if width is not None and width - indent >= MIN_WIDTH:
            lines = textwrap.wrap(
                text, width - indent, break_long_words=False, break_on_hyphens=False
            ) or [""]
        for number, line in enumerate(lines):
            click.echo(f"{'' if number else name:<{indent}}{line}".rstrip())


def print_json(value: Any) -> None:
    """Print one line of JSON; non-finite numbers are strings, and what would act on a terminal is
    escaped."""
    text = visible(json.dumps(to_words(value), ensure_ascii=False))
    # escape surrogates, from file names that are not UTF-8
    click.echo(text.encode("utf-8", "backslashreplace").decode())


def report_faults(faults: Sequence[str]) -> int:
    """Print on stderr why records cannot be read; return the exit code of the command."""
    for fault in faults:
        click.echo(fault, err=True)
    return 4 if faults else 0


@dataclass(frozen=True)
class Output:
    """In which form a command's output is wanted, and where."""

    form: str
    path: str | None
    """None: stdout"""
    open_it: bool

    def deliver(self, text: str | Iterable[str]) -> None:
        """Print text, or lines as they are produced, or write them to the file and open it if that is asked.

        Raises:
            ConfigError: the file cannot be written or opened, or there is no file to open.
        """
        lines = text.splitlines() if isinstance(text, str) else text
        if self.path is None:
            if self.open_it:
                raise ConfigError.of("-e needs a file to open", hint="name one with -o FILE")
            for line in lines:
                click.echo(line)
            return
        path = Path(self.path)
        try:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise ConfigError.of(f"cannot write {path}: {error.strerror}", where="-o") from error
        click.echo(f"wrote {path}", err=True)
        if self.open_it:
            open_file(path)


def _choose_output(form: str, path: str | None, as_json: bool, open_it: bool) -> Output:
    return Output("json" if as_json else form, path, open_it)


def packs_output(
    choose: Callable[[str, str | None, bool, bool], Output] = _choose_output,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a function that gets --format, -o, --json and -e as one `output`, made of these."""

    def pack(work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def packed(
            *, form: str, path: str | None, as_json: bool, open_it: bool, **options: Any
        ) -> Any:
            return work(output=choose(form, path, as_json, open_it), **options)

        return packed

    return pack


def output_options(*formats: str) -> Callable[[Command], Command]:
    """Add --format, --json, -o and -e; see `packs_output`."""

    def add(command: Command) -> Command:
        for option in (
            click.option("-e", "--open", "open_it", is_flag=True, help="Open FILE, see -o."),
            click.option(
                "-o", "--output", "path", metavar="FILE", help="Write into FILE, not stdout."
            ),
            json_format_option,
            click.option(
                "--format",
                "form",
                type=click.Choice(formats),
                default=formats[0],
                show_default=True,
                help="What is written.",
            ),
        ):
            command = option(command)
        return command

    return add


def picture_kind(path: Path, option: str) -> PictureKind:
    """Return the kind of picture that a file's suffix names.

    Raises:
        ConfigError: it names none; `option` is where the path was given.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in get_args(PictureKind):
        raise ConfigError.of(f"unknown kind of picture: {path}", option, ".png, .svg, .pdf")
    return cast(PictureKind, kind)


def write_picture(path: Path, content: bytes, option: str) -> None:
    """Write a picture's file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise ConfigError.of(f"cannot write {path}: {error.strerror}", option) from error


def open_file(path: Path) -> None:
    """Open a file with the system's default application.

    Raises:
        ConfigError: there is no such application.
    """
    try:
        has_failed = click.launch(str(path), wait=True) != 0
    except OSError:
        has_failed = True
    if has_failed:
        raise ConfigError.of(
            f"no application to open {path}", hint="the file is written; copy it elsewhere"
        )


def as_text(data: Any) -> str:
    """Serialize JSON values to one line."""
    return json.dumps(data)  # ASCII, which every stdout can encode
