"""TensorBoard: one event file for each start of the run, written without TensorFlow or torch.

Its only axes are the step and the time; other axes are separate curves (`at/tokens`, …). A resumed
run begins its file with a session start, at which TensorBoard drops the points of later steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instar.config.sections import TensorBoardConfig
from instar.record.events import Event, Placed, RunFinished, RunStarted
from instar.record.trackers.tracker import Outcome, TrackedRun, measured, note, totals

FLUSH_S = 120
"""interval of the writer itself; the tracker's thread flushes more often"""
QUEUE = 1000


class TensorBoard:
    name = "tensorboard"

    def __init__(self, config: TensorBoardConfig) -> None:
        self.where = ""
        self._config = config
        self._writer: Any = None
        self._run: TrackedRun | None = None
        self._last = 0.0

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        chosen = self._config.dir
        folder = Path(chosen) / run.name if chosen is not None else run.folder / "tensorboard"
        self.where = str(folder)
        self._writer = EventFileWriter(str(folder), max_queue_size=QUEUE, flush_secs=FLUSH_S)
        self._run = run

    def take(self, event: Event) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        if isinstance(event, RunStarted):
            # points after event.step are superseded, event.step itself is not
            begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event, event.step + 1, session_log=begin)
            self._describe(event)
        if isinstance(event, Placed) and (numbers := measured(event)):
            summary = summary_pb2.Summary()
            for tag, value in numbers.items():
                summary.value.add(tag=tag, simple_value=value)
            self._add(event, event.step, summary=summary)
        if text_note := note(event):
            text = f"**{text_note.title}**\n\n{text_note.text}".replace("\n", "  \n")
            self._add(event, text_note.step, summary=text_pb(text_note.kind, text))
        if isinstance(event, RunFinished):
            text = _table("total", {name: f"{value:g}" for name, value in totals(event).items()})
            self._add(event, event.step, summary=text_pb("finished", text))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, outcome: Outcome) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        status = {"finished": Status.STATUS_SUCCESS, "crashed": Status.STATUS_FAILURE}
        ended = SessionEndInfo(
            status=status.get(outcome, Status.STATUS_UNKNOWN), end_time_secs=self._last
        )
        summary = summary_pb2.Summary()
        summary.value.add(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(HParamsPluginData(session_end_info=ended)),
            tensor=metadata.NULL_TENSOR,
        )
        self._writer.add_event(event_pb2.Event(wall_time=self._last, summary=summary))
        self._writer.close()

    def _describe(self, event: RunStarted) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        assert self._run is not None
        config = self._run.config
        table = _table("key", {key: str(value) for key, value in config.items()})
        self._add(event, event.step, summary=text_pb("config", table))
        hparams = {key: value for key, value in config.items() if value is not None}
        summary = hparams_pb(hparams, trial_id=self._run.name, start_time_secs=event.time)
        self._add(event, event.step, summary=summary)

    def _add(self, event: Event, step: int, **what: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._last = event.time
        self._writer.add_event(event_pb2.Event(wall_time=event.time, step=step, **what))


def _table(head: str, rows: dict[str, str]) -> str:
    """Returns a Markdown table with two columns."""
    lines = (
        f"| {name} | {value} |".replace("\n", " ").replace("\\", "\\\\")
        for name, value in rows.items()
    )
    return "\n".join([f"| {head} | value |", "| --- | --- |", *lines])
