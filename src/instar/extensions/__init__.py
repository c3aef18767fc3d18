"""The seam between the core and its extensions: what each of them adds, as names of what is imported when it is used.

The core asks this module, and imports no extension. An extension of Instar is a package here whose
`EXTENSION` says what it adds; a deleted one is named with the command that installs it. A package of
somebody else names its own in an entry point of the group `instar.extensions`, and the entry point's name
is the one word that it owns: its command, and nothing of the package is imported before that word is used.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from instar.config.errors import ConfigError
from instar.config.files import cache_home, read_regular

GROUP = "instar.extensions"
"""The group of entry points of other packages' extensions."""
SETTLED_NS = 5 * 10**9
"""how long ago a folder of packages must have changed for what is in it to be remembered"""
_CACHE = "distributions.json"


class CommandSpec(NamedTuple):
    """A command or a group of commands of the command line."""

    target: str
    """`module:attribute` of a click command"""
    summary: str
    """what a list of commands says of it"""
    after: str = ""
    """the command that it is listed after; empty: at the end"""


class SectionSpec(NamedTuple):
    """A section of the config."""

    target: str
    """`module:attribute` of a class of `instar.config.sections.Section`"""
    description: str


class TaskNames(NamedTuple):
    """A task."""

    config: str
    """`module:attribute` of its config class, a `RunConfig`"""
    spec: str
    """`module:attribute` of its `TaskSpec`"""
    shape: str = ""
    """the class of its models' shapes, whose `from_dict` takes an architecture from a manifest"""


class MetricName(NamedTuple):
    """How a metric is called and written."""

    label: str
    is_bytes: bool = False
    layers: str = ""
    """title of the values by layer, metrics "name/group"; empty: there are none"""


class ForecastNote(NamedTuple):
    """What an extension says of a run's forecast."""

    text: str
    """lines below it; may be empty"""
    values: Mapping[str, Any]
    """added to it as JSON"""


# without methods that nobody calls: each is compiled at import, which `instar --help` waits for
@dataclass(frozen=True, eq=False, repr=False)
class Extension:
    """What an extension adds. Targets are `module:attribute`, imported when they are used."""

    name: str
    summary: str
    commands: Mapping[str, CommandSpec] = field(default_factory=dict)
    """by their words, such as "fleet", or "schedule pilot" in a group of the core"""
    programs: Mapping[str, str] = field(default_factory=dict)
    """click commands by the module that is typed after `python -m`"""
    sections: Mapping[str, SectionSpec] = field(default_factory=dict)
    """by their dotted names, such as "checkpoint.delta\""""
    tasks: Mapping[str, TaskNames] = field(default_factory=dict)
    """by what a config has as `task`"""
    conflicts: str = ""
    """a function from a config to the conflicts of its keys"""
    missing: str = ""
    """a function from a config to what this machine lacks for it"""
    hook: str = ""
    """opens what the extension does during a run, see `instar.run.output.extension`"""
    events: Mapping[str, str] = field(default_factory=dict)
    """classes of `instar.record.events.ExtensionEvent`, by kind"""
    metrics: Mapping[str, MetricName] = field(default_factory=dict)
    """names of what its events measure"""
    plots: Mapping[str, str] = field(default_factory=dict)
    """functions from records, a chart and its request to text, by a format of `instar logs plot`"""
    forecast: str = ""
    """a function from a forecast, the loaded config, its path and files by name to a `ForecastNote`"""
    at_end: str = ""
    """called on rank 0 with a run's folder and config when it has ended, however it did"""
    page: str = ""
    """a function from the dashboard's runs by key to a page of HTML, served as /extensions/NAME"""
    run_sets: Mapping[str, str] = field(default_factory=dict)
    """functions from a folder to its runs, each with its group, by the file that marks such a folder"""
    operations: Mapping[str, str] = field(default_factory=dict)
    """of growth, `instar.growth.operators.Operator`, by names that begin with the extension's and a dot"""
    starters: Mapping[str, Path] = field(default_factory=dict)
    """configs from which `instar init` makes one, by their kinds"""
    catalogs: Mapping[str, str] = field(default_factory=dict)
    """makers of what the dashboard shows besides runs, by the name of the part of its page"""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """functions that make a run of another tool's checkpoint, by the ending of its file"""


