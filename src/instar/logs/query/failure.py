"""What ended a crashed run: the error, where it was raised, and the end of that rank's log."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from instar.logs.query.summary import summarize
from instar.logs.query.tail import last_lines
from instar.logs.read.record import RunRecord
from instar.record.events import Failed

MAX_LINES = 40
_SENTENCE = re.compile(r"rank (\d{1,9}) failed(?: at step ([\d,]{1,20}))?: (.+)", re.DOTALL)
_TYPE = re.compile(r"([A-Za-z_][\w.]{0,99}): (?=\S)|([A-Z]\w{0,99})$")
_ERROR = re.compile(rb" (?:ERROR|CRITICAL): |Fatal Python error: ")


@dataclass(frozen=True)
class RunFailure:
    """The error of a crashed run."""

    type: str
    """of the exception; empty if unknown, e.g. of a killed process"""
    message: str
    rank: int | None
    step: int | None
    resume: str
    """command that resumes the run; empty if it cannot be resumed"""
    log: tuple[str, ...]
    """the end of the rank's log, from its last error on if there is one"""


def run_failure(record: RunRecord) -> RunFailure | None:
    """Return what ended a run; None unless it has crashed."""
    summary = summarize(record)
    if summary.state != "crashed":
        return None
    message, rank, step = summary.reason, None, None
    if match := _SENTENCE.fullmatch(summary.reason):
        rank, message = int(match[1]), match[3]
        step = int(match[2].replace(",", "")) if match[2] else None
    failures = record.of(Failed)
    if failures and failures[-1].event.segment == summary.segments:
        rank, step = failures[-1].event.rank, failures[-1].event.step
    kind = ""
    if match := _TYPE.match(message):
        kind, message = match[1] or match[2], message[match.end() :]
    log = _end_of_log(record, rank or 0)
    return RunFailure(kind, message, rank, step, summary.go_on, log)


def _end_of_log(record: RunRecord, rank: int) -> tuple[str, ...]:
    lines: list[bytes] = []
    with suppress(OSError):
        lines, _ = last_lines(record.run.log(rank), 4 * MAX_LINES)
    errors = [number for number, line in enumerate(lines) if _ERROR.search(line)]
    # a line of context before the error
    excerpt = lines[max(0, errors[-1] - 1) :][:MAX_LINES] if errors else lines[-MAX_LINES:]
    return tuple(line.decode("utf-8", "replace").rpartition("\r")[2] for line in excerpt)
