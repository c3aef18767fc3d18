"""The record in other tools: TensorBoard, W&B, trackio, MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TrackerSpec(NamedTuple):
    """A tracker that configs name."""

    target: str
    """`module:class`, imported when it starts; made from its section of the config"""
    package: str | None
    """what must be installed, also the name of the extra; None: nothing"""


TRACKERS: Mapping[str, TrackerSpec] = {
    "tensorboard": TrackerSpec(f"{__name__}.tensorboard:TensorBoard", "tensorboard"),
    "wandb": TrackerSpec(f"{__name__}.wandb:Wandb", "wandb"),
    "trackio": TrackerSpec(f"{__name__}.trackio:Trackio", "trackio"),
    "mlflow": TrackerSpec(f"{__name__}.mlflow:Mlflow", "mlflow"),
}
"""By the key in `record.trackers`."""
