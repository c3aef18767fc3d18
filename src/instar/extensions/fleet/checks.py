"""Checks of a fleet file before anything is started: all problems at once, or its plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

from instar.config.document import KeyPath, dotted_key
from instar.config.errors import ConfigError, ConfigProblem, nearest, nearest_hint
from instar.config.fields import plain_root_of, schema_keys
from instar.config.load import load_config
from instar.config.schema import RunConfig
from instar.config.suggestions import suggest_key
from instar.extensions.fleet.engines.nodes import program_path
from instar.extensions.fleet.placement import has_driver
from instar.extensions.fleet.plan import (
    MATRIX_KEYS,
    OWN_KEYS,
    FleetPlan,
    Instance,
    LoadedFleet,
    Machine,
    combinations_of,
    each_of,
    instances_from,
    resolve_beside,
    sets_of,
    start_variables,
    variables_in,
    variables_of,
)
from instar.extensions.fleet.spec import MOST_INSTANCES, FleetSpec, Job, Process, Scalar, Service
from instar.extensions.fleet.trials import extremes, run_problems, search_problems
from instar.record.start_folder import misplacements

_BASE = ("name", "index")
_OF_INSTANCE = ("run_name", "output_dir")
_CHOOSE_GPUS = frozenset({"device", "parallel.world_size", "parallel.devices"})
"""keys of a run's config by which it chooses its GPUs"""


def make_plan(
    loaded_config: LoadedFleet, machine: Machine, *, on_this_machine: bool = True
) -> FleetPlan:
    """Expand the matrix and check everything that can be known before the start.

    Args:
        on_this_machine: it is about to be started here, so that its commands must be installed.

    Raises:
        ConfigError: with all problems: unknown variables, collisions, missing commands, …
    """
    spec = loaded_config.spec
    problems = [
        *_process_problems(loaded_config),
        *(missing_commands(loaded_config) if on_this_machine else ()),
        *_dependency_problems(loaded_config),
        *_combinations(loaded_config),
        *search_problems(loaded_config, _used(spec)),
    ]
    combinations = list(combinations_of(spec))
    if not combinations:
        problems.append(loaded_config.problem(("matrix",), "no combination is left", "see exclude"))
    if len(combinations) > MOST_INSTANCES:
        message = f"{len(combinations):,} instances, more than {MOST_INSTANCES:,}"
        raise ConfigError(*problems, loaded_config.problem(("matrix",), message))
    problems += _variable_problems(loaded_config, combinations)
    parallel, more_problems = _parallel(loaded_config, machine, len(combinations))
    problems += more_problems
    if problems:
        raise ConfigError(*problems)
    plan = FleetPlan(spec, tuple(instances_from(spec, combinations)), parallel)
    problems = [*_collisions(loaded_config, plan), *_run_problems(loaded_config, plan)]
    if problems:
        raise ConfigError(*problems)
    return plan


def with_gpus_of_runs(loaded_config: LoadedFleet, machine: Machine) -> LoadedFleet:
    """Return a fleet of runs that names no GPUs with one for each rank: otherwise all train on the first.

    A fleet is left as it is if it has commands, which would see no GPUs then, if a run chooses its
    devices by index, and if it has mistakes, which `make_plan` reports.
    """
    spec, jobs = loaded_config.spec, dict[str, Job]()
    for process in spec.processes.values():
        if process.command is not None or "gpus" in process.resources.model_fields_set:
            return loaded_config
    if spec.engine != "local" or not machine.gpus:
        return loaded_config
    for name, job in spec.jobs.items():
        try:
            n_gpus = _gpus_of_run(loaded_config, name, job)
        except (ConfigError, ValueError, StopIteration):
            return loaded_config
        resources = job.resources.model_copy(update={"gpus": n_gpus})
        jobs[name] = job.model_copy(update={"resources": resources})
    return replace(loaded_config, spec=spec.model_copy(update={"jobs": jobs}))


