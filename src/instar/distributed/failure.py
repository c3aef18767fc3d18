"""Failures of a rank: the exceptions, their exit codes, and the failure record for the launcher.

The record is one JSON file at TORCHELASTIC_ERROR_FILE, in the form torchrun's own report reads,
with Instar's facts beside it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from instar.config.errors import InstarError, sentence_of
from instar.config.user_code.failures import what_happened

logger = logging.getLogger(__name__)

_PF_EXITING = 0x4
"""flag of a process that exits, in Linux's /proc/PID/stat"""
RECORD_VARIABLE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_VARIABLE = "INSTAR_LAUNCHER_PID"
FOLDER_PREFIX = "instar-"
"""of the launcher's temporary folder, which has a folder `start-N/rank` for each rank's record"""
NOTHING_STARTED = "stopped before the first step; start again with the same command"

_GPU_SIGNS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS")
_TRANSPORT_SIGNS = ("gloo", "NCCL", "by peer", "Broken pipe", "Timed out waiting")


class RunFailed(InstarError):  # noqa: N818
    """The run cannot continue. `secondary`: only because another rank failed first."""

    exit_code = 4
    secondary = False


class UserCodeFailed(RunFailed):
    """A function of the user's raised what `__cause__` is: the rank's log has its traceback."""


