"""What `instar logs export --to` a tracker does: sends a record to the tracker, as its run would have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from instar.config.document import parse
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.files import read_regular
from instar.config.sections import RecordConfig, TrackersConfig
from instar.logs.read.record import RunRecord
from instar.record.trackers.configured import configured_trackers, missing_libraries
from instar.record.trackers.sink import replay_record
from instar.record.trackers.tracker import TrackedRun


def check_tracker(to: str, output: str | None) -> None:
    """Raise ConfigError if the library of a tracker is not installed."""
    settings = _settings(to, output, {})
    if problems := missing_libraries(RecordConfig(trackers=settings)):
        raise ConfigError(
            *(
                ConfigProblem((), f"--to {to}: {problem.message}", problem.hint)
                for problem in problems
            )
        )


def replay_run(
    record: RunRecord, to: str, output: str | None, last_steps: Mapping[int, int]
) -> tuple[str, int]:
    """Send the events of a record to a tracker; return where they are, and their number.

    Args:
        last_steps: of the stretches of the run, see `SegmentTree.limits`; empty: all events.
    """
    config = _config(record)
    (tracker,) = configured_trackers(_settings(to, output, config))
    run = TrackedRun.from_record(record.run.path, config)
    events = replay_record(tracker, run, record.run.events, last_steps)
    return tracker.where, events


def _config(record: RunRecord) -> dict[str, Any]:
    """Return the run's nested config as far as it can be read; if it belongs to another user,
    without the section `record`, which sets where trackers write."""
    try:
        is_own = record.run.config.stat().st_uid == os.geteuid()
        text = read_regular(record.run.config).decode("utf-8", "replace")
    except OSError:
        return {}
    document, _ = parse(text, str(record.run.config))
    plain = document.data if document is not None and not document.unreadable else {}
    plain = plain if isinstance(plain, dict) else {}
    return plain if is_own else {key: plain[key] for key in plain if key != "record"}


def _settings(to: str, output: str | None, config: dict[str, Any]) -> TrackersConfig:
    """Return the settings of one tracker, as in the run, but offline and writing to `output`."""
    section: Any = config
    for key in ("record", "trackers", to):
        section = section.get(key) if isinstance(section, dict) else None
    section = section if isinstance(section, dict) else {}
    over: dict[str, Any] = {"mode": "offline"} if to == "wandb" else {}
    if output is not None and to == "mlflow":
        over["uri"] = str(Path(output).absolute() / "mlruns")
    elif output is not None:
        over["dir"] = str(Path(output).absolute())
    try:
        return TrackersConfig.model_validate({to: section | over})
    except ValidationError:  # config of another version
        return TrackersConfig.model_validate({to: over})
