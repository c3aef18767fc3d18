"""The commented config that `instar init` writes."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from instar.config.document import printable
from instar.config.dump import entry, opening
from instar.config.errors import ConfigError
from instar.config.fields import keys
from instar.config.load import load
from instar.config.section import Section

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


@dataclass(frozen=True)
class Kind:
    """What `instar init` can write: what it is, what to type after training, what it sets."""

    about: str
    then: str
    values: Mapping[str, Any]


_SPEAK = "instar sample latest"

KINDS: Mapping[str, Kind] = {
    "gpt": Kind(
        "A small GPT that learns from the Python standard library's own source code,\n"
        "in a few minutes on a CPU.",
        _SPEAK,
        {
            "name": "gpt",
            **_SMALL,
            "model.n_layer": 4,
            "model.n_embd": 128,
            "train.until": ["600it"],
            "eval.eval_interval": 100,
        },
    ),
    "growth": Kind(
        "A small GPT that grows while it learns, in depth and in width: on the Python standard\n"
        "library's own source code, in a few minutes on a CPU.",
        _SPEAK,
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
    "graph": Kind(
        "A small graph network that learns whether a causal set was sprinkled into spacetime, and\n"
        "into how many dimensions, in a few minutes on a CPU. The sets are generated once.",
        "instar test latest",
        {
            "name": "graph",
            "task": "graph",
            "model.heads": [
                {"name": "manifold", "kind": "classification", "classes": 2},
                {"name": "dimension", "kind": "classification", "classes": 3},
                {"name": "ordering_fraction", "kind": "regression", "weight": 10.0},
            ],
            "data.causal_sets.sets": 4000,
            "data.causal_sets.min_points": 64,
            "data.causal_sets.max_points": 128,
            "train.until": ["20ep"],
            "early_stopping.rules": [{"metric": "manifold/accuracy", "patience": 5, "grace": 5}],
            "checkpoint.best_of": ["manifold/accuracy"],
            "test.at_end": True,
        },
    ),
}

_HEAD = """\
{about}

  instar train {path}
  {then}

What begins with '#key:' is not set and shows the value in force without it.
All keys: instar config schema{of}      What is in force: instar config show {path} --origin
"""


def starter(kind: str, path: str, chosen: Sequence[str] = ()) -> str:
    """The commented config that `instar init` writes to `path`.

    Every key of the schema is there: set where the template has a value that the chosen
    presets leave open, else as '#key: value' with the value in force.

    Raises:
        ConfigError: the presets are not of this kind's task.
    """
    about, then, values = KINDS[kind].about, KINDS[kind].then, KINDS[kind].values
    task = values.get("task")
    if chosen and task:
        raise ConfigError.one(
            f"preset {', '.join(chosen)}: presets are of language models, not of task {task}",
            "--preset",
            "leave it out",
        )
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

    of = f" --task {task}" if task else ""
    head = _HEAD.format(about=about, then=then, of=of, path=printable(shlex.quote(path)))
    lines = [*(f"# {line}".rstrip() for line in head.splitlines()), ""]
    section = ""
    for key, field in keys(type(config)).items():
        lines += opening(type(config), section, section := key.rpartition(".")[0])
        indent = "  " * key.count(".")
        lines += _comment(field.description or "", indent)
        lines += [line for about in _of_items(field) for line in _comment(about, indent, "  ")]
        written = entry(config, key)
        lines += written if key in values else [f"{indent}#{written[0].lstrip()}"]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str, inner: str = "") -> list[str]:
    """The text as lines of comment; `inner` stands between the sign and the text."""
    begin, further = f"{indent}# {inner}", f"{indent}# {inner}{inner}"
    return textwrap.wrap(text, 88, initial_indent=begin, subsequent_indent=further)


def _of_items(field: FieldInfo) -> Iterator[str]:
    """What each key of a list's items means, where the items are sections."""
    for item in get_args(field.annotation):
        if isinstance(item, type) and issubclass(item, Section):
            for name, of_item in item.model_fields.items():
                yield f"{name}: {of_item.description}"
