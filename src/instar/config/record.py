"""What a run writes down beside its checkpoints, how often, and whom it tells."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import Field

from instar.config.section import PositiveFloat, PositiveInt, Section, Texts

Share = Annotated[float, Field(gt=0, lt=1)]


class TensorBoardConfig(Section):
    """TensorBoard's event files."""

    dir: str | None = Field(
        None,
        description="folder in which the run has a folder of its name; default: tensorboard in the "
        "run's own folder",
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field("instar", description="project that the run belongs to")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: written to disk, for `wandb sync` to send later"
    )
    entity: str | None = Field(None, description="user or team; default: your own")
    group: str | None = Field(None, description="group of runs that it belongs to")
    tags: Texts = Field((), description="labels of the run")
    dir: str | None = Field(
        None, description="folder that `wandb` writes into; default: the run's own folder"
    )
    system_stats: bool = Field(False, description="let `wandb` watch the machine as well")


class TrackioConfig(Section):
    """trackio, on this machine."""

    project: str = Field("instar", description="project that the run belongs to")
    dir: str | None = Field(
        None,
        description="folder of its databases; default: TRACKIO_DIR, or where trackio itself looks",
    )


class MlflowConfig(Section):
    """MLflow."""

    uri: str | None = Field(
        None,
        description="tracking store: a folder, sqlite:///… or http://…; default: "
        "MLFLOW_TRACKING_URI, or the folder mlruns beside the run's",
    )
    experiment: str = Field("instar", description="experiment that the run belongs to")


class TrackersConfig(Section):
    """Other tools that the record is copied into while it is written; {} chooses their defaults."""

    tensorboard: TensorBoardConfig | None = Field(None, description="TensorBoard's event files")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases, offline unless told")
    trackio: TrackioConfig | None = Field(None, description="trackio, on this machine")
    mlflow: MlflowConfig | None = Field(None, description="MLflow")


class AlertsConfig(Section):
    """When a person should look at a run, and who is told besides the display and the record."""

    divergence: PositiveFloat | None = Field(
        0.2,
        description="alert when the training loss, smoothed, has given back this share of what it "
        "had fallen; null: never",
    )
    stall: Share | None = Field(
        0.3,
        description="alert when training runs at less than this share of its usual speed; "
        "null: never",
    )
    nan_skips: PositiveInt | None = Field(
        3,
        description="alert when so many steps in a row were skipped for gradients that were not "
        "finite; null: never",
    )
    command: Texts | str = Field(
        (),
        description="program to run for each alert, with its arguments, without a shell; it has "
        "the alert as JSON on stdin and in INSTAR_ALERT",
    )
    webhook: str | None = Field(
        None, description="address (http or https) that each alert is sent to as JSON, by POST"
    )

    @property
    def argv(self) -> tuple[str, ...]:
        """`command` as a list of words.

        Raises:
            ValueError: a quote in it is never closed.
        """
        return tuple(shlex.split(self.command) if isinstance(self.command, str) else self.command)


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
    sample_prompt: str = Field("", description="what samples begin with; empty: a new line")
    sample_tokens: Annotated[int, Field(ge=0)] = Field(
        128, description="longest sample, tokens; 0: take none"
    )
    report: bool = Field(True, description="write report.html when the run ends, however it does")
    out_dir: str = Field("runs", description="folder in which the run's own folder is made")
    run_dir: str | None = Field(
        None, description="the run's own folder; default: <out_dir>/<name>-<id>"
    )
    trackers: TrackersConfig = Field(
        default_factory=TrackersConfig, description="other tools that the record is copied into"
    )
    alerts: AlertsConfig = Field(
        default_factory=AlertsConfig, description="when a person should look at the run"
    )
