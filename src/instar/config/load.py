"""Config loading: schema defaults, presets, a file and its schedule's file, `--set` options.

Each layer is parsed once into plain data with positions; the layers are merged and validated once.
The problems of all layers are collected before anything is raised. Neither torch nor numpy is
imported. `Loaded.to_json` is the result as text, which a launcher passes to its ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from instar.config import CONFIG_VARIABLE, PRESETS, growing, names_in, suggestions
from instar.config.checks import cross_checks
from instar.config.document import (
    MAX_PROBLEMS,
    MOST_SHOWN,
    Document,
    KeyPath,
    dotted_key,
    parse,
    parse_option,
    problem_at,
    read_document,
)
from instar.config.errors import (
    ConfigError,
    ConfigProblem,
    SourceLocation,
    nearest_hint,
    value_text,
)
from instar.config.fields import (
    FORMER,
    LANGUAGE,
    choices,
    emptied_sections,
    flatten_config,
    is_section,
    nested,
    root_of,
    schema_keys,
    task_config_class,
    values,
    with_values,
)
from instar.config.files import HINT, WEB, addresses, message_of, read_regular
from instar.config.origins import (
    DEFAULT,
    PRESET,
    SCHEDULE,
    SET,
    WEIGHTS,
    ConfigEntry,
    config_text,
    operation_places,
    place_of,
    redacted_value,
    value_places,
    yaml_of,
)
from instar.config.schema import RunConfig
from instar.config.sections import FROM
from instar.config.user_code.trust import check_trusted

START = "`instar init gpt` writes a config to start from"

Root = type[RunConfig]
Check = Callable[[RunConfig], Iterable[ConfigProblem]]
Translation = Callable[[Sequence[Any]], tuple[list[Any], tuple[str, ...]]]
"""The entries of a schedule → as many in the schema's words, and what to say of it."""
Brought = tuple[Mapping[str, Any], str, Sequence[ConfigProblem]]
"""Values of dotted keys that come with weights, their origin, and conflicts with given values."""


@dataclass(frozen=True)
class Loaded:
    """A config with the origin of every dotted key: "default", "preset fast", "grow.yaml:4:3" or
    "--set"; also of each operation of the schedule, as "schedule[0]"."""

    config: RunConfig
    origins: Mapping[str, str]
    data: Mapping[str, Any] = field(repr=False)
    """The nested data of all layers, from which the config was made."""
    places: Mapping[str, SourceLocation] = field(repr=False)
    """The position of each given value; a list item's key is "train.until[0]"."""
    notes: tuple[str, ...] = ()
    """How a schedule of another form was read."""

    def problem(self, key: str, message: str, hint: str = "") -> ConfigProblem:
        """Return a problem at the origin of the value of `key` (also "train.until[0]")."""
        place = place_of(self.places, key) or SourceLocation(DEFAULT)
        return replace(problem_at(place, message, hint, key), task=_task_text(self.config.task))

    def to_yaml(self, *, origin: bool = True) -> str:
        """Return the resolved config with the origin of each value; `load` reads it back equal."""
        return config_text(self.config, self.origins if origin else {})

    def to_json(self) -> str:
        """Serialize to JSON text, for `loaded_from_json` in another process."""
        places = {key: [p.source, p.line, p.column, p.text] for key, p in self.places.items()}
        return json.dumps([self.config.task, self.data, dict(self.origins), places, self.notes])


def from_launcher() -> Loaded | None:
    """Return the config that the launcher of this process has loaded; None without a launcher.

    Child processes of this one do not inherit it.
    """
    path = os.environ.pop(CONFIG_VARIABLE, None)
    return None if path is None else loaded_from_json(read_regular(path).decode())


def loaded_from_json(text: str) -> Loaded:
    """Deserialize `Loaded.to_json`; nothing is read, merged or checked again."""
    task, values, origins, places, notes = json.loads(text)
    location_of = {key: SourceLocation(*place) for key, place in places.items()}
    config = task_config_class(task, values).model_validate(values)
    return Loaded(config, origins, values, location_of, tuple(notes))


