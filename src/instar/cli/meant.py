"""What was probably meant by words on the command line that mean nothing."""

from __future__ import annotations

import re
from collections.abc import Collection

import click

OF_OTHERS = {
    "continue": "resume",
    "diff": "config diff",
    "eval": "test",
    "evaluate": "test",
    "events": "logs events",
    "export": "logs export",
    "fit": "train",
    "generate": "sample",
    "help": "--help",
    "list": "logs list",
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
}
"""What is no command of its own, or is one elsewhere."""


def command_meant(name: str, table: Collection[str]) -> str:
    """The command of a table that a word stands for; empty if nobody can say."""
    from difflib import get_close_matches

    if "train" in table and name.endswith((".yaml", ".yml")):
        return f"instar train {name}"
    meant = OF_OTHERS.get(name, "")
    if meant.partition(" ")[0] in (*table, "--help"):
        return meant
    return next(iter(get_close_matches(name, table, n=1)), "")


def explained(error: click.UsageError) -> click.UsageError:
    """The error, with what to write instead where a key of the config was given as an option."""
    hint = ""
    options = {name for each in _params(error) for name in each.opts}
    if isinstance(error, click.NoSuchOption):
        hint = _option_meant(error.option_name, options)
    elif "--set" in options and (pair := re.search(r"\(([\w.]+=[^\s)]*)", error.message)):
        hint = f"write --set {pair[1]}"
    return (
        click.UsageError(f"{error.message} {hint[:1].upper()}{hint[1:]}.", error.ctx)
        if hint
        else error
    )


def _params(error: click.UsageError) -> list[click.Parameter]:
    return error.ctx.command.params if error.ctx else []


def _option_meant(given: str, options: Collection[str]) -> str:
    if "--set" not in options:
        return ""
    from instar.config.explain import key_meant
    from instar.config.roots import LANGUAGE, root_of

    if given in ("--config", "--cfg") and "--config" not in options:
        return "the config needs no option: instar train CFG"
    key = key_meant(root_of(LANGUAGE), given.lstrip("-").replace("-", "_"))
    if key == "train.until" and "--until" in options:
        return "write --until, e.g. --until 2000it or --until 3ep"
    return f"write --set {key}=VALUE" if key else ""
