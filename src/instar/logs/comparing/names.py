"""What runs are called beside each other: by that which tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from instar.config.differing import differing
from instar.logs.reporting.configured import config_lines, derived_keys
from instar.record.rundir import RunDir

_MOST_KEYS = 3
_KEPT = ("name", "resume", "record", "checkpoint")
"""Keys and sections that say how a run is kept, not what it is."""
Given = dict[str, str]
"""The values of a run's config that do not follow from others, by dotted keys."""


def names(runs: Sequence[RunDir]) -> list[str]:
    """One for each: the name, if no other has it; else name and the keys that differ, such as
    `demo seed=2`; else the folder's name."""
    short = [run.name for run in runs]
    if len(set(short)) == len(runs):
        return short
    given = given_values(runs)
    keys = list(differing(given))
    if 0 < len(keys) <= _MOST_KEYS:
        told = [_told(name, values, keys) for name, values in zip(short, given, strict=True)]
        if len(set(told)) == len(runs):
            return told
    folders = [run.path.name for run in runs]
    return folders if len(set(folders)) == len(runs) else [str(run.path) for run in runs]


def grouped(runs: Sequence[RunDir], by: Literal["name", "seed"]) -> dict[str, list[int]]:
    """The numbers of the runs that are alike, by what the groups are called."""
    groups = alike(runs, by)
    firsts = names([runs[numbers[0]] for numbers in groups])
    if len(firsts) == 1:
        firsts = [runs[0].name]
    return dict(zip(firsts, groups, strict=True))


def alike(runs: Sequence[RunDir], by: Literal["name", "seed"]) -> list[list[int]]:
    """The numbers of the runs that belong together: of one name, or (`seed`) alike in all that was
    said of them but the seed and how they are kept; one whose config cannot be read is alone.
    """
    keys: list[object] = [run.name for run in runs]
    if by == "seed":
        said = [values | {"seed": ""} if values else {} for values in given_values(runs)]
        keys = [
            frozenset(values.items()) or run.path for run, values in zip(runs, said, strict=True)
        ]
    groups: dict[object, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def given_values(runs: Sequence[RunDir]) -> list[Given]:
    """What was said of each run; nothing where its config cannot be read."""
    every = [config_lines(run) for run in runs]
    derived = derived_keys(every)
    found: list[Given] = []
    for lines in every:
        values: Given = {}
        for line in lines:
            if not line.key or line.key in derived or line.key.partition(".")[0] in _KEPT:
                continue
            values[line.key] = f"{values.get(line.key, '')} {line.value}".strip()
        found.append(values)
    return found


def _told(name: str, values: Given, keys: Sequence[str]) -> str:
    pairs = (f"{key.rpartition('.')[2]}={values.get(key, 'none')}" for key in keys)
    return " ".join([name, *pairs])