def load_config(
    path: str | None,
    overrides: Sequence[str] = (),
    checks: Sequence[Check] = (cross_checks,),
    *,
    import_task: bool = True,
    weights: Callable[[Mapping[str, Any]], Brought] | None = None,
    translate: Translation | None = None,
) -> Loaded:
    """Load a config file (None: none) with `--set` texts such as "model.n_head=8" applied.

    A mapping is merged key by key over what is below it, `{}` gives a section its defaults over file
    and presets, and so does null in a `--set` text. In a file, a section without lines changes nothing.

    Args:
        checks: find keys that conflict with each other.
        import_task: whether to import the class that a task `module:class` names, which runs its
            code; False keeps its sections as plain data. Pass False to only read a run.
        weights: returns what comes with `model.from`, for the given values by dotted key; None: the
            config is only read, or its run has weights already.
        translate: reads schedules of other forms; None: none is translated.

    Raises:
        ConfigError: with all problems of all layers.
        Untrusted: the config names code to run, and it or that code belongs to another user.
    """
    findings = _Findings()
    file = None if path is None else _read_config(path, findings)
    options = [option for text in overrides if (option := findings.add(*parse_option(text)))]
    documents = [*([file] if file else []), *options]
    if import_task:
        check_trusted(path, [document.data for document in documents])
    root = _root(documents, findings, import_task=import_task)
    typed_entries, emptied_keys = _typed_entries(root, documents, options, findings)
    presets = _preset_entries(root, typed_entries, findings)
    layer = {p: e for p, e in presets.items() if not any(p[: len(up)] == up for up in emptied_keys)}
    layer |= typed_entries
    if checks:
        _refuse_addresses(layer, findings)
    conflicts: Sequence[ConfigProblem] = ()
    if weights is not None:
        conflicts = _add_brought(root, layer, typed_entries, weights, findings)
    schedule_is_open = _open_schedule(root, layer, findings)
    notes = () if translate is None else _translate_schedule(layer, translate)
    config = _validate_layer(root, layer, findings)
    if config is not None and (path is None or file is not None):
        config, refusals = _grown(root, config, layer, findings, schedule_is_open=schedule_is_open)
        problems = (problem for check in checks for problem in check(config))
        _compare((*conflicts, *refusals, *problems), value_places(layer), findings)
    if findings.problems or config is None:
        raise findings.error()
    origins = {key: _emptied_by(emptied_keys, key) for key in values(config)}
    origins |= {dotted_key(entry.path): entry.origin for entry in layer.values()}
    origins |= operation_places(layer)
    return Loaded(config, origins, _tree(root, layer), value_places(layer), notes)


def _add_brought(
    root: Root,
    layer: dict[KeyPath, ConfigEntry],
    typed_entries: Mapping[KeyPath, ConfigEntry],
    weights: Callable[[Mapping[str, Any]], Brought],
    findings: _Findings,
) -> Sequence[ConfigProblem]:
    """Add to `layer` what comes with `model.from` or a file `model.config`; return keys in conflict with it."""
    named_files = {("model", FROM), ("model", "config")} & typed_entries.keys() & layer.keys()
    if not named_files:
        return ()
    weight_values, origin, conflicts = weights(
        {dotted_key(path): entry.value for path, entry in typed_entries.items()}
    )
    weights_layer = findings.add(*parse(yaml_of(weight_values), origin))
    if weight_values and weights_layer:
        layer |= _entries(root, weights_layer, findings, origin)
    return conflicts


def _typed_entries(
    root: Root, documents: Sequence[Document], options: Sequence[Document], findings: _Findings
) -> tuple[dict[KeyPath, ConfigEntry], dict[KeyPath, str]]:
    """Return the entries of a file and of options, the last of a key; and the origins of the sections that
    were given their defaults."""
    all_entries: dict[KeyPath, ConfigEntry] = {}
    emptied_keys: dict[KeyPath, str] = {}
    for document in documents:
        origin = SET if document in options else ""
        entries = _entries(root, document, findings, origin)
        for section in emptied_sections(root, document.data, null=bool(origin)):
            emptied_keys[section] = origin or str(document.place(section, key=True))
            all_entries = {p: e for p, e in all_entries.items() if p[: len(section)] != section}
        all_entries |= {p: entry.over(all_entries.get(p)) for p, entry in entries.items()}
    return all_entries, emptied_keys


def _preset_entries(
    root: Root, typed_entries: dict[KeyPath, ConfigEntry], findings: _Findings
) -> dict[KeyPath, ConfigEntry]:
    """Return the entries of the chosen presets, of a later one over those of an earlier one."""
    layer: dict[KeyPath, ConfigEntry] = {}
    for name in _chosen_presets(root, typed_entries, findings):
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        preset = findings.add(*parse(text, f"{PRESET}{name}"))
        layer |= _entries(root, preset, findings, f"{PRESET}{name}") if preset else {}
    return layer


