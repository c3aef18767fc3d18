"""Worker processes: each opens a thing of its own and answers calls to its methods.

Workers are started afresh, never forked, and import nothing but what they are given. What passes
between a process and its own workers is pickled, large arrays beside the pickle.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, Self

import numpy as np

from instar.config.errors import InstarError
from instar.data.columns import Columns, join
from instar.data.order import Int64Array
from instar.data.source import Source

Parts = list[memoryview]
"""A pickle, and the large buffers that belong to it."""

_ASKED_TO_STOP = {signal.SIGINT, signal.SIGTERM}
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from instar.data.workers import serve; serve(int(sys.argv[1]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
_PATIENCE_S = 5.0


class WorkerLost(InstarError):  # noqa: N818
    """A worker process is gone."""


class WorkerTraceback(Exception):  # noqa: N818
    """Where in a worker an exception was raised; its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Workers:
    """Processes that have each opened a thing.

    They ignore SIGINT and SIGTERM, end with `close`, and are gone when this process is. Numerical
    libraries use one thread in each, unless OMP_NUM_THREADS and RAYON_NUM_THREADS say otherwise.
    """

    def __init__(self, open_thing: Callable[[], object], number: int) -> None:
        """Start them, and wait until all have opened their things.

        Args:
            open_thing: called in each worker; picklable, as is what the methods take and return.

        Raises:
            WorkerLost: one died meanwhile. What opening raises is raised here.
        """
        if number < 1:
            raise ValueError(f"needs at least one worker, got {number}")
        opening = _packed(open_thing)
        self._workers: list[_Worker] = []
        try:
            for index in range(number):
                self._workers.append(_Worker(f"worker {index} of {number}"))
            for opened in [worker.ask(opening) for worker in self._workers]:
                opened.result()
        except BaseException:
            self.close()
            raise

    def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a worker's thing; its calls are carried out one after the other.

        The future raises what the method raises, with its notes, or `WorkerLost`.

        Raises:
            WorkerLost: the workers are closed.
        """
        return self._workers[worker].ask(_packed((method, args)))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def processes(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.process.pid for worker in self._workers)

    def close(self) -> None:
        """End all workers, whatever they are doing. Closing twice is allowed."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerSource:
    """A source that worker processes read, each a part of the samples.

    It is opened here as well, for what can be said of it without reading.
    """

    def __init__(self, open_source: Callable[[], Source], number: int) -> None:
        """Args:
        open_source: see `Workers`; opens the same source everywhere.
        """
        self._source = open_source()
        self.workers = Workers(open_source, number)
        self.fingerprint = self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """What the source would give; raises what it would raise, or `WorkerLost`."""
        size = indices.size
        number = max(1, min(len(self.workers), size))
        futures = [
            self.workers.call(
                worker,
                "read",
                indices[size * worker // number : size * (worker + 1) // number],
                epoch,
            )
            for worker in range(number)
        ]
        parts: list[Columns] = [future.result() for future in futures]
        return join(parts) if number > 1 else parts[0]

    def close(self) -> None:
        """End the workers. Closing twice is allowed."""
        self.workers.close()


class _Worker:
    """One process, and the thread that talks to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._questions: SimpleQueue[tuple[Future[Any], Parts] | None] = SimpleQueue()
        self._asking = threading.Lock()
        self._closed = False
        self._line, theirs = socket.socketpair()
        with theirs:
            self.process = _start(theirs)
        self._thread = threading.Thread(target=self._talk, name=f"instar-{name}", daemon=True)
        self._thread.start()

    def ask(self, question: Parts) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._asking:
            if self._closed:
                raise WorkerLost(f"{self.name} is closed")
            self._questions.put((answer, question))
        return answer

    def hang_up(self) -> None:
        with self._asking:
            if self._closed:
                return
            self._closed = True
            self._questions.put(None)
        with suppress(OSError):  # it has left already
            self._line.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._thread.join()
        self._reap()
        self._line.close()

    def _talk(self) -> None:
        while (asked := self._questions.get()) is not None:
            answer, question = asked
            try:
                answer.set_result(self._answer(question))
            except BaseException as error:  # or nobody would ever hear of it
                answer.set_exception(error)

    def _answer(self, question: Parts) -> Any:
        try:
            _send(self._line, question)
            parts = _receive(self._line)
        except (EOFError, OSError):
            raise WorkerLost(f"{self.name} {self._end()}") from None
        raised, content = _unpacked(parts)
        if not raised:
            return content
        error, notes, place = content
        if notes:
            error.__notes__ = notes
        raise error from WorkerTraceback(f"in {self.name} (process {self.process.pid}):\n{place}")

    def _end(self) -> str:
        if self._closed:
            return "is closed"
        code = self._reap()
        how = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        )
        return f"(process {self.process.pid}) {how}"

    def _reap(self) -> int:
        """The exit code of the process, which has been told to leave, or has left."""
        try:
            return self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def serve(line: int) -> None:
    """A worker's life: open a thing, answer calls to it, end when nobody is on the line."""
    for number in _ASKED_TO_STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKED_TO_STOP)
    threading.Thread(target=_leave_when_alone, args=(line,), daemon=True).start()
    with socket.socket(fileno=line) as connection, suppress(EOFError, OSError):
        things: list[Any] = []
        while True:
            question = _receive(connection)
            try:
                if things:
                    method, args = _unpacked(question)
                    answer = _packed((False, getattr(things[0], method)(*args)))
                else:
                    things.append(_unpacked(question)())
                    answer = _packed((False, None))
            except BaseException as error:  # the other side waits for an answer
                answer = _packed((True, _told(error)))
            _send(connection, answer)


def _leave_when_alone(line: int) -> NoReturn:
    """Waits for the other end of the line to be closed, also by the death of its process."""
    poll = select.poll()
    poll.register(line, 0)
    poll.poll()
    os._exit(0)


def _start(line: socket.socket) -> subprocess.Popen[bytes]:
    """A worker that is deaf to the signals from its first instruction on."""
    words = [sys.executable, "-u", "-c", _START, str(line.fileno()), *sys.path]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_STOP)
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            pass_fds=[line.fileno()],
            env=_ONE_THREAD | os.environ,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _told(error: BaseException) -> tuple[BaseException, list[str], str]:
    """An exception that can be pickled, its notes, and where it was raised."""
    notes = list(getattr(error, "__notes__", ()))
    place = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, notes, place


def _packed(thing: object) -> Parts:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def _unpacked(parts: Parts) -> Any:
    head, *buffers = parts
    return pickle.loads(head, buffers=buffers)  # noqa: S301


def _send(line: socket.socket, parts: Parts) -> None:
    sizes = [len(parts), *(part.nbytes for part in parts)]
    line.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
    for part in parts:
        line.sendall(part)


def _receive(line: socket.socket) -> Parts:
    """Raises EOFError where the other side is gone."""
    (count,) = struct.unpack("<Q", _exactly(line, 8))
    sizes = struct.unpack(f"<{count}Q", _exactly(line, 8 * count))
    return [_exactly(line, size) for size in sizes]


def _exactly(line: socket.socket, size: int) -> memoryview:
    whole = np.empty(size, dtype=np.uint8).data
    rest = whole
    while rest:
        received = line.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return whole
