"""The section `checkpoint.delta` of a config, and what may be in its way. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from instar.config.errors import ConfigProblem
from instar.config.sections import PositiveInt, Section
from instar.extensions import load_target

if TYPE_CHECKING:
    from instar.config.schema import RunConfig
    from instar.run.output.extension import RunPlace


class DeltaConfig(Section):
    """A chain of deltas: every version of the weights, stored as what changed in it."""

    every: PositiveInt | None = Field(
        None, description="steps between deltas, in the run's folder deltas; null: none"
    )
    anchor_every: PositiveInt = Field(
        50, description="links after which one holds all weights again, so that chains stay short"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="weights are rounded to this before they are compared; auto: the precision of "
        "the forward pass. Of fp32 weights, nearly all change in every step",
    )


def delta_config(config: RunConfig) -> DeltaConfig:
    """Return the section of a run's config."""
    return cast(DeltaConfig, config.checkpoint.delta)  # type: ignore[attr-defined]


def open_deltas(place: RunPlace) -> Any:
    """Return the `DeltaSaver` of a run; None if it saves no deltas, and then what saves them is not imported."""
    if delta_config(place.config).every is None:
        return None
    return load_target("instar.extensions.delta.saver:DeltaSaver")(place)


def delta_conflicts(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that have no whole model on rank 0 at each step of a delta."""
    every, parallel = delta_config(config).every, config.parallel
    if every is None:
        return
    if parallel.strategy in ("fsdp", "hsdp"):
        yield ConfigProblem(
            ("checkpoint.delta.every", "parallel.strategy"),
            f"deltas are written by rank 0 from a whole model, but parallel.strategy is {parallel.strategy}",
            "use strategy: ddp, or leave it out",
        )
    rounds = parallel.diloco.sync_every
    if parallel.strategy == "diloco" and every % rounds:
        yield ConfigProblem(
            ("checkpoint.delta.every", "parallel.diloco.sync_every"),
            f"checkpoint.delta.every is {every}, but with strategy diloco ranks have common weights every "
            f"{rounds} steps (parallel.diloco.sync_every)",
            f"use a multiple of {rounds}",
        )


def missing_library(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield that the library which compresses deltas is not installed, if it is needed."""
    if delta_config(config).every is not None and find_spec("zstandard") is None:
        message = "checkpoint.delta needs the library `zstandard`, which is not installed"
        hint = "install the extra: pip install 'instar[delta]', or leave it out"
        yield ConfigProblem(("checkpoint.delta.every",), message, hint)
