"""Lazily imported command groups, options shared by several commands, and `--json` of every command: stdout
has one line of JSON, also if the command fails."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import click

from instar.cli import completion
from instar.config.errors import ConfigError, nearest
from instar.config.user_code.trust import FLAG, TRUST_VARIABLE
from instar.extensions import (
    commands_in,
    extend_commands,
    how_to_install,
    load_target,
    third_party,
    usable_entry_points,
)

MOST_RANKS = 2**16

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completion.keys,
    help="Override a key of the file, e.g. model.n_layer=6; may be given several times.",
)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
MOST_PROFILED = 100
JSON = "--json"
Say = Callable[[str], None]
"""Prints an error on stderr."""
FOREIGN_COMMANDS = {
    "analyze": "checkpoint analyze",
    "average": "checkpoint average",
    "chat": "sample",
    "compare": "logs compare",
    "continue": "resume",
    "convert": "checkpoint export",
    "diff": "config diff",
    "eval": "test",
    "evaluate": "test",
    "events": "logs events",
    "export": "checkpoint export or logs export",
    "fit": "train",
    "generate": "sample",
    "help": "--help",
    "import": "checkpoint import",
    "inspect": "checkpoint inspect",
    "kill": "control RUN stop",
    "list": "logs list",
    "lr_find": "find lr",
    "ls": "logs list",
    "plot": "logs plot",
    "prepare": "data prepare",
    "run": "train",
    "save": "control RUN save",
    "schema": "config schema",
    "show": "config show",
    "status": "control RUN status",
    "stop": "control RUN stop",
    "summary": "logs summary",
    "tail": "logs tail",
    "validate": "config validate",
    "verify": "checkpoint verify",
    "version": "--version",
}
"""Replacements for commands of other tools and for subcommands without their group."""


class NewFolder(click.Path):
    """Path of a folder to be created."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value).strip():
            self.fail("the path of a folder is empty; write e.g. runs/new", param, ctx)
        return super().convert(value, param, ctx)


