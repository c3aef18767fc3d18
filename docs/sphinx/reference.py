"""The reference pages, from the sources that the command line itself prints: every command with its
options, and every key of a config with its type, default and meaning; and from docstrings: every
public name of Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import cleandoc, isclass

import click

from instar.cli.config import schema_rows
from instar.cli.main import instar
from instar.config.fields import known_tasks, root_of, section_types

Row = Sequence[str]

PUBLIC = (
    ("Train", "instar", "launch resume"),
    ("Train in this process", "instar.api", "train"),
    ("Runs", "instar", "list_runs load_run Run compare"),
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
            found = command.get_command(context, inner)
            if found is not None and not found.hidden:
                yield from _tree(f"{name} {inner}", found)


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (f"## {name}", "", "```text", usage, "```", "")
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        # \b begins a paragraph whose lines click does not wrap
        if paragraph.startswith("\b\n"):
            yield from ("```text", paragraph.removeprefix("\b\n"), "```", "")
        else:
            yield from (_escape(paragraph), "")
    depth = name.count(" ") + 1
    inner = [each for each, _ in _tree(name, command) if each.count(" ") == depth]
    yield from (f"- [{each}](#{each.replace(' ', '-')})" for each in inner)
    yield ""
    records = filter(None, (each.get_help_record(context) for each in command.params))
    yield from _table(
        ("option", "meaning"), [(f"`{name}`", _escape(about)) for name, about in records if about]
    )


def config() -> str:
    """Return a page with every key of a config, by section."""
    lines = ["# Configuration", "", "Printed by `instar config schema`.", ""]
    known: set[tuple[str, ...]] = set()
    for task in known_tasks():
        rows = [row for row in schema_rows(root_of(task)) if row not in known]
        known.update(rows)
        for section in section_types(root_of(task)):
            inside = [row for row in rows if row[0].rpartition(".")[0] == section]
            if inside:
                of = f" of task `{task}`" if task != next(iter(known_tasks())) else ""
                lines += [f"## {f'`{section}`' if section else 'Top level'}{of}", ""]
                lines += _keys(inside, len(section) + 1 if section else 0)
    lines += ["## Entries of `schedule`", ""]
    lines += _keys(schema_rows(root_of("language"), "schedule")[1:], 0)
    return "\n".join(lines)


def _keys(rows: Sequence[Row], cut: int) -> Iterator[str]:
    yield from _table(
        ("key", "type", "default", "meaning"),
        [
            (f"`{key[cut:]}`", _escape(kind), f"`{default}`" if default else "", _escape(about))
            for key, kind, default, about in rows
        ],
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


def _table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        for row in (head, ["---"] * len(head), *rows):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        yield ""


def _escape(text: str) -> str:
    """Escape what Markdown would read as formatting."""
    for sign in "\\*_<[`":
        text = text.replace(sign, "\\" + sign)
    return text
