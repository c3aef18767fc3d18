"""Starters: what `instar init` writes, a config with every key and its meaning."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from instar.config import PRESETS, STARTERS, growing, names_in
from instar.config.document import dotted_key, parse
from instar.config.errors import ConfigError, printable_text
from instar.config.fields import LANGUAGE, flatten_config, root_of, schema_keys, values
from instar.config.load import load_config
from instar.config.origins import entry_text, opening
from instar.config.schema import RunConfig
from instar.extensions import starters

_REST = """
What begins with '#key:' is not set and shows the value in force without it.
All keys: instar config schema{of}      What is in force: instar config show {path} --origin
"""


def starter_files() -> Mapping[str, Path]:
    """Return the files that starters are made from, also those of extensions, by their kinds."""
    files = {name: STARTERS / f"{name}.yaml" for name in names_in(STARTERS)} | starters()
    return dict(sorted(files.items()))


def starter(kind: str, path: str, preset_names: Sequence[str] = ()) -> str:
    """Return the commented config that `instar init` writes to `path`.

    It contains every key of the schema: set if the starter has a value that the selected presets
    do not override, otherwise as '#key: value' with the value in force.

    Raises:
        ConfigError: the presets are for another task.
    """
    text = starter_files()[kind].read_text(encoding="utf-8")
    document, _ = parse(text, kind)
    assert document is not None
    task = document.data.get("task", LANGUAGE)
    if preset_names and task != LANGUAGE:
        raise ConfigError.of(
            f"preset {', '.join(preset_names)}: presets are for language models, not for task {task}",
            "--preset",
            "leave it out",
        )
    presets = {name: (PRESETS / f"{name}.yaml").read_text("utf-8") for name in preset_names}
    set_values = _set_values(root_of(task), document.data, presets)
    # with a schedule of its own, a preset that makes one leaves the final shape as it is
    settings = {"schedule": list[Any]()} | set_values
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    grows = next((name for name in preset_names if name in growing.DIVISORS), "")

    comments = (f"preset {n}: {_opening_comment(p)}" for n, p in presets.items())
    description = "\n\n".join([_opening_comment(text), *comments])
    of = "" if task == LANGUAGE else f" --task {task}"
    head = f"{description}\n{_REST}".format(of=of, path=printable_text(shlex.quote(path)))
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    config = load_config(None, overrides).config
    entries = _entries(root_of(task), values(config), set_values, grows)
    return "\n".join([*lines, "", *entries]) + "\n"


def _set_values(
    root: type[RunConfig], data: Mapping[str, Any], presets: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a starter sets, without the keys of the presets' texts."""
    by_preset = {
        key
        for name, preset in presets.items()
        if (document := parse(preset, name)[0]) is not None
        for key, _ in flatten_config(root, document.data)
    }
    set_values = {
        dotted_key(key): value for key, value in flatten_config(root, data) if key not in by_preset
    }
    return set_values | ({"preset": [*presets]} if presets else {})


def _entries(
    root: type[RunConfig], in_force: Mapping[str, Any], set_keys: Collection[str], grows: str
) -> Iterator[str]:
    """Yield the lines of all keys with their meaning; `grows` is the preset that makes the schedule."""
    section = ""
    for key, value in in_force.items():
        field = schema_keys(root)[key]
        yield from opening(section, section := key.rpartition(".")[0], root)
        indent = "  " * key.count(".")
        yield from _meaning(field, indent)
        lines = entry_text(key, value)
        if key == "schedule" and key not in set_keys and grows:
            yield f"# schedule: made by preset {grows}, see --dry-run"
        elif key in set_keys:
            yield from lines
        else:
            yield f"{indent}#{lines[0].lstrip()}"


def _meaning(field: FieldInfo, indent: str) -> Iterator[str]:
    yield from _comment(field.description or "", indent)
    for item_type in get_args(field.annotation):
        for name, inner in getattr(item_type, "model_fields", {}).items():
            yield from _comment(f"{name}: {inner.description}", indent, "  ")


def _opening_comment(text: str) -> str:
    """Return the comment that a file of values begins with."""
    return "\n".join(line[2:] for line in takewhile(lambda line: line[:1] == "#", text.split("\n")))


def _comment(text: str, indent: str, inner: str = "") -> list[str]:
    """Format text as comment lines; `inner` follows the comment sign."""
    begin, further = f"{indent}# {inner}", f"{indent}# {inner}{inner}"
    return textwrap.wrap(text, 88, initial_indent=begin, subsequent_indent=further)
