"""The basis of an evaluation: everything that its metrics depend on but the weights.

Two evaluations of a run can be compared only if their bases are equal. Best values, early stopping,
plateaus and triggers begin anew at the first evaluation on another basis, whatever has changed it: an
operation, a value that a resume sets, other data, or an edit of a custom task: of its module, and of what that
imports from its own folder. Nothing is run to look.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

import xxhash

from instar.config.fields import values
from instar.config.files import read_regular
from instar.config.schema import FeedConfig, RunConfig, SamplesConfig
from instar.config.user_code.definitions import definition_sources
from instar.config.user_code.trust import is_local, module_files
from instar.tasks.task import Task

Basis = Mapping[str, str]
"""What a metric depends on, by name."""

SAMPLES = "held-out samples"
_NUMBER = "evaluated samples"
_TOKENIZER = "tokenizer"
_CHOICE = "seed of their choice"
_SOURCE = "source of the task"
_UNTOLD = (SAMPLES, _TOKENIZER, _SOURCE)
_MOST_BYTES = 1 << 24


class HeldOut(Protocol):
    """What a basis tells of held-out samples, a `Source`; readers of bases need none."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


def basis_of(config: RunConfig, task: Task, source: HeldOut, limit: int | None = None) -> Basis:
    """Return the basis of an evaluation.

    Args:
        config: with everything that resumes have set.
        task: in its present shape.
        source: the held-out samples.
        limit: number of samples of a random subset; None: all.
    """
    total = len(source)
    is_subset = limit is not None and limit < total
    basis = {
        SAMPLES: source.fingerprint,
        "tokens per sample": f"{task.held_out_context:,}",
        _NUMBER: f"{limit if is_subset else total:,}",
        _CHOICE: f"{config.data_seed}" if is_subset else "",
        _TOKENIZER: task.spec.fingerprints.get("tokenizer", ""),
        "vocabulary": f"{task.architecture.sizes().get('vocab', 0):,}",
        _SOURCE: digest_of_sources(config.task),
    }
    return basis | {
        key: json.dumps(value) for key, value in _loss_keys(config, task.spec.loss_keys).items()
    }


def incomparable(before: Basis, after: Basis) -> tuple[str, ...]:
    """Return why evaluations on two bases cannot be compared; empty: they can.

    >>> incomparable({"vocabulary": "256"}, {"vocabulary": "300"})
    ('vocabulary 256 → 300',)
    """
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = tuple(
        f"{name} {before.get(name) or '-'} → {after.get(name) or '-'}"
        for name in names
        if name not in (*_UNTOLD, _CHOICE if len(names) > 1 else "")
    )
    if _SOURCE in names:
        changes = (*changes, "the source of the task has changed")
    if _TOKENIZER in names:
        return (*changes, "another tokenizer")
    # another length makes other samples of the same text
    return changes or tuple(f"other {name}" for name in names)


def without_seed(basis: Basis, *, with_folds: bool = False) -> Basis:
    """Return a basis without what a seed may decide: also a tokenizer, which may be trained on the samples that
    are not held out; `with_folds`: and without the number of samples, which differs by one between folds."""
    by_seed = (SAMPLES, _CHOICE, _TOKENIZER, *((_NUMBER,) if with_folds else ()))
    return {name: value for name, value in basis.items() if name not in by_seed}


def digest(basis: Basis) -> str:
    """Return a short text that is equal for equal bases; empty for an empty one."""
    content = json.dumps(dict(basis), sort_keys=True).encode()
    return xxhash.xxh3_64_hexdigest(content) if basis else ""


def _loss_keys(config: RunConfig, loss_keys: Collection[str]) -> Mapping[str, object]:
    """Return the config's values that may define the loss or a metric: any key that a custom task has
    of its own, and those that a task names. Other keys change the model, not what is measured."""
    every = values(config)
    if ":" not in config.task:
        return {key: every[key] for key in loss_keys}
    common = {f"data.{name}" for name in (*FeedConfig.model_fields, *SamplesConfig.model_fields)}
    task_keys = (key for key in every if key.startswith(("model.", "data.")))
    return {key: every[key] for key in task_keys if key not in common}


def digest_of_sources(task: str) -> str:
    """Return a hash of the files that define a task "module:name"; "" of tasks that are built in or installed.

    It is that of the first call in this process: later edits are not in what has been imported. What a notebook
    defines is as its cells were run last.
    """
    return _digest(definition_sources(task)) if is_local(task) else _imported(task, Path.cwd())


@cache
def _imported(task: str, place: Path) -> str:  # noqa: ARG001
    return _digest(task_files(task) if ":" in task else ())


def _digest(files: Collection[tuple[str, bytes]]) -> str:
    digest = xxhash.xxh3_64()
    for name, content in sorted(files):
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest() if files else ""


def task_files(task: str) -> tuple[tuple[str, bytes], ...]:
    """Return the files of a task by their names within its folder: its module, the packages around it, and what
    these import from there."""
    modules = [file for file in module_files(task) if file.is_file()]
    if not modules:
        return ()
    top = task.partition(":")[0].split(".")[0]
    first = modules[0].with_suffix("")
    root = next(p for p in first.parents if first.is_relative_to(p / top))
    contents: dict[Path, bytes] = {}
    while modules:
        file = modules.pop()
        if file in contents:
            continue
        try:
            contents[file] = read_regular(file, _MOST_BYTES, follow=True)
        except (OSError, ValueError):
            continue
        if file.suffix == ".py":
            modules += _imported_files(file, contents[file], root)
    return tuple((str(file.relative_to(root)), content) for file, content in contents.items())


def _imported_files(file: Path, content: bytes, root: Path) -> Iterator[Path]:
    """Yield the files below a folder that a module imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."), root)
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            names = node.module.split(".") if node.module else []
            for alias in node.names:  # each may be a module
                yield from _files(above, [*names, alias.name], root)


def _files(folder: Path, names: list[str], root: Path) -> Iterator[Path]:
    """Yield the files that are run when a module of a folder is imported; those that there are."""
    if not folder.is_relative_to(root):
        return
    for name in names:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file():
                yield file
        folder = folder / name
