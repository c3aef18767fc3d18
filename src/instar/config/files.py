"""Opening files in untrusted folders, creating folders durably, and addresses, which no path may be.

A run's folder may come from another user or from an archive. Its files are opened here, so that
none of them can block a reader (a FIFO), be endless (a device), or refer to another file (a link).

The name of a file or folder survives a power loss once its parent folder is synced.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from instar.config.errors import ConfigError, ConfigProblem, printable_text, redact_text

_SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_Text = TypeVar("_Text", bytes, str)
_NOT_FOLLOWED = "a symbolic link, which is not followed"
RUN_FOLDERS = ("checkpoints", "deltas", "logs", "control", "columns", "test", "profile", "media")
"""The folders in a run's, which hold nothing of anything else."""
_OF_FLEETS = ("configs", "control", "logs", "results", "slurm", "hosts")
_INSIDE = frozenset({*RUN_FOLDERS, *_OF_FLEETS})
_RUN_FILES = ("events.jsonl", "run.yaml")
_DEEPEST = 6
"""folders between a run's and a file of it, at most"""
MOST_NESTED = 200
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)
"""of JSON, and its texts, which may hold brackets"""
SMALL_BYTES = 1 << 26
"""Upper bound in bytes of files that are read as a whole: a manifest, a result, a tokenizer."""


def open_regular(path: Path | str, *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading.

    Args:
        follow: whether the path itself may be a symbolic link, and folders of a run on the way to it; other
            links among its parents are always followed.

    Raises:
        OSError: it is missing, unreadable, or not a regular file.
    """
    return os.fdopen(_open_file(path, os.O_RDONLY, follow), "rb")


def own_regular(path: Path | str, *, mode: int = 0o644, append: bool = False) -> int:
    """Open a regular file for reading and writing, created with `mode` if missing; return its
    descriptor. Its content is kept.

    Raises:
        OSError: it cannot be written, or it is a symbolic link, has a second hard link, or is not a
            regular file: writing would change something outside its folder.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0)
    descriptor = _open_file(path, flags, False, mode)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "another name for a file outside this folder", str(path))
    return descriptor


def read_regular(path: Path | str, most_bytes: int = SMALL_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: see `open_regular`; or it is larger than `most_bytes`.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content


class TooDeep(ValueError):  # noqa: N818
    """JSON that is nested deeper than anything that is meant; reading it ends in a RecursionError."""


def of_bounded_depth(text: _Text) -> _Text:
    """Return JSON text as it is, if it is nested at most `MOST_NESTED` deep.

    Raises:
        TooDeep: it is nested deeper.
    """
    raw = text.encode() if isinstance(text, str) else text
    if raw.count(b"[") + raw.count(b"{") <= MOST_NESTED:
        return text
    depth = 0
    for match in _BRACKETS.finditer(raw):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
        if depth > MOST_NESTED:
            raise TooDeep(f"nested more than {MOST_NESTED} levels deep")
    return text


def check_regular(path: Path | str, *, follow: bool = False) -> None:
    """Raise the OSError of `open_regular`, before a library opens the file by its name."""
    open_regular(path, follow=follow).close()


def check_inside(folder: Path, names: Iterable[str]) -> None:
    """Check that those of a folder's subfolders that exist are in it, before anything is written or
    deleted there. A symbolic link leads to what belongs to something else.

    Raises:
        OSError: one is a symbolic link, or no folder.
    """
    for name in names:
        with suppress(FileNotFoundError):
            kind = (folder / name).lstat().st_mode
            if stat.S_ISLNK(kind):
                raise OSError(errno.ELOOP, _NOT_FOLLOWED, str(folder / name))
            if not stat.S_ISDIR(kind):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder / name))


def open_inside(folder: Path) -> int:
    """Open a folder to create files in it, and return its descriptor.

    Raises:
        OSError: it is missing, a symbolic link, or no folder.
    """
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for new_folder in missing:
        sync_name(new_folder)


