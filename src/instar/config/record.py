"""What a run writes down beside its checkpoints, how often, and whom it tells."""

from __future__ import annotations

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
    out_dir: str = Field("runs", description="folder in which the run's own folder is made")
    run_dir: str | None = Field(
        None, description="the run's own folder; default: <out_dir>/<name>-<id>"
    )
