"""Records of runs as the tools themselves write them, each in a process of its own, and their own figures of these.

    python tool_records.py TOOL FOLDER

writes into FOLDER what `instar logs import` is given there, and prints JSON: the `path` to give, and `curves`, points
of step and value by the names that they should have in an imported run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Curves = dict[str, list[list[Any]]]
STEPS = 8


class Written(NamedTuple):
    """A record, and what its tool says of it."""

    path: Path
    curves: Curves
    """points of step and value by name"""


def loss(step: int) -> float:
    """The loss of runs whose figures are logged: not a number once, as in life."""
    return math.nan if step == 3 else 5.0 / (step + 1)


def points(rows: Iterable[Mapping[str, Any]], step: str, names: Mapping[str, str]) -> Curves:
    """The curves of rows; `names`: of imported metrics by those of rows."""
    curves: Curves = {name: [] for name in names.values()}
    for row in rows:
        for source, name in names.items():
            if row.get(source) is not None:
                curves[name].append([row[step], row[source]])
    return curves


def transformers(folder: Path) -> Written:
    from grown_loops import fresh, of_trainer
    from transformers import TrainerState

    trainer = of_trainer(
        fresh(),
        folder / "tiny",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        include_num_input_tokens_seen="all",
        metric_for_best_model="loss",
    )
    trainer.train()
    state = TrainerState.load_from_json(
        str(folder / "tiny" / "checkpoint-6" / "trainer_state.json")
    )
    names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
    names |= {"eval_loss": "val/loss", "eval_runtime": "val/runtime"}
    return Written(folder / "tiny", points(state.log_history, "step", names))


def transformers_accuracy(folder: Path) -> Written:
    """A run whose best checkpoint has the highest accuracy, stopped halfway, as its state says."""
    from transformers import TrainerState

    history: list[dict[str, float]] = []
    for step in (2, 4, 6):
        history.append({"step": step, "epoch": step / 10, "loss": 5 / step, "learning_rate": 1e-3})
        history.append({"step": step, "eval_loss": 4 / step, "eval_accuracy": 0.1 * (7 - step)})
    state = TrainerState(
        log_history=history,
        global_step=6,
        max_steps=12,
        best_metric=history[1]["eval_accuracy"],
        best_global_step=2,
    )
    path = folder / "accuracy" / "trainer_state.json"
    path.parent.mkdir()
    state.save_to_json(str(path))
    names = {"loss": "loss", "eval_loss": "val/loss", "eval_accuracy": "val/accuracy"}
    return Written(path, points(TrainerState.load_from_json(str(path)).log_history, "step", names))


def lightning(folder: Path) -> Written:
    import lightning.pytorch as pl
    from grown_loops import Language, Texts
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader

    rows: list[dict[str, Any]] = []

    class Module(Language):
        def training_step(self, batch: Any, index: int) -> Any:
            value = super().training_step(batch, index)
            self.log("train_loss", value, on_step=True, on_epoch=True)
            return value

    class Logger(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            rows.append({name: float(value) for name, value in metrics.items()} | {"step": step})
            super().log_metrics(metrics, step)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=Logger(folder, name="small"),
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(Texts(8), batch_size=2), DataLoader(Texts(2), batch_size=2))
    names = {"train_loss_step": "loss", "val_loss": "val/loss", "lr-AdamW": "lr"}
    names |= {"train_loss_epoch": "train_loss_epoch"}
    return Written(folder / "small" / "version_0", points(rows, "step", names))


def tensorboard(folder: Path) -> Written:
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "boards" / "exp1")) as writer:
        for step in range(STEPS):
            writer.add_scalar("Loss/train", loss(step), step)
            writer.add_scalar("grad_norm", step / 7, step, new_style=True)
        for step in (0, 4, 7):
            writer.add_scalar("Loss/val", 6 / (step + 1), step)
            writer.add_scalar("Accuracy/val", step / 10, step)
            writer.add_histogram("weights", torch.arange(4.0), step)
        writer.add_image("sample", torch.zeros(3, 2, 2), 0)
    events = EventAccumulator(
        str(folder / "boards" / "exp1"), size_guidance={"tensors": 0}
    ).Reload()
    names = {"Loss/train": "loss", "Loss/val": "val/loss", "Accuracy/val": "val/Accuracy"}
    curves: Curves = {
        name: [[point.step, point.value] for point in events.Scalars(tag)]
        for tag, name in names.items()
    }
    curves["grad_norm"] = [
        [point.step, point.tensor_proto.float_val[0]] for point in events.Tensors("grad_norm")
    ]
    return Written(folder / "boards", curves)


def wandb(folder: Path) -> Written:
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    rows: list[dict[str, Any]] = []
    with wandb.init(
        project="demo",
        name="../a run",
        mode="offline",
        dir=str(folder),
        config={"lr": 0.1, "model": {"n_layer": 2}, "hub.token": "SECRET"},
        settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
    ) as run:
        run.define_metric("eval/hits", summary="max")
        for step in range(STEPS):
            row: dict[str, Any] = {"train/loss": loss(step), "train/global_step": 10 * step}
            row |= {"train/learning_rate": 0.1 / (step + 1), "train/epoch": step / 4}
            if step in (0, 4, 7):
                row |= {"eval/loss": 6 / (step + 1), "eval/hits": step}
                row |= {"gradients": wandb.Histogram([1.0, 2.0])}
            rows.append(row)
            run.log(row)
    (path,) = folder.glob("wandb/offline-run-*")
    names = {"train/loss": "loss", "train/learning_rate": "lr"}
    names |= {"eval/loss": "val/loss", "eval/hits": "val/hits"}
    return Written(path, points(rows, "train/global_step", names))


def trackio(folder: Path) -> Written:
    os.environ["TRACKIO_DIR"] = str(folder / "local")
    from trackio.sqlite_storage import SQLiteStorage

    for number, name in enumerate(("first", "second")):
        SQLiteStorage.bulk_log(
            project="demo",
            run=name,
            run_id=f"id-{name}",
            metrics_list=[
                {"train_loss": loss(step) + number, "val_loss": 6 / (step + 1)}
                for step in range(STEPS)
            ],
            steps=[*range(STEPS)],
            timestamps=[f"2026-01-01T00:00:0{step}+00:00" for step in range(STEPS)],
            config={"lr": 0.1 / (number + 1), "_Created": "2026-01-01"},
        )
    rows = SQLiteStorage.get_logs("demo", "first", run_id="id-first")
    names = {"train_loss": "loss", "val_loss": "val/loss"}
    return Written(folder / "local", points(rows, "step", names))


def nanogpt(folder: Path) -> Written:
    """Printed by the lines of its train.py."""
    curves: Curves = {"loss": [], "val/loss": [], "train/loss": [], "mfu": []}
    lines = ["tokens per iteration will be: 1,024", "number of parameters: 0.80M"]
    for step in range(STEPS):
        if step % 4 == 0:
            losses = {"train": 4.5 / (step + 1), "val": 4.75 / (step + 1)}
            lines.append(
                f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}"
            )
            curves["train/loss"].append([step, float(f"{losses['train']:.4f}")])
            curves["val/loss"].append([step, float(f"{losses['val']:.4f}")])
        mfu = 0.0125 if step > 4 else -1.0
        lines.append(
            f"iter {step}: loss {loss(step):.4f}, time {12.345:.2f}ms, mfu {mfu * 100:.2f}%"
        )
        curves["loss"].append([step, float(f"{loss(step):.4f}")])
        if mfu > 0:
            curves["mfu"].append([step, mfu])
    path = folder / "train.log"
    path.write_text("\n".join(lines))
    return Written(path, curves)


def forgather(folder: Path) -> Written:
    """Written as its JsonLogger does, and cut off in the middle of a record, as it is while training."""
    rows = [
        {"timestamp": 1.7e9 + step, "global_step": step, "epoch": step / 4}
        | {"loss": loss(step), "grad_norm": 1.0, "learning_rate": 1e-3}
        for step in range(STEPS)
    ]
    rows.insert(5, {"timestamp": 1.7e9 + 4.5, "global_step": 4, "epoch": 1.0, "eval_loss": 1.25})
    text = "[\n" + ",\n".join(map(json.dumps, rows)) + ",\n" + json.dumps(rows[0])[:20]
    path = folder / "log_2026" / "trainer_logs.json"
    path.parent.mkdir()
    path.write_text(text)
    names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
    return Written(path, points(rows, "global_step", names | {"eval_loss": "val/loss"}))


TOOLS: Mapping[str, Callable[[Path], Written]] = {
    "transformers": transformers,
    "transformers_accuracy": transformers_accuracy,
    "lightning": lightning,
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
    "nanogpt": nanogpt,
    "forgather": forgather,
}


def write_record(tool: str, folder: Path) -> Written:
    """Let a tool write a record into a folder, in a process that has imported most of what it needs."""
    from forks import forks  # not in that process

    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    result = subprocess.run(
        [str(forks().python), __file__, tool, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env=os.environ | nowhere,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    return Written(Path(answer["path"]), answer["curves"])


if __name__ == "__main__":
    record = TOOLS[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"path": str(record.path), "curves": record.curves}))
