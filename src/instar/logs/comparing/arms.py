"""What is compared with what: runs, or groups of runs that differ in nothing but the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.config.errors import ConfigError
from instar.logs.comparing.names import alike
from instar.logs.reporting.configured import config_lines
from instar.record.rundir import RunDir

By = Literal["run", "name", "seed"]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    runs: tuple[RunDir, ...]
    configs: tuple[Mapping[str, Any], ...] = field(repr=False)
    """keys and values of each run, but for what was derived; empty where its run.yaml cannot be
    read"""

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(config.get("seed") for config in self.configs)

    @property
    def keys(self) -> tuple[object, ...]:
        """What pairs its runs with those of another arm: the seed, and a number where several
        have the same."""
        seeds = self.seeds
        return tuple((seed, seeds[:number].count(seed)) for number, seed in enumerate(seeds))

    def config(self) -> dict[str, Any]:
        """The values that all of its runs have; of the others a list, one of each run."""
        first = self.configs[0]
        every = {key: [config.get(key) for config in self.configs] for key in first}
        return {
            key: one[0] if all(each == one[0] for each in one) else one
            for key, one in every.items()
        }


def arms(runs: Sequence[RunDir], by: By = "run") -> tuple[list[Arm], list[str]]:
    """The runs as arms, in the order of the first run of each, and what is wrong with configs.

    By `name`, runs of one name are one arm; by `seed`, those whose configs are alike but for the
    seed and how they are kept.
    """
    configs, faults = {}, []
    for run in runs:
        try:
            configs[run] = config_of(run)
        except ConfigError as error:
            configs[run] = {}
            faults.append(f"{run.config}: {error.problems[0].message}")
    numbers = [[n] for n in range(len(runs))] if by == "run" else alike(runs, by)
    groups = [[runs[n] for n in group] for group in numbers]
    names = _names(groups, by)
    return [
        Arm(name, tuple(group), tuple(configs[run] for run in group))
        for name, group in zip(names, groups, strict=True)
    ], faults


def config_of(run: RunDir) -> dict[str, Any]:
    """A run's resolved config without what was derived; nothing is checked against data or machine.

    Raises:
        ConfigError: it cannot be read.
    """
    from instar.config.differing import values
    from instar.config.load import load

    derived = {line.key for line in config_lines(run) if line.origin == "derived"}
    found = values(load(str(run.config), checks=()).config)
    return {key: value for key, value in found.items() if key not in derived}


def _names(groups: Sequence[Sequence[RunDir]], by: By) -> list[str]:
    """Of each group the name its runs share, else its first run's folder; none twice."""
    names = []
    for group in groups:
        shared = {run.name for run in group}
        single = by == "run" or len(shared) > 1 or len(group) == 1
        names.append(group[0].path.name if single else shared.pop())
    if by != "run":  # arms of one name differ in their configs
        names = [
            group[0].path.name if names.count(name) > 1 else name
            for name, group in zip(names, groups, strict=True)
        ]
    return [
        str(group[0].path) if names.count(name) > 1 else name
        for name, group in zip(names, groups, strict=True)
    ]