class PeerError(RunFailed):
    """A rank failed in a joint operation: `rank` is the one at fault, `what` the operation."""

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
    """`ranks` hang, or never entered the collective in which the others wait.

    The message is a whole sentence. `ranks` is empty if the rank at fault is unknown.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Interrupted(InstarError):  # noqa: N818
    """Stopped by a signal; the run can be resumed."""

    exit_code = 75


class StoppedUnsaved(Interrupted):
    """Stopped by a signal before there was anything to resume."""

    exit_code = 130


STOPPED = (Interrupted.exit_code, StoppedUnsaved.exit_code)


def stopped_before_start(*, resumable: bool) -> Interrupted:
    """Return the exception for a stop before the first step; `resumable`: the same command resumes an
    existing run, or starts it in the same folder."""
    return (Interrupted if resumable else StoppedUnsaved)(NOTHING_STARTED)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank. `time` is in seconds since the epoch, `kind` the exception's type.

    `ranks`: the ranks at fault, if different from the one that reports it.
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
        """Format as, e.g., "rank 1 failed at step 120: ValueError: …"."""
        if self.kind == RankMissing.__name__:
            return self.message
        at = "" if self.step is None else f" at step {self.step}"
        message = f": {self.message}" if self.message else ""
        return f"rank {self.rank} failed{at}: {self.kind}{message}"


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for `error`: 75 or 130 if stopped, 2 for the config, 4 for anything else.

    `sys.exit` is only called by the user's code, and is a failure whatever its code.
    """
    if isinstance(error, InstarError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return StoppedUnsaved.exit_code
    return RunFailed.exit_code


@contextmanager
def exits_fail(what: str) -> Iterator[None]:
    """Context for the user's code: turns `sys.exit()` into a failure of `what`.

    Raises:
        RunFailed: the code called `sys.exit()`; names `what`.
    """
    try:
        yield
    except SystemExit as error:
        raise RunFailed(f"{what} ended the process: {what_happened(error)}") from error


def is_secondary(error: BaseException) -> bool:
    """Return whether `error` is only a consequence of the loss of another rank."""
    if isinstance(error, RunFailed):
        return error.secondary
    # DDP's reducer raises the transport's RuntimeError unchanged.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TRANSPORT_SIGNS)


def may_be_secondary(error: BaseException) -> bool:
    """Return whether `error` is of a GPU, which may be at fault itself, or have lost another rank: NCCL's
    kernels read its memory, and errors of kernels appear at any later call."""
    return (
        isinstance(error, RuntimeError)
        and any(sign in str(error) for sign in _GPU_SIGNS)
        and not (out_of_memory(error) or is_secondary(error))
    )


def root_cause(error: BaseException) -> BaseException:
    """Return this rank's own exception, if `error` is the PeerError that reports it to all ranks."""
    if isinstance(error, PeerError) and not error.secondary:
        return error.__cause__ or error
    return error


def out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is a failed memory allocation of torch or Python."""
    signs = ("can't allocate memory", "out of memory", "Cannot allocate memory")
    root = root_cause(error)
    return isinstance(root, MemoryError) or (
        isinstance(root, RuntimeError) and any(sign in str(root) for sign in signs)
    )


def transport_text(error: BaseException) -> str:
    """Return the message of the transport's error, without gloo's source location, advice and emoji."""
    return re.sub(r"^\[[^\]]*\.cc:\d+\]\s*|\. This is typically.*", "", str(error), flags=re.DOTALL)


def exception_text(error: BaseException) -> str:
    """Return the message of an exception with its notes."""
    text = sentence_of(error) if isinstance(error, OSError) else str(error)
    if out_of_memory(error):
        text = f"out of memory: {text}; reduce the model or train.batch_size"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def describe_failure(error: BaseException, rank: int, step: int | None) -> Failure:
    """Return the failure record of `error` on `rank` at `step`."""
    root = root_cause(error)
    doing = f" (while {error.what})" if isinstance(error, PeerError) and root is not error else ""
    return Failure(
        rank=rank,
        step=step,
        kind=type(root).__name__,
        message=f"{exception_text(root)}{doing}",
        exit_code=exit_code_of(error),
        secondary=is_secondary(error),
        time=time.time(),
        ranks=root.ranks if isinstance(root, RankMissing) else (),
    )


def write_failure(failure: Failure, error: BaseException, environ: Mapping[str, str]) -> None:
    """Leave the record where the launcher, ours or torchrun's, looks for it; none, no record.

    A disk that is full, or a folder that was tidied away, hides no failure: it is logged.
    """
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
    temporary = Path(f"{target}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(target)
    except OSError as refusal:
        logger.warning("the launcher cannot be told: %s: %s", target, refusal.strerror)


def remove_orphaned(environ: Mapping[str, str], patience_s: float = 0.0) -> None:
    """Remove this rank's files of a launcher that was killed; the last rank removes its folder.

    Args:
        patience_s: how long to wait until the launcher ends. Linux signals this when the thread
            that made this process has ended; the others may be a moment later.
    """
    record, launcher = environ.get(RECORD_VARIABLE), environ.get(LAUNCHER_VARIABLE)
    if not record or launcher is None:
        return
    deadline = time.monotonic() + patience_s
    while _is_running_parent(int(launcher)):
        if time.monotonic() >= deadline:
            return
        time.sleep(0.005)
    start_folder = Path(record).parent
    folder = start_folder.parents[1]
    if folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(start_folder, ignore_errors=True)
        with suppress(OSError):  # other ranks still have theirs
            start_folder.parent.rmdir()
            shutil.rmtree(folder, ignore_errors=True)


def _is_running_parent(pid: int) -> bool:
    """Return whether a process is the parent of this one, and does not exit.

    A process that exits keeps its children until its memory is freed, which may take a second.
    """
    if os.getppid() != pid:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    state, *numbers = status.rpartition(")")[2].split()  # after the name, which may have spaces
    return state not in "ZX" and not int(numbers[5]) & _PF_EXITING


def read_failure(path: Path) -> Failure | None:
    """Read the failure record at `path`; None if there is none written by Instar."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        facts = record["instar"]
        return Failure(**{**facts, "ranks": tuple(facts["ranks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def point_to_log(log: Path, environ: Mapping[str, str]) -> None:
    """Tell the launcher where this rank's log is, so that it can show its last lines."""
    record = environ.get(RECORD_VARIABLE)
    if record and LAUNCHER_VARIABLE in environ:
        pointer = _log_pointer(Path(record))
        temporary = pointer.with_suffix(".tmp")
        try:
            temporary.write_text(str(log.absolute()), encoding="utf-8")
            temporary.replace(
                pointer
            )  # the launcher reads it meanwhile, and must not see half of it
        except OSError as refusal:
            logger.warning("the launcher cannot be told: %s: %s", pointer, refusal.strerror)


def log_of_failure(record: Path) -> Path | None:
    """Return the log of the rank whose failure record is, or would be, at `record`."""
    try:
        return Path(_log_pointer(record).read_text(encoding="utf-8"))
    except OSError:
        return None


def _log_pointer(record: Path) -> Path:
    return record.with_name("log.path")
