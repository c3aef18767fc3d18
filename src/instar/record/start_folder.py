"""The folder that a run was started in, which its relative paths begin in, wherever it is resumed from.

`start.json` in the run's folder names it twice: as it was, and from the run's folder, for when both are beside_run.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from instar.config.errors import ConfigError, ConfigProblem, InstarError, SourceLocation
from instar.config.fields import values
from instar.config.files import read_regular
from instar.config.load import Loaded, load_config
from instar.config.origins import place_of
from instar.record.atomic import replace_file
from instar.record.rundir import RunDir

START_FILE = "start.json"
_PATHS = (
    *("data.path", "data.source", "data.val_source", "data.tokenizer", "data.chat_template"),
    *("data.val", "data.test", "schedule", "model.from", "model.adapter"),
)
_NO_PATHS = ("stdlib", "byte", "char", "bpe")
"""sources and tokenizers that are no files"""


class StartFolder(msgspec.Struct, frozen=True):
    """start.json: the folder, the same from the run's folder, and a `data.path` given since, if any."""

    folder: str
    relative: str
    data_path: str | None = None


def note_start(run: RunDir, folder: Path | None = None, before: StartFolder | None = None) -> None:
    """Record the folder in which a run's relative paths begin, the current one by default, unless one is
    recorded. A folder that cannot be written is left alone.

    Args:
        before: of the run that it goes on from, whose data are used too.
    """
    if not (run.path / START_FILE).exists():
        folder = (folder or Path()).absolute()
        data_path = before.data_path if before else None
        _write(run, StartFolder(str(folder), os.path.relpath(folder, run.path), data_path))


def note_branch(trunk: RunDir, branch: RunDir) -> None:
    """Record in the folder of a branch, which will lie beside its trunk's, where the trunk was started."""
    start = read_start(trunk)
    if start is not None:
        _write(branch, start)


def remember_data(run: RunDir, path: str) -> None:
    """Record where the run's data are now."""
    start = read_start(run) or StartFolder(str(Path.cwd()), os.path.relpath(Path.cwd(), run.path))
    _write(run, msgspec.structs.replace(start, data_path=str(Path(path).absolute())))


def read_start(run: RunDir) -> StartFolder | None:
    """Return what is recorded; None if nothing is, or nothing that can be read."""
    try:
        return msgspec.json.decode(read_regular(run.path / START_FILE), type=StartFolder)
    except (OSError, ValueError):
        return None


def paths_folder(run: RunDir, paths: Mapping[str, Any]) -> Path:
    """Return the folder in which the run's relative paths lead somewhere: where it was started, wherever
    that is now, or the current folder.

    Args:
        paths: values of the run's config by key.
    """
    current, start_folder = Path.cwd(), read_start(run)
    items = [*(paths.get("data.mixture") or ()), *(paths.get("eval.sets") or ())]
    texts = [*(paths.get(key) for key in _PATHS), *(item.get("source") for item in items)]
    marks = [*_relative(texts), *_modules(paths)]
    if start_folder is None or not marks:
        return current
    beside_run = Path(os.path.normpath(run.path.absolute() / start_folder.relative))
    recorded_folder = Path(start_folder.folder)

    def count(place: Path) -> int:
        return sum(_leads(place, mark) for mark in marks)

    # a copy of a project has files of its own, and never takes those of the original
    start = beside_run if count(beside_run) else recorded_folder
    return start if 0 < count(start) >= count(current) else current


def absolute(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return `--set` texts whose paths do not depend on the current folder."""
    texts = []
    for text in overrides:
        key, equals, value = text.partition("=")
        is_path = equals and key.strip() in _PATHS and _is_there(Path(value))
        texts.append(f"{key}={Path(value).absolute()}" if is_path else text)
    return tuple(texts)


def misplacements(loaded_config: Loaded) -> Iterator[ConfigProblem]:
    """Yield the paths of a config that lead nowhere from the current folder, where they begin, and somewhere
    from the folder of the file that they are written in, or from that where its run was started."""
    config_values = values(loaded_config.config)
    texts = {key: config_values.get(key) for key in _PATHS}
    for section in ("data.mixture", "eval.sets"):
        for number, item in enumerate(config_values.get(section) or ()):
            texts[f"{section}[{number}].source"] = item.get("source")
    for key, value in texts.items():
        for text in _relative([value]):
            place = place_of(loaded_config.places, key)
            if not isinstance(place, SourceLocation) or text in _NO_PATHS or _leads(Path(), text):
                continue
            file = Path(os.path.normpath(Path(place.source).absolute()))
            start = read_start(RunDir(file.parent))
            folders = [Path(start.folder)] if start else []
            for folder in (file.parent, *folders):
                if file.is_file() and _leads(folder, text):
                    message = f"{text} is in {folder}, and relative paths begin in {Path.cwd()}"
                    yield loaded_config.problem(key, message, "call the command there")
                    break


def explain_error(loaded_config: Loaded, error: ConfigError) -> ConfigError:
    """Return an error about the paths of a config, of which those that lead somewhere from another folder
    are told with it."""
    problems = {problem.key: problem for problem in misplacements(loaded_config)}
    return ConfigError(*(problems.get(problem.key, problem) for problem in error.problems))


def _leads(folder: Path, text: str) -> bool:
    """Return whether a path or a pattern leads somewhere from a folder."""
    if glob.has_magic(text) and not _is_there(folder / text):
        return any(glob.iglob(text, root_dir=folder, recursive=True))  # noqa: PTH207
    return _is_there(folder / text)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a schedule in JSON is too long for a path
        return False


def _relative(values: Iterable[Any]) -> list[str]:
    texts = (value for value in values if isinstance(value, str) and value)
    return [text for text in texts if not Path(text).is_absolute() and ":" not in text]


def _modules(paths: Mapping[str, Any]) -> list[str]:
    """Return the files of modules that the config names."""
    references = (paths.get(key) for key in ("task", "data.transform", "data.source"))
    names = [text.partition(":")[0] for text in references if isinstance(text, str) and ":" in text]
    return [f"{name.replace('.', '/')}.py" for name in names]


def _write(run: RunDir, start: StartFolder) -> None:
    with suppress(OSError):
        replace_file(run.path / START_FILE, msgspec.json.encode(start) + b"\n")


def begun_in(
    run: RunDir, overrides: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> tuple[RunDir, Path, tuple[str, ...]]:
    """Return a run, the folder in which its relative paths begin, and `--set` texts that hold there.

    A `data.path` that is given is remembered, and used by later starts if the run's own is gone.
    """
    run, overrides = RunDir(run.path.absolute()), absolute(overrides)
    try:
        config_values = values(load_config(str(run.config), checks=(), import_task=False).config)
    except InstarError:  # said when it is loaded again
        return run, Path.cwd(), overrides
    base, start, key = paths_folder(run, config_values), read_start(run), "data.path"
    paths = [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")]
    data_path = config_values.get(key)
    if paths and _is_there(Path(paths[-1])):
        remember_data(run, paths[-1])
    elif (
        start and start.data_path and isinstance(data_path, str) and not _is_there(base / data_path)
    ):
        say(f"{key}: {start.data_path}, as given before")
        overrides = (*overrides, f"{key}={start.data_path}")
    return run, base, overrides
