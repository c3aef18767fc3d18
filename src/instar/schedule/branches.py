"""Branches of a schedule: copies of a run that go on beside it, each to an end of its own.

The trunk is the run whose schedule has the entries; a branch begins with the trunk's state after a step.
Its history is the trunk's, then an override with its part of the config, then `BRANCHED`, which says
where it comes from and when its learning rate falls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from instar.config.errors import nearest_hint, value_text
from instar.config.fields import is_fixed, is_launch_only, values, with_values
from instar.config.schema import RunConfig
from instar.config.sections import LARGEST, Operation
from instar.config.suggestions import wrong_value

BRANCH = "branch"
"""The operation of the trunk, which changes nothing in it."""

BRANCHED = "branched"
"""The operation that a branch begins with."""

END, OPERATIONS = "train.until", "schedule"
"""Keys of the config that every branch has its own values of."""

_OPTIONS = ("iters", "decay", "set", "train", OPERATIONS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Finding = tuple[str, str, str]
"""The key within the entry ("" for all of it), the rest of the message, and a hint."""


@dataclass(frozen=True)
class Branch:
    """A branch as an entry of a schedule gives it."""

    name: str
    iters: int
    """Steps after the trunk's."""
    decay: int
    """The last steps, in which the learning rate falls; 0: it does not."""
    overrides: Mapping[str, Any]
    """Other keys of the config."""
    schedule: Sequence[Mapping[str, Any]]
    """Its own schedule."""
    train: bool = True
    """Whether the trunk's command trains it, too; otherwise only one that names it does."""

    def changes(self, step: int) -> dict[str, Any]:
        """Return the keys of the config that a branch at `step` changes, with their values."""
        changes = {END: [f"{step + self.iters}it"], OPERATIONS: list(self.schedule)}
        return {**self.overrides, **changes}

    def began(self, parent: str, step: int) -> Operation:
        """Return the operation that the branch begins with, at `step` of the run `parent`."""
        place = {"parent": parent, "decay_start": step + self.iters - self.decay}
        return Operation(BRANCHED, self.name, {**place, "decay_iters": self.decay})


def read_branch(operation: Operation) -> Branch:
    """Return the branch of an operation without `branch_problems`."""
    options = operation.options
    iters = options["iters"]
    decay, overrides, schedule = options.get("decay"), options.get("set"), options.get(OPERATIONS)
    return Branch(
        operation.value,
        iters,
        iters if decay is None else decay,
        overrides or {},
        schedule or (),
        options.get("train", True),
    )


def branch_folder(trunk: Path, name: str) -> Path:
    """Return the folder of a branch: beside the trunk's, whose name is the first part of its own.

    Raises:
        ValueError: the name could lead elsewhere.
    """
    if not _is_name(name):
        raise ValueError(f"{value_text(name)} is not the name of a branch")
    trunk = trunk.absolute()
    return trunk.with_name(f"{trunk.name}.{name}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def branch_problems(operation: Operation) -> Iterator[Finding]:
    """Yield what is wrong with an operation `branch`, as far as it needs no config."""
    options = operation.options
    if not _is_name(operation.value):
        problem_text = (
            f"must be the branch's name, a part of its folder's, got {value_text(operation.value)}"
        )
        yield "value", problem_text, "use letters, digits, - and _"
    for option in options:
        if option not in _OPTIONS:
            hint = nearest_hint(option, _OPTIONS, f"there are {', '.join(_OPTIONS)}")
            yield option, "is unknown", hint
    iters, decay = options.get("iters"), options.get("decay")
    if not _is_count(iters) or iters == 0:
        problem_text = (
            "is missing"
            if iters is None
            else f"must be a positive whole number, got {value_text(iters)}"
        )
        yield "iters", problem_text, "give the steps that the branch makes after the trunk's"
    elif decay is not None and not (_is_count(decay) and decay <= iters):
        problem_text = (
            f"must be a whole number from 0 to iters ({iters:,}), got {value_text(decay)}"
        )
        yield "decay", problem_text, "the rate falls in the last n steps of the branch"
    overrides = options.get("set")
    if overrides is not None and not isinstance(overrides, Mapping):
        yield (
            "set",
            f"must have keys of the config, got {value_text(overrides)}",
            "{train.batch_size: 8}",
        )
    if type(options.get("train", True)) is not bool:
        hint = "false: only `instar resume BRANCH` trains it"
        yield "train", f"must be true or false, got {value_text(options['train'])}", hint
    schedule = options.get(OPERATIONS)
    if schedule is not None and not (
        isinstance(schedule, list | tuple)
        and all(isinstance(change, Mapping) for change in schedule)
    ):
        yield OPERATIONS, f"must be a list of operations, got {value_text(schedule)}", ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def branch_conflicts(branch: Branch, config: RunConfig) -> Iterator[Finding]:
    """Yield what a branch cannot change in the config of its trunk, and invalid values."""
    config_values = values(config)
    for key in branch.overrides:
        if key not in config_values:
            hint = nearest_hint(str(key), config_values, "write keys such as train.batch_size")
            yield f"set.{key}", "is not a key of the config", hint
        elif key in (END, OPERATIONS):
            branch_key = "iters" if key == END else OPERATIONS
            yield f"set.{key}", "is set by the branch itself", f"give its {branch_key}"
        elif is_fixed(key) or is_launch_only(key):
            why = "is fixed when a run begins" if is_fixed(key) else "belongs to the process"
            yield f"set.{key}", f"{why}, and is the trunk's in its branches", "leave it out"
        else:
            yield from _invalid(config, {key: branch.overrides[key]}, "set")
    yield from _invalid(config, {OPERATIONS: list(branch.schedule)}, OPERATIONS)
    for number, change in enumerate(branch.schedule):
        if change.get("name") == BRANCH:
            hint = "list it in the trunk's schedule"
            yield f"{OPERATIONS}[{number}].name", "must not be branch: a branch has none", hint


def _invalid(config: RunConfig, set_values: Mapping[str, Any], part: str) -> Iterator[Finding]:
    try:
        with_values(config, set_values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message, hint = wrong_value(
            type(config), first["loc"], first["input"], first["type"], first["msg"]
        )
        yield part, f"is invalid: {message}", hint
    except (TypeError, ValueError) as error:
        yield part, f"is invalid: {error}", ""
