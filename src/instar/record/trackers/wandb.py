"""Weights & Biases: offline by default, silent, and without prompts.

Each row has `step` and the other axes (`at/tokens`, `at/flops`, …), any of which a chart can use;
the tool's own `_step` counts rows. A resumed run keeps its id; offline it gets another folder, and
`wandb sync` uploads the folders in order. Superseded rows cannot be removed: the curve returns to
the earlier step, and a row with `events/resume` marks it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from instar.config.sections import WandbConfig
from instar.record.events import Event, ImageEvent, Placed, RunFinished, TableEvent
from instar.record.media import read_image
from instar.record.trackers.tracker import (
    Level,
    Outcome,
    TrackedRun,
    Tracker,
    event_note,
    media_key,
    metrics_of_event,
    totals,
)

_LEVELS: dict[Level, str] = {"info": "INFO", "warn": "WARN", "error": "ERROR"}


class Wandb(Tracker):
    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._wandb: Any = None
        self._run: Any = None
        self._folder = Path()

    def start(self, run: TrackedRun) -> None:
        self._folder = run.folder
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb, config = wandb, self._config
        if config.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("no API key is known: wandb login, or mode: offline")
        where = f"{config.entity or ''}/{config.project}"
        run_id = run.ids.get(self.name, where) or secrets.token_hex(8)
        folder = Path(config.dir or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags) or None,
            id=run_id,
            name=run.name,
            resume="allow",
            mode=config.mode,
            dir=str(folder),
            config=dict(run.config),
            reinit="create_new",
            settings=self._settings(),
        )
        online = config.mode == "online"
        self.where = str(self._run.url if online else Path(self._run.dir).parent)
        run.ids.keep(self.name, where, run_id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _settings(self) -> Any:
        return self._wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            allow_val_change=True,
            x_disable_stats=not self._config.system_stats,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=2.0,
        )

    def take(self, event: Event) -> None:
        if isinstance(event, Placed) and (numbers := metrics_of_event(event)):
            self._log(event, event.step, numbers)
        if isinstance(event, ImageEvent | TableEvent):
            self._log_media(event)
        if text_note := event_note(event):
            self._log(
                event,
                text_note.step,
                {f"events/{text_note.kind}": f"{text_note.title}: {text_note.text}"},
            )
            if text_note.kind in ("alert", "failed"):
                level = _LEVELS[text_note.level]
                self._run.alert(title=text_note.title, text=text_note.text, level=level)
        if isinstance(event, RunFinished):
            self._run.summary.update({f"final/{key}": v for key, v in totals(event).items()})

    def _log_media(self, event: ImageEvent | TableEvent) -> None:
        media: Any
        if isinstance(event, TableEvent):
            rows = [[*row] for row in event.rows]
            media = self._wandb.Table(
                columns=list(event.columns), data=rows, allow_mixed_types=True
            )
        elif read_image(self._folder, event.path) is not None:
            media = self._wandb.Image(str(self._folder / event.path))
        else:
            return
        self._log(event, event.step, {media_key(event): media})

    def _log(self, event: Event, step: int, row: dict[str, Any]) -> None:
        self._run.log(row | {"step": step, "_timestamp": event.time})

    def flush(self) -> None:
        """Do nothing: `wandb` writes in a separate process, which outlives this one."""

    def finish(self, outcome: Outcome) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
