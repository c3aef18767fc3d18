"""The commands `instar init`, `instar demo` and `instar config`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from instar.api.editor_schemas import config_schema
from instar.cli.options import CommandGroup, json_option, set_option, trust_option
from instar.cli.output import print_json, print_table
from instar.config import PRESETS, STARTERS, names_in
from instar.config.document import dotted_key
from instar.config.errors import ConfigError, ConfigProblem, nearest
from instar.config.fields import (
    default,
    differing_keys,
    schedule_keys,
    schema_keys,
    section_types,
    task_config_class,
    values,
)
from instar.config.load import Loaded
from instar.config.origins import in_yaml
from instar.config.schema import RunConfig
from instar.config.suggestions import expected, suggest_key
from instar.config.user_code.trust import is_trusted
from instar.config.writers.starter import starter
from instar.extensions import how_to_install, starters
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config

_NEXT = (
    ("instar logs plot", "the loss curve, with each growth marked", "plotext", "plot"),
    ("instar report -o run.html", "all of it on one page", None, ""),
    ("instar dashboard", "runs in a browser, while they train", "uvicorn", "dashboard"),
    ("instar init", "a config of your own to start from, every key explained", None, ""),
)
"""What `instar demo` suggests: command, meaning, and the package and the extra that it needs."""


class StarterKind(click.Choice[str]):
    """A kind of starter; one of a deleted extension is named with the command that installs it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if command := how_to_install("starters", value):
            self.fail(f"the extension of {value!r} is not installed: {command}", param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("kind", type=StarterKind(sorted([*names_in(STARTERS), *starters()])), default="gpt")
@click.argument("path", required=False)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    type=click.Choice(names_in(PRESETS)),
    help="Start from ready-made settings; may be given several times, later ones win.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(kind: str, path: str | None, presets: tuple[str, ...], force: bool) -> None:
    """Write a commented config to PATH (default: KIND.yaml).

    Every key is in it, with its meaning; what begins with '#key:' is at its default.
    """
    path = path or f"{kind}.yaml"
    text = starter(kind, path, presets)
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError.of("the file already exists", path, "--force overwrites it") from None
    except (OSError, ValueError) as error:
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError.of(f"cannot be written: {message}", path) from None
    click.echo(f"wrote {path}   next: instar train {shlex.quote(path)}", err=True)


@click.command()
@set_option
def demo(overrides: tuple[str, ...]) -> None:
    """Train a small GPT, which two operations change while it trains, and let it write.

    It learns from the Python standard library's source code, in about a minute on two cores, and
    needs no download. The run is kept in the folder `runs`, its data in `data`.
    """
    from instar.api.training import train
    from instar.cli.train import sample

    click.echo(
        "training a GPT on Python's standard library; a schedule changes it twice while it trains, each time proved:",
        err=True,
    )
    run = train(STARTERS / "demo.yaml", overrides)
    prompt = "def "
    command = f'instar sample {shlex.quote(str(run))} --prompt "{prompt}"'
    click.echo(f"\nsampling from it:  {command}\n", err=True)
    click.get_current_context().invoke(sample, run=str(run), prompt=prompt)
    click.echo("\nnext:", err=True)
    for line, meaning, package, extra in _NEXT:
        if how_to_install("commands", line.split()[1]):
            continue
        missing = package is not None and find_spec(package) is None
        needs = f"; first: pip install 'instar[{extra}]'" if missing else ""
        click.echo(f"  {line:<27}# {meaning}{needs}", err=True)


@click.group(cls=CommandGroup)
def config() -> None:
    """Show, validate and compare configs."""


@config.command()
@click.argument("cfg", required=False)
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@set_option
@trust_option
@json_option
def show(cfg: str | None, origin: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the settings in force: defaults, presets, the file CFG, then --set.

    The output is itself a valid config (except with --json --origin: a record of keys).
    """
    loaded_config = _load(cfg, overrides)
    if not as_json:
        click.echo(loaded_config.to_yaml(origin=origin), nl=False)
    elif not origin:
        print_json(loaded_config.config.model_dump(mode="json"))
    else:
        origins = loaded_config.origins
        print_json(
            {
                key: {"value": v, "origin": origins[key]}
                for key, v in values(loaded_config.config).items()
            }
        )


@config.command()
@click.argument("section", required=False)
@click.option("--task", default="language", show_default=True, help="Task whose schema is shown.")
@json_option
def schema(section: str | None, task: str, as_json: bool) -> None:
    """List all config keys, or those of one SECTION.

    --json prints the JSON Schema of a config file, which editors use to complete and check; a file names it with
    the key `$schema`, which changes nothing.
    """
    name, root = section or "", task_config_class(task, [section or ""])
    names = list(filter(None, section_types(root)))
    if name not in section_types(root) and name not in schema_keys(root):
        suggestion = suggest_key(root, name) or nearest(name, [*names, *schema_keys(root)])
        hint = f"did you mean '{suggestion}'?" if suggestion else f"there are {', '.join(names)}"
        raise ConfigError.of(f"unknown section or key '{name}'", hint=hint)
    if as_json:
        print_json(config_schema(root, name))
    else:
        print_table(("key", "type", "default", "meaning"), schema_rows(root, name))


def schema_rows(root: type[RunConfig], name: str = "") -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of every key of a config class, or of those of the
    section or key `name`."""
    rows = [
        (
            key,
            short_type(expected(root, tuple(key.split(".")))),
            in_yaml(default(field)),
            field.description or "",
        )
        for key, field in schema_keys(root).items()
        if not name or key == name or key.startswith(f"{name}.")
    ]
    if name == "schedule":
        rows += [
            (
                dotted_key(path),
                short_type(expected(root, path)),
                "" if field.is_required() else in_yaml(default(field)),
                field.description or "",
            )
            for path, field in schedule_keys().items()
        ]
    return rows


@config.command()
@click.argument("cfg")
@set_option
@trust_option
@json_option
def validate(cfg: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the file CFG; every mistake is listed, exit code 2."""
    loaded_config = _load(cfg, overrides)
    all_values = values(loaded_config.config)
    set_count = sum(loaded_config.origins[key] != "default" for key in all_values)
    if as_json:
        print_json({"config": cfg, "valid": True, "set": set_count, "keys": len(all_values)})
        return
    click.echo(f"{cfg}: ok, {set_count} of {len(all_values)} keys set")


@config.command()
@click.argument("a")
@click.argument("b")
@trust_option
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """List the keys in which the configs A and B differ, defaults and presets included."""
    problems: list[ConfigProblem] = []
    read: list[dict[str, Any]] = []
    for path in (a, b):
        try:
            read.append(values(_load(path).config))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    differences = differing_keys(read)
    if as_json:
        print_json(
            {key: {"a": value_a, "b": value_b} for key, (value_a, value_b) in differences.items()}
        )
    elif differences:
        rows = [
            (key, in_yaml(value_a), in_yaml(value_b))
            for key, (value_a, value_b) in differences.items()
        ]
        print_table(("key", a, b), rows)
    else:
        click.echo("no differences", err=True)


def _load(cfg: str | None, overrides: Sequence[str] = ()) -> Loaded:
    """Load a config and check it. Without `--trust-code`, a run's own config, which may belong to
    another user, is only read: the class of its task is not imported."""
    run = None if cfg is None else RunDir(Path(cfg).parent)
    of_run = run is not None and run.config == Path(cfg or "") and run.holds_parts()
    return load_run_config(cfg, overrides, import_task=is_trusted() or not of_run)


def short_type(words: str) -> str:
    """Return the description of a type, shortened for a table."""
    for long, short in (
        ("greater than", ">"),
        ("of at least", "≥"),
        ("less than", "<"),
        ("at most", "≤"),
        (" and", ","),
        ("one of ", ""),
        (" or a ", " or "),
    ):
        words = words.replace(long, short)
    return words.removeprefix("a ")
