"""Runs that another tool trained: there is a record of them alone, whose first line says so."""

from __future__ import annotations

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.record.events import RunStarted, events_in
from instar.record.rundir import RunDir

MAX_LINE_BYTES = 1 << 20


def imported_start(run: RunDir) -> RunStarted | None:
    """Return the start of an imported run; None: Instar trained it, or its record cannot be read."""
    try:
        with open_regular(run.events) as file:
            line = file.readline(MAX_LINE_BYTES)
    except OSError:
        return None
    event = next((event for _, event in events_in([line])), None)
    return event if isinstance(event, RunStarted) and event.imported_from else None


def refuse_imported(run: RunDir) -> None:
    """Raise ConfigError if there is no model of a run, because another tool trained it."""
    if (start := imported_start(run)) is not None:
        raise ConfigError.of(
            f"{run.path} was imported from {start.imported_from}: it is a record without a model to "
            "resume, test or sample",
            hint="only `instar logs`, `instar report` and `instar dashboard` read it",
        )
