"""Growth in a loop that saves and loads with accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from instar.config.files import read_regular
from instar.loops.schedule import GrowthSchedule

HISTORY = "growth.json"
"""Beside the states of `Accelerator.save_state`."""


def resume_across_growth(accelerator: Any, schedule: GrowthSchedule, optimizer: Optimizer) -> None:
    """Makes `save_state` write the history of a schedule, and `load_state` grow the prepared model and its optimizer by
    it before their tensors are loaded."""

    def save(_models: Any, _weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            Path(folder, HISTORY).write_text(json.dumps(schedule.state_dict()), encoding="utf-8")

    def load(models: Any, folder: str) -> None:
        schedule.load_state_dict(json.loads(read_regular(Path(folder, HISTORY))))
        schedule.replay(models[0], optimizer)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