def _gpus_of_run(loaded_config: LoadedFleet, name: str, job: Job) -> int:
    """Return how many GPUs a run takes of those that it sees.

    Raises:
        ConfigError, ValueError, StopIteration: it chooses them, or it or the fleet has mistakes.
    """
    spec = loaded_config.spec
    combinations = combinations_of(spec) if spec.search is None else extremes(spec.search)
    instance = next(instances_from(spec, combinations))
    if _CHOOSE_GPUS & instance.values.keys():
        raise ValueError("instances take different GPUs")
    file = str(resolve_beside(loaded_config, ("jobs", name, "run"), str(job.run)))
    variables = variables_of(instance, ()) | start_variables(spec, name)
    config = load_config(file, sets_of(job, variables), import_task=False).config
    if config.device == "cpu":
        return 0
    if config.device not in ("auto", "cuda") or config.parallel.devices:
        raise ValueError("GPUs are chosen by index")
    return job.nproc or config.parallel.world_size or 1


def _process_problems(loaded_config: LoadedFleet) -> Iterator[ConfigProblem]:
    spec = loaded_config.spec
    if not spec.jobs and not spec.services:
        yield loaded_config.problem(
            (), "a fleet has at least one job or service", "see docs/fleet.md"
        )
    for name in spec.services.keys() & spec.jobs.keys():
        yield loaded_config.problem(
            ("jobs", name), f"'{name}' is a service and a job", "rename one"
        )
    for path, process in _processes(spec):
        run = process.run if isinstance(process, Job) else None
        if (process.command is None) == (run is None):
            what = "a command or a run" if isinstance(process, Job) else "a command"
            yield loaded_config.problem(path, f"{dotted_key(path)} needs {what}")
        for place, command in _commands(process):
            yield from _command_problems(loaded_config, (*path, *place), command)
        if process.resources.nodes > 1 and (path[0] == "services" or spec.engine == "local"):
            place, hint = (*path, "resources", "nodes"), "engine: ray or engine: slurm has more"
            message = f"{dotted_key(path)} needs {process.resources.nodes} nodes, and there is one"
            if path[0] == "services":
                message, hint = "a service runs on one node", "only jobs run on several"
            yield loaded_config.problem(place, message, hint)
        if isinstance(process, Job) and run is None and (process.set or process.nproc):
            yield loaded_config.problem(path, f"{dotted_key(path)}: set and nproc belong to a run")
    for name, service in spec.services.items():
        check, section = service.healthcheck, ("services", name, "healthcheck")
        if check is None:
            continue
        if not (check.http or check.tcp or check.command or check.probe):
            hint = "e.g. http: /health, tcp: true or command: …"
            yield loaded_config.problem(section, f"{dotted_key(section)} checks nothing", hint)
        if (check.http or check.tcp or check.probe) and not service.ports:
            message = f"{dotted_key(section)} needs a port, and {name} has none"
            yield loaded_config.problem(section, message, "write ports: [http] in the service")
        elif check.port is not None and check.port not in service.first_ports:
            hint = f"it has {', '.join(service.first_ports)}"
            yield loaded_config.problem(
                (*section, "port"), f"{name} has no port '{check.port}'", hint
            )
        elif check.port and check.command and not (check.http or check.tcp or check.probe):
            message = f"{dotted_key(section)}: a command is not told the port"
            hint = f"write ${{ports.{check.port}}} into the command"
            yield loaded_config.problem((*section, "port"), message, hint)
        if check.model is not None and check.probe is None:
            message, hint = (
                f"{dotted_key(section)}: only a probe names a model",
                "add probe: completion",
            )
            yield loaded_config.problem((*section, "model"), message, hint)


def _command_problems(
    loaded_config: LoadedFleet, path: KeyPath, command: str | tuple[str, ...]
) -> Iterator[ConfigProblem]:
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        yield loaded_config.problem(path, f"{dotted_key(path)} cannot be split into words: {error}")
        return
    if not words or not words[0]:
        yield loaded_config.problem(path, f"{dotted_key(path)} is empty")


