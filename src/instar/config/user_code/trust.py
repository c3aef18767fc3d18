"""Whose code a config names: other users' is refused, unless it is declared trusted.

A config may name code: a task, a source or a transform as `module:name`, a program to run for each
alert. Training runs that code, so if the config, its folder or the code belongs to another user of
the machine, it must be declared trusted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError, ConfigProblem, value_text

MAIN = "__main__"
TRUST_VARIABLE = "INSTAR_TRUST_CODE"
"""Set to 1 by `--trust-code`; ranks and data workers inherit it."""
FLAG = "--trust-code"

_CODE = ("task", "data.source", "data.transform")
"""Keys whose value may be `module:name`."""
_PROGRAM = "record.alerts.command"
_PLACES = (
    "record.alerts.webhook",
    "record.trackers.mlflow.uri",
    *(f"record.trackers.{name}.dir" for name in ("tensorboard", "wandb", "trackio")),
)
"""Keys whose value says where a run sends or writes what is not in its folder."""
_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_local(name: str) -> bool:
    """Return whether "module:name" is defined in a notebook or in the script that runs."""
    return name.startswith(f"{MAIN}:")


def code_names(document: Mapping[str, Any], keys: Sequence[str] = _CODE) -> Iterator[str]:
    """Yield what these keys of a nested config name as `module:name`."""
    for key in keys:
        value = _value(document, key)
        if isinstance(value, str) and _NAME.fullmatch(value):
            yield value


def is_trusted() -> bool:
    """Return whether the user has declared other users' code to be trusted."""
    return os.environ.get(TRUST_VARIABLE) == "1"


class Untrusted(ConfigError):  # noqa: N818
    """A config would run code that another user of this machine could have written."""


def check_trusted(path: str | None, documents: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless the code that a config names, and the places outside the run's folder that it is sent
    to, are the user's own, or declared trusted.

    Args:
        path: the config file.
        documents: the mapping in the file, and those of options that override it.

    Raises:
        Untrusted: another user owns the config, its folder or a module; names owner and file.
    """
    if is_trusted():
        return
    code_keys = {key: text for document in documents for key, text in _code_references(document)}
    problems = []
    for key, text in code_keys.items():
        files = [*_of_config(path), *([] if key == _PROGRAM else module_files(text))]
        foreign = next(((file, owner) for file in files if (owner := foreign_owner(file))), None)
        if foreign is not None:
            file, owner = foreign
            problems.append(
                ConfigProblem(
                    (key,),
                    f"{key} {value_text(text)} runs code, and {file} belongs to {owner}",
                    f"{FLAG} (or {TRUST_VARIABLE}=1) runs it as you",
                    place=path or f"--set {key}",
                )
            )
    for key in _PLACES if path is not None else ():
        at = next((n for n in range(len(documents))[::-1] if _has(documents[n], key)), None)
        owner = next(filter(None, map(foreign_owner, _of_config(path))), "")
        if at == 0 and _value(documents[0], key) and owner:
            problems.append(
                ConfigProblem(
                    (key,),
                    f"{key} says where the run is sent, and the config or its folder belongs to {owner}",
                    f"--set {key}=null leaves it out; {FLAG} (or {TRUST_VARIABLE}=1) uses it as you",
                    place=str(path),
                )
            )
    if problems:
        raise Untrusted(*problems)


def module_files(name: str) -> Iterator[Path]:
    """Yield the files that importing the module of "module:name" would run, and their folders.

    Nothing is imported. Files of this Python installation and missing files are left out, and so is the program that
    runs already.
    """
    if is_local(name):
        return
    folders = [Path.cwd(), *map(Path, sys.path)]
    for part in name.partition(":")[0].split("."):
        path = next((file for folder in folders if (file := _module_in(folder, part))), None)
        packages = [folder / part for folder in folders if (folder / part).is_dir()]
        if path is not None:
            packages = [path.parent] if path.parent.name == part else []
            yield from (file for file in (path, path.parent) if not _is_pythons(file))
        folders = packages
        yield from (folder for folder in folders if not _is_pythons(folder))


def _module_in(folder: Path, name: str) -> Path | None:
    """Return the file of a module or package in a folder."""
    files = [folder / name / "__init__.py", *(folder / f"{name}{end}" for end in all_suffixes())]
    return next((file for file in files if file.is_file()), None)


def _is_pythons(path: Path) -> bool:
    return any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _code_references(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a config that names code to run, and the code."""
    for key in _CODE:
        for name in code_names(document, (key,)):
            yield key, name
    program = _value(document, _PROGRAM)
    program = program[0] if isinstance(program, list) and program else program
    if isinstance(program, str) and program:
        yield _PROGRAM, program


def _value(document: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    value: Any = document
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _has(document: Mapping[str, Any], key: str) -> bool:
    """Return whether a mapping sets a dotted key, also by removing a section around it."""
    value: Any = document
    for name in key.split("."):
        if not isinstance(value, dict) or not value:
            return value is not document  # a section set to null or {}
        if name not in value:
            return False
        value = value[name]
    return True


def _of_config(path: str | None) -> Iterator[Path]:
    if path is not None:
        yield Path(path)
        yield Path(path).absolute().parent


def foreign_owner(path: Path) -> str:
    """Return who owns a file or folder, if that is neither this user nor root; else ""."""
    try:
        owner = path.stat().st_uid
        return "" if owner in (os.geteuid(), 0) else f"user {path.owner()}"
    except KeyError:  # a number without a name
        return f"user {owner}"
    except (OSError, ValueError):
        return ""