def sync_name(path: Path) -> None:
    """Sync the name of a file or folder to disk, if its parent folder can be opened.

    A writable folder need not be readable.
    """
    with suppress(PermissionError):
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_on_the_way(path: Path) -> Path | None:
    """Return the symbolic link, if any, among the folders from a folder of a run or a fleet to a file in it.
    Whoever wrote the run's folder may have planted it; the run's folder itself may be a link."""
    # by names first: a list of runs opens thousands of files, and to make a path costs more than to look at one
    names = path.parts[-2 : -2 - _DEEPEST : -1]
    depths = [
        depth
        for depth, name in enumerate(names)
        if name in _INSIDE and _is_of_run(path.parents[depth])
    ]
    above = (path.parents[depth] for depth in range(depths[-1] + 1)) if depths else ()
    return next((folder for folder in above if folder.is_symlink()), None)


def _is_of_run(folder: Path) -> bool:
    """Return whether a folder is one of those in a run's or a fleet's, of which its files tell."""
    name, parent = folder.name, folder.parent
    return (
        name == "checkpoints"
        or (name in RUN_FOLDERS and any((parent / run).exists() for run in _RUN_FILES))
        or (name in _OF_FLEETS and (parent / "fleet.json").exists())
    )


def _open_file(path: Path | str, flags: int, follow: bool, mode: int = 0o644) -> int:
    flags |= _SAFE | (0 if follow else os.O_NOFOLLOW)
    if not follow and (link := _link_on_the_way(Path(path))) is not None:
        raise OSError(errno.ELOOP, _NOT_FOLLOWED, str(link))
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, _NOT_FOLLOWED, str(path)) from error
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a FIFO without a reader
            raise OSError(error.errno, "not a regular file", str(path)) from error
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    with suppress(OSError):
        os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def cache_home(kind: str) -> Path | None:
    """Return the current user's cache folder of one kind; None if there is no usable one.

    It is in `$INSTAR_CACHE_DIR`, or else in `$XDG_CACHE_HOME/instar` or `~/.cache/instar`; only
    this user can enter it.
    """
    variable = os.environ.get("INSTAR_CACHE_DIR", "")
    above = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache_dir = Path(above) if Path(above).is_absolute() else Path.home() / ".cache"
        home = Path(variable) if variable else cache_dir / "instar"
        if not home.is_dir():  # cheaper than to make it: a list asks for every run
            home.mkdir(0o700, parents=True, exist_ok=True)
        status = home.lstat()  # a link could lead to another folder owned by this user
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        if status.st_mode & 0o077:
            home.chmod(0o700)
        folder = home / kind
        if not folder.is_dir():
            folder.mkdir(0o700, exist_ok=True)
    except (OSError, ValueError, RuntimeError):  # no home folder, or not writable
        return None
    return None if folder.is_symlink() else folder


# Addresses such as s3://bucket/folder, which no path may be: they would be taken for folders.

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WEB = ("record.alerts.", "record.trackers.", "record.sample_prompt", "model.config")
"""Keys of a config whose values may be addresses or texts."""
OPTIONS = frozenset({"--prompt", "--stop", "--message", "--tag", "--add", "--remove", "--set"})
"""Options of the command line that take texts."""
HINT = (
    "only files and folders of this machine are read and written; copy it here first, or mount it"
)


def is_address(text: object) -> bool:
    return isinstance(text, str) and _ADDRESS.match(text.strip()) is not None


def message_of(text: str) -> str:
    """Return the refusal of an address."""
    return f"{redact_text(printable_text(text))} is an address, not a path"


def check_path(text: str, what: str) -> None:
    """Raise ConfigError if a path is an address; `what` names what it is the path of."""
    if is_address(text):
        raise ConfigError(ConfigProblem((), message_of(text), HINT, what))


def addresses(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield every address within nested data, with its path."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from addresses(value, (*path, key))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from addresses(value, (*path, number))
    elif is_address(data):
        yield path, data


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError if an argument or an option's value on the command line is an address."""
    before = ""
    for word in words:
        if word == "--":
            return
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        if option not in OPTIONS:
            check_path(value, option if option.startswith("--") else "")
        before = word if word.startswith("--") and "=" not in word else ""
