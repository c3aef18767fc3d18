"""What a data set is made from: its parameters, its folder, and the files that were read."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.order import Int64Array
from instar.data.text.files import STDLIB, NoFiles, SourceFiles, find_files, same_place
from instar.data.text.foreign.chat_template import template_of
from instar.data.text.hf import local_files
from instar.data.text.shards import DATASET_FILE, TokenDataset, open_dataset
from instar.data.text.tokenizer import TOKENIZER_FILE, TRAINED, named_tokenizer
from instar.data.text.verify import changes, read_survey

_PATHS = ("source", "val_source", "tokenizer")
_DEFAULTS: dict[str, Any] = {
    "kind": "tokens",
    "val_source": None,
    "drop_duplicates": False,
    "chat_form": "messages",
    "chat_answers": "all",
}
"""What a record means that does not name these keys"""
_READ = ("source", "val_source")

Say = Callable[[str], None]
NOTE = "note: "
"""Begins what is said at every start about data that are prepared already."""


def default_path(data: DataConfig, seed: int, *, held_out: bool = False) -> str:
    """Return the folder of a config without data.path: the last that was prepared; see `next_path`.

    Args:
        held_out: the data are a held-out set; see `prepare_dataset`.
    """
    first = first_path(data, seed, held_out=held_out)
    return _numbered_path(first, _last_number(first))


def next_path(data: DataConfig, seed: int, *, held_out: bool = False) -> str:
    """Return the folder after `default_path`, for sources that have changed: `data/x.2` after `data/x`.

    Runs that began with the folders before still find them; those on a mixture only while it is the last.
    """
    first = first_path(data, seed, held_out=held_out)
    return _numbered_path(first, _last_number(first) + 1)


def _numbered_path(first: str, number: int) -> str:
    return first if number == 1 else f"{first}.{number}"


def _last_number(first: str) -> int:
    number = 1
    while Path(f"{first}.{number + 1}", DATASET_FILE).exists():
        number += 1
    return number


def first_path(data: DataConfig, seed: int, *, held_out: bool = False) -> str:
    """Return the folder of the first data set of these `parameters`; its name has a hash of them."""
    stem = Path(data.source).stem or Path(data.source).resolve().name
    names = [_plain(stem) or "text", _tokenizer_name(data.tokenizer)]
    names += [str(data.vocab_size)] * (data.tokenizer == "bpe")
    names += [str(data.max_bytes)] * (data.max_bytes is not None)
    identity = msgspec.json.encode(parameters(data, seed), order="sorted")
    folder = f"data/{'-'.join(names)}-{xxhash.xxh3_128_hexdigest(identity)[:8]}"
    return f"{folder}-held-out" if held_out else folder


def parameters(data: DataConfig, seed: int) -> dict[str, Any]:
    """Return all that determines a data set's content: fields of DataConfig, and the seed."""
    fields = {"source", "tokenizer", "max_bytes", "val_fraction", "test_fraction"}
    fields |= {"vocab_size"} if data.tokenizer == "bpe" else set()
    fields |= {"val_source"} if data.val_source is not None else set()
    fields |= {"drop_duplicates"} if data.drop_duplicates else set()
    if data.kind == "chat":
        fields |= {"kind", "chat_template"}
        fields |= {"chat_form"} if data.chat_form != "messages" else set()
        fields |= {"chat_answers"} if data.chat_answers != "all" else set()
    elif data.kind != "tokens":
        fields |= {"kind", "subset", "source_split"}
        fields |= {"text_field" if data.tokens_field is None else "tokens_field"}
    elif {data.source, data.val_source} - {None, STDLIB}:
        fields |= {"text_field"}
    return {"seed": seed} | {field: getattr(data, field) for field in sorted(fields)}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")


def _tokenizer_name(name: str) -> str:
    """Return a tokenizer's name for a path: the stem of its file, or its folder."""
    if name in TRAINED:
        return name
    path = Path(name).resolve()
    return _plain(path.parent.name if path.name == TOKENIZER_FILE else path.stem) or "file"


def made_from(data: DataConfig, seed: int, byte_counts: Int64Array) -> dict[str, Any]:
    """Return the source in a data set's record; `byte_counts` are the bytes taken, [documents]."""
    source = parameters(data, seed)
    source |= {"documents": int(np.count_nonzero(byte_counts)), "bytes": int(byte_counts.sum())}
    paths = {key: source[key] for key in _PATHS if source.get(key) not in (None, STDLIB, *TRAINED)}
    source["resolved"] = {key: os.path.realpath(path) for key, path in paths.items()}
    if STDLIB in (data.source, data.val_source):
        source["python"] = platform.python_version()
    if data.kind == "chat":
        source["template"] = _template(data)
    return source


