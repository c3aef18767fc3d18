"""How a rank ends badly: the errors it may raise, and the record it leaves for the launcher.

The record is one JSON file at TORCHELASTIC_ERROR_FILE, in the form torchrun's own report reads,
with Instar's facts beside it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from instar.config.errors import InstarError

RECORD_VARIABLE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_VARIABLE = "INSTAR_LAUNCHER_PID"
NOTHING_STARTED = "stopped before the first step; start again with the same command"

_TRANSPORT_SIGNS = ("gloo", "NCCL", "by peer", "Broken pipe", "Timed out waiting")


class RunFailed(InstarError):  # noqa: N818
    """The run cannot go on. `secondary`: only because another rank failed first."""

    exit_code = 4
    secondary = False


class PeerError(RunFailed):
    """A rank failed in something all did together: `rank` is to blame, `what` it was doing."""

    def __init__(
        self, message: str, *, what: str, rank: int, exit_code: int, secondary: bool
    ) -> None:
        super().__init__(message)
        self.what = what
        self.rank = rank
        self.exit_code = exit_code
        self.secondary = secondary


class PeerLost(RunFailed):
    """Another rank is gone or does not answer."""

    secondary = True


class RankMissing(RunFailed):
    """`ranks` do not move, or never came where all others wait; the message is a whole sentence.

    Empty if it cannot be told who keeps the others from moving.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Interrupted(InstarError):  # noqa: N818
    """Stopped by a signal; the run can be resumed."""

    exit_code = 75


@dataclass(frozen=True)
class Failure:
    """One rank's end. `time` is in seconds since the epoch, `kind` the exception's type.

    `ranks`: those to blame, if they are others than the one that says so.
    """

    rank: int
    step: int | None
    kind: str
    message: str
    exit_code: int
    secondary: bool
    time: float
    ranks: tuple[int, ...] = ()

    def sentence(self) -> str:
        """Who failed, when and of what, e.g. "rank 1 failed at step 120: ValueError: …"."""
        if self.kind == RankMissing.__name__:
            return self.message
        at = "" if self.step is None else f" at step {self.step}"
        message = f": {self.message}" if self.message else ""
        return f"rank {self.rank} failed{at}: {self.kind}{message}"


def exit_code_of(error: BaseException) -> int:
    """The code with which a process ends on `error`: 75 interrupted, 2 config, 4 anything else."""
    if isinstance(error, InstarError):
        return error.exit_code
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else RunFailed.exit_code
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return RunFailed.exit_code


def is_secondary(error: BaseException) -> bool:
    """Whether `error` is what a rank sees when another rank is gone."""
    if isinstance(error, RunFailed):
        return error.secondary
    # DDP's reducer lets the transport's RuntimeError through as it is.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TRANSPORT_SIGNS)


def root_of(error: BaseException) -> BaseException:
    """This rank's own exception, if `error` is what all ranks were told of it."""
    if isinstance(error, PeerError) and not error.secondary:
        return error.__cause__ or error
    return error


def told(error: BaseException) -> str:
    """What an error says, and the notes on it."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def describe(error: BaseException, rank: int, step: int | None) -> Failure:
    """What there is to know of `error` on `rank` at `step`."""
    root = root_of(error)
    doing = f" (while {error.what})" if isinstance(error, PeerError) and root is not error else ""
    return Failure(
        rank=rank,
        step=step,
        kind=type(root).__name__,
        message=f"{told(root)}{doing}",
        exit_code=exit_code_of(error),
        secondary=is_secondary(error),
        time=time.time(),
        ranks=root.ranks if isinstance(root, RankMissing) else (),
    )


def write_failure(failure: Failure, error: BaseException, environ: Mapping[str, str]) -> None:
    """Leave the record where the launcher, ours or torchrun's, looks for it; none, no record."""
    target = environ.get(RECORD_VARIABLE)
    if not target:
        return
    record = {
        "message": {
            "message": f"{failure.kind}: {failure.message}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(failure.time)),
            },
        },
        "instar": asdict(failure),
    }
    aside = Path(f"{target}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(record), encoding="utf-8")
    aside.replace(target)


def read_failure(path: Path) -> Failure | None:
    """The record at `path`, or None if there is none that Instar wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        facts = record["instar"]
        return Failure(**{**facts, "ranks": tuple(facts["ranks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def point_to_log(log: Path, environ: Mapping[str, str]) -> None:
    """Tell Instar's launcher where this rank's log is, so that a killed rank has last lines too."""
    record = environ.get(RECORD_VARIABLE)
    if record and LAUNCHER_VARIABLE in environ:
        _log_pointer(Path(record)).write_text(str(log.absolute()), encoding="utf-8")


def log_of(record: Path) -> Path | None:
    """The log of the rank whose failure record is, or would be, at `record`."""
    try:
        return Path(_log_pointer(record).read_text(encoding="utf-8"))
    except OSError:
        return None


def _log_pointer(record: Path) -> Path:
    return record.with_name("log.path")
