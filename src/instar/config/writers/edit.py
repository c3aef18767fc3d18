"""A config's text with other values: what people wrote into it, and their comments, stay."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from instar.config.document import merge_data, parse, parse_option
from instar.config.errors import ConfigError, printable_text
from instar.config.files import read_regular
from instar.config.origins import in_yaml

_WRITTEN = "# written by "
_MOST_BYTES = 1 << 20


def edited_config(text: str, settings: Sequence[str], author: str, remarks: Sequence[str]) -> str:
    """Return the text of a config with `--set` texts applied, which a file of its own then needs no more.

    Where the form of the text cannot be kept, its values are, without comments.

    Args:
        text: of the config's file; empty: there is none.
        author: of the changes, such as "instar find lr", by which `is_written_by` knows the file again.
        remarks: lines of comment at the top.

    Raises:
        ConfigError: the text or a setting cannot be read.
    """
    after, changes = _data(text), [_setting(option) for option in settings]
    for change in changes:
        after = merge_data(after, change)
    comments = [f"{_WRITTEN}{author}", *(f"# {printable_text(remark)}" for remark in remarks)]
    body = _edited(text, changes)
    if body is None or _data(body) != after:
        comments.append("# without the comments of the config that it was made of")
        body = "".join(f"{in_yaml(str(key))}: {in_yaml(value)}\n" for key, value in after.items())
    return "\n".join(comments) + "\n" + body


def is_written_by(path: Path, author: str) -> bool:
    """Return whether a file was written with `edited_config`, and so may be written again."""
    try:
        first = read_regular(path, _MOST_BYTES).decode("utf-8").partition("\n")[0]
    except (OSError, ValueError):
        return False
    return first == f"{_WRITTEN}{author}"


def check_replaceable(path: Path, author: str, option: str, *, has_folder: bool = True) -> None:
    """Raise ConfigError if a file is there that somebody else wrote, or there is no folder for it, which it has."""
    if path.exists() and not is_written_by(path, author):
        hint = f"move it, or choose another file with {option}"
        raise ConfigError.of("exists, and is not replaced", where=str(path), hint=hint)
    if has_folder and not path.parent.is_dir():
        raise ConfigError.of("no such folder", where=str(path.parent))


def _data(text: str) -> dict[str, Any]:
    document, problems = parse(text, "the config")
    if problems:
        raise ConfigError(*problems)
    return document.data if document is not None and isinstance(document.data, dict) else {}


def _setting(option: str) -> dict[str, Any]:
    document, problems = parse_option(option)
    if document is None or problems:
        raise ConfigError(*problems)
    data: dict[str, Any] = document.data
    return data


def _edited(text: str, changes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text with changes, which are nested data; None: its form cannot be kept."""
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 1 << 16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = yaml.load(text) if text.strip() else None
            tree = CommentedMap() if tree is None else tree
            for change in changes:
                for path, value in _leaves(change):
                    _write(tree, path, value)
            stream = io.StringIO()
            yaml.dump(tree, stream)
        except (YAMLError, ValueError, TypeError, AttributeError, RecursionError):
            return None
    return stream.getvalue()


def _leaves(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the path and the value of everything that is no mapping, or an empty one."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _write(tree: Any, path: Sequence[str], value: Any) -> None:
    """Set a value of a tree of ruamel's."""
    *above, name = path
    for key in above:
        if not isinstance(tree.get(key), CommentedMap):
            tree[key] = CommentedMap()
        tree = tree[key]
    if name not in tree or tree[name] != value:
        tree[name] = value
