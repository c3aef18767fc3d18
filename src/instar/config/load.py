"""From layers to a config: schema defaults, presets, a file, `--set` options.

All mistakes of all layers are found before anything is raised. Neither torch nor numpy is
imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from instar.config import explain, presets
from instar.config.checks import cross_checks
from instar.config.document import UNREADABLE, Mistake, Place, Value, parse, show
from instar.config.dump import resolved
from instar.config.errors import ConfigError, Problem
from instar.config.fields import keys, schema_node, sections
from instar.config.schema import RunConfig

MAX_BYTES = 1 << 20
PRESET = "preset "
START = "`instar init gpt` writes a config to start from"


@dataclass(frozen=True)
class Entry:
    """A value as some layer gave it: `place` is its key's."""

    value: Value
    place: Place
    origin: str


Layer = dict[str, Entry]


class Findings:
    """What is found wrong on the way, and the keys whose true value is therefore not known."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self.doubtful: set[str] = set()

    def note(self, place: Place, message: str, hint: str = "", key: str = "") -> None:
        self.mistakes.append(Mistake(place, message, hint, key))

    def error(self) -> ConfigError:
        """All of it, a file's mistakes in their order there, before those of options."""
        order = sorted(
            self.mistakes, key=lambda m: (not m.place.line, m.place.line, m.place.column)
        )
        return ConfigError(*(mistake.problem() for mistake in order))


@dataclass(frozen=True)
class Loaded:
    """A config, and for every dotted key its origin: "default", "preset fast",
    "grow.yaml:4:3" or "--set"."""

    config: RunConfig
    origins: Mapping[str, str]
    entries: Mapping[str, Entry] = field(repr=False)

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """A problem that points at where `key` (also "train.until[0]") got its value."""
        place = _place(self.entries, key) or Place("default")
        return Mistake(place, message, hint, key).problem()

    def to_yaml(self, *, origin: bool = True) -> str:
        """The resolved config, each value with its origin; `load` reads it back equal."""
        return resolved(self.config, self.origins if origin else {})


