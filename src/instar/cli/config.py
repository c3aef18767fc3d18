"""`instar config`: what a config may say, says, and where it says it."""

from __future__ import annotations

from typing import Any

import click

from instar.cli.facts import print_json
from instar.cli.lazy import Group
from instar.cli.options import json_option, set_option


@click.group(cls=Group)
def config() -> None:
    """Show, validate and compare configs."""


@config.command()
@click.argument("cfg", required=False)
@click.option("--origin", is_flag=True, help="Tell where each value comes from.")
@set_option
@json_option
def show(cfg: str | None, origin: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the settings in force: defaults, presets, the file CFG, then --set.

    The output is itself a config that can be run (without --json --origin: then it is a
    record of keys).
    """
    from instar.config.fields import values
    from instar.schedule.checks import load_checked

    loaded = load_checked(cfg, overrides)
    if not as_json:
        click.echo(loaded.to_yaml(origin=origin), nl=False)
    elif not origin:
        print_json(loaded.config.model_dump(mode="json"))
    else:
        origins = loaded.origins
        print_json(
            {key: {"value": v, "origin": origins[key]} for key, v in values(loaded.config).items()}
        )


@config.command()
@click.argument("section", required=False)
@click.option("--task", default="language", show_default=True, help="Of which task's configs.")
@json_option
def schema(section: str | None, task: str, as_json: bool) -> None:
    """List the keys that there are, or those of one SECTION.

    With --json the JSON Schema of a config file, from which editors complete and check.
    """
    from instar.cli.table import print_table
    from instar.config.dump import in_yaml
    from instar.config.errors import ConfigError
    from instar.config.explain import dotted, key_meant, nearest
    from instar.config.fields import (
        default,
        editor_schema,
        expected,
        keys,
        schedule_keys,
        schema_node,
        sections,
    )
    from instar.config.roots import root_of

    name, root = section or "", root_of(task)
    there = list(filter(None, sections(root)))
    if name not in sections(root) and name not in keys(root):
        meant = key_meant(root, name) or nearest(name, [*there, *keys(root)])
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(there)}"
        raise ConfigError.one(f"there is no section or key '{name}'", hint=hint)
    if as_json:
        print_json(editor_schema(root, name))
        return
    rows = [
        (
            key,
            _brief(expected(root, schema_node(root, tuple(key.split("."))) or {})),
            in_yaml(default(root, key)),
            field.description or "",
        )
        for key, field in keys(root).items()
        if not name or key == name or key.startswith(f"{name}.")
    ]
    if name == "schedule":
        rows += [
            (
                dotted(path),
                _brief(expected(root, schema_node(root, path) or {})),
                "" if field.is_required() else in_yaml(field.default),
                field.description or "",
            )
            for path, field in schedule_keys().items()
        ]
    print_table(("key", "type", "default", "meaning"), rows)


@config.command()
@click.argument("cfg")
@set_option
def validate(cfg: str, overrides: tuple[str, ...]) -> None:
    """Check the file CFG; every mistake is listed, exit code 2."""
    from instar.config.fields import keys
    from instar.schedule.checks import load_checked

    loaded = load_checked(cfg, overrides)
    every = keys(type(loaded.config))
    given = sum(loaded.origins[key] != "default" for key in every)
    click.echo(f"{cfg}: ok, {given} of {len(every)} keys set")


@config.command()
@click.argument("a")
@click.argument("b")
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """List the keys in which the configs A and B differ, defaults and presets included."""
    from instar.cli.table import print_table
    from instar.config.differing import differing
    from instar.config.dump import in_yaml
    from instar.config.errors import ConfigError, Problem
    from instar.config.fields import values
    from instar.schedule.checks import load_checked

    problems: list[Problem] = []
    read: list[dict[str, Any]] = []
    for path in (a, b):
        try:
            read.append(values(load_checked(path).config))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    found = differing(read)
    if as_json:
        print_json({key: {"a": one, "b": other} for key, (one, other) in found.items()})
    elif found:
        rows = [(key, in_yaml(one), in_yaml(other)) for key, (one, other) in found.items()]
        print_table(("key", a, b), rows)
    else:
        click.echo("no differences", err=True)


def _brief(words: str) -> str:
    """A type in words, made narrower for a table."""
    for long, short in (
        ("greater than", ">"),
        ("of at least", "≥"),
        ("less than", "<"),
        ("at most", "≤"),
        (" and", ","),
        ("one of ", ""),
    ):
        words = words.replace(long, short)
    return words.removeprefix("a ")
