"""What is compared with what: runs, or groups of runs that differ in nothing but the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.logs.comparing.names import alike
from instar.logs.reporting.configured import config_values
from instar.record.rundir import RunDir

By = Literal["run", "name", "seed"]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

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
        """What pairs its runs with those of another arm: the seed, and a number where several
        have the same."""
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


def arms(runs: Sequence[RunDir], by: By = "run") -> tuple[list[Arm], list[str]]:
    """The runs as arms, in the order of the first run of each, and what is wrong with configs.

    By `name`, runs of one name are one arm; by `seed`, those whose configs are alike but for the
    seed and how they are kept.
    """
    configs, faults = config_values(runs)
    numbers = [[n] for n in range(len(runs))] if by == "run" else alike(runs, by)
    names = _names([[runs[n] for n in group] for group in numbers], by)
    return [
        Arm(name, tuple(runs[n] for n in group), tuple(configs[n] for n in group))
        for name, group in zip(names, numbers, strict=True)
    ], faults


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