def load(path: str | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read a config file (None: none) under `--set` texts such as "model.n_head=8".

    Raises ConfigError with all the mistakes in all of them.
    """
    findings = Findings()
    document = None if path is None else _read_file(path, findings)
    from_file: Layer = {}
    if document is not None:
        _flatten(document, "", "", from_file, findings)
    from_options: Layer = {}
    for text in overrides:
        option = _read_option(text, findings)
        if option is not None:
            _flatten(option, "", "--set", from_options, findings)

    given = from_file | from_options
    layer: Layer = {}
    for name in _chosen_presets(given, findings):
        layer |= _preset_layer(name, findings)
    layer |= given

    config = _validated(layer, findings)
    if path is None or document is not None:
        _compare(config, layer, findings)
    if findings.mistakes:
        raise findings.error()
    origins = {key: layer[key].origin if key in layer else "default" for key in keys()}
    return Loaded(config, origins, layer)


def _read_file(path: str, findings: Findings) -> Value | None:
    """The mapping in a file; None after a mistake that leaves none."""
    text = _read_text(path, findings)
    if text is None:
        return None
    document, found = parse(text, path)
    findings.mistakes.extend(found)
    if document is None or document.data is None or document.data is UNREADABLE:
        if not found:
            findings.note(Place(path), "the file is empty", START)
        return None
    if not isinstance(document.data, dict):
        message = f"a config is made of 'key: value' lines, got {show(document.plain())}"
        findings.note(document.place, message)
        return None
    return document


def _read_text(path: str, findings: Findings) -> str | None:
    whole = Place(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) <= MAX_BYTES:
            return raw.decode("utf-8-sig")
        findings.note(whole, f"larger than {MAX_BYTES >> 20} MiB; this is no config")
    except FileNotFoundError:
        findings.note(whole, "no such file", _near_file(path))
    except IsADirectoryError:
        findings.note(whole, "is a folder, not a config file")
    except UnicodeDecodeError as error:
        lines = raw[: error.start].decode("utf-8").split("\n")
        place = Place(path, len(lines), len(lines[-1]) + 1, lines[-1] + "�")
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        findings.note(place, message, "save the file as UTF-8")
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        findings.note(whole, f"cannot be read: {said}")
    return None


def _near_file(path: str) -> str:
    folder = Path(path).parent
    there = [each.name for each in folder.glob("*.y*ml")] if folder.is_dir() else []
    if meant := explain.nearest(Path(path).name, there):
        return f"did you mean '{folder / meant}'?"
    return START


def _read_option(text: str, findings: Findings) -> Value | None:
    """`a.b=v` as the mapping {a: {b: v}}."""
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    place = Place(f"--set {shown}")
    key, equals, given = text.partition("=")
    key = key.strip()
    if not equals or not key:
        hint = "e.g. --set model.n_layer=6"
        findings.note(place, "--set expects key=value", hint)
        return None
    value, found = parse(given, place.source, numbered=False)
    findings.mistakes.extend(found)
    if value is None and found:
        return None
    value = value or Value(None, place)
    for name in reversed(key.split(".")):
        value = Value({name: (place, value)}, place)
    return value


def _flatten(
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
        if name not in sections()[section].model_fields:
            hint, meant = explain.unknown_key(name, section)
            findings.doubtful.add(meant)
            message = f"unknown key '{name}'" + (f" in {section}" if section else "")
            findings.note(place, message, hint, key)
        elif key in keys() and inner.readable():
            layer[key] = Entry(inner, place, origin or str(place))
        elif key in sections() and isinstance(inner.data, dict):
            _flatten(inner, key, origin, layer, findings)
        elif key in keys() or inner.data is not None:
            findings.doubtful.update(each for each in keys() if f"{each}.".startswith(f"{key}."))
            if inner.readable():
                message = f"{key} is a section of 'key: value' lines, got {show(inner.plain())}"
                hint = explain.no_section(key)
                findings.note(inner.place, message, hint, f"{key}.")


def _chosen_presets(given: Layer, findings: Findings) -> list[str]:
    """The names of the presets asked for that there are; the others become mistakes, and
    `given` is rid of them."""
    if "preset" not in given:
        return []
    chosen = []
    for value in given["preset"].value.scalars():
        if value.data in presets.names():
            chosen.append(value.data)
        else:
            findings.doubtful.update(keys().keys() - given.keys())
            meant = explain.nearest(str(value.data), presets.names())
            hint = (
                f"did you mean '{meant}'?" if meant else f"there are {', '.join(presets.names())}"
            )
            message = f"there is no preset {show(value.data)}"
            findings.note(value.place, message, hint, "preset")
    if len(chosen) < len(list(given["preset"].value.scalars())):
        del given["preset"]
    return chosen


def _preset_layer(name: str, findings: Findings) -> Layer:
    layer: Layer = {}
    document, found = parse(presets.text(name), f"{PRESET}{name}")
    findings.mistakes.extend(found)
    if document is not None:
        _flatten(document, "", f"{PRESET}{name}", layer, findings)
    return layer


def _validated(layer: Layer, findings: Findings) -> RunConfig:
    """The config; where values are refused, the config without them, for further checks."""
    sound = dict(layer)
    for key, entry in layer.items():
        for value in entry.value.scalars():
            if isinstance(value.data, float) and not math.isfinite(value.data):
                findings.note(value.place, f"{key} must be a finite number", key=key)
                sound.pop(key, None)
    try:
        return RunConfig.model_validate(_nested(sound))
    except ValidationError as error:
        told: set[tuple[str | int, ...]] = set()
        for item in error.errors(include_url=False):
            path = item["loc"]
            while item["type"] != "extra_forbidden" and len(path) > 1 and not schema_node(path):
                path = path[:-1]
            key = next(name for name in _prefixes(path) if name in layer)
            value = layer[key].value.within(path[key.count(".") + 1 :])
            if path not in told:
                told.add(path)
                message, hint = explain.wrong_value(path, value.plain(), item["type"], item["msg"])
                findings.note(value.place, message, hint, key)
            sound.pop(key, None)
    findings.doubtful.update(layer.keys() - sound.keys())
    return RunConfig.model_validate(_nested(sound))


def _compare(config: RunConfig, layer: Layer, findings: Findings) -> None:
    """Note which keys do not fit each other, at the first of them that the user wrote."""
    for clash in cross_checks(config):
        if findings.doubtful.isdisjoint(clash.keys):
            places = [place for key in clash.keys if (place := _place(layer, key))]
            place = min(places, key=_is_preset, default=Place("default"))
            findings.note(place, clash.message, clash.hint, clash.keys[0])


def _prefixes(path: tuple[str | int, ...]) -> list[str]:
    return [".".join(map(str, path[:length])) for length in range(1, len(path) + 1)]


def _nested(layer: Layer) -> dict[str, Any]:
    """Dotted keys as the nested dicts the schema reads; one text stands for a list of it."""
    tree: dict[str, Any] = {}
    for key, entry in layer.items():
        *outer, last = key.split(".")
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        data = entry.value.plain()
        lone = isinstance(data, str) and get_origin(keys()[key].annotation) is tuple
        inside[last] = [data] if lone else data
    return tree


def _place(entries: Mapping[str, Entry], key: str) -> Place | None:
    """Where the value of a key, or of one item of it, was written; None: a default."""
    name, *indices = re.split(r"\[(\d+)\]", key)
    if name not in entries:
        return None
    entry = entries[name]
    if _is_preset(entry.place):
        return Place(entry.origin)
    return entry.value.within(tuple(int(i) for i in indices if i)).place


def _is_preset(place: Place) -> bool:
    return place.source.startswith(PRESET)
