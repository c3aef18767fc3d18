"""Nodes of any text of YAML 1.2, by ruamel.yaml; errors in plain English."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.reader import ReaderError

from instar.config.errors import odd_space
from instar.config.yaml_nodes.simple import LINE_BREAK, MAX_DEPTH


class NotYamlError(Exception):
    """A text that is no YAML: why, what to do, and where, from 0; without a line, the place is not known."""

    def __init__(self, message: str, hint: str = "", line: int | None = None, column: int = 0):
        super().__init__(message)
        self.message, self.hint, self.line, self.column = message, hint, line, column


def compose_any(text: str, max_values: int) -> Any:
    """Return the root node of a document; None if it is empty.

    Composing a MiB of values takes a minute: over `max_values`, it is refused.

    Raises:
        NotYamlError: it cannot be read.
    """

    class BoundedComposer(Composer):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            if self.nodes > max_values:
                message = f"more than {max_values:,} keys and values; this is not a config"
                raise ComposerError(None, None, message, self.parser.peek_event().start_mark)
            return super().compose_node(parent, index)

    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    yaml.Composer = BoundedComposer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            return yaml.compose(text)
    except MarkedYAMLError as error:
        raise _explained(error, LINE_BREAK.split(text)) from error
    except ReaderError as error:
        message = f"the character U+{int(error.character):04X} is not allowed in YAML"
        before = LINE_BREAK.split(text[: error.position])
        raise NotYamlError(message, line=len(before) - 1, column=len(before[-1])) from error
    except (YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise NotYamlError(str(error)) from error


# Report an unclosed quote or bracket at its beginning.
_UNCLOSED = (
    ("found unexpected end of stream", "this quote is never closed"),
    ("expected ',' or", "this bracket is not closed, or a ',' is missing in it"),
)
_NO_COLON = "could not find expected ':'"
_SAID = (
    *_UNCLOSED,
    ("found character '\\t'", "a tab is not allowed here; indent with spaces"),
    ("mapping values are not", "a ':' is not allowed here; indent wrong, or quotes missing?"),
    (_NO_COLON, "this line has no ':' after its key"),
    ("found undefined alias", "an alias (*name) whose anchor (&name) was never given"),
    ("found another document", "a second document begins here; one file is one config"),
    ("maximum depth of data", f"nested more than {MAX_DEPTH} levels deep"),
    ("expected <block end>", "this does not line up with the line above it"),
    ("found character '", "a value cannot begin with this character; put it in quotes"),
    ("expected the node content", "a value is missing before this"),
    ("unknown escape", "no such escape; text with backslashes goes in single quotes"),
)


def _explained(error: MarkedYAMLError, lines: Sequence[str]) -> NotYamlError:
    """Explain an error of the parser.

    A line that is not 'key: value' is often detected by the parser only on the next line.
    """
    text_of_error = f"{error.problem or error.context}"
    mark, hint = error.problem_mark or error.context_mark, ""
    if error.context_mark and any(
        pattern in text_of_error for pattern in (*dict(_UNCLOSED), _NO_COLON)
    ):
        mark = error.context_mark
    line, column = (mark.line, mark.column) if mark else (None, 0)
    if line is not None:
        if (
            "mapping values are not" in text_of_error
            and (before := _no_pair_before(line, lines)) is not None
        ):
            text_of_error, line = _NO_COLON, before
            column = len(lines[line]) - len(lines[line].lstrip())
        hint = _as_pair(lines[line]) if text_of_error == _NO_COLON else ""
    explanations = (explanation for pattern, explanation in _SAID if pattern in text_of_error)
    return NotYamlError(next(explanations, text_of_error), hint, line, column)


def _no_pair_before(line: int, lines: Sequence[str]) -> int | None:
    """Return the last non-empty line before this one, if it is neither 'key: value' nor an item, or
    has an unusual space character."""
    for number in range(line - 1, -1, -1):
        text = lines[number].strip(" \t")
        if text and not text.startswith("#"):
            is_mapping = re.search(r":(\s|$)", text, re.ASCII) or text.startswith("-")
            return None if is_mapping and not odd_space(text) else number
    return None


def _as_pair(line: str) -> str:
    """Suggest the 'key: value' that a line probably means."""
    if odd := odd_space(line):
        return f"{odd}; write ordinary ones"
    match = re.fullmatch(r"(\s*)([\w.-]+)\s*[:=]?\s*(.*?)\s*$", line.partition(" #")[0])
    return f"write '{match[2]}: {match[3]}".rstrip() + "'" if match else ""