def missing_commands(loaded_config: LoadedFleet) -> Iterator[ConfigProblem]:
    """Yield the commands of the engine `local` that are not installed here; hosts elsewhere may have
    others."""
    if loaded_config.spec.engine != "local":
        return
    for path, process in _processes(loaded_config.spec):
        for place, command in _commands(process) if process.cwd is None else ():
            with suppress(ValueError, IndexError):  # reported by `_command_problems`
                program = (shlex.split(command) if isinstance(command, str) else command)[0]
                is_installed = which(program, path=program_path(os.environ)) is not None
                if program and "$" not in program and not is_installed:
                    message = f"there is no command '{program}'"
                    hint = "install it, or give its path"
                    yield loaded_config.problem((*path, *place), message, hint)


def _dependency_problems(loaded_config: LoadedFleet) -> Iterator[ConfigProblem]:
    spec = loaded_config.spec
    every = spec.processes
    for path, process in _processes(spec):
        for name, condition in process.depends_on.items():
            place = (*path, "depends_on", name)
            if name not in every:
                hint = nearest_hint(name, every, f"there are {', '.join(every)}")
                yield loaded_config.problem(place, f"{dotted_key(path)} depends on '{name}'", hint)
            elif name in spec.jobs and condition != "completed":
                yield loaded_config.problem(place, f"'{name}' is a job", "write completed")
            elif name in spec.services and condition == "completed":
                yield loaded_config.problem(
                    place, f"'{name}' is a service", "write service_healthy"
                )
    # remove processes without open dependencies until none is left
    unmet = {name: set(process.depends_on) & every.keys() for name, process in every.items()}
    while ready := [name for name, needs in unmet.items() if not needs & unmet.keys()]:
        for name in ready:
            del unmet[name]
    if unmet:
        section = "services" if next(iter(unmet)) in spec.services else "jobs"
        yield loaded_config.problem(
            (section, next(iter(unmet)), "depends_on"),
            f"circular dependency between {', '.join(unmet)}",
        )


def _combinations(loaded_config: LoadedFleet) -> Iterator[ConfigProblem]:
    spec = loaded_config.spec
    keys_in_use = {*spec.matrix, *(key for combination in spec.include for key in combination)}
    for number, excluded_values in enumerate(spec.exclude):
        for key in excluded_values.keys() - keys_in_use:
            hint = nearest_hint(key, keys_in_use, f"it has {', '.join(keys_in_use) or 'no keys'}")
            path = ("exclude", number, key)
            yield loaded_config.problem(path, f"'{key}' is no key of the matrix", hint)
    every = set(spec.matrix) or keys_in_use
    for number, included_values in enumerate(spec.include):
        if included_values.keys() != every:
            hint = f"give it {', '.join(sorted(every))}"
            yield loaded_config.problem(("include", number), "not the keys of the others", hint)
    keys_in_use |= {*(spec.search.space if spec.search else ())}
    of_processes = (start_variables(spec, name).keys() for name in spec.processes)
    reserved = {*_BASE, *_OF_INSTANCE, MATRIX_KEYS}.union(*of_processes)
    for section, keys, taken in (
        (("vars",), spec.vars.keys(), reserved),
        (_varied_in(spec), keys_in_use, reserved | spec.vars.keys()),
    ):
        for key in keys & taken:
            message = f"'{key}' has a meaning of its own"
            yield loaded_config.problem((*section, key), message, "rename it")


def _varied_in(spec: FleetSpec) -> KeyPath:
    return ("matrix",) if spec.search is None else ("search", "space")


def _used(spec: FleetSpec) -> set[str]:
    """Return the variables that occur in texts."""
    texts = [text for process in spec.processes.values() for _, text in _texts(process)]
    names: set[str] = set()
    for text in (*texts, spec.run_name, spec.output_dir):
        with suppress(ValueError):  # reported by `_unknown`
            names |= set(variables_in(text))
    return names


