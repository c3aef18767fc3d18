"""From layers to a config: schema defaults, presets, a file and its schedule's, `--set` options.

All mistakes of all layers are found before anything is raised. Neither torch nor numpy is
imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from instar.config import explain, presets
from instar.config.checks import cross_checks
from instar.config.clash import Clash
from instar.config.document import KeyPath, Mistake, Place, Value, parse, show
from instar.config.dump import resolved
from instar.config.errors import ConfigError, Problem
from instar.config.fields import Root, keys, schema_node, sections
from instar.config.reading import Findings, read_document, read_file, read_option
from instar.config.roots import LANGUAGE, root_of
from instar.config.schema import RunConfig

PRESET = "preset "
SCHEDULE = "schedule"

Check = Callable[[RunConfig], Iterable[Clash]]


@dataclass(frozen=True)
class Entry:
    """A value as some layer gave it: `place` is its key's."""

    value: Value
    place: Place
    origin: str


Layer = dict[str, Entry]


@dataclass(frozen=True)
class Loaded:
    """A config, and for every dotted key its origin: "default", "preset fast", "grow.yaml:4:3" or
    "--set"; for each operation of the schedule too, as "schedule[0]"."""

    config: RunConfig
    origins: Mapping[str, str]
    entries: Mapping[str, Entry] = field(repr=False)

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """A problem that points at where `key` (also "train.until[0]") got its value."""
        place = _place(self.entries, key) or Place("default")
        return Mistake(place, message, hint, key).problem(_told(self.config.task))

    def to_yaml(self, *, origin: bool = True) -> str:
        """The resolved config, each value with its origin; `load` reads it back equal."""
        return resolved(self.config, self.origins if origin else {})


def load(
    path: str | None, overrides: Sequence[str] = (), checks: Sequence[Check] = (cross_checks,)
) -> Loaded:
    """Read a config file (None: none) under `--set` texts such as "model.n_head=8".

    Args:
        checks: find the keys that do not fit each other.

    Raises ConfigError with all the mistakes in all of them.
    """
    findings = Findings()
    document = None if path is None else read_file(path, findings)
    read = (read_option(text, findings) for text in overrides)
    options = [option for option in read if option is not None]
    root = _root([*([document] if document else []), *options], findings)
    from_file: Layer = {}
    if document is not None:
        _flatten(root, document, "", "", from_file, findings)
    from_options: Layer = {}
    for option in options:
        _flatten(root, option, "", "--set", from_options, findings)

    given = from_file | from_options
    layer: Layer = {}
    for name in _chosen_presets(root, given, findings):
        layer |= _preset_layer(root, name, findings)
    layer |= given
    _open_schedule(layer, findings)

    config = _validated(root, layer, findings)
    if path is None or document is not None:
        _compare((clash for check in checks for clash in check(config)), layer, findings)
    if findings.mistakes:
        raise findings.error()
    origins = {key: layer[key].origin if key in layer else "default" for key in keys(root)}
    return Loaded(config, origins | _operations(layer), layer)


def _root(documents: Sequence[Value], findings: Findings) -> Root:
    """The config of the task that the last of several mappings names."""
    named = [each.data["task"] for each in documents if "task" in each.data]
    if not named or not isinstance(named[-1][1].data, str):
        return root_of(LANGUAGE)
    value = named[-1][1]
    try:
        root, findings.task = root_of(value.data), _told(value.data)
        return root
    except ConfigError as error:
        for problem in error.problems:
            findings.note(value.place, problem.message, problem.hint, "task")
        findings.doubtful.update(("task", "model", "data", *_OF_METRICS))
        # its sections are not known, so nothing is said of what is in them
        return root_of(LANGUAGE)


_OF_METRICS = ("early_stopping.rules", "checkpoint.best_of", "learning_rate.plateau.metric")


def _told(task: str) -> str:
    """A task as `instar config schema` must be told of it; empty where it need not."""
    return "" if task == LANGUAGE else task


def _operations(layer: Layer) -> dict[str, str]:
    """Where each operation of the schedule stands."""
    places = [item.place for item in layer[SCHEDULE].value.data] if SCHEDULE in layer else []
    return {f"{SCHEDULE}[{n}]": str(place) for n, place in enumerate(places) if place.line}


def _open_schedule(layer: Layer, findings: Findings) -> None:
    """Put a schedule's file in the place of its path."""
    entry = layer.get(SCHEDULE)
    if entry is None or not isinstance(entry.value.data, str):
        return
    beside = Path(entry.place.source).parent / entry.value.data
    hint = f"did you mean '{beside}'?" if beside.is_file() else "it is read from where you are"
    document = read_document(entry.value.data, hint, findings, entry.value.place)
    if document is not None and not isinstance(document.data, tuple):
        message = f"a schedule is a list of operations, got {show(document.plain())}"
        config = isinstance(document.data, dict) and document.data.keys() & RunConfig.model_fields
        hint = "this is a config; " if config else ""
        findings.note(document.place, message, f"{hint}begin each with '- name:'")
        document = None
    if document is None or not document.readable():
        findings.doubtful.add(SCHEDULE)
        del layer[SCHEDULE]
    else:
        layer[SCHEDULE] = Entry(document, entry.place, entry.origin)