WordKind = Literal["commands", "programs", "sections", "plots", "tasks", "starters", "checkpoints"]


class Words(NamedTuple):
    """What the user types that belongs to an extension of Instar, also where its folder is deleted."""

    extra: str
    """of the distribution, for `pip install`"""
    words: Mapping[WordKind, Collection[str]]


BUILT_IN: Mapping[str, Words] = {
    "board": Words(
        "dashboard", {"commands": ("report", "dashboard", "logs report"), "plots": ("html",)}
    ),
    "delta": Words("delta", {"commands": ("delta",), "sections": ("checkpoint.delta",)}),
    "fleet": Words("fleet", {"commands": ("fleet",)}),
    "lab": Words("lab", {"commands": ("find", "doctor", "schedule pilot", "schedule search")}),
    "foreign": Words("foreign", {"commands": ("logs import",), "checkpoints": (".pt",)}),
    "graphs": Words("graph", {"tasks": ("graph",), "starters": ("graph",)}),
    "harness": Words("harness", {}),
    "grpo": Words("grpo", {"programs": ("instar.recipes.grpo", "instar.recipes.grpo.serve")}),
}
"""The extensions of Instar."""


@cache
def built_in() -> Mapping[str, Extension]:
    """Return the extensions of Instar that are not deleted."""
    extensions: dict[str, Extension] = {}
    for name in BUILT_IN:
        module = f"{__name__}.{name}"
        try:
            extensions[name] = importlib.import_module(module).EXTENSION
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    return extensions


def load_target(target: str) -> Any:
    """Import what a target names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _specs_of(kind: str) -> dict[str, Any]:
    """Return what the extensions of Instar add of a kind, a field of `Extension`, by its names."""
    return {
        name: spec
        for extension in built_in().values()
        for name, spec in getattr(extension, kind).items()
    }


def commands_in(group: str = "") -> Mapping[str, CommandSpec]:
    """Return the commands that extensions of Instar add to a group of the core, by name."""
    prefix = f"{group} " if group else ""
    return {
        words.removeprefix(prefix): command
        for words, command in _specs_of("commands").items()
        if words.startswith(prefix) and " " not in words.removeprefix(prefix)
    }


def extend_commands(
    table: Mapping[str, tuple[str, str]], group: str = ""
) -> dict[str, tuple[str, str]]:
    """Return a table of commands with those of extensions, each after the command that it names."""
    rows, names = dict(table), [*table]
    for name, command in commands_in(group).items():
        place = names.index(command.after) + 1 if command.after in names else len(names)
        names.insert(place, name)
        rows[name] = command.target, command.summary
    return {name: rows[name] for name in names}


def how_to_install(kind: WordKind, word: str) -> str:
    """Return the commands that install a deleted extension to which a word belongs; empty if none does."""
    for name, (extra, words) in BUILT_IN.items():
        if word in words.get(kind, ()) and name not in built_in():
            restore = (
                "pip install --force-reinstall --no-deps instar"  # pip does not miss deleted files
            )
            return f"{restore} && pip install 'instar[{extra}]'"
    return ""


def programs() -> Mapping[str, str]:
    """Return the targets of what is typed after `python -m`, by its module."""
    return _specs_of("programs")


def sections_in(section: str) -> Mapping[str, SectionSpec]:
    """Return the sections that extensions of Instar add to one of the config; "" is the top level."""
    return {
        name.rpartition(".")[2]: spec
        for name, spec in _specs_of("sections").items()
        if name.rpartition(".")[0] == section
    }


@cache
def tasks() -> Mapping[str, TaskNames]:
    """Return the tasks that extensions of Instar add."""
    return _specs_of("tasks")


def starters() -> dict[str, Path]:
    """Return the configs from which `instar init` makes those of extensions of Instar, by their kinds."""
    return _specs_of("starters")


def find_task(name: str) -> TaskNames | None:
    """Return the task of an extension, of other packages too; None if there is none of this name.

    Raises:
        ConfigError: the package cannot be imported.
    """
    extension = None if name in tasks() else third_party(name)
    return tasks().get(name) or (extension and extension.tasks.get(name)) or None


def active_extensions(names: Iterable[str]) -> Iterator[Extension]:
    """Yield the extensions that take part in a run: those of Instar, and of packages whose sections a
    config has."""
    yield from built_in().values()
    yield from filter(None, map(third_party, names))


@cache
def event_types() -> Mapping[str, Any]:
    """Return the classes of events that extensions of Instar record, by kind."""
    return {kind: load_target(target) for kind, target in _specs_of("events").items()}


def event_type(kind: str) -> Any:
    """Return the class of an event of another package, by its kind; None if there is none."""
    extension = third_party(kind)
    target = extension and extension.events.get(kind)
    return load_target(target) if target else None


@cache
def metric_names() -> Mapping[str, MetricName]:
    """Return how the metrics of Instar's extensions are called."""
    return _specs_of("metrics")


