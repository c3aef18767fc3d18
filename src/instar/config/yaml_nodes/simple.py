"""Nodes of texts that libyaml reads as YAML 1.2, in a tenth of the time that ruamel.yaml takes: configs that runs write.

libyaml knows YAML 1.1. What the two versions read in different ways, and whatever could nest without end, is not simple.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import yaml

MAX_DEPTH = 40

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")

_MOST_CHARACTERS = 1 << 15
"""bounds the number of values"""
_ODD_CHARACTER = re.compile("[\x00-\x09\x0b-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff]")
"""control characters, and what only YAML 1.1 takes for the end of a line"""
_QUOTED_OR_COMMENT = re.compile(r"\"[^\"\\\n]*\"|'[^'\n]*'|(?:^|(?<=[ \n]))#[^\n]*")
_ODD_SIGN = re.compile(r"[&*!%|>?@`\\\"']|- +-|^(?:---|\.\.\.)", re.MULTILINE)
"""aliases, tags, directives, blocks of text, several documents, quotes over several lines, lists in lists"""
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}

_TAG = "tag:yaml.org,2002:"
_WORDS = {
    **dict.fromkeys(("~", "null", "Null", "NULL"), "null"),
    **dict.fromkeys(("true", "True", "TRUE", "false", "False", "FALSE"), "bool"),
    "<<": "merge",
}
_FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9_]+(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_INT = re.compile(r"(?=[-+0-9])[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9_]+)")


class NotSimpleError(Exception):
    """A text for `full.compose_any`."""


def compose_simple(text: str) -> Any:
    """Return the root node of a document; None if it is empty. Raises NotSimpleError."""
    if not _is_simple(text):
        raise NotSimpleError
    parser = _Parser(text)
    try:
        return parser.get_single_node()
    except (yaml.YAMLError, ValueError) as error:
        raise NotSimpleError from error
    finally:
        parser.dispose()


def _is_simple(text: str) -> bool:
    if len(text) > _MOST_CHARACTERS or _ODD_CHARACTER.search(text):
        return False
    bare_text = _QUOTED_OR_COMMENT.sub("", text)
    if _ODD_SIGN.search(bare_text):
        return False
    indents = (len(line) - len(line.lstrip(" ")) for line in bare_text.split("\n"))
    brackets = accumulate(_BRACKETS[match[0]] for match in re.finditer(r"[\[\]{}]", text))
    return max(indents) + max(brackets, default=0) + 2 < MAX_DEPTH


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The latter is as slow as ruamel.yaml, where PyYAML was built without libyaml."""


class _Parser(_Loader):  # type: ignore[misc]
    """libyaml, with the types that YAML 1.2 gives plain words."""

    def resolve(self, kind: type, value: str, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return f"{_TAG}map" if kind is yaml.MappingNode else f"{_TAG}seq"
        if not implicit[0]:  # in quotes
            return f"{_TAG}str"
        if not value:
            raise NotSimpleError  # the place of nothing is another
        if word := _WORDS.get(value):
            return _TAG + word
        return _TAG + (
            "float" if _FLOAT.fullmatch(value) else "int" if _INT.fullmatch(value) else "str"
        )

    def descend_resolver(self, *_: object) -> None:
        pass

    def ascend_resolver(self) -> None:
        pass