def byte_size(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Return a number of bytes such as 500MB, 5GB or 2GiB."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]I?B)?", text.strip().upper(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise click.BadParameter(f"{text!r} is not a size; write e.g. 500MB or 5GB")
    return size


def _trust(_context: click.Context, _option: click.Parameter, enabled: bool) -> None:
    """Set the environment variable, which ranks and data workers inherit."""
    if enabled:
        os.environ[TRUST_VARIABLE] = "1"


trust_option = click.option(
    FLAG,
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Run code that the config names even if another user owns it.",
)


def _indices(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise click.BadParameter(f"{text!r}; write each GPU's index once, e.g. 0,1")
    return [int(part) for part in parts]


def rank_options(command: Command) -> Command:
    """Add the options --nproc and --devices, a list of indices."""
    for option in (
        click.option(
            "--devices", callback=_indices, help="GPUs of the ranks, e.g. 0,1; one rank per device."
        ),
        click.option(
            "--nproc", type=click.IntRange(1, MOST_RANKS), help="Number of ranks on this machine."
        ),
    ):
        command = option(command)
    return command


def from_option(default: str, words: str) -> Callable[[Command], Command]:
    """Add the option --from, a checkpoint of a run; `words` is its help."""
    return click.option(
        "--from",
        "start",
        default=default,
        show_default=True,
        metavar="CHECKPOINT",
        shell_complete=completion.starts,
        help=words,
    )


def allow_option(words: str) -> Callable[[Command], Command]:
    """Add the option --allow: what may differ from the resumed run; `words` is its help."""
    return click.option(
        "--allow",
        multiple=True,
        type=click.Choice(["architecture", "data", "tokenizer"]),
        help=words,
    )


def _profiled_steps(_context: click.Context, _option: click.Parameter, text: str | None) -> int:
    from instar.config.budget import parse_budget  # `instar --help` does not wait for it

    if text is None:
        return 0
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; write e.g. 5it") from None
    if budget.kind != "steps" or budget.amount > MOST_PROFILED:
        raise click.BadParameter(f"{text!r} is not 1it to {MOST_PROFILED}it")
    return int(budget.amount)


profile_option = click.option(
    "--profile",
    metavar="STEPS",
    callback=_profiled_steps,
    help="Profile this many steps after the first ones, e.g. 5it: print the most expensive operators, and "
    "write a trace per rank.",
)


class DeferredCommand(click.Command):
    """A command whose work, `module:function`, is imported when it is called: the decorated function has its
    options and its help."""

    def __init__(self, *args: Any, work: str, **options: Any) -> None:
        self.work = work
        super().__init__(*args, **options)

    @property
    def callback(self) -> Callable[..., Any]:
        return load_target(self.work)  # type: ignore[no-any-return]

    @callback.setter
    def callback(self, _: object) -> None: ...


class StrictCommand(click.Command):
    """A command that refuses an option given twice with different values, instead of using the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        single = [
            parameter
            for parameter in self.params
            if isinstance(parameter, click.Option)
            and not (parameter.multiple or parameter.count or parameter.is_flag)
        ]
        for option in single:
            words = [*option.opts, *option.secondary_opts]
            values = [
                args[n + 1] if word in words else word.partition("=")[2]
                for n, word in enumerate(args[: args.index("--") if "--" in args else None])
                if (word in words and n + 1 < len(args))
                or word.startswith(tuple(f"{w}=" for w in words))
            ]
            if len(set(values)) > 1:
                ctx.fail(f"{words[-1]} is given {len(values)} times: {', '.join(values)}; give one")
        return super().parse_args(ctx, args)


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


def json_requested(args: Sequence[str]) -> bool:
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


def _keep(_context: click.Context, _option: click.Parameter, enabled: bool) -> None:
    if enabled and isinstance(sys.stdout, _Line):
        sys.stdout.kept = io.StringIO()


class CommandGroup(click.Group):
    """A group whose help shows each command's first sentence untruncated, with the commands of extensions;
    all its commands take --json."""

    command_class = StrictCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *commands_in(self.name or "")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and (extension_command := commands_in(self.name or "").get(cmd_name)):
            command = load_target(extension_command.target)
        return command and takes_json(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            refuse_deleted(f"{self.name} {args[0]}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        rows = {name: spec.summary for name, spec in commands_in(self.name or "").items()}
        rows |= {
            name: command.get_short_help_str(1000)
            for name, command in self.commands.items()
            if not command.hidden
        }
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


def refuse_deleted(words: str) -> None:
    """Raise ConfigError if a command belongs to an extension of Instar that is not installed."""
    if remedy := how_to_install("commands", words):
        raise ConfigError.of(
            "this command's extension is not installed", where=f"instar {words}", hint=remedy
        )


class LazyGroup(click.Group):
    """A group defined by a table: each command's location, `module:attribute`, and its help. Extensions add
    to it, and packages of others too if `is_open`."""

    def __init__(
        self,
        *args: Any,
        table: Mapping[str, tuple[str, str]],
        is_open: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.core_table, self.is_open = table, is_open

    @cached_property
    def table(self) -> Mapping[str, tuple[str, str]]:
        """The commands of the core and of Instar's extensions."""
        group = "" if self.is_open else self.name or ""
        return extend_commands(self.core_table, group)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.table)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        row = self.core_table.get(cmd_name) or self.table.get(cmd_name)
        if row is not None:
            return takes_json(load_target(row[0]))
        extension = third_party(cmd_name) if self.is_open else None
        command = extension and extension.commands.get(cmd_name)
        return takes_json(load_target(command.target)) if command else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            refuse_deleted(args[0] if self.is_open else f"{self.name} {args[0]}")
            ctx.fail(f"No such command '{args[0]}'.{self._did_you_mean(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in self.table.items()])
        if not self.is_open:
            return
        points, messages = usable_entry_points(self.table)
        for message in messages:
            say(message)
        if points:
            with formatter.section("Extensions of other packages"):
                formatter.write_dl([(point.name, point.summary) for point in points])

    def _did_you_mean(self, name: str) -> str:
        suggestion = suggest_command(name, self.table)
        return f" Did you mean '{suggestion}'?" if suggestion else ""


def suggest_command(name: str, table: Collection[str]) -> str:
    """Return the command that an unknown word probably means; empty if it is ambiguous."""
    if "train" in table and name.endswith((".yaml", ".yml")):
        from shlex import quote  # not before: `instar --help` does not wait for it

        return f"instar train {quote(name)}"
    suggestion = FOREIGN_COMMANDS.get(name, "")
    if suggestion.partition(" ")[0] in (*table, "--help", "--version"):
        return suggestion.replace(" or ", "' or '")
    return nearest(name, table) or ""


def schedule_option(file: str) -> str:
    """Return the schedule's file as a --set option."""
    return f"schedule={json.dumps(file)}"
