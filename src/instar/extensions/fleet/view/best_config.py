"""The config of a search's best trial, as a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from instar.config.fields import plain_root_of, schema_keys
from instar.config.files import read_regular
from instar.config.load import load_config
from instar.config.writers.edit import check_replaceable, edited_config
from instar.extensions.fleet.folder import FleetFolder
from instar.extensions.fleet.plan import (
    OWN_KEYS,
    instances_of,
    sets_of,
    start_variables,
    variables_of,
)
from instar.extensions.fleet.view.rows import BestTrial
from instar.record.atomic import replace_file

_AUTHOR = "instar fleet"


def write_best_configs(fleet: FleetFolder, best: BestTrial | None) -> Iterator[Path]:
    """Write the run config of each job with the values of the best trial into the fleet's folder; yield their paths.

    Raises:
        ConfigError: somebody else has a file there.
    """
    if best is None:
        return
    spec = fleet.loaded_config.spec
    trial = instances_of(spec)[best.instance]
    trial = replace(trial, values=best.values, variables={**trial.variables, **best.values})
    jobs = {name: job for name, job in spec.jobs.items() if job.run is not None}
    for name, job in jobs.items():
        path = fleet.path / ("best.yaml" if len(jobs) == 1 else f"best-{name}.yaml")
        check_replaceable(path, _AUTHOR, "--set name=…")
        text = read_regular(fleet.configs[name], follow=True).decode("utf-8-sig")
        task = load_config(fleet.configs[name], checks=(), import_task=False).config.task
        keys = schema_keys(plain_root_of(task))
        variables = variables_of(trial, keys) | start_variables(spec, name)
        settings = [t for t in sets_of(job, variables) if t.partition("=")[0] not in OWN_KEYS]
        remark = (
            f"{best.text}, of {spec.search.count if spec.search else 1} in the fleet {spec.name}"
        )
        replace_file(path, edited_config(text, settings, _AUTHOR, [remark]).encode())
        yield path
