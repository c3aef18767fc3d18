"""What is wrong with text that is not readable as YAML: in plain English, and on which line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ruamel.yaml.error import MarkedYAMLError

MAX_DEPTH = 40

_SAID = (
    ("found character '\\t'", "a tab cannot stand here; indent with spaces"),
    ("mapping values are not", "a ':' cannot stand here; indent wrong, or quotes missing?"),
    ("could not find expected ':'", "this line has no ':' after its key"),
    ("found undefined alias", "an alias (*name) whose anchor (&name) was never given"),
    ("found another document", "a second document begins here; one file is one config"),
    ("maximum depth of data", f"nested more than {MAX_DEPTH} levels deep"),
    ("expected <block end>", "this does not line up with what stands above it"),
    ("found character '", "a value cannot begin with this character; put it in quotes"),
    ("expected the node content", "a value is missing before this"),
    ("unknown escape", "no such escape; text with backslashes goes in single quotes"),
)
# What was opened and never closed is pointed at where it was opened.
_UNCLOSED = (
    ("found unexpected end of stream", "this quote is never closed"),
    ("expected ',' or", "this bracket is not closed, or a ',' is missing in it"),
)
_NO_COLON = "could not find expected ':'"
_COLON = re.compile(r":(\s|$)", re.ASCII)
_ALMOST = re.compile(r"(\s*)([\w.-]+)\s*[:=]?\s*(.*?)\s*$")
_ODD_SPACE = re.compile(r"[^\S \t\r\n]")


class Fault(NamedTuple):
    """What is wrong, and where: line and column count from 0; None: nobody can say."""

    message: str
    hint: str
    line: int | None
    column: int


def fault(error: MarkedYAMLError, lines: Sequence[str]) -> Fault:
    """What a YAML error means; of a line that is no 'key: value', the parser often notices only on
    the next one."""
    said = f"{error.problem or error.context}"
    mark = error.problem_mark or error.context_mark
    if error.context_mark and any(theirs in said for theirs, _ in (*_UNCLOSED, (_NO_COLON, ""))):
        mark = error.context_mark
    if mark is None:
        return Fault(_plain(said), "", None, 0)
    line, column = mark.line, mark.column
    if "mapping values are not" in said and (before := _no_pair_before(line, lines)) is not None:
        said, line = _NO_COLON, before
        column = len(lines[line]) - len(lines[line].lstrip())
    hint = _as_pair(lines[line]) if said == _NO_COLON else ""
    return Fault(_plain(said), hint, line, column)


def odd_space(text: str) -> str:
    """In words, a space in it that YAML takes for a letter; empty if there is none."""
    found = _ODD_SPACE.search(text)
    return f"the space U+{ord(found[0]):04X} is a letter to YAML" if found else ""


def _plain(said: str) -> str:
    return next((plain for theirs, plain in (*_UNCLOSED, *_SAID) if theirs in said), said)


def _no_pair_before(line: int, lines: Sequence[str]) -> int | None:
    """The last line before this one that says anything, if it is no 'key: value' and no item, or
    has a space that is none."""
    for number in range(line - 1, -1, -1):
        text = lines[number].strip(" \t")
        if text and not text.startswith("#"):
            sound = _COLON.search(text) or text.startswith("-")
            return None if sound and not odd_space(text) else number
    return None


def _as_pair(line: str) -> str:
    """How a line that is no 'key: value' was probably meant."""
    if odd := odd_space(line):
        return f"{odd}; write ordinary ones"
    almost = _ALMOST.fullmatch(line.partition(" #")[0])
    return f"write '{almost[2]}: {almost[3]}".rstrip() + "'" if almost else ""
