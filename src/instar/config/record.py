"""What a run writes down beside its checkpoints, how often, and whom it tells."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from instar.config.section import PositiveInt, Section


class RecordConfig(Section):
    """What is written down, and how often."""

    log_interval: PositiveInt = Field(10, description="steps between lines on the display")
    analyze_every: PositiveInt | None = Field(
        None,
        description="steps between analyses beside training: effective ranks, attention entropy, "
        "change since the last one, and what they suggest",
    )
    layers_every: PositiveInt | None = Field(
        None,
        description="steps between records of each layer's gradient norm and update ratio; the "
        "steps that are looked at keep a copy of the weights",
    )
    sample_every: PositiveInt | None = Field(
        None,
        description="steps between samples of what the model writes, at the evaluation that follows; "
        "one is always taken at the end, where a task can write",
    )
    sample_prompt: str = Field("", description="what samples begin with")
    sample_tokens: Annotated[int, Field(ge=0)] = Field(
        128, description="longest sample, tokens; 0: take none"
    )
    report: bool = Field(True, description="write report.html when the run ends, however it does")
    out_dir: str = Field("runs", description="folder in which the run's own folder is made")
    run_dir: str | None = Field(
        None, description="the run's own folder; default: <out_dir>/<name>-<id>"
    )