def _flatten(
    root: Root,
    value: Value,
    section: str,
    origin: str,
    layer: Layer,
    findings: Findings,
) -> None:
    """Put a section's values into the layer under dotted keys, an empty origin meaning the
    key's place; unknown keys become mistakes, what they stood for becomes doubtful."""
    for name, (place, inner) in value.data.items():
        key = f"{section}.{name}" if section else name
        if name not in sections(root)[section].model_fields:
            if section and section.partition(".")[0] in findings.doubtful:
                continue  # a section of a task that is not there
            hint, meant = explain.unknown_key(root, name, section)
            findings.doubtful.add(meant)
            message = f"unknown key '{name}'" + (f" in {section}" if section else "")
            findings.note(place, message, hint, key)
        elif key in keys(root) and inner.readable():
            layer[key] = Entry(inner, place, origin or str(place))
        elif key in sections(root) and isinstance(inner.data, dict):
            _flatten(root, inner, key, origin, layer, findings)
        elif key in keys(root) or inner.data is not None:
            findings.doubtful.update(
                each for each in keys(root) if f"{each}.".startswith(f"{key}.")
            )
            if inner.readable():
                message = f"{key} is a section of 'key: value' lines, got {show(inner.plain())}"
                hint = explain.no_section(root, key)
                findings.note(inner.place, message, hint, f"{key}.")


def _chosen_presets(root: Root, given: Layer, findings: Findings) -> list[str]:
    """The names of the presets asked for that there are; the others become mistakes, and
    `given` is rid of them."""
    if "preset" not in given:
        return []
    chosen = []
    for value in given["preset"].value.scalars():
        if value.data in presets.names():
            chosen.append(value.data)
        else:
            findings.doubtful.update(keys(root).keys() - given.keys())
            meant = explain.nearest(str(value.data), presets.names())
            hint = (
                f"did you mean '{meant}'?" if meant else f"there are {', '.join(presets.names())}"
            )
            message = f"there is no preset {show(value.data)}"
            findings.note(value.place, message, hint, "preset")
    if len(chosen) < len(list(given["preset"].value.scalars())):
        del given["preset"]
    return chosen


def _preset_layer(root: Root, name: str, findings: Findings) -> Layer:
    layer: Layer = {}
    document, found = parse(presets.text(name), f"{PRESET}{name}")
    findings.mistakes.extend(found)
    if document is not None:
        _flatten(root, document, "", f"{PRESET}{name}", layer, findings)
    return layer


def _validated(root: Root, layer: Layer, findings: Findings) -> RunConfig:
    """The config; where values are refused, the config without them, for further checks."""
    sound = dict(layer)
    for key, entry in layer.items():
        for path, value in entry.value.leaves():
            if isinstance(value.data, float) and not math.isfinite(value.data):
                name = explain.dotted((key, *path))
                findings.note(value.place, f"{name} must be a finite number", key=key)
                _refuse(sound, key, path, findings)
    try:
        return root.model_validate(_nested(root, sound))
    except ValidationError as error:
        told: set[KeyPath] = set()
        for item in error.errors(include_url=False):
            path = item["loc"]
            while (
                item["type"] != "extra_forbidden" and len(path) > 1 and not schema_node(root, path)
            ):
                path = path[:-1]
            key = next(name for name in _prefixes(path) if name in layer)
            inner = path[key.count(".") + 1 :]
            value = layer[key].value.within(inner)
            if path not in told:
                told.add(path)
                message, hint = explain.wrong_value(
                    root, path, value.plain(), item["type"], item["msg"]
                )
                unknown = item["type"] == "extra_forbidden"
                place = layer[key].value.key_place(inner) if unknown else value.place
                findings.note(place, message, hint, key)
            _refuse(sound, key, inner, findings)
    return root.model_validate(_nested(root, sound))


def _refuse(sound: Layer, key: str, path: KeyPath, findings: Findings) -> None:
    """Take a key out of what is sound; of the schedule only the operation that the path leads to,
    a nameless one keeping its place, so that the others are looked at further."""
    entry = sound.get(key)
    if entry is None:
        return
    if key == SCHEDULE and path:
        operations = list(entry.value.data)
        operations[int(path[0])] = Value(
            {"name": (entry.place, Value("", entry.place))}, entry.place
        )
        sound[key] = Entry(Value(tuple(operations), entry.value.place), entry.place, entry.origin)
        findings.doubtful.add(f"{key}[{path[0]}]")
    else:
        del sound[key]
        findings.doubtful.add(key)


def _compare(clashes: Iterable[Clash], layer: Layer, findings: Findings) -> None:
    """Note which keys do not fit each other, at the first of them that the user wrote."""
    for clash in clashes:
        if findings.doubtful.isdisjoint(clash.keys):
            places = [place for key in clash.keys if (place := _place(layer, key))]
            place = min(places, key=_is_preset, default=Place("default"))
            findings.note(place, clash.message, clash.hint, clash.keys[0])


def _prefixes(path: Sequence[str | int]) -> list[str]:
    return [".".join(map(str, path[:length])) for length in range(1, len(path) + 1)]


def _nested(root: Root, layer: Layer) -> dict[str, Any]:
    """Dotted keys as the nested dicts the schema reads; one text stands for a list of it."""
    tree: dict[str, Any] = {}
    for key, entry in layer.items():
        *outer, last = key.split(".")
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        data = entry.value.plain()
        lone = isinstance(data, str) and get_origin(keys(root)[key].annotation) is tuple
        inside[last] = [data] if lone else data
    return tree


def _place(entries: Mapping[str, Entry], key: str) -> Place | None:
    """Where the value of a key, or of something in it, was written; None: a default."""
    steps = re.findall(r"[^.\[\]]+", key)
    name = next((name for name in reversed(_prefixes(steps)) if name in entries), None)
    if name is None:
        return None
    entry = entries[name]
    if _is_preset(entry.place):
        return Place(entry.origin)
    inner = steps[name.count(".") + 1 :]
    return entry.value.within(tuple(int(i) if i.isdecimal() else i for i in inner)).place


def _is_preset(place: Place) -> bool:
    return place.source.startswith(PRESET)
