"""Makes the basis of an evaluation from the config, the task and the held-out samples."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Protocol

from instar.config.fields import values
from instar.config.schema import FeedConfig, RunConfig, SamplesConfig
from instar.tasks.basis import CHOICE, NUMBER, SAMPLES, SOURCE, TOKENIZER, Basis
from instar.tasks.sources import digest_of_sources
from instar.tasks.task import Task


class HeldOut(Protocol):
    """What a basis tells of held-out samples, a `Source`; readers of bases need none."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


def basis_of(config: RunConfig, task: Task, source: HeldOut, limit: int | None = None) -> Basis:
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
        NUMBER: f"{limit if is_subset else total:,}",
        CHOICE: f"{config.data_seed}" if is_subset else "",
        TOKENIZER: task.spec.fingerprints.get("tokenizer", ""),
        "vocabulary": f"{task.architecture.sizes().get('vocab', 0):,}",
        SOURCE: digest_of_sources(config.task),
    }
    return basis | {
        key: json.dumps(value) for key, value in _loss_keys(config, task.spec.loss_keys).items()
    }


def _loss_keys(config: RunConfig, loss_keys: Collection[str]) -> Mapping[str, object]:
    """Return the config's values that may define the loss or a metric: any key that a custom task has
    of its own, and those that a task names. Other keys change the model, not what is measured."""
    every = values(config)
    if ":" not in config.task:
        return {key: every[key] for key in loss_keys}
    common = {f"data.{name}" for name in (*FeedConfig.model_fields, *SamplesConfig.model_fields)}
    task_keys = (key for key in every if key.startswith(("model.", "data.")))
    return {key: every[key] for key in task_keys if key not in common}
