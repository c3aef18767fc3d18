"""A process with limits for what files of others make a library do: it may panic, abort, take all memory or never end.

It runs a tokenizer or a chat template. Messages are JSON and bytes. A request that takes too long or too much memory
ends the process by a signal, whatever the library does meanwhile; so does a fault of the library. Its panics and
errors are answers.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, Literal

from instar.processes.child import (
    AnsweringProcess,
    ProcessLost,
    exit_text,
    receive_parts,
    send_parts,
)

LIMIT_BYTES = 832 << 20
"""of memory beyond what the process has when a request comes, and the following"""
_PER_BYTE = 24
"""for each byte of a request: vocabularies and tokens take more than their text"""
TOO_LARGE = f"it takes more than {LIMIT_BYTES >> 20} MiB of memory"
_TEXT_BYTES, _TEXT_PER_BYTE = 16 << 20, 64
"""of a rendered text, and for each byte of its request: texts are kept, and tokenized elsewhere"""
_LIBRARIES = {"template": "transformers.utils.chat_template_utils", "tokenizer": "tokenizers"}

Reply = tuple[dict[str, Any], bytes]
Answer = Callable[[dict[str, Any], bytes], Reply]


class RequestFailed(Exception):  # noqa: N818
    """What was asked took too much, or failed; the message says how in one line."""


class LimitedProcess:
    """Runs `serve_limited` for a file's content; a request may take `limit_s` and `LIMIT_BYTES`.

    The process is started when it is asked something, anew after it has failed, and apart in a fork.
    """

    def __init__(
        self, kind: Literal["tokenizer", "template"], content: bytes, limit_s: int
    ) -> None:
        self._kind, self._content, self._limit_s = kind, content, limit_s
        self._lock = threading.Lock()
        self._process: AnsweringProcess | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0: it is not started."""
        return self._process.pid if self._process else 0

    def ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request. Raises RequestFailed if there is none."""
        with self._lock:
            return self._exchange(self._start(), request, content)

    def start(self) -> None:
        """Load the content, unless that is done. Raises RequestFailed if it cannot be loaded."""
        with self._lock:
            self._start()

    def _start(self) -> AnsweringProcess:
        process = self._process
        if process is None or process.is_inherited:
            process = AnsweringProcess(
                serve_limited, self._kind, self._limit_s, env=os.environ, silent=True
            )
            self._process = process
            self._end = weakref.finalize(self, process.end, 0.0)
            self._exchange(process, {"ask": "load"}, self._content)
        return process

    def _exchange(
        self, process: AnsweringProcess, request: dict[str, Any], content: bytes
    ) -> tuple[dict[str, Any], bytes]:
        try:
            head, reply = process.exchange([json.dumps(request).encode(), content])
        except BaseException as error:  # also an interrupt in the middle of a message
            self._process = None
            self._end()
            if isinstance(error, ProcessLost):
                raise RequestFailed(self._cause(error.status)) from None
            raise
        header: dict[str, Any] = json.loads(bytes(head))
        if "error" in header:
            raise RequestFailed(header["error"])
        return header, bytes(reply)

    def _cause(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"it takes more than {self._limit_s} s"
        if status == -signal.SIGABRT:
            return f"{TOO_LARGE}, or aborts"
        return f"its process {exit_text(status)}"


def serve_limited(connection: socket.socket, kind: str, limit_s: int) -> None:
    """Answer requests until the connection is closed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    loader = _template if kind == "template" else _tokenizer
    with suppress(ImportError):  # is said when it is used; the time that it takes is no file's
        import_module(_LIBRARIES[kind])
    answer: Any = None
    try:
        while True:
            head, content = map(bytes, receive_parts(connection))
            request = json.loads(head)
            limit_memory(LIMIT_BYTES + len(content) * _PER_BYTE)
            signal.alarm(limit_s)
            try:
                if request["ask"] == "load":
                    answer = loader(content)
                    reply: Reply = {}, b""
                else:
                    reply = answer(request, content)
            except MemoryError:
                reply = {"error": TOO_LARGE}, b""
            except BaseException as error:  # panics are no Exception
                reply = {"error": (str(error) or type(error).__name__).splitlines()[0]}, b""
            signal.alarm(0)
            send_parts(connection, [json.dumps(reply[0]).encode(), reply[1]])
    finally:  # also at the end of the connection: what a library does at the end is not waited for
        os._exit(0)


def _template(text: bytes) -> Answer:
    """Return what renders conversations with this template, as transformers does.

    Of the first `count` messages of each of `texts`, with a prompt for an answer if that is asked; `spans` are
    the places of `{% generation %}` in each text.
    """
    template = text.decode("utf-8", "surrogatepass")

    def answer(request: dict[str, Any], content: bytes) -> Reply:
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            return {"missing": str(error)}, b""
        conversation = json.loads(content)
        texts, spans = [], []
        for count, prompt in request["texts"]:
            more = {"return_assistant_tokens_mask": True} if request["spans"] else {}
            if prompt:
                more["add_generation_prompt"] = True
            try:
                renderings: Any = render_jinja_template(
                    conversations=[conversation["messages"][:count]],
                    chat_template=template,
                    **{**conversation["variables"], **more},
                )
            except MemoryError:
                raise
            except ImportError as error:
                return {"missing": str(error)}, b""
            except Exception as error:  # whatever jinja2 makes of it
                return {"refused": str(error)}, b""
            texts.append(str(renderings[0][0]))
            spans.append(renderings[1][0] if request["spans"] else [])
            if len(texts[-1]) > _TEXT_BYTES + _TEXT_PER_BYTE * len(content):
                return {"error": f"it makes a text of {len(texts[-1]):,} characters"}, b""
        return {"texts": texts, "spans": spans}, b""

    return answer


def _tokenizer(text: bytes) -> Answer:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(text.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None  # what it adds is added elsewhere
    return partial(_tokens_reply, tokenizer)


def _tokens_reply(tokenizer: Any, request: dict[str, Any], content: bytes) -> Reply:
    match request["ask"]:
        case "vocabulary":
            return {}, json.dumps(tokenizer.get_vocab(with_added_tokens=True)).encode()
        case "decode":
            ids = array.array("I", content).tolist()
            return {}, tokenizer.decode(ids, skip_special_tokens=False).encode("utf-8", "replace")
    texts, at = [], 0
    for size in request["sizes"]:
        texts.append(content[at : at + size].decode())
        at += size
    tokenizer.encode_special_tokens = request["ask"] == "encode"
    if request["ask"] == "encode":
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        rows = [array.array("I", encoding.ids) for encoding in encodings]
    else:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        rows = [
            array.array("I", encoding.ids) + array.array("I", chain(*encoding.offsets))
            for encoding in encodings
        ]
    return {"counts": [*map(len, rows)]}, b"".join(rows)


def limit_memory(size: int) -> None:
    """Let this process take `size` bytes of memory more than it has; Linux only."""
    with suppress(OSError, ValueError):
        with open("/proc/self/status") as file:  # noqa: PTH123
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + size, hard_limit))
