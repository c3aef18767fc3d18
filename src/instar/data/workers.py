"""Worker processes for reading samples: each opens an object and answers calls to its methods.

Workers are spawned, never forked, and import only what they are given. Messages between a process
and its workers are pickled, with large arrays as out-of-band buffers.
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
from instar.data.source import Measure, Source, measure_of
from instar.distributed.signals import STOP_SIGNALS
from instar.processes.child import Child, exit_text

Parts = list[memoryview]
"""A pickle, followed by its out-of-band buffers."""

_ASKED_TO_STOP = set(STOP_SIGNALS)
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from instar.data.workers import serve; serve(int(sys.argv[1]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
_PATIENCE_S = 5.0


class WorkerLost(InstarError):  # noqa: N818
    """A worker process has exited."""


class WorkerTraceback(Exception):  # noqa: N818
    """Traceback of an exception raised in a worker; set as the exception's cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Workers:
    """Processes that have each opened an object.

    They ignore the signals that ask a run to stop, exit on `close`, and die with this process.
    Numerical libraries use one thread in each, unless OMP_NUM_THREADS and RAYON_NUM_THREADS are
    set.
    """

    def __init__(self, open_thing: Callable[[], object], number: int) -> None:
        """Start the processes, and wait until each has opened its object.

        Args:
            open_thing: called in each worker; must be picklable, as must the arguments and results
                of the object's methods.

        Raises:
            WorkerLost: a worker exited meanwhile. Exceptions of `open_thing` are raised here.
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
        """Call a method of a worker's object; the calls of one worker are executed in order.

        The future raises the method's exception, with its notes, or `WorkerLost`.

        Raises:
            WorkerLost: the workers are closed.
        """
        return self._workers[worker].ask(_packed((method, args)))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of the workers."""
        return tuple(worker.process.pid for worker in self._workers)

    def close(self) -> None:
        """Stop all workers, even busy ones. Idempotent."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerSource:
    """A source read by worker processes, each of which reads a part of the samples.

    It is also opened in this process, to answer queries that need no reading.
    """

    def __init__(self, open_source: Callable[[], Source], number: int) -> None:
        """
        Args:
            open_source: opens the same source in every process, see `Workers`.
        """
        self._source = open_source()
        self.workers = Workers(open_source, number)
        self.fingerprint = self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    @property
    def measure(self) -> Measure | None:
        return measure_of(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the source's samples; raises the source's exceptions, or `WorkerLost`."""
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
        """Stop the workers. Idempotent."""
        self.workers.close()


class _Worker:
    """One process, and the thread that communicates with it."""

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
        with suppress(OSError):  # the worker has exited already
            self._line.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._thread.join()
        self.process.wait(_PATIENCE_S)
        self._line.close()

    def _talk(self) -> None:
        while (asked := self._questions.get()) is not None:
            answer, question = asked
            try:
                answer.set_result(self._answer(question))
            except BaseException as error:  # the caller waits for the future
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
        return f"(process {self.process.pid}) {exit_text(self.process.wait(_PATIENCE_S))}"


def serve(line: int) -> None:
    """Main function of a worker: open an object, answer calls to it until the socket closes."""
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
    """Exit when the other end of the socket is closed, also by the death of its process."""
    poll = select.poll()
    poll.register(line, 0)
    poll.poll()
    os._exit(0)


def _start(line: socket.socket) -> Child:
    return Child(
        [sys.executable, "-u", "-c", _START, str(line.fileno()), *sys.path],
        env=_ONE_THREAD | os.environ,
        stdin=subprocess.DEVNULL,
        pass_fds=[line.fileno()],
        blocked=_ASKED_TO_STOP,
    )


def _told(error: BaseException) -> tuple[BaseException, list[str], str]:
    """Return an exception that can be pickled, its notes, and its traceback."""
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
    """Receive a message. Raises EOFError if the other side has closed the socket."""
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
