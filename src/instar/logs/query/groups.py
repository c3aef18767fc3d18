"""Groups runs that differ only in the seed or the fold of a cross-validation, names the groups, and tells which of their values can be compared:
according to their configs, and to what their evaluations were made on, as their checkpoints say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.config.document import parse
from instar.config.errors import ConfigError, printable_text, shorten_text
from instar.config.fields import differing_keys
from instar.config.origins import ConfigLine, plain_text
from instar.logs.query.bases import note_on_basis, recorded_basis
from instar.logs.query.config import config_lines, config_values, derived_keys
from instar.record.rundir import RunDir
from instar.tasks.basis import incomparable, without_seed

By = Literal["run", "name", "seed"]
_MOST_KEYS = 3
_LONGEST = 24
"""characters of a value in a name"""
_LONGEST_IN_TABLE = 60
_KEPT = ("name", "resume", "record", "checkpoint")
"""keys and sections that do not influence training"""
REPEATED = ("seed", "data.fold")
"""keys in which the runs of a group may differ: they train the same thing again"""
Given = dict[str, str]
"""the underived values of a run's config, by dotted key"""
Config = Mapping[str, Any]
"""keys and values of a run's config; empty if it cannot be read"""
_READ = (
    "data.source",
    "data.subset",
    "data.source_split",
    "data.mixture",
    "data.text_field",
    "data.tokens_field",
)
"""keys that define the training data, and the held-out data unless `data.val_source` does; the
options of generated data are in a section named after their source"""
_ALWAYS = ("task", "data.val_source", "data.tokenizer")
SAME_DATA = "compare runs on the same data and tokenizer, or leave --at-loss out"


@dataclass(frozen=True)
class RunGroup:
    """One group of a comparison."""

    name: str
    runs: tuple[RunDir, ...]
    configs: tuple[Mapping[str, Any], ...] = field(repr=False)
    """keys and values of each run without derived keys; empty if its config cannot be read"""

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(config.get("seed") for config in self.configs)

    @property
    def folds(self) -> tuple[int | None, ...]:
        """The fold that each run holds out; None: of a run without folds."""
        return tuple(
            config.get("data.fold", 0) if config.get("data.folds") else None
            for config in self.configs
        )

    @property
    def keys(self) -> tuple[object, ...]:
        """Keys that pair its runs with those of another group: seed, fold, and number among equal ones."""
        pairs = tuple(zip(self.seeds, self.folds, strict=True))
        return tuple((*pair, pairs[:number].count(pair)) for number, pair in enumerate(pairs))

    def config(self) -> dict[str, Any]:
        """Return the values that all runs share, and for other keys a list with one value per run.

        Runs whose config cannot be read are left out; empty if all are.
        """
        readable = [config for config in self.configs if config]
        every = {
            key: [config.get(key) for config in readable] for config in readable for key in config
        }
        return {
            key: values[0] if all(value == values[0] for value in values) else values
            for key, values in every.items()
        }


def group_runs(
    runs: Sequence[RunDir], by: By = "run", group_names: Mapping[RunDir, str] | None = None
) -> tuple[list[RunGroup], list[str]]:
    """Return the groups of `group_indices` with the configs of their runs, and the faults of these."""
    configs, faults = config_values(runs)
    groups = group_indices(runs, by, group_names, folder_labels if by == "run" else None)
    return [
        RunGroup(name, tuple(runs[n] for n in group), tuple(configs[n] for n in group))
        for name, group in groups.items()
    ], faults


def run_labels(
    runs: Sequence[RunDir], without: Collection[str] = (), values: Sequence[Given] | None = None
) -> list[str]:
    """Return a unique label per run: its name; else name and differing keys, as `demo seed=2`, other
    than those in `without`; else the folder's name. `values`: `given_values` of the runs, if known."""
    short = [printable_text(run.name) for run in runs]
    if len(set(short)) == len(runs):
        return short
    run_values = values or given_values(runs)
    keys = [key for key in differing_keys(run_values) if key not in without]
    if 0 < len(keys) <= _MOST_KEYS:
        labels = [
            _label(name, values, keys) for name, values in zip(short, run_values, strict=True)
        ]
        if len(set(labels)) == len(runs):
            return labels
    return folder_labels(runs)


def folder_labels(runs: Sequence[RunDir]) -> list[str]:
    """Return the name of each run's folder; where it is not unique, the path."""
    short = [run.path.name for run in runs]
    return [
        printable_text(str(run.path) if short.count(name) > 1 else name)
        for run, name in zip(runs, short, strict=True)
    ]


