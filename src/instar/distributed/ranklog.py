"""What each rank says: its own log file, and a record if it fails."""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from instar.config.errors import ConfigError, InstarError
from instar.distributed.failure import (
    LAUNCHER_VARIABLE,
    Interrupted,
    describe,
    exit_code_of,
    point_to_log,
    root_of,
    write_failure,
)
from instar.distributed.placement import placement

logger = logging.getLogger(__name__)


def log_path(run_dir: Path, rank: int) -> Path:
    """Where rank `rank` of the run in `run_dir` logs."""
    return run_dir / "logs" / f"rank_{rank}.log"


class RankLog:
    """One rank's log, from before the run's folder is known to after the last exception.

    Lines wait in memory until `open` names the folder. From then on the standard streams of
    ranks other than 0 go into the file as well, so that one rank has the terminal. Keep `step`
    at the current step: a failure record names it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step: int | None = None
        self.path: Path | None = None
        self._file: TextIO | None = None
        self._streams: tuple[int, int] | None = None
        self._is_told = False
        form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
        self._format = logging.Formatter(form, "%Y-%m-%d %H:%M:%S")
        self._handler: logging.Handler = logging.handlers.MemoryHandler(
            10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
        )

    def open(self, run_dir: Path) -> Path:
        """Write to <run_dir>/logs/rank_<r>.log, what was said before first; returns its path."""
        path = log_path(run_dir, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.path = path
        target = logging.StreamHandler(self._file)
        target.setFormatter(self._format)
        waiting = self._handler
        assert isinstance(waiting, logging.handlers.MemoryHandler)
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
            self.write_down(error)
        threading.excepthook = self._thread_hook
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger("instar").setLevel(self._level)
        if self._streams is not None:
            self._restore(self._streams)
        if self._file is not None:
            faulthandler.disable()
            self._file.close()

    def write_down(self, error: BaseException) -> None:
        """Say what this rank ends on, here and where a launcher looks; once, at the first call."""
        if self._is_told or exit_code_of(error) == 0:
            return
        self._is_told = True
        if exit_code_of(error) == Interrupted.exit_code:
            logger.info("stopped: %s", error)
            return
        failure, root = describe(error, self.rank, self.step), root_of(error)
        write_failure(failure, root, os.environ)
        expected = isinstance(root, InstarError)
        logger.error("%s", failure.sentence(), exc_info=None if expected else root)

    def _on_thread_error(self, hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None:
            name = hook.thread.name if hook.thread else "?"
            logger.error("uncaught in thread %s", name, exc_info=hook.exc_value)

    def _attach(self, handler: logging.Handler) -> None:
        root = logging.getLogger()
        root.addHandler(handler)
        root.removeHandler(self._handler)
        self._handler = handler

    def _redirect(self, file: TextIO) -> None:
        _flush_streams()
        self._streams = (os.dup(1), os.dup(2))
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)

    def _restore(self, streams: tuple[int, int]) -> None:
        _flush_streams()
        for number, kept in zip((1, 2), streams, strict=True):
            os.dup2(kept, number)
            os.close(kept)
        self._streams = None


def run_rank(work: Callable[[RankLog], None]) -> int:
    """Do `work` as the rank this process is; log, record and tell how it ends; its exit code.

    Whoever must know is told once: Instar's launcher reads the record and names the failure
    itself; without it the failing rank does; rank 0 prints what is wrong with a config.
    """
    rank = 0
    log: RankLog | None = None
    try:
        rank = placement(os.environ).rank
        with RankLog(rank) as log:
            work(log)
    except BaseException as error:
        code = exit_code_of(error)
        if code != 0:
            _tell(error, rank, log)
        return code
    return 0


def _tell(error: BaseException, rank: int, log: RankLog | None) -> None:
    failure = describe(error, rank, log.step if log else None)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return
    if failure.exit_code in (ConfigError.exit_code, Interrupted.exit_code):
        if rank == 0:
            print(error, file=sys.stderr)
        return
    if failure.secondary or LAUNCHER_VARIABLE in os.environ:
        return
    if not isinstance(error, InstarError):
        traceback.print_exception(error)
    print(failure.sentence(), file=sys.stderr)
    if log and log.path:
        print(f"  see {log.path}", file=sys.stderr)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
