"""The log file of each rank, and its failure record."""

from __future__ import annotations

import faulthandler
import io
import logging
import logging.handlers
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from instar.config.errors import ConfigError, InstarError
from instar.config.files import own_regular
from instar.distributed.appender import Appender, AppendingStream
from instar.distributed.failure import (
    LAUNCHER_VARIABLE,
    STOPPED,
    UserCodeFailed,
    describe_failure,
    exit_code_of,
    out_of_memory,
    point_to_log,
    root_cause,
    write_failure,
)
from instar.distributed.placement import placement
from instar.distributed.signals import detach_closed_streams, flush

logger = logging.getLogger(__name__)


MAX_HELD_BYTES = 1 << 20
"""of log lines while the disk refuses writes; further lines are dropped"""


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the log of rank `rank`."""
    return run_dir / "logs" / f"rank_{rank}.log"


class RankLog:
    """One rank's log, from before the run's folder is known until after the last exception.

    Lines are buffered in memory until `open` is called. From then on the standard streams of all
    ranks but 0 are redirected to the file, so that only rank 0 uses the terminal. Keep `step` at the
    current step: the failure record names it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step: int | None = None
        self.path: Path | None = None
        self._file: TextIO | None = None
        self._appender: Appender | None = None
        self._streams: tuple[int, int, TextIO, TextIO] | None = None
        self._is_recorded = False
        form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
        # with the zone, since a log is also read elsewhere
        self._format = logging.Formatter(form, "%Y-%m-%d %H:%M:%S%z")
        self._handler: logging.Handler = logging.handlers.MemoryHandler(
            10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
        )

    def open(self, run_dir: Path) -> Path:
        """Write to <run_dir>/logs/rank_<r>.log, buffered lines first; return its path.

        A failing disk never ends the run: lines that cannot be written are held in memory. Called again, it
        goes on in the folder of another run, such as a branch.
        """
        path = rank_log_path(run_dir, self.rank)
        self._close()
        self._appender = _appender(path)
        self._file = self._stream()
        self.path = path
        target = logging.StreamHandler(self._file)
        target.setFormatter(self._format)
        waiting = self._handler
        if isinstance(waiting, logging.handlers.MemoryHandler):
            waiting.setTarget(target)
            waiting.flush()
        self._attach(target)
        waiting.close()
        faulthandler.enable(self._file)
        if self.rank != 0:
            self._redirect(self._file)
        point_to_log(path, os.environ)
        return path

    def __enter__(self) -> RankLog:
        self._level = logging.getLogger("instar").level
        logging.getLogger("instar").setLevel(logging.INFO)
        logging.getLogger().addHandler(self._handler)
        self._thread_hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.record_failure(error)
        threading.excepthook = self._thread_hook
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger("instar").setLevel(self._level)
        self._close()

    def _close(self) -> None:
        """Give the standard streams back, and close the file."""
        if self._streams is not None:
            self._restore(self._streams)
        if self._file is not None and self._appender is not None:
            faulthandler.disable()
            self._file.flush()
            if lost := self._appender.close():
                with suppress(OSError, AttributeError):
                    print(
                        f"warning: the disk refused {lost} writes to {self.path}", file=sys.stderr
                    )
        self._file = self._appender = None

    def record_failure(self, error: BaseException) -> None:
        """Log the error that ends this rank and write its failure record; only the first call counts."""
        if self._is_recorded or exit_code_of(error) == 0:
            return
        self._is_recorded = True
        if exit_code_of(error) in STOPPED:
            logger.info("stopped: %s", error)
            return
        failure, root = describe_failure(error, self.rank, self.step), root_cause(error)
        write_failure(failure, root, os.environ)
        cause = root.__cause__ if isinstance(root, UserCodeFailed) else root
        expected = isinstance(cause, InstarError)
        logger.error("%s", failure.sentence(), exc_info=None if expected else cause)

    def _on_thread_error(self, hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None:
            name = hook.thread.name if hook.thread else "?"
            logger.error("uncaught in thread %s", name, exc_info=hook.exc_value)

    def _attach(self, handler: logging.Handler) -> None:
        root = logging.getLogger()
        root.addHandler(handler)
        root.removeHandler(self._handler)
        self._handler = handler

    def _stream(self) -> TextIO:
        assert self._appender is not None
        raw = io.BufferedWriter(AppendingStream(self._appender))
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)

    def _redirect(self, file: TextIO) -> None:
        """Redirect to the log what Python prints and what libraries write to descriptors 1 and 2."""
        flush(sys.stdout, sys.stderr)
        self._streams = (os.dup(1), os.dup(2), sys.stdout, sys.stderr)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = self._stream(), self._stream()

    def _restore(self, streams: tuple[int, int, TextIO, TextIO]) -> None:
        flush(sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = streams[2:]
        for number, stream in zip((1, 2), streams[:2], strict=True):
            os.dup2(stream, number)
            os.close(stream)
        self._streams = None


def _appender(path: Path) -> Appender:
    """Open a log for appending; if that fails, warn and discard the log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = own_regular(path, mode=0o666, append=True)
    except OSError as error:
        logger.warning("cannot open %s: %s; this rank has no log", path, error.strerror)
        with suppress(OSError, AttributeError):
            print(f"warning: cannot open {path}: {error.strerror}", file=sys.stderr)
        descriptor = os.open(os.devnull, os.O_WRONLY)
    return Appender(descriptor, max_bytes=MAX_HELD_BYTES)


@dataclass
class RankRun:
    """What the rank of this process does: its log, and the exit code that it comes to."""

    log: RankLog
    code: int = 0


@contextmanager
def running_rank() -> Iterator[RankRun]:
    """Context manager of the work of the rank of this process, whose failure is logged, reported, and made an exit code.

    A failure is printed once: by Instar's launcher from the failure record, or, without it, by the
    failing rank; config errors are printed by rank 0.
    """
    run = RankRun(RankLog(placement(os.environ).rank))
    try:
        with run.log:
            yield run
    except BaseException as error:
        run.code = exit_code_of(error)
        if run.code != 0:
            detach_closed_streams()
            with suppress(OSError):
                _print_failure(error, run.log)


def _print_failure(error: BaseException, log: RankLog) -> None:
    failure = describe_failure(error, log.rank, log.step)
    if isinstance(error, KeyboardInterrupt):
        return
    if failure.exit_code in (ConfigError.exit_code, *STOPPED):
        if log.rank == 0:
            print(error, file=sys.stderr)
        return
    if failure.secondary or LAUNCHER_VARIABLE in os.environ:
        return
    if not isinstance(error, InstarError | OSError | MemoryError) and not out_of_memory(error):
        traceback.print_exception(error)
    print(failure.sentence(), file=sys.stderr)
    if log.path:
        print(f"  see {log.path}", file=sys.stderr)