def group_indices(
    runs: Sequence[RunDir],
    by: By,
    group_names: Mapping[RunDir, str] | None = None,
    label: Callable[[Sequence[RunDir]], list[str]] | None = None,
    values: Sequence[Given] | None = None,
) -> dict[str, list[int]]:
    """Return the indices of the runs of each group by the group's unique name, in the order of first
    runs.

    Args:
        by: "run": each run is a group; "name": runs of one name; "seed": runs whose configs differ
            only in the seed, the fold and in how they are recorded. A run whose config cannot be read is then
            a group of its own.
        group_names: names of the groups of some runs, whatever `by`; an empty one names none.
        label: names the other groups, given their first runs; default `names`.
        values: `given_values` of the runs, if known.
    """
    groups: dict[str, list[int]] = {}
    numbers_by_key: dict[object, list[int]] = {}
    numbers_left = [n for n, run in enumerate(runs) if not (group_names or {}).get(run)]
    values = values or (given_values(runs) if by == "seed" and numbers_left else None)
    keys = {n: _key(n, runs[n], by, values[n] if values else {}) for n in numbers_left}
    for n, run in enumerate(runs):
        if n in keys:
            numbers_by_key.setdefault(keys[n], []).append(n)
        else:
            groups.setdefault((group_names or {})[run], []).append(n)
    numbers = [group[0] for group in numbers_by_key.values()]
    firsts = [runs[n] for n in numbers]
    if label:
        labels = label(firsts)
    else:
        ignored_keys = REPEATED if by == "seed" else ()
        labels = run_labels(firsts, ignored_keys, [values[n] for n in numbers] if values else None)
    for name, group in zip(labels, numbers_by_key.values(), strict=True):
        groups[str(runs[group[0]].path) if name in groups else name] = group
    return dict(sorted(groups.items(), key=lambda entry: entry[1][0]))


def _key(number: int, run: RunDir, by: By, values: Given) -> object:
    """Return what is equal for the runs of a group."""
    if by == "run":
        return number
    if by == "name":
        return run.name
    return frozenset((values | dict.fromkeys(REPEATED, "")).items()) if values else run.path


def notes_on_data(groups: Mapping[str, Sequence[RunDir]]) -> list[str]:
    """Return notes on groups whose runs were evaluated on different held-out samples."""
    return [
        f"{name}: its {len(runs)} runs also differ in their data, because data.seed follows seed; "
        "set data.seed to vary only order and initialization"
        for name, runs in groups.items()
        if len({_data_of(config_lines(run)) for run in runs} - {""}) > 1
    ]


def _data_of(lines: Sequence[ConfigLine]) -> str:
    """Return what decides which samples a run holds out, according to its config; "" if empty."""
    values = {line.key: line.value for line in lines}
    task, path, part = (values.get(k) for k in ("task", "data.path", "eval.eval_iters"))
    unset = (None, "", "null")
    if task in ("language", None) and path not in unset and part in unset:
        return str(path)  # prepared once, whatever the seeds of the runs
    data_seed = values.get("data.seed")
    return str(values.get("seed", "") if data_seed in unset else data_seed)


def given_values(runs: Sequence[RunDir]) -> list[Given]:
    """Return the underived values of each run; empty if its config cannot be read."""
    every = [config_lines(run) for run in runs]
    keys_left_out = derived_keys(every)
    all_values: list[Given] = []
    for lines in every:
        values: Given = {}
        for line in lines:
            if not line.key or line.key in keys_left_out or line.key.partition(".")[0] in _KEPT:
                continue
            values[line.key] = f"{values.get(line.key, '')} {_unquote(line.value)}".strip()
        all_values.append(values)
    return all_values


def _unquote(text: str) -> str:
    """Return a value of a config's line as a table shows it."""
    if not text.startswith('"'):
        return text
    document, faults = parse(text, "")
    return text if faults or document is None else plain_text(document.data)


def _label(name: str, values: Given, keys: Sequence[str]) -> str:
    pairs = (f"{key.rpartition('.')[2]}={_short(values.get(key, 'none'))}" for key in keys)
    return " ".join([name, *pairs])


def _short(value: str) -> str:
    """Return a value short enough for a legend: for a list of operations, their number."""
    items = value.count("- {") if len(value) > _LONGEST else 0
    return _count_text(items) if items else shorten_text(value, _LONGEST)


def _count_text(operations: int) -> str:
    return f"{operations} operation{'' if operations == 1 else 's'}"


