"""The reference pages, from the sources that the command line itself prints: every command with its
options; and from docstrings: every public name of Python. Every key of a config: `config_page.py`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc, isclass

import click
from tables import escape, table

from instar.cli.main import instar

PUBLIC = (
    ("Train", "instar", "train launch resume"),
    ("Runs", "instar", "list_runs load_run Run compare plot"),
    ("Curves", "instar.api.curves", "Plot"),
    ("Models", "instar", "load_model load_tokenizer sample evaluate TextLoss"),
    ("Custom tasks", "instar.custom", "CustomTask Ragged Shape Table log log_image log_table"),
    ("Configs that are wrong", "instar.config.errors", "ConfigError"),
    ("Checkpoints that cannot be read", "instar.checkpoint.manifest", "CheckpointError"),
    ("Runs that fail", "instar.distributed.failure", "RunFailed Interrupted StoppedUnsaved"),
)
"""Title, module and names of what docs/python.md and docs/custom-task.md describe."""


def commands() -> str:
    """Return a page with every command: usage, description, options."""
    lines = ["# Commands", "", "Printed by `instar COMMAND --help`.", ""]
    for name, command in _tree("instar", instar):
        lines += _command(name, command)
    return "\n".join(lines)


def _tree(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            subcommand = command.get_command(context, inner)
            if subcommand is not None and not subcommand.hidden:
                yield from _tree(f"{name} {inner}", subcommand)


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (f"## {name}", "", "```text", usage, "```", "")
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        # \b begins a paragraph whose lines click does not wrap
        if paragraph.startswith("\b\n"):
            yield from ("```text", paragraph.removeprefix("\b\n"), "```", "")
        else:
            yield from (escape(paragraph), "")
    depth = name.count(" ") + 1
    inner = [inner_name for inner_name, _ in _tree(name, command) if inner_name.count(" ") == depth]
    yield from (f"- [{inner_name}](#{inner_name.replace(' ', '-')})" for inner_name in inner)
    yield ""
    records = filter(None, (parameter.get_help_record(context) for parameter in command.params))
    yield from table(
        ("option", "meaning"), [(f"`{name}`", escape(about)) for name, about in records if about]
    )


def python() -> str:
    """Return a page of directives that Sphinx fills from docstrings."""
    lines = ["# Python", "", "How these are used: [From Python](../python.md).", ""]
    for title, module, names in PUBLIC:
        lines += [f"## {title}", "", "```{eval-rst}", f".. currentmodule:: {module}", ""]
        for name in names.split():
            is_class = isclass(getattr(import_module(module), name))
            lines += [
                f".. autoclass:: {name}\n   :members:" if is_class else f".. autofunction:: {name}"
            ]
            lines += [""]
        lines += ["```", ""]
    return "\n".join(lines)
