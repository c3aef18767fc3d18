"""Groups of runs that differ in nothing but the seed, their names, and whether their data is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.config.errors import ConfigError, printable
from instar.config.fields import differing
from instar.config.origins import ConfigLine
from instar.logs.query.config import config_lines, config_values, derived_keys
from instar.record.rundir import RunDir

By = Literal["run", "name", "seed"]


@dataclass(frozen=True)
class RunGroup:
    """One group of a comparison."""

    name: str
    runs: tuple[RunDir, ...]
    configs: tuple[Mapping[str, Any], ...] = field(repr=False)
    """keys and values of each run, but for what was derived; empty where its config cannot be
    read"""

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(config.get("seed") for config in self.configs)

    @property
    def keys(self) -> tuple[object, ...]:
        """Pairs its runs with those of another group: the seed, and a number where several runs
        have the same seed."""
        seeds = self.seeds
        return tuple((seed, seeds[:number].count(seed)) for number, seed in enumerate(seeds))

    def config(self) -> dict[str, Any]:
        """The values that all of its runs have; of the others a list, one of each run. Runs whose
        config cannot be read are left out; empty if all are."""
        known = [config for config in self.configs if config]
        every = {key: [config.get(key) for config in known] for config in known for key in config}
        return {
            key: one[0] if all(each == one[0] for each in one) else one
            for key, one in every.items()
        }


def group_runs(runs: Sequence[RunDir], by: By = "run") -> tuple[list[RunGroup], list[str]]:
    """Returns groups of runs, in the order of their first runs, and the faults of their configs.

    By `name`, runs of one name are one group; by `seed`, runs whose configs differ in nothing but
    the seed and how they are recorded.
    """
    configs, faults = config_values(runs)
    numbers = [[n] for n in range(len(runs))] if by == "run" else alike(runs, by)
    names = _names([[runs[n] for n in group] for group in numbers], by)
    return [
        RunGroup(name, tuple(runs[n] for n in group), tuple(configs[n] for n in group))
        for name, group in zip(names, numbers, strict=True)
    ], faults


def _names(groups: Sequence[Sequence[RunDir]], by: By) -> list[str]:
    """Of each group the name its runs share, else its first run's folder; none twice."""
    names = []
    for group in groups:
        shared = {run.name for run in group}
        single = by == "run" or len(shared) > 1 or len(group) == 1
        names.append(group[0].path.name if single else shared.pop())
    if by != "run":  # groups of one name differ in their configs
        names = [
            group[0].path.name if names.count(name) > 1 else name
            for name, group in zip(names, groups, strict=True)
        ]
    return [
        printable(str(group[0].path) if names.count(name) > 1 else name)
        for name, group in zip(names, groups, strict=True)
    ]


_MOST_KEYS = 3
_LONGEST = 24
"""characters of a value in a name"""
_LONGEST_IN_TABLE = 60
_KEPT = ("name", "resume", "record", "checkpoint")
"""Keys and sections that do not influence training."""
Given = dict[str, str]
"""The values of a run's config that do not follow from others, by dotted keys."""


def names(runs: Sequence[RunDir]) -> list[str]:
    """One for each: the name, if no other has it; else name and the keys that differ, such as
    `demo seed=2`; else the folder's name."""
    short = [printable(run.name) for run in runs]
    if len(set(short)) == len(runs):
        return short
    given = given_values(runs)
    keys = list(differing(given))
    if 0 < len(keys) <= _MOST_KEYS:
        told = [_told(name, values, keys) for name, values in zip(short, given, strict=True)]
        if len(set(told)) == len(runs):
            return told
    folders = [printable(run.path.name) for run in runs]
    if len(set(folders)) == len(runs):
        return folders
    return [printable(str(run.path)) for run in runs]


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


def notes_on_data(runs: Sequence[RunDir], by: Literal["name", "seed"]) -> list[str]:
    """Returns notes on groups whose runs were evaluated on different held-out samples."""
    return [
        f"{name}: its {len(numbers)} runs differ in their data as well, for data.seed follows seed; "
        "with data.seed given, only order and first values differ"
        for name, numbers in grouped(runs, by).items()
        if len({_data_of(config_lines(runs[number])) for number in numbers} - {""}) > 1
    ]