def short_values(key: str, values: Sequence[object], texts: Sequence[str]) -> list[str]:
    """Return the values of one key for the cells of a table; `texts`: their full texts.

    A text that is too long is shortened to the number of operations of a schedule, or else to its
    beginning. `differs` is appended where an earlier, different value has the same short form.
    """
    short = [
        text if len(text) <= _LONGEST_IN_TABLE else _abbreviate(key, value, text)
        for value, text in zip(values, texts, strict=True)
    ]
    return [
        cell if texts[short.index(cell)] == text else f"{cell}, differs"
        for cell, text in zip(short, texts, strict=True)
    ]


def _abbreviate(key: str, value: object, text: str) -> str:
    if not isinstance(value, list | tuple):
        return shorten_text(text, _LONGEST_IN_TABLE)
    operations = key == "schedule" and all(isinstance(item, Mapping) for item in value)
    return _count_text(len(value)) if operations else f"{len(value)} items"


def check_same_data(configs: Sequence[Config], metric: str) -> None:
    """Raise ConfigError unless the metric is measured on the same data and tokens in all runs."""
    if keys := _differing(configs, held_out=metric.startswith("val/")):
        raise ConfigError.of(
            f"the runs differ in {', '.join(keys)}: {metric} is measured on different data or tokens",
            where="--at-loss",
            hint=SAME_DATA,
        )


def warnings_on_data(configs: Sequence[Config], *, held_out: bool = True) -> tuple[str, ...]:
    """Return one line if the losses of the runs are not comparable according to their configs, else nothing.

    Args:
        held_out: also those on held-out data, of which no basis is recorded.
    """
    if held_out and (keys := _differing(configs, held_out=True)):
        what = "losses, which are measured on different data or tokens, are not comparable"
    elif keys := _differing(configs, held_out=False):
        what = "training losses, which are measured on different data, are not comparable"
    else:
        return ()
    return (f"the runs differ in {', '.join(keys)}: their {what}",)


def _differing(configs: Sequence[Config], *, held_out: bool) -> list[str]:
    """Return the differing keys that make losses incomparable; `held_out`: losses on held-out data.

    A config that another tool recorded has other keys, and says nothing of this.
    """
    readable = [config for config in configs if "task" in config]
    tokenizers = {config.get("data.tokenizer") for config in readable}
    # one val_source for all holds out the same text, but a bpe tokenizer is trained on the source
    same_held_out = (
        all(config.get("data.val_source") for config in readable) and "bpe" not in tokenizers
    )
    source_key = {f"data.{config.get('data.source')}" for config in readable}
    data_keys = _ALWAYS if held_out and same_held_out else (*_ALWAYS, *_READ, *source_key)
    if "bpe" in tokenizers:
        data_keys = (*data_keys, "data.vocab_size")
    keys = dict.fromkeys(key for config in readable for key in config)
    return [
        key
        for key in keys
        if (key in data_keys or any(key.startswith(f"{name}.") for name in data_keys))
        and len({repr(config.get(key)) for config in readable}) > 1
    ]


@dataclass(frozen=True)
class Comparability:
    """Whether losses on held-out data can be compared between the runs of groups."""

    differing: tuple[str, ...]
    """one line for each way in which evaluations differ from those of the first group"""
    is_known: bool
    """whether what is recorded decides it, for all runs"""


def comparability(groups: Sequence[RunGroup]) -> Comparability:
    """Compare what the runs of groups were evaluated on with the run of the first group that has the same seed,
    else with its first run. That runs of several seeds hold out other samples is left to the notes on groups."""
    bases = {run: recorded_basis(run) for group in groups for run in group.runs}
    first = groups[0]
    partners = dict(zip(first.keys, first.runs, strict=True))
    has_several_runs = any(len(group.runs) > 1 for group in groups)
    has_folds = any(fold is not None for group in groups for fold in group.folds)
    is_known = all(bases.values())
    lines: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for group in groups:
        for run, key in zip(group.runs, group.keys, strict=True):
            partner = first.runs[0] if group is first else partners.get(key, first.runs[0])
            before, after = bases[partner], bases[run]
            if has_several_runs and (group is first or key not in partners) and run != partner:
                before, after = (
                    without_seed(basis, with_folds=has_folds) for basis in (before, after)
                )
                is_known = is_known and group is first
            if before and after and (reasons := incomparable(before, after)):
                lines.setdefault(reasons, (partner.path.name, []))[1].append(run.path.name)
    return Comparability(
        tuple(
            note_on_basis("losses", names, partner, reasons)
            for reasons, (partner, names) in lines.items()
        ),
        is_known,
    )