def _variable_problems(
    loaded_config: LoadedFleet, combinations: list[dict[str, Scalar]]
) -> Iterator[ConfigProblem]:
    spec = loaded_config.spec
    base = {
        *_BASE,
        *spec.vars,
        *spec.matrix,
        *(key for combination in combinations for key in combination),
    }
    yield from _unknown(loaded_config, ("run_name",), spec.run_name, base)
    yield from _unknown(loaded_config, ("output_dir",), spec.output_dir, base | {"run_name"})
    for path, process in _processes(spec):
        variables = base | {*_OF_INSTANCE} | start_variables(spec, path[1]).keys()
        for place, text in _texts(process):
            yield from _unknown(loaded_config, (*path, *place), text, variables)


def _unknown(
    loaded_config: LoadedFleet, path: KeyPath, text: str, variables: Iterable[str]
) -> Iterator[ConfigProblem]:
    variables = set(variables)
    try:
        for name in variables_in(text):
            if name not in variables:
                similar = nearest(name, variables)
                hint = (
                    f"did you mean '${{{similar}}}'?"
                    if similar
                    else f"there are {', '.join(sorted(variables))}"
                )
                yield loaded_config.problem(
                    path, f"unknown variable ${{{name}}} in {dotted_key(path)}", hint
                )
    except ValueError as error:
        yield loaded_config.problem(path, f"{dotted_key(path)}: {error}")


def _commands(process: Process) -> Iterator[tuple[KeyPath, str | tuple[str, ...]]]:
    """Yield the command of a process and that of its health check, by their paths in the process."""
    if process.command is not None:
        yield ("command",), process.command
    if isinstance(process, Service) and process.healthcheck and process.healthcheck.command:
        yield ("healthcheck", "command"), process.healthcheck.command