@cache
def layer_titles() -> Mapping[str, str]:
    """Return the titles of metrics by layer, by the beginning of their names."""
    return {f"{name}/": m.layers for name, m in metric_names().items() if m.layers}


def run_set(folder: Path) -> Any:
    """Return the function that tells a folder's runs with their groups; None if no extension made it."""
    targets = (
        target for marker, target in _specs_of("run_sets").items() if (folder / marker).exists()
    )
    target = next(targets, None)
    return target and load_target(target)


def forecast_notes(
    forecast: Any,
    loaded_config: Any,
    path: str | None,
    files: Mapping[str, Path | None] | None = None,
) -> list[ForecastNote]:
    """Return what extensions say of the forecast of a loaded config.

    Args:
        path: of the config.
        files: given for this by their names.
    """
    names = loaded_config.config.extension_names
    targets = [extension.forecast for extension in active_extensions(names) if extension.forecast]
    return [load_target(target)(forecast, loaded_config, path, files or {}) for target in targets]


def values_of_notes(notes: Iterable[ForecastNote]) -> dict[str, Any]:
    """Return what notes add to a forecast as JSON."""
    return {name: value for note in notes for name, value in note.values.items()}


def plot_in(form: str) -> Any:
    """Return the function that draws a chart in a format; None if no extension has it."""
    target = _specs_of("plots").get(form)
    return target and load_target(target)


def catalog(part: str) -> Any:
    """Return what makes a part of the dashboard's page; None if no extension has it."""
    target = _specs_of("catalogs").get(part)
    return target and load_target(target)


def checkpoint_importer(ending: str) -> Any:
    """Return the function that makes a run of a file with this ending; None if no extension has it."""
    target = _specs_of("checkpoints").get(ending)
    return target and load_target(target)


class EntryPoint(NamedTuple):
    """An extension of another package, of which nothing has been imported."""

    name: str
    target: str
    """`module:attribute` of an `Extension`"""
    distribution: str
    summary: str
    """of the distribution"""

    def __str__(self) -> str:
        return f"the extension {self.name} of {self.distribution or self.target}"


@cache
def entry_points() -> Mapping[str, EntryPoint]:
    """Return the extensions of installed packages, by the word that each owns; the first one counts.

    The files are read as they are: importing `importlib.metadata` would take longer than the rest of `--help`.
    """
    points: dict[str, EntryPoint] = {}
    for folder in _distributions():
        about = dict(
            re.findall(r"^(Name|Summary): (.*)$", _read(folder / "METADATA"), re.MULTILINE)
        )
        for name, target in _targets_in(folder):
            point = EntryPoint(name, target, about.get("Name", ""), about.get("Summary", ""))
            points.setdefault(name, point)
    return points