def _refuse_addresses(layer: dict[KeyPath, ConfigEntry], findings: _Findings) -> None:
    """Note values that are addresses where paths are meant, and remove them."""
    for path, entry in list(layer.items()):
        name = dotted_key(path)
        if name.startswith(WEB):
            continue
        for inner, text in addresses(entry.value):
            findings.note(entry.place(inner), f"{name}: {message_of(text)}", HINT, name)
            findings.doubtful.add(name)
            layer.pop(path, None)


class _Findings:
    """Problems found so far, and the keys whose values are unreliable because of them."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.doubtful: set[str] = set()
        self.files: list[str] = []
        """The files in the order in which they were read."""
        self.task = ""
        """The task of the keys, if not language."""

    def note(self, place: SourceLocation, message: str, hint: str = "", key: str = "") -> None:
        self.problems.append(problem_at(place, message, hint, key))

    def add(self, document: Document | None, problems: Iterable[ConfigProblem]) -> Document | None:
        """Add the problems of a document; return the document."""
        self.problems += problems
        return document

    def read(
        self, path: str, start: str, location: SourceLocation | None = None, within: KeyPath = ()
    ) -> Document | None:
        """Parse a file, see `document.read`; None after a problem that prevents it."""
        self.files.append(path)
        return self.add(*read_document(path, start, location, within))

    def mark_doubtful(self, root: Root, path: KeyPath) -> None:
        """Mark a key, or all keys of a section, as unreliable."""
        self.doubtful.add(name := dotted_key(path))
        if is_section(root, path):
            self.doubtful |= {key for key in schema_keys(root) if key.startswith(f"{name}.")}

    def error(self) -> ConfigError:
        """Return all problems by file and by position in it, before those of options."""
        # report a problem in an aliased value once, however often it is merged
        unique: dict[tuple[str, str], ConfigProblem] = {}
        for problem in self.problems:
            text = re.sub(r"\[\d+\]", "", problem.message) if problem.excerpt else problem.message
            unique.setdefault((problem.where, text), problem)
        problems = sorted(unique.values(), key=self._order)
        return ConfigError(*(replace(problem, task=self.task) for problem in problems))

    def _order(self, problem: ConfigProblem) -> tuple[bool, int, int, int]:
        place = problem.place
        assert isinstance(place, SourceLocation)
        file = self.files.index(place.source) if place.source in self.files else 0
        return not place.line, file, place.line, place.column


def _read_config(path: str, findings: _Findings) -> Document | None:
    """Return the mapping in a file; None after a problem that prevents it."""
    document = findings.read(path, f"write --set {path}" if "=" in path else START)
    if document is not None and not isinstance(document.data, dict):
        message = f"a config consists of 'key: value' lines, got {value_text(document.data)}"
        findings.note(document.place(), message)
        return None
    return document


def _root(documents: Sequence[Document], findings: _Findings, *, import_task: bool) -> Root:
    """Return the config class of the task named by the last mapping that has one."""
    naming = [document for document in documents if "task" in document.data]
    task = naming[-1].data["task"] if naming else None
    if not isinstance(task, str):
        task = LANGUAGE
    names = [str(key) for document in documents for key in document.data]
    try:
        root = task_config_class(task, names, plain=not import_task)
        findings.task = _task_text(task)
        return root
    except ConfigError as error:
        if not naming:
            raise  # a package whose section the config has
        for problem in error.problems:
            findings.note(naming[-1].place(("task",)), problem.message, problem.hint, "task")
        findings.doubtful.update(("task", "model", "data", *_OF_METRICS))
        return root_of(LANGUAGE)


_OF_METRICS = ("early_stopping.rules", "checkpoint.best_of", "learning_rate.plateau.metric")


def _task_text(task: str) -> str:
    """Return the `--task` argument for `instar config schema`; empty if it needs none."""
    return "" if task == LANGUAGE else task


def _entries(
    root: Root, document: Document, findings: _Findings, origin: str
) -> dict[KeyPath, ConfigEntry]:
    """Return a document's values by path; an empty origin means the position of the key."""
    entries: dict[KeyPath, ConfigEntry] = {}
    unreadable_paths = {bad[:n] for bad in document.unreadable for n in range(1, len(bad) + 1)}
    for path in document.unreadable:
        findings.mark_doubtful(root, path)
    for path, value in flatten_config(root, document.data):
        if path[0] in ("model", "data") and path[0] in findings.doubtful:
            continue  # sections of an unknown task
        if dotted_key(path) in FORMER:
            continue
        if path in unreadable_paths:
            findings.doubtful.add(dotted_key(path))
        elif not is_section(root, path):
            place = document.place(path, key=True)
            entries[path] = ConfigEntry(value, origin or str(place), document, path, path)
        elif value is not None:
            name = dotted_key(path)
            findings.mark_doubtful(root, path)
            text = value_text(redacted_value(name, value))
            message = f"{name} is a section of 'key: value' lines, got {text}"
            hint = suggestions.section_hint(root, name)
            findings.note(document.place(path), message, hint, f"{name}.")
    return entries