def _data_of(lines: Sequence[ConfigLine]) -> str:
    """What decides which samples a run holds out, as far as its config says; "" if it is empty."""
    values = {line.key: line.value for line in lines}
    task, path, part = (values.get(k) for k in ("task", "data.path", "eval.eval_iters"))
    unset = (None, "", "null")
    if task in ("language", None) and path not in unset and part in unset:
        return str(path)  # prepared once, whatever the seeds of the runs
    own = values.get("data.seed")
    return str(values.get("seed", "") if own in unset else own)


def given_values(runs: Sequence[RunDir]) -> list[Given]:
    """Returns the given values of each run; empty where its config cannot be read."""
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
    pairs = (f"{key.rpartition('.')[2]}={_short(values.get(key, 'none'))}" for key in keys)
    return " ".join([name, *pairs])


def _short(value: str) -> str:
    """A value short enough for a legend; for a list of operations their number."""
    if len(value) <= _LONGEST:
        return value
    items = value.count("- {")
    return _counted(items) if items else f"{value[: _LONGEST - 1]}…"


def _counted(operations: int) -> str:
    return f"{operations} operation{'' if operations == 1 else 's'}"


def short_values(key: str, values: Sequence[object], whole: Sequence[str]) -> list[str]:
    """Returns the values of one key for the cells of a table; `whole`: their full texts.

    A text that is too long has a short form: the number of operations of a schedule, of anything
    else its beginning. `differs` is added where an earlier value with the same form is another.
    """
    short = [
        text if len(text) <= _LONGEST_IN_TABLE else _abbreviated(key, value, text)
        for value, text in zip(values, whole, strict=True)
    ]
    return [
        cell if whole[short.index(cell)] == text else f"{cell}, differs"
        for cell, text in zip(short, whole, strict=True)
    ]


def _abbreviated(key: str, value: object, text: str) -> str:
    if not isinstance(value, list | tuple):
        return f"{text[: _LONGEST_IN_TABLE - 1]}…"
    operations = key == "schedule" and all(isinstance(item, Mapping) for item in value)
    return _counted(len(value)) if operations else f"{len(value)} items"


Config = Mapping[str, Any]
"""keys and values of a run's config; empty where it cannot be read"""

_READ = (
    "data.source",
    "data.subset",
    "data.source_split",
    "data.mixture",
    "data.text_field",
    "data.tokens_field",
)
"""What training data are read, and held-out ones where `data.val_source` does not name them. The
options of generated data are in a section named after their source."""
_ALWAYS = ("task", "data.val_source", "data.tokenizer")


def check_same_data(configs: Sequence[Config], metric: str) -> None:
    """Raise ConfigError unless one value of the metric is the same achievement in all runs."""
    if keys := _differing(configs, held_out=metric.startswith("val/")):
        raise ConfigError.one(
            f"the runs differ in {', '.join(keys)}: {metric} is measured on different data or tokens",
            where="--at-loss",
            hint="compare runs on the same data and tokenizer, or leave --at-loss out",
        )


def warnings_on_data(configs: Sequence[Config]) -> tuple[str, ...]:
    """One line where the losses of runs must not be compared; else nothing."""
    if keys := _differing(configs, held_out=True):
        what = "losses, which are measured on different data or tokens, are not comparable"
    elif keys := _differing(configs, held_out=False):
        what = "training losses, which are measured on different data, are not comparable"
    else:
        return ()
    return (f"the runs differ in {', '.join(keys)}: their {what}",)


def _differing(configs: Sequence[Config], *, held_out: bool) -> list[str]:
    """The keys that make losses of runs different quantities; `held_out`: those on held-out data."""
    known = [config for config in configs if config]
    tokenizers = {config.get("data.tokenizer") for config in known}
    # one val_source for all holds out the same text, but a bpe tokenizer is trained on the source
    same_held_out = (
        all(config.get("data.val_source") for config in known) and "bpe" not in tokenizers
    )
    generated = {f"data.{config.get('data.source')}" for config in known}
    wanted = _ALWAYS if held_out and same_held_out else (*_ALWAYS, *_READ, *generated)
    if "bpe" in tokenizers:
        wanted = (*wanted, "data.vocab_size")
    keys = dict.fromkeys(key for config in known for key in config)
    return [
        key
        for key in keys
        if (key in wanted or any(key.startswith(f"{name}.") for name in wanted))
        and len({repr(config.get(key)) for config in known}) > 1
    ]
