"""The commented config that `instar init` writes."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from instar.config.document import printable
from instar.config.dump import entry, opening
from instar.config.fields import keys
from instar.config.load import load

_SMALL = {
    "model.n_head": 4,
    "model.context": 128,
    "data.source": "stdlib",
    "data.tokenizer": "bpe",
    "data.vocab_size": 2048,
    "train.batch_size": 16,
    "optimizer.lr": 1e-3,
    "learning_rate.warmup_iters": 50,
}

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt": (
        "A small GPT that learns from the Python standard library's own source code,\n"
        "in a few minutes on a CPU.",
        {
            "name": "gpt",
            **_SMALL,
            "model.n_layer": 4,
            "model.n_embd": 128,
            "train.until": ["600it"],
            "eval.eval_interval": 100,
        },
    ),
    "growth": (
        "A small GPT that grows while it learns, in depth and in width: on the Python standard\n"
        "library's own source code, in a few minutes on a CPU.",
        {
            **_SMALL,
            "name": "growth",
            "schedule": [
                {
                    "name": "insert_layers",
                    "value": 2,
                    "where": "even",
                    "trigger_loss": 5.0,
                    "max_wait_iters": 200,
                },
                {
                    "name": "widen_mlp",
                    "value": "x1.5",
                    "when": {"any": [{"loss_below": 4.5}, {"waited": 150}]},
                    "lr": {"rewarm": 20},
                },
                {"name": "change_lr", "value": 0.5, "when": {"at_fraction": 0.8}},
            ],
            "model.n_layer": 2,
            "model.n_embd": 128,
            "train.until": ["800it"],
            # growth sits best where the rate is stable (arXiv 2511.04981)
            "learning_rate.shape": "wsd",
            "eval.eval_interval": 50,
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
        lines += textwrap.wrap(
            field.description or "",
            88,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        written = entry(config, key)
        lines += written if key in values else [f"{indent}#{written[0].lstrip()}"]
    return "\n".join(lines) + "\n"
