"""The process that runs a tokenizer of someone else's file; it needs the tokenizers library only.

Run as `python -P worker.py FD LIMIT_S`, it answers requests on the socket FD until the other end is closed. A message
is two sizes, JSON, and bytes. A request that takes too long or too much memory ends the process by a signal, whatever the
library does meanwhile; so does a fault of the library. Signals to a whole group, which the other end handles, are blocked
when it starts. Its panics and errors are answers.
"""

import array
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from itertools import chain
from typing import Any

LIMIT_BYTES = 832 << 20
"""of memory beyond what the process has when a request comes, and the following"""
_PER_BYTE = 24
"""for each byte of a request: vocabularies and tokens take more than their text"""
SIZES = struct.Struct("<IQ")


def main() -> None:
    """Answer requests."""
    from tokenizers import Tokenizer

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    tokenizer: Any = None
    while (message := receive(link)) is not None:
        request, content = message
        _limit_memory(len(content) * _PER_BYTE)
        signal.alarm(int(sys.argv[2]))
        try:
            if request["ask"] == "load":
                tokenizer = Tokenizer.from_str(content.decode())
                tokenizer.no_truncation()
                tokenizer.no_padding()
                tokenizer.post_processor = None  # what it adds is added elsewhere
                reply: tuple[dict[str, Any], bytes] = {}, b""
            else:
                reply = _answered(tokenizer, request, content)
        except BaseException as error:  # panics are no Exception
            reply = {"error": (str(error) or type(error).__name__).splitlines()[0]}, b""
        signal.alarm(0)
        send(link, *reply)


def _answered(
    tokenizer: Any, request: dict[str, Any], content: bytes
) -> tuple[dict[str, Any], bytes]:
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
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        rows = [array.array("I", one.ids) for one in encoded]
    else:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        rows = [
            array.array("I", one.ids) + array.array("I", chain(*one.offsets)) for one in encoded
        ]
    return {"counts": [*map(len, rows)]}, b"".join(rows)


def _limit_memory(more: int) -> None:
    """Let this process take some memory more than it has; Linux only."""
    with suppress(OSError, ValueError):
        with open("/proc/self/status") as file:  # noqa: PTH123
            held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + LIMIT_BYTES + more, most))


def send(link: Any, header: dict[str, Any], content: bytes) -> None:
    """Send a message."""
    head = json.dumps(header).encode()
    link.write(SIZES.pack(len(head), len(content)) + head)
    link.write(content)
    link.flush()


def receive(link: Any) -> tuple[dict[str, Any], bytes] | None:
    """Return the next message; None at the end. Raises OSError if it is cut short."""
    sizes = link.read(SIZES.size)
    if len(sizes) < SIZES.size:
        return None
    head, content = (link.read(size) for size in SIZES.unpack(sizes))
    if len(sizes) + len(head) + len(content) < SIZES.size + sum(SIZES.unpack(sizes)):
        raise OSError("a message was cut short")
    return json.loads(head), content


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)
