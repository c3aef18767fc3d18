"""The page docs/config.md: every key of a config and of a fleet's file, from the classes that check them.

`python docs/sphinx/config_page.py` writes it anew; a test compares it with the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from tables import Row, escape, table

from instar.cli.config import short_type
from instar.config.document import KeyPath
from instar.config.fields import (
    ALLOWED,
    LANGUAGE,
    PlainConfig,
    Root,
    default,
    is_fixed,
    is_launch_only,
    known_tasks,
    root_of,
)
from instar.config.origins import in_yaml
from instar.config.suggestions import expected
from instar.extensions import built_in
from instar.extensions.fleet.spec import FleetSpec

PAGE = Path(__file__).parents[1] / "config.md"

_INTRODUCTION = """# Every key of a config

Generated from the schema. `instar config schema [SECTION]` prints the same in a terminal, `instar init gpt` writes a
file with every key explained, and `instar config show FILE --origin` says what is in force and where it comes from.
`train.clip` is the key `clip` of the section `train`; in `eval.sets[].name`, `[]` stands for each entry of a list, and
`NAME` for a name that you choose. The parts for text come first; of `task: module:class` (a task of your own) and the other
tasks, only what differs is listed.

*Resume* says what a new value does when a [run is resumed](checkpoints.md#resuming):

| | |
| --- | --- |
| `changes` | the new value applies from that step on, and is recorded in the run's history |
| `this start` | the value describes the process, not the run: it applies to this start only |
| `fixed` | a new value is refused, since what is saved depends on it |
| `fixed, --allow …` | the same, unless that option is given |
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join((_INTRODUCTION, *_run_keys(), *_fleet_keys()))


def _run_keys() -> Iterator[str]:
    """Yield the lines of all tasks, of each those that differ from the tasks before."""
    section_extensions = {
        name: extension.name for extension in built_in().values() for name in extension.sections
    }
    task_extensions = {
        name: extension.name for extension in built_in().values() for name in extension.tasks
    }
    previous_rows: set[Row] = set()
    roots = {LANGUAGE: root_of(LANGUAGE), "module:class": PlainConfig}
    roots |= {task: root_of(task) for task in known_tasks() if task != LANGUAGE}
    for task, root in roots.items():
        task_title = "" if task == LANGUAGE else f" of `task: {task}`"
        for path, section in _sections((), root):
            rows = [
                row for row in _rows(root, path, section, is_run=True) if row not in previous_rows
            ]
            previous_rows.update(rows)
            title = _code(_dotted_key(path)) if path else "Top level"
            extension = section_extensions.get(_dotted_key(path)) or task_extensions.get(task)
            remark = f" (extension {extension})" if extension else ""
            yield from _part(f"{title}{task_title}{remark}", _HEAD, rows)


def _fleet_keys() -> Iterator[str]:
    yield "## Files of fleets\n\nWhat `instar fleet up FILE` reads ([fleets](fleet.md), extension fleet).\n"
    for path, section in _sections((), FleetSpec):
        title = f"`{_dotted_key(path)}` of a fleet" if path else "Top level of a fleet"
        rows = [row[:4] for row in _rows(FleetSpec, path, section, is_run=False)]
        yield from _part(title, _HEAD[:4], rows)


_HEAD = ("key", "type", "default", "meaning", "resume")


def _part(title: str, head: Row, rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield f"## {title}\n"
        yield from table(head, rows)


def _rows(
    root: Root, path: KeyPath, section: type[BaseModel], *, is_run: bool
) -> Iterator[tuple[str, ...]]:
    """Yield key, type, default, meaning and what a resume does with it, of keys that hold a value."""
    for name, field in section.model_fields.items():
        key = _dotted_key((*path, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        value = "" if field.is_required() else _code(in_yaml(default(field)))
        kind = escape(short_type(expected(root, (*path, name))))
        yield (
            _code(key),
            kind,
            value,
            escape(field.description or ""),
            _at_resume(key) if is_run else "",
        )


def _at_resume(key: str) -> str:
    if is_launch_only(key):
        return "this start"
    if not is_fixed(key):
        return "changes"
    # the last name that allows it is the narrowest
    permissions = [name for name, keys in ALLOWED.items() if key.startswith(keys)]
    return f"fixed, `--allow {permissions[-1]}`" if permissions else "fixed"


def _sections(
    path: KeyPath, section: type[BaseModel], above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yield a section and all within it, entries of lists and mappings too, each not within itself."""
    if section not in above:
        yield path, section
        for name, field in section.model_fields.items():
            for steps, inner in _models(field.annotation):
                yield from _sections((*path, name, *steps), inner, (*above, section))


def _models(annotation: Any) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yield the sections that a value may be or hold, with the steps that lead to them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield (), annotation
    origin = get_origin(annotation)
    is_class = isinstance(origin, type)
    steps: KeyPath = ()
    if is_class and issubclass(origin, Mapping):
        steps = ("NAME",)
    elif is_class and issubclass(origin, Sequence):
        steps = (0,)
    for argument in get_args(annotation):
        yield from ((steps + inner, model) for inner, model in _models(argument))


def _code(text: str) -> str:
    return f"`{text}`"


def _dotted_key(path: KeyPath) -> str:
    text = "".join("[]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
