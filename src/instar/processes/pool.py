"""A pool of worker processes: each opens an object and answers calls to its methods.

Workers are spawned, never forked, and import only what they are given. Messages between a process
and its workers are pickled, with large arrays as out-of-band buffers.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

import numpy as np

from instar.config.errors import InstarError
from instar.config.user_code.definitions import bring_definitions
from instar.processes.child import (
    AnsweringProcess,
    Parts,
    ProcessLost,
    exit_text,
    receive_parts,
    send_parts,
)

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


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

    def __init__(self, open_object: Callable[[], object], number: int) -> None:
        """Start the processes, and wait until each has opened its object.

        Args:
            open_object: called in each worker; must be picklable, as must the arguments and results
                of the object's methods.

        Raises:
            WorkerLost: a worker exited meanwhile. Exceptions of `open_object` are raised here.
        """
        if number < 1:
            raise ValueError(f"needs at least one worker, got {number}")
        opening = _pack(open_object)
        self._workers: list[_Worker] = []
        try:
            for index in range(number):
                self._workers.append(_Worker(f"worker {index} of {number}"))
            for future in [worker.ask(opening) for worker in self._workers]:
                future.result()
        except BaseException:
            self.close()
            raise

    def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a worker's object; the calls of one worker are executed in order.

        The future raises the method's exception, with its notes, or `WorkerLost`.

        Raises:
            WorkerLost: the workers are closed.
        """
        return self._workers[worker].ask(_pack((method, args)))

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


class _Worker:
    """One process, and the thread that communicates with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[tuple[Future[Any], Parts] | None] = SimpleQueue()
        self._asking = threading.Lock()
        self._is_closed = False
        self.process = AnsweringProcess(
            serve_calls, env=_ONE_THREAD | os.environ, allocate=_empty_bytes
        )
        self._thread = threading.Thread(target=self._talk, name=f"instar-{name}", daemon=True)
        self._thread.start()

    def ask(self, request: Parts) -> Future[Any]:
        future: Future[Any] = Future()
        with self._asking:
            if self._is_closed:
                raise WorkerLost(f"{self.name} is closed")
            self._calls.put((future, request))
        return future

    def hang_up(self) -> None:
        with self._asking:
            if self._is_closed:
                return
            self._is_closed = True
            self._calls.put(None)
        self.process.hang_up()

    def end(self) -> None:
        self._thread.join()
        self.process.end()

    def _talk(self) -> None:
        while (call := self._calls.get()) is not None:
            future, request = call
            try:
                future.set_result(self._answer(request))
            except BaseException as error:  # the caller waits for the future
                future.set_exception(error)

    def _answer(self, request: Parts) -> Any:
        try:
            has_raised, content = _unpack(self.process.exchange(request))
        except ProcessLost as ending:
            end = f"(process {self.process.pid}) {exit_text(ending.status)}"
            raise WorkerLost(f"{self.name} {'is closed' if self._is_closed else end}") from None
        if not has_raised:
            return content
        error, notes, place = content
        if notes:
            error.__notes__ = notes
        raise error from WorkerTraceback(f"in {self.name} (process {self.process.pid}):\n{place}")


def serve_calls(connection: socket.socket) -> None:
    """Main function of a worker: open an object, answer calls to it until the connection closes."""
    with connection, suppress(EOFError, OSError):
        objects: list[Any] = []
        while True:
            request = receive_parts(connection, _empty_bytes)
            try:
                if objects:
                    method, args = _unpack(request)
                    answer = _pack((False, getattr(objects[0], method)(*args)))
                else:
                    bring_definitions()  # what is opened may be of a notebook
                    objects.append(_unpack(request)())
                    answer = _pack((False, None))
            except BaseException as error:  # the other side waits for an answer
                answer = _pack((True, _describe_error(error)))
            send_parts(connection, answer)


def _empty_bytes(size: int) -> memoryview:
    """Return a buffer that, unlike a bytearray, is written once only: batches are large."""
    return np.empty(size, dtype=np.uint8).data


def _describe_error(error: BaseException) -> tuple[BaseException, list[str], str]:
    """Return an exception that can be pickled, its notes, and its traceback."""
    notes = list(getattr(error, "__notes__", ()))
    place = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, notes, place


def _pack(value: object) -> Parts:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def _unpack(parts: Parts) -> Any:
    head, *buffers = parts
    return pickle.loads(head, buffers=buffers)  # noqa: S301