def _texts(process: Process) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts in which variables are replaced, by their paths in the process."""
    for path, command in _commands(process):
        for number, word in enumerate(command if isinstance(command, tuple) else ()):
            yield (*path, number), word
        if isinstance(command, str):
            yield path, command
    health = process.healthcheck if isinstance(process, Service) else None
    for key, text in (("http", health.http), ("model", health.model)) if health else ():
        if text is not None:
            yield ("healthcheck", key), text
    for key, text in process.env.items():
        yield ("env", key), text
    if process.cwd is not None:
        yield ("cwd",), process.cwd
    if isinstance(process, Job):
        for key, value in process.set.items():
            for text in each_of(value):
                if isinstance(text, str):
                    yield ("set", key), text


def _parallel(
    loaded_config: LoadedFleet, machine: Machine, count: int
) -> tuple[int, list[ConfigProblem]]:
    """Return how many instances fit next to each other; a problem if none does."""
    spec, problems = loaded_config.spec, list[ConfigProblem]()
    fits: list[int] = []
    for what, available in (
        ("gpus", machine.gpus),
        ("cpus", machine.cpus),
        ("memory", machine.memory),
    ):
        needs = sum(getattr(process.resources, what) or 0 for process in spec.processes.values())
        if needs > available:
            path = next(
                (*place, "resources", what)
                for place, process in _processes(spec)
                if getattr(process.resources, what)
            )
            unit = "bytes of memory" if what == "memory" else what
            message = f"an instance needs {needs:,} {unit}, and there are {available:,}"
            hint = _no_gpus_hint() if what == "gpus" and not available else ""
            problems.append(loaded_config.problem(path, message, hint))
        elif needs:
            fits.append(available // needs)
    if not fits and spec.max_parallel is None:
        fits.append(machine.cpus)  # nothing says what an instance needs: a core for each
    return max(1, min(spec.max_parallel or count, count, *fits)), problems


def _no_gpus_hint() -> str:
    if has_driver():
        return (
            "pip install 'instar[fleet]' to see this machine's; CUDA_VISIBLE_DEVICES may hide them"
        )
    return "--gpus 0-7 names pretended ones"


def _collisions(loaded_config: LoadedFleet, plan: FleetPlan) -> Iterator[ConfigProblem]:
    for key in ("run_name", "output_dir"):
        first: dict[Any, Instance] = {}
        for instance in plan.instances:
            value = getattr(instance, key)
            value = value.absolute() if isinstance(value, Path) else value
            other = first.setdefault(value, instance)
            if other is not instance:
                first_key = next((k for k in plan.spec.matrix), "index")
                message = f"instances {other.index} and {instance.index} have the same {key}"
                hint = f"use e.g. ${{{first_key}}} in it"
                yield loaded_config.problem((key,), f"{message}: {getattr(instance, key)}", hint)
                break
    for instance in plan.instances:
        if "/" in instance.run_name or instance.run_name in ("", ".", ".."):
            yield loaded_config.problem(
                ("run_name",), f"'{instance.run_name}' cannot name a folder"
            )
            break


def _run_problems(loaded_config: LoadedFleet, plan: FleetPlan) -> Iterator[ConfigProblem]:
    """Validate the config of each run, once per value of the matrix."""
    spec, search = plan.spec, plan.spec.search
    runs = {name: job for name, job in spec.jobs.items() if job.run is not None}
    used, instances = _used(spec), plan.instances
    if search is not None:
        instances = tuple(instances_from(spec, extremes(search)))
    matrix_keys = {key: None for instance in instances for key in instance.values}
    for name, job in runs.items():
        path: KeyPath = ("jobs", name, "run")
        file = str(resolve_beside(loaded_config, path, str(job.run)))
        try:
            read = load_config(file, import_task=False)
        except ConfigError as error:
            yield from error.problems
            continue
        config = read.config
        if job.cwd is None and not _has_data(config):
            yield from misplacements(read)
        root = plain_root_of(config.task)
        if search is not None:
            yield from run_problems(loaded_config, search, config)
        yield from _overwritten(loaded_config, name, matrix_keys)
        unknown = [key for key in matrix_keys if key not in schema_keys(root)]
        for key in unknown:
            if key not in used:
                similar = suggest_key(root, key) or nearest(key, schema_keys(root)) or ""
                hint = f"did you mean '{similar}'?" if similar else "use it as ${…} somewhere"
                message = f"'{key}' is no key of {file}, and no text uses it"
                yield loaded_config.problem((*_varied_in(spec), key), message, hint)
        checked_pairs: set[tuple[str, Scalar]] = set()
        reports: dict[str, ConfigProblem] = {}
        for instance in instances:
            pairs = set(instance.values.items())
            if instance.index and pairs <= checked_pairs:
                continue
            checked_pairs |= pairs
            variables = variables_of(instance, schema_keys(root)) | start_variables(spec, name)
            try:
                load_config(file, sets_of(job, variables), import_task=False)
            except ConfigError as error:
                for problem in error.problems:
                    if problem.key in matrix_keys:
                        place = loaded_config.place((*_varied_in(spec), problem.key))
                        problem = replace(problem, place=place)
                    reports.setdefault(str(problem), problem)
                if search is None:
                    break
        yield from reports.values()


def _overwritten(
    loaded_config: LoadedFleet, name: str, varied_keys: Iterable[str]
) -> Iterator[ConfigProblem]:
    """Yield the keys of a run of which one value would replace another."""
    spec, varied_in = loaded_config.spec, _varied_in(loaded_config.spec)
    sets, path = spec.jobs[name].set, ("jobs", name, "set")
    for section, keys in ((varied_in, varied_keys), (path, sets)):
        for key in OWN_KEYS.keys() & keys:
            message = f"'{key}' is set by the fleet"
            yield loaded_config.problem((*section, key), message, OWN_KEYS[key])
    until = f"{spec.vars.get('max_steps')}it"  # a quick test ends earlier than its matrix says
    for key in sets.keys() & {*varied_keys}:
        if (key, sets[key]) != ("train.until", until):
            message = f"'{key}' is in {dotted_key(varied_in)} and in {dotted_key(path)}"
            yield loaded_config.problem((*path, key), message, "leave it out of one of them")


def _has_data(config: RunConfig) -> bool:
    path = getattr(config.data, "path", None)
    return isinstance(path, str) and Path(path).exists()


def _processes(spec: FleetSpec) -> Iterator[tuple[tuple[str, str], Process]]:
    for name, service in spec.services.items():
        yield ("services", name), service
    for name, job in spec.jobs.items():
        yield ("jobs", name), job
