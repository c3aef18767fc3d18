"""Loss of power, replayed: what a disk may hold after it, given what was asked of it before.

`recording` writes down, for one folder, everything that becomes of names and contents, whoever does
it: what passes through `os` is seen as it happens, what does not (a library that writes files by
itself) is noticed at the next thing that does. `crashes` then gives every state that may be found
when the power comes back after any number of these operations:

- content not yet synced may be there, be that of the last sync, be cut, or be zeros;
- names not yet synced with their folder may be there or not, each for itself: made, renamed and
  removed names are all or nothing, and keep their order only where they are about the same name.

That is less than any journaling file system promises, and as little as POSIX does.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from instar.record.atomic import DELETER

EXHAUSTIVE = 1 << 13
"""States of one moment up to which all are made; beyond, so many are drawn."""

Node = int
ROOT: Node = 0


@dataclass(frozen=True)
class Names:
    """Names of one folder change, all or none; None: the name is gone."""

    folder: Node
    changes: tuple[tuple[str, Node | None], ...]


@dataclass(frozen=True)
class Written:
    """A file's content is this from now on."""

    file: Node
    content: bytes


@dataclass(frozen=True)
class Synced:
    """The content of a file, or the names in a folder, are on the disk."""

    node: Node


@dataclass(frozen=True)
class Said:
    """Something was told to somebody: from now on it must be true."""

    word: int


Operation = Names | Written | Synced | Said
Tree = dict[str, bytes | None]
"""Relative path → content; None: a folder."""


