"""The commented config that `instar init` writes."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence

from instar.config.document import printable
from instar.config.dump import entry, opening
from instar.config.fields import keys
from instar.config.load import load

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
  instar sample latest

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

    head = _HEAD.format(about=about, path=printable(shlex.quote(path)))
    lines = [*(f"# {line}".rstrip() for line in head.splitlines()), ""]
    section = ""
    for key, field in keys().items():
        lines += opening(section, section := key.rpartition(".")[0])
        indent = "  " * key.count(".")
        off = "" if key in values else "#"
        lines += textwrap.wrap(
            field.description or "",
            88,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        lines.append(f"{indent}{off}{entry(config, key)}")
    return "\n".join(lines) + "\n"
