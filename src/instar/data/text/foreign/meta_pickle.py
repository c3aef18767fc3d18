"""The characters of a vocabulary that nanoGPT's `prepare.py` pickled (`meta.pkl`).

Nothing of a pickle is run: its opcodes are read, those that make numbers, texts, lists, tuples and dictionaries are
followed, and all others are refused. These name modules, call functions and build objects.
"""

from __future__ import annotations

import pickletools
from typing import Any

MOST_BYTES = 4 << 20
"""of a file: an opcode is a byte, and makes an object of 64"""
_LITERALS = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_characters(content: bytes) -> str:
    """Return the characters of a vocabulary in the order of their ids, 0, 1, 2, ….

    Raises:
        ValueError: the file has other content; says which.
    """
    values = read_plain(content)
    id_of = values.get("stoi") if isinstance(values, dict) else None
    if not isinstance(id_of, dict) or not id_of:
        raise ValueError("it has no `stoi`, the ids of characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in id_of):
        raise ValueError("`stoi` has texts of other lengths than one character")
    if not all(type(number) is int for number in id_of.values()):
        raise ValueError("`stoi` has ids that are no whole numbers")
    if sorted(id_of.values()) != [*range(len(id_of))]:
        raise ValueError("the ids of `stoi` are not 0, 1, 2, …, each once")
    if (size := values.get("vocab_size", len(id_of))) != len(id_of):
        raise ValueError(f"`vocab_size` is {size!r}, and `stoi` has {len(id_of):,} characters")
    return "".join(sorted(id_of, key=id_of.__getitem__))


def read_plain(content: bytes) -> Any:
    """Return the value of a pickle that is made of plain values.

    Raises:
        ValueError: it is larger than `MOST_BYTES`, damaged, or has anything else.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, more than {MOST_BYTES:,}")
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name == "STOP":
                return stack.pop()
            if name in _LITERALS:
                stack.append(argument)
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif not _combine(name, stack, marks):
                raise ValueError(f"it has {_described(name, argument, stack)}, which is never run")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from None
    raise ValueError("it is damaged: it has no end")


def _combine(name: str, stack: list[Any], marks: list[int]) -> bool:
    """Carry out an opcode that makes or fills a container; return False of any other opcode."""
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        marks.append(len(stack))
    elif name in _TUPLES:
        stack.append(tuple(_taken(stack, len(stack) - _TUPLES[name])))
    elif name in ("TUPLE", "LIST"):
        items = _taken(stack, marks.pop())
        stack.append(items if name == "LIST" else tuple(items))
    elif name in ("APPEND", "APPENDS"):
        items = _taken(stack, len(stack) - 1 if name == "APPEND" else marks.pop())
        stack[-1].extend(items)
    elif name in ("DICT", "SETITEM", "SETITEMS"):
        items = _taken(stack, len(stack) - 2 if name == "SETITEM" else marks.pop())
        if name == "DICT":
            stack.append({})
        if not isinstance(stack[-1], dict):
            raise TypeError("items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # the hash of nested tuples would exhaust the stack of C
            if not isinstance(key, str | int | float):
                raise TypeError(f"a key is a {type(key).__name__}")
            stack[-1][key] = value
    elif name not in ("PROTO", "FRAME"):
        return False
    return True


def _taken(stack: list[Any], begin: int) -> list[Any]:
    """Remove what is on the stack from a place on, and return it."""
    if begin < 0:
        raise IndexError("there is less on the stack")
    items = stack[begin:]
    del stack[begin:]
    return items


def _described(name: str, argument: object, stack: list[Any]) -> str:
    """Return in words what an opcode would do."""
    if name in ("GLOBAL", "INST"):
        return f"the name {'.'.join(str(argument).split())[:80]}"
    if name == "STACK_GLOBAL" and len(stack) > 1:
        return f"the name {'.'.join(str(word) for word in stack[-2:])[:80]}"
    return f"the opcode {name}"