def _emptied_by(emptied_keys: Mapping[KeyPath, str], key: str) -> str:
    """Return the origin of a default: what has emptied the innermost section of its key, if any."""
    path = tuple(key.split("."))
    above = (emptied_keys.get(path[:length]) for length in range(len(path) - 1, 0, -1))
    return next((origin for origin in above if origin), DEFAULT)


def _chosen_presets(
    root: Root, entries: dict[KeyPath, ConfigEntry], findings: _Findings
) -> list[str]:
    """Return the names of the requested presets that exist; remove the others from `entries`."""
    entry = entries.get(("preset",))
    if entry is None:
        return []
    names = entry.value if isinstance(entry.value, list) else [entry.value]
    presets = names_in(PRESETS)
    for index, name in enumerate(names):
        if name not in presets:
            findings.doubtful |= schema_keys(root).keys() - {dotted_key(path) for path in entries}
            hint = nearest_hint(str(name), presets, f"there are {', '.join(presets)}")
            message = f"unknown preset {value_text(name)}"
            findings.note(entry.place((index,)), message, hint, "preset")
            entries.pop(("preset",), None)
    return [name for name in names if name in presets]


def _open_schedule(root: Root, layer: dict[KeyPath, ConfigEntry], findings: _Findings) -> bool:
    """Replace the path of a schedule's file by its content; return whether the file also names the shape
    that the run begins with, which replaces the config's."""
    entry = layer.get((SCHEDULE,))
    if entry is None or not isinstance(entry.value, str):
        return False
    location = entry.place()
    sibling = Path(location.source).parent / entry.value
    elsewhere = "the path is relative to the working directory"
    hint = f"did you mean '{sibling}'?" if sibling.is_file() else elsewhere
    document = findings.read(entry.value, hint, location, (SCHEDULE,))
    data = None if document is None else document.data
    inside: KeyPath = ()
    if isinstance(data, dict) and SCHEDULE in data and data.keys() <= {"model", SCHEDULE}:
        inside, data = (SCHEDULE,), data[SCHEDULE]
    if document is not None and not isinstance(data, list):
        message = f"a schedule is a list of operations, got {value_text(data)}"
        config = isinstance(document.data, dict) and document.data.keys() & RunConfig.model_fields
        hint = "this is a config; " if config else ""
        findings.note(document.place(inside), message, f"{hint}begin each with '- name:'")
        document = None
    if document is None or document.unreadable:
        findings.doubtful.add(SCHEDULE)
        del layer[SCHEDULE,]
        return False
    if inside:
        layer |= _entries(root, document, findings, "")
    layer[SCHEDULE,] = replace(entry, value=data, document=document, inside=inside)
    return bool(inside) and "model" in document.data


def _translate_schedule(
    layer: dict[KeyPath, ConfigEntry], translate: Translation
) -> tuple[str, ...]:
    """Translate the entries of the schedule, whose positions stay; return what to say of it."""
    entry = layer.get((SCHEDULE,))
    if entry is None or not isinstance(entry.value, list):
        return ()
    entries, notes = translate(entry.value)
    layer[SCHEDULE,] = replace(entry, value=entries)
    return notes


