"""One event file of TensorBoard, for a start of a run. Requires tensorboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from instar.record.events import Event, ImageEvent, Placed, RunFinished, RunStarted, TableEvent
from instar.record.media import read_image
from instar.record.trackers.tracker import (
    Outcome,
    TrackedRun,
    event_note,
    media_key,
    metrics_of_event,
    totals,
)

_FLUSH_S = 120
"""interval of the writer itself; the tracker's thread flushes more often"""
_QUEUE = 1000


class EventFile:
    """Writes the events of a run into one file."""

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self._writer: Any = EventFileWriter(str(folder), max_queue_size=_QUEUE, flush_secs=_FLUSH_S)
        self._run = run
        self._last = 0.0

    def take(self, event: Event) -> None:
        """See `Tracker`."""
        if isinstance(event, RunStarted):
            # points after event.step are superseded, event.step itself is not
            begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event, event.step + 1, session_log=begin)
            self._describe(event)
        if isinstance(event, Placed) and (numbers := metrics_of_event(event)):
            summary = summary_pb2.Summary()
            for tag, value in numbers.items():
                summary.value.add(tag=tag, simple_value=value)
            self._add(event, event.step, summary=summary)
        if isinstance(event, ImageEvent) and (content := read_image(self._run.folder, event.path)):
            summary = summary_pb2.Summary()
            image = summary_pb2.Summary.Image(
                height=event.height, width=event.width, encoded_image_string=content
            )
            summary.value.add(tag=media_key(event), image=image)
            self._add(event, event.step, summary=summary)
        if isinstance(event, TableEvent):
            text = _table(list(event.columns), event.rows)
            self._add(event, event.step, summary=text_pb(media_key(event), text))
        if text_note := event_note(event):
            text = f"**{text_note.title}**\n\n{text_note.text}".replace("\n", "  \n")
            self._add(event, text_note.step, summary=text_pb(text_note.kind, text))
        if isinstance(event, RunFinished):
            rows = [(name, f"{value:g}") for name, value in totals(event).items()]
            text = _table(["total", "value"], rows)
            self._add(event, event.step, summary=text_pb("finished", text))

    def flush(self) -> None:
        """Write what waits."""
        self._writer.flush()

    def finish(self, outcome: Outcome) -> None:
        """See `Tracker`."""
        status = {"finished": Status.STATUS_SUCCESS, "crashed": Status.STATUS_FAILURE}
        session_end = SessionEndInfo(
            status=status.get(outcome, Status.STATUS_UNKNOWN), end_time_secs=self._last
        )
        summary = summary_pb2.Summary()
        summary.value.add(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(
                HParamsPluginData(session_end_info=session_end)
            ),
            tensor=metadata.NULL_TENSOR,
        )
        self._writer.add_event(event_pb2.Event(wall_time=self._last, summary=summary))
        self._writer.close()

    def _describe(self, event: RunStarted) -> None:
        config = self._run.config
        table = _table(["key", "value"], config.items())
        self._add(event, event.step, summary=text_pb("config", table))
        hparams = {key: value for key, value in config.items() if value is not None}
        summary = hparams_pb(hparams, trial_id=self._run.name, start_time_secs=event.time)
        self._add(event, event.step, summary=summary)

    def _add(self, event: Event, step: int, **what: Any) -> None:
        self._last = event.time
        self._writer.add_event(event_pb2.Event(wall_time=event.time, step=step, **what))


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_in_cell, line))} |" for line in lines)


def _in_cell(value: object) -> str:
    return str(value).replace("\n", " ").replace("\\", "\\\\").replace("|", "\\|")
