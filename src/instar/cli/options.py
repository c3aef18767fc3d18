"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key over the file's, e.g. model.n_layer=6; may be given several times.",
)


def rank_options(command: Command) -> Command:
    """How many ranks a command starts, and on which devices."""
    for option in (
        click.option("--devices", help="GPUs of the ranks, e.g. 0,1; as many ranks as devices."),
        click.option("--nproc", type=click.IntRange(min=1), help="Ranks to start on this machine."),
    ):
        command = option(command)
    return command


def from_option(default: str, words: str) -> Callable[[Command], Command]:
    """The checkpoint of a run with which a command begins; `words` are the choices."""
    return click.option(
        "--from", "start", default=default, show_default=True, metavar="CHECKPOINT", help=words
    )


def allow_option(words: str) -> Callable[[Command], Command]:
    """In what a run that goes on may be another than it was."""
    return click.option(
        "--allow",
        multiple=True,
        type=click.Choice(["architecture", "data", "tokenizer"]),
        help=words,
    )
