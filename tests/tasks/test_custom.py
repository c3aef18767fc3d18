"""A user's task, as the trainer sees it."""

from __future__ import annotations

import numpy as np
import torch
from foreign import TINY

from instar.config.load import load_config
from instar.run.step.stepper import to_device
from instar.tasks.task import Batch, Task, spec_class


def open_task(name: str) -> tuple[Task, Batch]:
    """A task, and eight of its held-out samples."""
    loaded_config = load_config(None, [f"task={name}", "data.val=20"])
    task = spec_class(name).open(loaded_config, 1).task(loaded_config.config)
    return task, to_device(task.held_out("val").read(np.arange(8)), torch.device("cpu"))


def test_predictions_keep_the_digits_of_float64() -> None:
    task, batch = open_task("foreign:Double")
    predictions = task.measure(task.build(), batch, predict=True).predictions
    close = 1 + TINY * batch["x"].numpy()
    np.testing.assert_array_equal(predictions["closely"], close)
    np.testing.assert_array_equal(predictions["close"], close[:, 0])
    # NumPy has no bfloat16
    assert np.asarray(predictions["roughly"]).dtype == np.float32


def test_metrics_keep_the_digits_of_float64_and_of_counts() -> None:
    task, batch = open_task("foreign:Double")
    tallies = task.measure(task.build(), batch).tallies
    assert torch.equal(tallies["accuracy"].values, 1 + TINY * batch["x"][:, 0])
    assert torch.equal(tallies["doubt"].values.double(), batch["number"].double() + 2**52)
    assert task.loss_sum(task.build(), batch).dtype == torch.float64


def test_the_forecast_counts_optimizer_and_moving_average() -> None:
    loaded_config = load_config(None, ["task=science:Halves", "data.val=20", "train.ema=0.9"])
    spec = spec_class("science:Halves").open(loaded_config, 1)
    memory = spec.memory(spec.architecture, 1, 8, "cpu")
    assert memory["ema"] == memory["weights"] == memory["optimizer"] / 2


def test_a_loss_in_bfloat16_is_added_up_in_float32() -> None:
    task, batch = open_task("science:Halves")
    model = task.build().bfloat16()
    low = {**batch, "x": batch["x"].bfloat16()}
    assert task.loss_sum(model, low).dtype == torch.float32