def _distributions() -> list[Path]:
    """Return what describes the installed distributions with extensions; the working directory installs none.

    A cache says which these are until something is installed in their folder: on a cluster's file system
    it takes a second to open some hundred small files, which every command would do.
    """
    home = cache_home("extensions")
    rows = _cached_rows(home)
    fresh_rows: dict[str, list[Any]] = {}
    distributions: list[Path] = []
    for folder in map(Path, filter(None, sys.path)):
        with suppress(OSError):
            if folder.samefile(Path()):
                continue
            changed_ns = folder.stat().st_mtime_ns
            row = rows.get(str(folder), [])
            if row[:1] != [changed_ns]:
                row = [changed_ns, *_with_extensions(folder)]
                # a distribution that is just being installed writes its files after its folder
                if time.time_ns() - changed_ns > SETTLED_NS:
                    fresh_rows[str(folder)] = row
            distributions += [folder / name for name in row[1:]]
    if home is not None and fresh_rows:
        existing = {folder: row for folder, row in rows.items() if Path(folder).is_dir()}
        with suppress(OSError):  # what another process reads half written is no cache
            (home / _CACHE).write_text(json.dumps(existing | fresh_rows))
    return distributions


def _cached_rows(home: Path | None) -> dict[str, list[Any]]:
    """Return by folder when it had changed, and names of distributions in it; what is no such row is left out."""
    try:
        rows = dict(json.loads(read_regular(home / _CACHE))) if home else {}
    except (OSError, ValueError, TypeError):
        return {}
    return {
        folder: row
        for folder, row in rows.items()
        if isinstance(row, list) and all(re.fullmatch(r"[\w.+!-]+", str(name)) for name in row)
    }


def _with_extensions(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.endswith(".dist-info"))
    return [name for name in names if _targets_in(folder / name)]


def _targets_in(distribution: Path) -> list[tuple[str, str]]:
    """Return names and targets of a distribution's entry points in the group."""
    text = _read(distribution / "entry_points.txt")
    lines = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+)[ \t]*=[ \t]*([\w.]+:\w+)", lines, re.MULTILINE)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_entry_points(core_words: Collection[str]) -> tuple[list[EntryPoint], list[str]]:
    """Return the extensions of other packages without importing them, and what is said of unusable ones.

    Args:
        core_words: words of the core that no package can replace.
    """
    points: list[EntryPoint] = []
    messages: list[str] = []
    for name, point in entry_points().items():
        if name in core_words or name in BUILT_IN:
            messages.append(f"{point} is ignored: the name is Instar's own")
        elif not _has_module(point.target.partition(":")[0].partition(".")[0]):
            messages.append(
                f"{point} is ignored: there is no module {point.target.partition(':')[0]}"
            )
        else:
            points.append(point)
    return points, messages


def _has_module(name: str) -> bool:
    from importlib.util import find_spec  # not for `instar --help` where no package adds anything

    return find_spec(name) is not None


@cache
def third_party(name: str) -> Extension | None:
    """Import another package's extension by the word that it owns; None if there is none.

    Raises:
        ConfigError: it cannot be imported, or adds what is not named after it.
    """
    point = entry_points().get(name)
    if point is None or name in BUILT_IN:
        return None
    try:
        extension = load_target(point.target)
    except Exception as error:
        message = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError.of(message, where=str(point)) from error
    if not isinstance(extension, Extension) or extension.name != name:
        raise ConfigError.of(f"{point.target} is no Extension named {name}", where=str(point))
    words_of = (
        *extension.commands,
        *extension.sections,
        *extension.events,
        *extension.tasks,
        *extension.operations,
    )
    if strange := [words for words in words_of if words.split()[0].split(".")[0] != name]:
        raise ConfigError.of(f"'{strange[0]}' does not begin with its name", where=str(point))
    return extension