class Recorder:
    """What happened in one folder; `say` adds what was acknowledged."""

    def __init__(self, base: Path) -> None:
        self.operations: list[Operation] = []
        self._base = base
        self._nodes: dict[str, Node] = {".": ROOT}
        self._contents: dict[Node, bytes] = {}
        self._next = itertools.count(1)
        self._turn = threading.RLock()
        self.notice()

    def say(self, word: int) -> None:
        with self._turn:
            self.notice()
            self.operations.append(Said(word))

    def in_turn(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, heard as a whole: threads that work side by side are heard in turn."""

        def when_it_is_its_turn(*arguments: Any, **options: Any) -> Any:
            with self._turn:
                return operation(*arguments, **options)

        return when_it_is_its_turn

    def notice(self) -> None:
        """Write down what happened since the last operation that was seen."""
        paths = set()
        for folder, folders, files in os.walk(self._base):
            for name in sorted(folders):
                paths.add(path := self._relative(Path(folder, name)))
                if path not in self._nodes:
                    self._name(path, next(self._next))
            for name in sorted(files):
                paths.add(path := self._relative(Path(folder, name)))
                new = path not in self._nodes
                node = next(self._next) if new else self._nodes[path]
                content = Path(folder, name).read_bytes()
                if self._contents.get(node) != content:
                    self._contents[node] = content
                    self.operations.append(Written(node, content))
                if new:  # after its content, so that it is known to be a file
                    self._name(path, node)
        unseen = self._nodes.keys() - paths - {"."}
        assert not unseen, f"removed by something that the recorder does not see: {unseen}"

    def make_folder(self, path: str) -> None:
        self._name(path, next(self._next))

    def rename_path(self, path: str, to: str) -> None:
        old, new = os.path.split(path), os.path.split(to)
        assert old[0] == new[0], "a rename from folder to folder is not replayed"
        for was in [key for key in self._nodes if key == path or key.startswith(f"{path}/")]:
            self._nodes[to + was[len(path) :]] = self._nodes.pop(was)
        changes = ((old[1], None), (new[1], self._nodes[to]))
        self.operations.append(Names(self._nodes[old[0] or "."], changes))

    def remove_path(self, path: str) -> None:
        del self._nodes[path]
        folder, name = os.path.split(path)
        self.operations.append(Names(self._nodes[folder or "."], ((name, None),)))

    def sync_path(self, descriptor: int) -> None:
        if (path := self.path_of(descriptor)) is not None:
            self.operations.append(Synced(self._nodes[path]))

    def path_of(self, descriptor: int) -> str | None:
        """Which of the paths is open, or None if it is another."""
        return next(
            (path for path in self._nodes if _same(self._base / path, descriptor)),
            None,
        )

    def inside(self, path: Any, folder: int | None) -> str | None:
        """A path relative to the base, or None where it is not in it."""
        if folder is not None:
            parent = self.path_of(folder)
            return None if parent is None else str(Path(parent, path))
        full_path = Path.cwd() / path
        return self._relative(full_path) if full_path.is_relative_to(self._base) else None

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._base))

    def _name(self, path: str, node: Node) -> None:
        self._nodes[path] = node
        folder, name = os.path.split(path)
        self.operations.append(Names(self._nodes[folder or "."], ((name, node),)))


@contextmanager
def recording(base: Path) -> Iterator[Recorder]:
    """Record what becomes of `base`, whose content so far is on the disk."""
    recorder = Recorder(base.resolve())
    syncs = [Synced(node) for node in range(_count(recorder.operations) + 1)]
    recorder.operations += syncs
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in _recording_functions(recorder).items():
            patch.setattr(os, name, recorder.in_turn(replacement))
        yield recorder
        for thread in threading.enumerate():
            if thread.name == DELETER:
                thread.join()
    recorder.notice()


def _recording_functions(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    real = {name: getattr(os, name) for name in ("fsync", "mkdir", "rename", "unlink", "rmdir")}

    def fsync(descriptor: int) -> None:
        recorder.notice()
        real["fsync"](descriptor)
        recorder.sync_path(descriptor)

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        recorder.notice()
        real["mkdir"](path, mode, dir_fd=dir_fd)
        if (inside := recorder.inside(path, dir_fd)) is not None:
            recorder.make_folder(inside)

    def rename(path: Any, to: Any) -> None:
        recorder.notice()
        real["rename"](path, to)
        inside = recorder.inside(path, None), recorder.inside(to, None)
        if inside[0] is not None and inside[1] is not None:
            recorder.rename_path(inside[0], inside[1])

    def remove(path: Any, *, dir_fd: int | None = None, how: str) -> None:
        recorder.notice()
        inside = recorder.inside(path, dir_fd)
        real[how](path, dir_fd=dir_fd)
        if inside is not None:
            recorder.remove_path(inside)

    def unknown(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the recorder cannot replay this operation")

    return {
        "fsync": fsync,
        "fdatasync": unknown,
        "mkdir": mkdir,
        "rename": rename,
        "replace": rename,
        "unlink": partial(remove, how="unlink"),
        "remove": partial(remove, how="unlink"),
        "rmdir": partial(remove, how="rmdir"),
        "link": unknown,
        "symlink": unknown,
    }


@dataclass(frozen=True)
class Crash:
    """A state in which a disk may be found, and the last thing that had been said before."""

    at: int
    last_word: int | None
    tree: Tree


def crashes(
    operations: Sequence[Operation], chance: random.Random, exhaustive: int = EXHAUSTIVE
) -> Iterator[Crash]:
    """Every legal state after every number of `operations`, each state once for what was said.

    A crash point with more than `exhaustive` states is drawn from as often.
    """
    disk = _Disk()
    last_word: int | None = None
    states: set[object] = set()
    for at, operation in enumerate(operations, 1):
        disk.do(operation)
        if isinstance(operation, Said):
            last_word = operation.word
        for tree in disk.after_power_loss(chance, exhaustive):
            state = last_word, frozenset(tree.items())
            if state not in states:
                states.add(state)
                yield Crash(at, last_word, tree)


def lay_out(tree: Tree, base: Path) -> None:
    """Make a state real in an empty folder."""
    for path, content in sorted(tree.items()):
        if content is None:
            (base / path).mkdir(parents=True)
        else:
            (base / path).write_bytes(content)


class _Disk:
    """What is on the disk for good, and what only may be."""

    def __init__(self) -> None:
        self._names: dict[Node, dict[str, Node]] = {ROOT: {}}
        self._unsure_names: list[Names] = []
        self._contents: dict[Node, bytes] = {}
        self._unsure_contents: dict[Node, list[bytes]] = {}

    def do(self, operation: Operation) -> None:
        match operation:
            case Names():
                self._unsure_names.append(operation)
            case Written(file, content):
                self._unsure_contents.setdefault(file, []).append(content)
            case Synced(node):
                for names in [names for names in self._unsure_names if names.folder == node]:
                    _apply(self._names, names)
                    self._unsure_names.remove(names)
                if node in self._unsure_contents:
                    self._contents[node] = self._unsure_contents.pop(node)[-1]

    def after_power_loss(self, chance: random.Random, exhaustive: int) -> Iterator[Tree]:
        """All that may be found, if that is not too much, else as many draws."""
        name_choices = [(False, True)] * len(self._unsure_names)
        files = list(self._unsure_contents)
        contents = [_remains(self._contents.get(f, b""), self._unsure_contents[f]) for f in files]
        total = 1
        for choices in (*name_choices, *contents):
            total *= len(choices)
        draws: Iterator[Sequence[Any]] = (
            itertools.product(*name_choices, *contents)
            if total <= exhaustive
            else ([chance.choice(c) for c in (*name_choices, *contents)] for _ in range(exhaustive))
        )
        for choice in draws:
            names = {folder: dict(entries) for folder, entries in self._names.items()}
            for unsure, is_kept in zip(self._unsure_names, choice, strict=False):
                if is_kept:
                    _apply(names, unsure)
            file_contents = self._contents | dict(
                zip(files, choice[len(name_choices) :], strict=True)
            )
            yield _tree(names, file_contents, ROOT, "")


def _apply(names: dict[Node, dict[str, Node]], change: Names) -> None:
    folder = names.setdefault(change.folder, {})
    for name, node in change.changes:
        if node is None:
            folder.pop(name, None)
        else:
            folder[name] = node


def _remains(before: bytes, contents: Sequence[bytes]) -> list[bytes]:
    """What an unsynced file may hold: old or new, all, cut, or with pages that never came."""
    remains = [before, b""]
    for content in contents:
        half = len(content) // 2
        zeros = bytes(len(content))
        remains += [content, content[:half], zeros, content[:half] + zeros[half:]]
    return list(dict.fromkeys(remains))


def _tree(
    names: dict[Node, dict[str, Node]], contents: dict[Node, bytes], folder: Node, path: str
) -> Tree:
    """What can be reached from the folder; a node without content is a folder."""
    tree: Tree = {}
    for name, node in names.get(folder, {}).items():
        below = f"{path}{name}"
        if node in contents:
            tree[below] = contents[node]
        else:
            tree[below] = None
            tree |= _tree(names, contents, node, f"{below}/")
    return tree


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _count(operations: Sequence[Operation]) -> int:
    return sum(isinstance(operation, Names) for operation in operations)
