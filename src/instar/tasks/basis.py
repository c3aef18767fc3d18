"""The basis of an evaluation: everything that its metrics depend on but the weights.

Two evaluations of a run can be compared only if their bases are equal. Best values, early stopping,
plateaus and triggers begin anew at the first evaluation on another basis, whatever has changed it: an
operation, a value that a resume sets, other data, or an edit of a custom task.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import xxhash

from instar.config.fields import values
from instar.config.schema import FeedConfig, RunConfig, SamplesConfig
from instar.tasks.sources import digest_of_sources
from instar.tasks.task import Task

if TYPE_CHECKING:
    from instar.data.source import Source

Basis = Mapping[str, str]
"""What a metric depends on, by name."""

SAMPLES = "held-out samples"
_TOKENIZER = "tokenizer"
_CHOICE = "seed of their choice"
_SOURCE = "source of the task"
_UNTOLD = (SAMPLES, _TOKENIZER, _SOURCE)


def basis_of(config: RunConfig, task: Task, source: Source, limit: int | None = None) -> Basis:
    """Return the basis of an evaluation.

    Args:
        config: with everything that resumes have set.
        task: in its present shape.
        source: the held-out samples.
        limit: number of samples of a random subset; None: all.
    """
    total = len(source)
    is_subset = limit is not None and limit < total
    basis = {
        SAMPLES: source.fingerprint,
        "tokens per sample": f"{task.held_out_context:,}",
        "evaluated samples": f"{limit if is_subset else total:,}",
        _CHOICE: f"{config.data_seed}" if is_subset else "",
        _TOKENIZER: task.spec.fingerprints.get("tokenizer", ""),
        "vocabulary": f"{task.architecture.sizes().get('vocab', 0):,}",
        _SOURCE: digest_of_sources(config.task),
    }
    return basis | {
        key: json.dumps(value) for key, value in _loss_keys(config, task.spec.loss_keys).items()
    }


def incomparable(before: Basis, after: Basis) -> tuple[str, ...]:
    """Return why evaluations on two bases cannot be compared; empty: they can.

    >>> incomparable({"vocabulary": "256"}, {"vocabulary": "300"})
    ('vocabulary 256 → 300',)
    """
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = tuple(
        f"{name} {before.get(name) or '-'} → {after.get(name) or '-'}"
        for name in names
        if name not in (*_UNTOLD, _CHOICE if len(names) > 1 else "")
    )
    if _SOURCE in names:
        changes = (*changes, "the source of the task has changed")
    if _TOKENIZER in names:
        return (*changes, "another tokenizer")
    # another length makes other samples of the same text
    return changes or tuple(f"other {name}" for name in names)


def without_seed(basis: Basis) -> Basis:
    """Return a basis without what a seed may decide: also a tokenizer, which may be trained on the samples that
    are not held out."""
    by_seed = (SAMPLES, _CHOICE, _TOKENIZER)
    return {name: value for name, value in basis.items() if name not in by_seed}


def digest(basis: Basis) -> str:
    """Return a short text that is equal for equal bases; empty for an empty one."""
    return (
        xxhash.xxh3_64_hexdigest(json.dumps(dict(basis), sort_keys=True).encode()) if basis else ""
    )


def _loss_keys(config: RunConfig, loss_keys: Collection[str]) -> Mapping[str, object]:
    """Return the config's values that may define the loss or a metric: any key that a custom task has
    of its own, and those that a task names. Other keys change the model, not what is measured."""
    every = values(config)
    if ":" not in config.task:
        return {key: every[key] for key in loss_keys}
    common = {f"data.{name}" for name in (*FeedConfig.model_fields, *SamplesConfig.model_fields)}
    return {
        key: value
        for key, value in every.items()
        if key.startswith(("model.", "data.")) and key not in common
    }