def _grown(
    root: Root,
    config: RunConfig,
    layer: dict[KeyPath, ConfigEntry],
    findings: _Findings,
    *,
    schedule_is_open: bool,
) -> tuple[RunConfig, Sequence[ConfigProblem]]:
    """Expand a preset that computes its values, in the layer too; or return what prevents it.

    An empty schedule of the config's own is the preset without growth.

    Args:
        schedule_is_open: whether the schedule's file names the first shape too, so there is nothing left to compute.
    """
    schedule_is_open = schedule_is_open and bool(growing.presets_in(config))
    conflicts = [] if schedule_is_open else list(growing.preset_conflicts(config))
    schedule = layer.get((SCHEDULE,))
    if conflicts or (schedule is not None and schedule.value == []):
        return config, conflicts
    if values_of := growing.left_out(config) if schedule_is_open else growing.expansion(config):
        origin = f"{PRESET}{growing.presets_in(config)[0]}"
        preset_document = findings.add(*parse(yaml_of(values_of), origin))
        assert preset_document is not None
        layer |= _entries(root, preset_document, findings, origin)
        config = with_values(config, values_of)
    return config, conflicts


def _tree(root: Root, layer: Mapping[KeyPath, ConfigEntry]) -> dict[str, Any]:
    """Return the nested data for the schema; one text is accepted for a list of it."""
    return nested(
        {
            path: [entry.value]
            if isinstance(entry.value, str)
            and (field := schema_keys(root).get(".".join(map(str, path))))
            and get_origin(field.annotation) is tuple
            else entry.value
            for path, entry in layer.items()
        }
    )


def _validate_layer(
    root: Root, layer: Mapping[KeyPath, ConfigEntry], findings: _Findings
) -> RunConfig | None:
    """Return the config; if values are invalid, the config without them, for further checks."""
    try:
        return root.model_validate(_tree(root, layer))
    except ValidationError as error:
        errors = error.errors(include_url=False)
    valid, bad_paths = dict(layer), set[KeyPath]()
    if len(errors) > MAX_PROBLEMS:
        findings.note(SourceLocation(findings.files[-1] if findings.files else SET), MOST_SHOWN)
    for item in errors[:MAX_PROBLEMS]:
        path, unknown = item["loc"], item["type"] == "extra_forbidden"
        while not unknown and len(path) > 1 and not choices(root, path):
            path = path[:-1]  # strip the branch of a union
        key = next((path[:n] for n in range(1, len(path) + 1) if path[:n] in layer), path[:1])
        around = (e for p, e in layer.items() if p[: len(path)] == path)
        entry = layer.get(key) or next(around, None)
        inner = path[len(key) :]
        if path not in bad_paths:
            bad_paths.add(path)
            place = entry.place(inner, key=unknown) if entry else SourceLocation(DEFAULT)
            if unknown:
                message, hint, suggestion = suggestions.unknown_key(root, path)
                findings.doubtful.add(suggestion)
            else:
                value = _within(layer[key].value, inner) if key in layer else item["input"]
                kind, reason = item["type"], item["msg"]
                message, hint = suggestions.wrong_value(root, path, value, kind, reason)
            findings.note(place, message, hint, dotted_key(key if key in layer else path))
        if key == (SCHEDULE,) and inner and key in valid:
            # replace an invalid operation by an empty one, so that the others are checked too
            operations = list(valid[key].value)
            operations[int(inner[0])] = {"name": ""}
            valid[key] = replace(valid[key], value=operations)
            findings.doubtful.add(f"{SCHEDULE}[{inner[0]}]")
        else:
            findings.doubtful.add(dotted_key(key))
            valid = {p: e for p, e in valid.items() if p[: len(key)] != key}
    try:
        return root.model_validate(_tree(root, valid))
    except ValidationError:  # e.g. a custom section with required keys
        return None


def _within(value: Any, path: KeyPath) -> Any:
    """Return the value at a path, or the innermost one that exists."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            break
    return value


def _compare(
    problems: Iterable[ConfigProblem], places: Mapping[str, SourceLocation], findings: _Findings
) -> None:
    """Record keys that conflict, at the first of them that the user wrote."""
    for problem in problems:
        if findings.doubtful.isdisjoint(problem.keys):
            places_of_keys = [place for key in problem.keys if (place := place_of(places, key))]
            generated = (PRESET, WEIGHTS)
            of_user = (p for p in places_of_keys if not p.source.startswith(generated))
            place = next(iter([*of_user, *places_of_keys]), SourceLocation(DEFAULT))
            findings.note(place, problem.message, problem.hint, problem.keys[0])
