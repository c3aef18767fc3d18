"""Growth in Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest
from grown_loops import SCHEDULE, fit

from instar.growth import GrowthError
from instar.loops import LightningGrowth

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def test_lightning_grows_at_a_validation_loss(tmp_path: Path) -> None:
    entry = {"name": "insert_layers", "value": 1, "when": {"loss_below": 100.0}}
    growth = LightningGrowth([entry])
    module = fit(tmp_path, growth, limit_val_batches=1, check_val_every_n_epoch=4)
    (change,) = growth.schedule.history
    assert (change.step, change.reason[:4]) == (4, "val ")
    assert len(module.model.model.layers) == 4


def test_a_module_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match="Language has no module 'net'"):
        fit(tmp_path, LightningGrowth(SCHEDULE, model="net"))
