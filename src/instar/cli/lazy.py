"""Groups of commands that are imported when they are called, not when they are listed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Group(click.Group):
    """A group whose help has all that its commands say of themselves in a sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        there = {name: command for name in names if (command := self.get_command(ctx, name))}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(1000)) for name, command in there.items()]
            )


class LazyGroup(click.Group):
    """A group by a table: of each command where it is, `module:attribute`, and what it does."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.table)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{self._did_you_mean(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.table.items()])

    def _did_you_mean(self, name: str) -> str:
        from instar.cli.meant import command_meant

        meant = command_meant(name, self.table)
        return f" Did you mean '{meant}'?" if meant else ""