def _template(data: DataConfig) -> str:
    """Return a hash of the chat template and the special tokens that it may name."""
    tokenizer = named_tokenizer(data.tokenizer)
    assert tokenizer is not None  # the tokenizer is a file
    template = template_of(data, tokenizer)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([template.text, template.special]))


def check_made_from(folder: Path, data: DataConfig, seed: int) -> TokenDataset:
    """Open the data set in a folder. Raises ConfigError if it was made from something else.

    The seed is not compared: a folder that is named in the config fixes the splits for any seed of
    the run. Paths are compared after they are resolved.
    """
    dataset = open_dataset(folder)
    recorded_source = _DEFAULTS | dict(dataset.source)
    settings = {key: getattr(data, key) for key in _DEFAULTS} | parameters(data, seed)
    lead_to: dict[str, str] = recorded_source.get("resolved", {})
    differing = []
    for key, setting in settings.items():
        recorded = recorded_source.get(key)
        # a path leads where it led, or, after a project was moved, where its words lead from here
        is_same_path = key in _PATHS and any(
            same_place(path, setting) for path in (lead_to.get(key, recorded), recorded)
        )
        # a file's content is compared below, whatever the tokenizer was made from
        is_file = key == "tokenizer" and _is_file(setting)
        if key != "seed" and recorded != setting and not is_same_path and not is_file:
            differing.append(key)
    if differing:
        differences = ", ".join(
            f"{key}={recorded_source.get(key)!r}, not {settings[key]!r}" for key in differing
        )
        raise ConfigError.at(
            "data.path",
            f"the data set {folder} was made otherwise: {differences}",
            "set these keys under data as it was made, or name another data.path",
        )
    if _is_file(data.tokenizer):
        tokenizer = named_tokenizer(data.tokenizer, data.bos, data.eos)
        if tokenizer is not None and tokenizer.fingerprint != dataset.tokenizer_fingerprint:
            raise ConfigError.at(
                "data.tokenizer",
                f"{data.tokenizer} is not the tokenizer that made the data set {folder}",
                "put back what it was, or name another data.path",
            )
    return dataset


def _is_file(tokenizer: object) -> bool:
    """Return whether `data.tokenizer` is an existing file or folder, not a kind to train."""
    return isinstance(tokenizer, str) and tokenizer not in TRAINED and Path(tokenizer).exists()


def is_made(folder: Path, data: DataConfig, seed: int) -> bool:
    """Return whether the folder holds the complete data set of the config.

    Raises ConfigError if the folder holds another data set, or something else.
    """
    if (folder / DATASET_FILE).exists():
        check_made_from(folder, data, seed)
        return True
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError.at(
            "data.path", f"{folder} already exists and is not a data set", "give another folder"
        )
    return False


@dataclass(frozen=True)
class SourceChanges:
    """How the sources of a data set differ from what was read, in words.

    `absent` are keys of sources that no longer exist, which is allowed.
    """

    sentences: tuple[str, ...]
    absent: tuple[str, ...]
    has_files: bool
    """whether the training data come from files that were recorded"""


def preparation_files(data: DataConfig) -> dict[str, SourceFiles]:
    """Return the files that are read to prepare a data set, by key; none of the standard library and
    of names on the hub.

    Raises:
        ConfigError: a source has no files.
    """
    files_of = ((key, _files(data, key)) for key in _READ)
    return {key: files for key, files in files_of if files is not None}


def source_changes(folder: Path, data: DataConfig) -> SourceChanges:
    """Compare the sources with what the data set in a folder was made from."""
    surveys, now = read_survey(folder), dict[str, SourceFiles]()
    for key in surveys:
        with suppress(NoFiles):
            files = _files(data, key)
            if files is not None:  # else it is neither a file nor a folder any more
                now[key] = files
    absent = [key for key in surveys if key not in now]
    sources = {key: str(getattr(data, key)) for key in _READ}
    sentences = changes(folder, surveys, now, sources)
    recorded_source = open_dataset(folder).source
    python = platform.python_version()
    if recorded_source.get("python", python) != python:
        sentences.append(
            f"the standard library is that of Python {python}, not of {recorded_source['python']} any more,"
        )
    if "template" in recorded_source:
        with suppress(ConfigError):  # the tokenizer's folder is gone
            if _template(data) != recorded_source["template"]:
                sentences.append("the chat template or its special tokens have changed")
    return SourceChanges(tuple(sentences), tuple(absent), "source" in surveys)


def _files(data: DataConfig, key: str) -> SourceFiles | None:
    source: str | None = getattr(data, key)
    if source in (None, STDLIB) or (key == "source" and data.read_from_start):
        return None
    assert source is not None
    is_text = data.kind in ("tokens", "chat") or (key == "val_source" and not data.tokens_field)
    return find_files(source, f"data.{key}") if is_text else local_files(source)
