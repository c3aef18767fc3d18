"""Which metrics of a record become the losses, the axes and the others, by their names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.extensions.foreign.records.names import LOSSES, VAL_LOSSES, name_metrics
from instar.extensions.foreign.records.table import RecordedCurve, RecordTable


def curve(values: Iterable[float] = (1.0, 2.0, 3.0)) -> RecordedCurve:
    array = np.array([*values], np.float64)
    return RecordedCurve(np.arange(len(array)), array, np.full(len(array), np.nan))


def curves(*names: str) -> dict[str, RecordedCurve]:
    return {name: curve() for name in names}


@pytest.mark.parametrize(
    ("names", "loss", "val"),
    [
        (["epoch", "loss", "eval_loss", "train_loss"], "loss", "eval_loss"),
        (["train_loss_epoch", "train_loss_step", "val_loss"], "train_loss_step", "val_loss"),
        (["train_loss", "val/loss"], "train_loss", "val/loss"),
        (["Loss/train", "Loss/val", "Accuracy/val"], "Loss/train", "Loss/val"),
        (["train/loss", "eval/loss"], "train/loss", "eval/loss"),
        (
            ["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"],
            "",
            "val_loss/dataloader_idx_0",
        ),
        (
            [
                "loss_metrics/global_max_loss",
                "loss_metrics/global_avg_loss",
                "validation_metrics/loss",
            ],
            "loss_metrics/global_avg_loss",
            "validation_metrics/loss",
        ),
        (["reward", "eval_a_loss"], "", ""),
    ],
)
def test_a_loss_is_found_by_its_name(names: list[str], loss: str, val: str) -> None:
    naming = name_metrics(curves(*names), "tool")
    assert (naming.source("loss"), naming.source("val/loss")) == (loss, val)


def test_every_name_of_the_tables_is_found_alone() -> None:
    for name in LOSSES:
        assert name_metrics(curves(name), "tool").metrics == {name: "loss"}
        assert name_metrics(curves(name.upper()), "tool").metrics == {name.upper(): "loss"}
    for name in VAL_LOSSES:
        assert name_metrics(curves(name), "tool").metrics == {name: "val/loss"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("learning_rate", "lr"),
        ("lr-AdamW", "lr"),
        ("lr/AdamW", "lr"),
        ("optimizer/lr", "lr"),
        ("train/learning_rate", "lr"),
        ("train/grad_norm", "grad_norm"),
        ("eval_accuracy", "val/accuracy"),
        ("Accuracy/val", "val/Accuracy"),
        ("valid_f1", "val/f1"),
        ("test_acc", "test/acc"),
        ("train/accuracy", "train/accuracy"),
        ("value_loss", "value_loss"),
        ("evaluation", "evaluation"),
        ("perplexity", "perplexity"),
    ],
)
def test_other_metrics_keep_their_names_or_get_those_of_ours(source: str, name: str) -> None:
    assert name_metrics(curves("loss", source), "tool").metrics[source] == name


def test_two_metrics_never_become_one() -> None:
    names = ["loss", "train/loss", "lr", "learning_rate", "eval_loss", "val/loss", "tool/lr"]
    naming = name_metrics(curves(*names), "tool", loss="train/loss", val="eval_loss")
    assert naming.metrics == {
        "train/loss": "loss",
        "eval_loss": "val/loss",
        "loss": "tool/loss",
        "lr": "lr",
        "learning_rate": "learning_rate",
        "val/loss": "tool/val/loss",
        "tool/lr": "tool/lr",
    }


def test_a_percentage_is_not_taken_for_a_fraction() -> None:
    records = {"loss": curve(), "mfu": curve([38.0, 39.0, 40.0])}
    assert name_metrics(records, "wandb").metrics["mfu"] == "wandb/mfu"
    records["mfu"] = curve([0.38, np.nan, 0.4])
    assert name_metrics(records, "wandb").metrics["mfu"] == "mfu"


def test_an_axis_never_falls_and_is_there_wherever_a_loss_is() -> None:
    tokens = {"num_input_tokens_seen": curve([10, 20, 30]), "epoch": curve([0, 0.5, 1])}
    assert name_metrics({"loss": curve(), **tokens}, "tool").axes == {
        "tokens": "num_input_tokens_seen",
        "epoch": "epoch",
    }
    for odd in (curve([10, 30, 20]), curve([10, 20]), curve([-1, 0, 1]), curve([1, 2, np.inf])):
        naming = name_metrics({"loss": curve(), "epoch": odd}, "tool")
        assert (naming.axes, naming.metrics["epoch"]) == ({}, "epoch")


def test_one_metric_cannot_be_both_losses() -> None:
    with pytest.raises(ConfigError, match="'loss' cannot be both losses"):
        name_metrics(curves("loss", "x"), "tool", loss="loss", val="loss")


def test_steps_are_those_of_a_metric_that_most_rows_have() -> None:
    record = RecordTable("run", "tool", "a tool's record")
    for row in range(4):
        record.add(row, {"loss": 1.0, "train/global_step": 10 * row} if row else {"loss": 9.0})
    record.use_step(["trainer/global_step", "train/global_step"])
    assert record.curves()["loss"].step.tolist() == [10, 20, 30]
    assert [*record.notes()] == [
        "steps are those of train/global_step",
        "1 row without a step left out",
    ]
    record = RecordTable("run", "tool", "a tool's record")
    for row in range(4):
        record.add(row, {"loss": 1.0, "step": 7.0} if row == 2 else {"loss": 9.0})
    record.use_step(["step"])
    assert record.curves()["loss"].step.tolist() == [0, 1, 2, 3]


def test_what_was_measured_before_a_restart_is_left_out_from_there() -> None:
    record = RecordTable("run", "tool", "a tool's record")
    for step in (1, 2, 3, 4):
        record.add(step, {"loss": float(step)})
    record.restart(3)
    record.add(3, {"loss": 0.5})
    assert record.curves()["loss"].value.tolist() == [1.0, 2.0, 0.5]
    assert [*record.notes()] == ["2 rows from before a restart left out"]
