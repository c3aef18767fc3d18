"""What can be checked of a search before it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import get_args

from pydantic.fields import FieldInfo

from instar.config.errors import ConfigProblem, nearest
from instar.config.fields import schema_keys
from instar.config.schema import RunConfig
from instar.extensions.fleet.load import LoadedFleet
from instar.extensions.fleet.plan import variables_in
from instar.extensions.fleet.spec import Scalar, Search


def search_problems(loaded_config: LoadedFleet, used: Collection[str]) -> Iterator[ConfigProblem]:
    """Check a search without reading run configs.

    Args:
        used: the variables that occur in texts of the fleet file.
    """
    spec, search = loaded_config.spec, loaded_config.spec.search
    if search is None:
        return
    if find_spec("optuna") is None:
        message, hint = "searches need optuna", "pip install 'instar[search]'"
        yield loaded_config.problem(("search",), message, hint)
    if spec.engine != "local":
        message = "values are drawn by the launcher of this machine"
        yield loaded_config.problem(("engine",), message, "a search has engine: local")
    for key in ("matrix", "include", "exclude"):
        if getattr(spec, key):
            hint = "write these values as choices in search.space, or start a fleet for each"
            yield loaded_config.problem((key,), f"a fleet with a search has no {key}", hint)
    for key in ("run_name", "output_dir"):
        with suppress(ValueError):  # an open brace is reported elsewhere
            for name in {*variables_in(getattr(spec, key))} & search.space.keys():
                message = f"{key} is needed before ${{{name}}} is drawn"
                yield loaded_config.problem((key,), message, "use ${index}")
    if any(job.run is not None for job in spec.jobs.values()):
        return
    for name in search.space:
        if name not in used:
            hint = f"write ${{{name}}} in a command"
            yield loaded_config.problem(("search", "space", name), f"no text uses '{name}'", hint)
    if spec.jobs and "output_dir" not in used:
        message = "evaluations of a command are read from its output_dir, and no text uses that"
        hint = f'append {{"step": 100, "{search.metric}": 2.1}} to ${{output_dir}}/metrics.jsonl'
        yield loaded_config.problem(("search", "metric"), message, hint)


def run_problems(
    loaded_config: LoadedFleet, search: Search, config: RunConfig
) -> Iterator[ConfigProblem]:
    """Compare a search with what it would change in a run and read from it."""
    fields = schema_keys(type(config))
    for key, dimension in search.space.items():
        if dimension.choices is None and dimension.is_integer and _is_real(fields.get(key)):
            message = (
                f"{key} is a real number, and from a whole low to a whole high whole ones are drawn"
            )
            hint = f"write low: {float(dimension.low or 0)}"
            yield loaded_config.problem(("search", "space", key, "low"), message, hint)
    directions = {f"val/{name}": direction for name, direction in config.metrics.items()}
    if search.metric in directions:
        better = f"{directions[search.metric]}imize"
        if better != search.direction and not (":" in config.task and search.metric != "val/loss"):
            size = "larger" if better == "maximize" else "smaller"
            message = f"{search.metric} is better if it is {size}"
            yield loaded_config.problem(
                ("search", "direction"), message, f"write direction: {better}"
            )
    elif ":" not in config.task:  # a task of the user's own may have others
        similar = nearest(search.metric, directions)
        hint = f"did you mean '{similar}'?" if similar else f"there are {', '.join(directions)}"
        yield loaded_config.problem(("search", "metric"), f"runs record no '{search.metric}'", hint)


def _is_real(field: FieldInfo | None) -> bool:
    kinds = set() if field is None else {*get_args(field.annotation)} or {field.annotation}
    return float in kinds and int not in kinds


def extremes(search: Search) -> list[dict[str, Scalar]]:
    """Return combinations in which each end of each range, and each choice, occurs."""
    bounds = {key: dimension.bounds() for key, dimension in search.space.items()}
    count = max(map(len, bounds.values()))
    return [
        {key: values[min(i, len(values) - 1)] for key, values in bounds.items()}
        for i in range(count)
    ]
