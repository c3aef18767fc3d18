"""Configs as YAML text: the commented template of `instar init`, and the resolved run.yaml."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from instar.config.document import parse, printable
from instar.config.fields import keys, sections, value_of
from instar.config.load import load
from instar.config.schema import RunConfig

KINDS = {
    "gpt": (
        "A small GPT that learns from the Python standard library's own source code,\n"
        "in a few minutes on a CPU.",
        {
            "name": "gpt",
            "model.n_layer": 4,
            "model.n_head": 4,
            "model.n_embd": 128,
            "model.context": 128,
            "data.source": "stdlib",
            "data.tokenizer": "bpe",
            "data.vocab_size": 2048,
            "train.until": ["600it"],
            "train.batch_size": 16,
            "optimizer.lr": 1e-3,
            "learning_rate.warmup_iters": 50,
            "eval.eval_interval": 100,
        },
    ),
}

_HEAD = """\
{about}

  instar train {path}
  instar sample runs/{name}-…      the folder that `train` names

What begins with '#key:' is not set and shows the value in force without it.
All keys: instar config schema      What is in force: instar config show {path} --origin
"""


def starter(kind: str, path: str, chosen: Sequence[str] = ()) -> str:
    """The commented config that `instar init` writes to `path`.

    Every key of the schema is there: set where the template has a value that the chosen
    presets leave open, else as '#key: value' with the value in force.
    """
    about, values = KINDS[kind]
    by_preset = {
        key
        for name in chosen
        for key, origin in load(None, [f"preset={name}"]).origins.items()
        if origin.startswith("preset ")
    }
    values = {key: value for key, value in values.items() if key not in by_preset}
    if chosen:
        values = {"preset": list(chosen), **values}
    options = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    config = load(None, options).config

    head = _HEAD.format(about=about, path=printable(shlex.quote(path)), name=config.name)
    lines = [*(f"# {line}".rstrip() for line in head.splitlines()), ""]
    section = ""
    for key, field in keys().items():
        lines += _opening(section, section := key.rpartition(".")[0])
        indent = "  " * key.count(".")
        off = "" if key in values else "#"
        lines += textwrap.wrap(
            field.description or "",
            88,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        lines.append(f"{indent}{off}{_line(config, key)}")
    return "\n".join(lines) + "\n"


def resolved(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Every key with its value, and its origin, where one is given, as a comment behind it."""
    lines: list[str] = []
    section = ""
    for key in keys():
        lines += _opening(section, section := key.rpartition(".")[0])
        line = f"{'  ' * key.count('.')}{_line(config, key)}"
        lines.append(f"{line:<40}  # {printable(origins[key])}" if key in origins else line)
    return "\n".join(lines) + "\n"


def _opening(before: str, section: str) -> list[str]:
    """The lines that open `section` after the section `before`."""
    if section == before:
        return []
    indent = "  " * section.count(".")
    about = (sections()[section].__doc__ or "").strip().splitlines()[0]
    return ["", f"{indent}# {about}", f"{indent}{section.rpartition('.')[2]}:"]


def _line(config: RunConfig, key: str) -> str:
    return f"{key.rpartition('.')[2]}: {in_yaml(value_of(config, key))}"


def in_yaml(value: Any) -> str:
    """A scalar or a list of scalars as YAML on one line, read back equal."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, str):
        return value if _plain(value) else _quoted(value)
    return json.dumps(value)


def _plain(text: str) -> bool:
    """Whether a text may stand without quotes, in a list too."""
    if not re.fullmatch(r"[\w./][\w./<=-]*", text, re.ASCII):
        return False
    value, found = parse(f"[{text}]", "")
    return not found and value is not None and value.plain() == [text]


def _quoted(text: str) -> str:
    """YAML's double-quoted form: what cannot be printed is escaped by its code point."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(char) or _escaped(char) for char in text)}"'


def _escaped(char: str) -> str:
    code = ord(char)
    if char.isprintable() and code < 0x10000:
        return char
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
