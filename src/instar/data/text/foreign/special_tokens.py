"""Special tokens of a tokenizer of transformers: what it adds to a text, and what its folder says of a text's end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import read_regular

TOKENIZER_CONFIG = "tokenizer_config.json"
END_FILE = "end_token.json"
"""what the files beside a tokenizer said, beside its copies in folders of data and runs"""
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_EOS_IDS = ("generation_config.json", "config.json")
"""files with `eos_token_id`, the first that has one decides"""
_TEXT = "A"
"""name of the text in a template of the tokenizers library"""


@dataclass(frozen=True)
class EndToken:
    """The end-of-document token that the files beside a tokenizer name."""

    token: str | None = None
    missing: str = ""
    """if there is none: what the files say, in words"""


def special_tokens(folder: Path, *, follow: bool) -> dict[str, str]:
    """Return the special tokens that a folder names, by key such as `eos_token`, as transformers reads them.

    Args:
        follow: whether files of the folder may be symbolic links, as in the cache of the hub.

    Raises:
        ConfigError: a file cannot be read.
    """
    config = read_json_file(folder / TOKENIZER_CONFIG, follow=follow)
    legacy: Mapping[str, Any] = {}
    if "added_tokens_decoder" not in config:
        legacy = read_json_file(folder / _SPECIAL_TOKENS_MAP, follow=follow)
    tokens = {}
    for key, token in {**config, **legacy}.items():
        text = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def end_token_of(
    folder: Path,
    vocabulary: Mapping[str, int],
    added_tokens: Iterable[str],
    *,
    follow: bool,
    is_kept: bool = True,
) -> EndToken:
    """Return the end-of-document token: the one that was read before, `eos_token` of the tokenizer's files, or
    else the token of the first `eos_token_id` of generation_config.json or config.json.

    Args:
        vocabulary: the ids of all tokens.
        added_tokens: the tokenizer's added tokens, of which an `eos_token_id` must be one: configs have defaults.
        is_kept: whether the folder may keep a token that was read before.

    Raises:
        ConfigError: a file cannot be read.
    """
    kept = read_json_file(folder / END_FILE, follow=follow) if is_kept else {}
    token = kept.get("eos_token")
    if not isinstance(token, str):
        token = special_tokens(folder, follow=follow).get("eos_token")
    if token is not None:
        if token in vocabulary:
            return EndToken(token)
        return EndToken(missing=f"the eos_token {token!r} beside it is not in its vocabulary")
    texts = {vocabulary[text]: text for text in added_tokens if text in vocabulary}
    for name in _EOS_IDS:
        ids = read_json_file(folder / name, follow=follow).get("eos_token_id")
        number = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(number, int):
            if number in texts:
                return EndToken(texts[number])
            missing = f"eos_token_id {number} of {name} is not among its added tokens"
            return EndToken(missing=missing)
    return EndToken(missing="no eos_token is named beside it")


def added_to_text(post_processor: object) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor of the tokenizers library puts before and after a text.

    Raises:
        ValueError: it does something else than that.
    """
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": list(parts)}:
            before: list[int] = []
            after: list[int] = []
            for part in parts:
                first, last = added_to_text(part)
                before, after = first + before, after + last
            return before, after
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            return _around_text(pieces, tokens)
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, first], "sep": [_, last]}:
            return [first], [last]
    raise ValueError("a post_processor of a kind that is unknown here")


def _around_text(pieces: list[Any], tokens: dict[str, Any]) -> tuple[list[int], list[int]]:
    sides: list[list[int]] = [[]]
    for piece in pieces:
        match piece:
            case {"Sequence": {"id": name}} if name == _TEXT and len(sides) == 1:
                sides.append([])
            case {"SpecialToken": {"id": name}} if isinstance(tokens.get(name), dict):
                sides[-1] += [int(number) for number in tokens[name]["ids"]]
            case _:
                raise ValueError("a post_processor that does not surround a text with tokens")
    if len(sides) != 2:
        raise ValueError("a post_processor that leaves the text out")
    return sides[0], sides[1]


def with_around(
    post_processor: object, before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, Any]:
    """Return a post-processor that puts tokens before and after a text, and does what else the given one does.

    Args:
        post_processor: of those that `added_to_text` knows.
        before: ids of tokens by name; so `after`.
    """
    single: list[dict[str, Any]] = [{"Sequence": {"id": _TEXT, "type_id": 0}}]
    pieces = (
        [{"SpecialToken": {"id": name, "type_id": 0}} for name in side] for side in (before, after)
    )
    first, last = pieces
    template = {
        "type": "TemplateProcessing",
        "single": [*first, *single, *last],
        "pair": [*first, *single, {"Sequence": {"id": "B", "type_id": 1}}, *last],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in {**before, **after}.items()
        },
    }
    kept = [part for part in _parts(post_processor) if part.get("type") == "ByteLevel"]
    return {"type": "Sequence", "processors": [*kept, template]} if kept else template


def _parts(post_processor: object) -> list[dict[str, Any]]:
    match post_processor:
        case {"type": "Sequence", "processors": list(parts)}:
            return [part for several in parts for part in _parts(several)]
        case dict():
            return [post_processor]
    return []


def read_json_file(path: Path, *, follow: bool) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no file. Raises ConfigError if it cannot be read."""
    try:
        content = json.loads(read_regular(path, follow=follow)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.of(f"cannot be read: {error}", where=str(path)) from None
    return content if isinstance(content, dict) else {}
