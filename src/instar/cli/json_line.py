"""`--json` of every command: stdout has one line of JSON, also if the command fails."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

import click

JSON = "--json"
Say = Callable[[str], None]
"""Prints an error on stderr."""


def say(text: str) -> None:
    click.echo(text, err=True)


def takes_json(command: click.Command) -> click.Command:
    """Return the command with the option --json: one that has no JSON of its own prints the text that it
    prints otherwise as {"output": …, "exit_code": …}."""
    if not isinstance(command, click.Group) and not any(JSON in p.opts for p in command.params):
        about = "Print one line of JSON: the output, or the error, and the exit code."
        command.params.append(
            click.Option([JSON], is_flag=True, expose_value=False, callback=_keep, help=about)
        )
    return command


def requested(args: Sequence[str]) -> bool:
    return JSON in args[: args.index("--")] if "--" in args else JSON in args


def in_one_line(run: Callable[[Say], int]) -> int:
    """Run a command whose stdout is one line of JSON, and return its exit code.

    Args:
        run: gets a function that prints an error.
    """
    stdout = sys.stdout
    if stdout is None:
        return run(say)
    errors, line, code = list[str](), _Line(stdout), 1

    def remember(text: str) -> None:
        errors.append(text)
        say(text)

    sys.stdout = cast(TextIO, line)
    try:
        code = run(remember)
        return code
    finally:
        sys.stdout = stdout
        if not line.written and not isinstance(sys.exc_info()[1], BrokenPipeError):
            text = line.kept.getvalue().removesuffix("\n") if line.kept else ""
            error = "\n".join(errors) or "see stderr"
            answer = {"error": error} if errors or code else {"output": text}
            click.echo(json.dumps(answer | {"exit_code": code}))


class _Line:
    """Stdout of a command that prints JSON itself, or keeps what another one prints."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.kept: io.StringIO | None = None
        self.written = False

    def write(self, text: str) -> int:
        if self.kept is not None:
            return self.kept.write(text)
        self.written = self.written or bool(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _keep(_context: click.Context, _option: click.Parameter, given: bool) -> None:
    if given and isinstance(sys.stdout, _Line):
        sys.stdout.kept = io.StringIO()
