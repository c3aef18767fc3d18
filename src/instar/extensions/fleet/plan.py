"""A fleet file, read with all its mistakes at once, each with its line and a suggestion; its instances, their
commands with `${name}` replaced, and how many of them run at a time."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from instar.config.document import (
    Document,
    KeyPath,
    merge_data,
    parse_option,
    problem_at,
    read_document,
)
from instar.config.errors import ConfigError, ConfigProblem, SourceLocation
from instar.config.fields import choices
from instar.config.files import HINT, WEB, addresses, message_of
from instar.config.origins import in_yaml
from instar.config.suggestions import unknown_key, wrong_value
from instar.extensions.fleet.spec import MASTER, MOST_INSTANCES, FleetSpec, Job, Process, Scalar

_MOST_COMBINATIONS = 100 * MOST_INSTANCES
"""before `exclude`"""
_MOST_CHARACTERS = 1 << 26
"""of the names and folders of all instances"""
_ADDRESS_KEYS = frozenset({"env", "command", "http", "address", "sbatch"})
"""keys of a fleet file, at any depth, whose values may be addresses or texts"""
NODE_VARIABLES = {
    "nodes": "NNODES",
    "node_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
"""variables of a job of several nodes, and the environment variables that have the same values"""
MATRIX_KEYS = "matrix_keys"
"""the variable with the keys of the matrix that are keys of a run's config"""
OWN_KEYS = {"record.run_dir": "write output_dir", "resume": "runs resume their folder"}
"""keys of a run's config that the fleet sets, and what to do instead"""
_VARIABLE = re.compile(r"\$(?:(\$)|\{([^{}$]*)\}|(\{))")


@dataclass(frozen=True)
class LoadedFleet:
    """A fleet with the positions of its values."""

    spec: FleetSpec
    documents: tuple[Document, ...]
    """the file and the command line's values; later ones take precedence"""

    def place(self, path: KeyPath, *, key: bool = False) -> SourceLocation:
        """Return where a value, or its key, was written."""
        for document in reversed(self.documents):
            if path in document.places:
                return document.place(path, key=key)
        return self.documents[0].place(path, key=key)

    def problem(self, path: KeyPath, message: str, hint: str = "") -> ConfigProblem:
        """Return a problem of a value."""
        return problem_at(self.place(path), message, hint)


def load_fleet(path: str, overrides: Sequence[str] = ()) -> LoadedFleet:
    """Read a fleet file with `--set` texts such as "vars.model=gpt2" applied.

    Raises:
        ConfigError: with all problems.
    """
    document, problems = read_document(path, "docs/fleet.md has examples")
    if document is None:
        raise ConfigError(*problems)
    return load_fleet_document(document, overrides, problems)


def load_fleet_document(
    document: Document, overrides: Sequence[str] = (), problems: Sequence[ConfigProblem] = ()
) -> LoadedFleet:
    """Do what `load_fleet` does with a document that was read, and the problems of reading it."""
    problems = [*problems]
    if not isinstance(document.data, dict):
        message, hint = "a fleet file is made of 'key: value' lines", "docs/fleet.md has examples"
        raise ConfigError(*problems, problem_at(document.place(), message, hint))
    documents = [document]
    data: dict[str, Any] = document.data
    for text in overrides:
        option, mistakes = parse_option(text, "max_parallel=2")
        problems += mistakes
        if option is not None:
            documents.append(option)
            data = merge_data(data, option.data)
    unreadable = {path for document in documents for path in document.unreadable}
    try:
        spec = FleetSpec.model_validate(data)
    except ValidationError as error:
        reading = LoadedFleet(FleetSpec(name="unread"), tuple(documents))
        for item in error.errors(include_url=False):
            location = _key_path(tuple(item["loc"]), data)
            if not any(location[: len(path)] == path for path in unreadable):
                problems.append(_explain(reading, location, item, data))
        raise ConfigError(*_sorted(problems)) from None
    loaded_config = LoadedFleet(spec, tuple(documents))
    for place, address in addresses(data):
        keys = (key for key in place if isinstance(key, str))
        if not any(key in _ADDRESS_KEYS or key.startswith(WEB) for key in keys):
            problems.append(loaded_config.problem(place, message_of(address), HINT))
    if problems:
        raise ConfigError(*_sorted(problems))
    return loaded_config


def _key_path(location: tuple[Any, ...], data: Any) -> KeyPath:
    """Return the part of pydantic's location that is in the data: without branches of unions."""
    path: list[str | int] = []
    for number, step in enumerate(location):
        last = number == len(location) - 1
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            path.append(step)
            data = data[step]
        elif isinstance(data, dict) and last:  # a missing key
            path.append(step)
    return tuple(path)


def _explain(reading: LoadedFleet, path: KeyPath, item: Any, data: dict[str, Any]) -> ConfigProblem:
    if item["type"] == "extra_forbidden":
        message, hint, _ = unknown_key(FleetSpec, path)
        return problem_at(reading.place(path, key=True), message, hint)
    value: Any = data
    for step in path[:-1] if item["type"] == "missing" else path:
        value = value[step]
    # of a word in place of a section, pydantic names the key that the word is the value of
    field = tuple(item["loc"]) if item["type"] == "literal_error" else path
    field = field if choices(FleetSpec, field) else path
    return reading.problem(path, *wrong_value(FleetSpec, field, value, item["type"], item["msg"]))


def _sorted(problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """By position, the first of each: the branches of a union fail alike."""
    first: dict[str, ConfigProblem] = {}
    for problem in problems:
        first.setdefault(problem.where, problem)

    def position(problem: ConfigProblem) -> tuple[bool, int, int]:
        place = problem.place
        line = place.line if isinstance(place, SourceLocation) else 0
        return not line, line, place.column if isinstance(place, SourceLocation) else 0

    return sorted(first.values(), key=position)


def resolve_beside(reading: LoadedFleet, path: KeyPath, name: str) -> Path:
    """Return a path that is written in the file, relative to where the command was typed, or else to
    the file."""
    path_here = Path(name)
    path_beside = Path(reading.place(path).source).parent / name
    return path_beside if not path_here.exists() and path_beside.exists() else path_here


@dataclass(frozen=True)
class Instance:
    """One combination of the matrix."""

    index: int
    values: Mapping[str, Scalar]
    """of the matrix"""
    run_name: str
    output_dir: Path
    variables: Mapping[str, Scalar]
    """for the texts of its processes; without ports and GPUs, which are known when it starts"""


@dataclass(frozen=True)
class Slot:
    """The GPUs and ports that an instance would get on an idle machine, by process."""

    gpus: Mapping[str, tuple[int, ...]]
    ports: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class FleetPlan:
    """The instances of a fleet, and how many fit next to each other."""

    spec: FleetSpec
    instances: tuple[Instance, ...]
    parallel: int

    @property
    def uses_gpus(self) -> bool:
        return any(process.resources.gpus for process in self.spec.processes.values())

    def slot(self, place: int) -> Slot:
        """Return the first choice of GPUs and ports of the instance in one of `parallel` places;
        instance i is in place i % parallel if no earlier one ends before another."""
        gpu = place * sum(process.resources.gpus for process in self.spec.processes.values())
        gpus: dict[str, tuple[int, ...]] = {}
        ports: dict[str, dict[str, int]] = {}
        number = self.spec.first_port
        for name, process in self.spec.processes.items():
            gpus[name] = tuple(range(gpu, gpu + process.resources.gpus))
            gpu += process.resources.gpus
            ports[name] = {}
            for port, first in process.first_ports.items():
                ports[name][port] = (number if first is None else first) + place
                number += self.parallel if first is None else 0
        return Slot(gpus, ports)


@dataclass(frozen=True)
class Machine:
    """What there is to share: GPUs, cores, and bytes of memory."""

    gpus: int
    cpus: int
    memory: int


ANY_MACHINE = Machine(1 << 30, 1 << 30, 1 << 60)
"""an engine's scheduler decides how many instances run at a time"""


def instances_of(spec: FleetSpec) -> tuple[Instance, ...]:
    """Expand the matrix without other checks, to show a fleet of any user.

    Raises:
        ValueError: a text cannot be expanded, or there are too many instances or characters.
    """
    if math.prod(map(len, spec.matrix.values())) > _MOST_COMBINATIONS:
        raise ValueError(f"more than {_MOST_COMBINATIONS:,} combinations")
    instances, characters = [], 0
    for instance in instances_from(spec, combinations_of(spec)):
        instances.append(instance)
        characters += len(instance.run_name) + len(str(instance.output_dir))
        if len(instances) > MOST_INSTANCES or characters > _MOST_CHARACTERS:
            raise ValueError(f"more than {MOST_INSTANCES:,} instances, or names too long")
    return tuple(instances)


class UnknownVariable(ValueError):  # noqa: N818
    """A text names a variable that does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown variable ${{{name}}}")
        self.name = name


def variables_in(text: str) -> Iterator[str]:
    """Yield the names of the variables in a text.

    Raises:
        ValueError: a `${` is not closed.
    """
    for match in _VARIABLE.finditer(text):
        if match[3]:
            raise ValueError("'${' without a '}'; write '$$' for a dollar sign")
        if match[2] is not None:
            yield match[2].strip()


def expand(text: str, values: Mapping[str, object]) -> str:
    """Replace variables by their values; `$$` is a dollar sign.

    Raises:
        UnknownVariable: there is no such variable.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = (match[2] or "").strip()
        if name not in values:
            raise UnknownVariable(name)
        return text_of(values[name])

    return _VARIABLE.sub(value_of, text)


def text_of(value: object) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def argv_of(
    name: str, process: Process, variables: Mapping[str, Any], config: str = ""
) -> list[str]:
    """Return a process's command with its variables replaced.

    Args:
        config: path of the run config of a job with `run`.
    """
    if isinstance(process, Job) and process.run is not None:
        return [sys.executable, "-m", *_train_words(process, variables, config)]
    command = process.command
    assert command is not None, name
    words = shlex.split(command) if isinstance(command, str) else command
    return [expand(word, variables) for word in words]


def _of_set(value: object, variables: Mapping[str, Any]) -> str:
    """Return one value of `set`. A variable alone keeps its type; a text with variables in it is read as
    if it were written with their values."""
    if not isinstance(value, str):
        return text_of(value)
    match = re.fullmatch(r"\$\{([^{}$]*)\}", value)
    if match and match[1].strip() in variables:
        return in_yaml(variables[match[1].strip()])
    return expand(value, variables) if "$" in value else in_yaml(value)


def overrides_of(job: Job, variables: Mapping[str, Any]) -> list[str]:
    """Return the `--set` texts of a run, but for its folder."""
    overrides: dict[str, Any] = {}
    for key, value in job.set.items():
        texts = [_of_set(item, variables) for item in each_of(value)]
        overrides[key] = f"[{', '.join(texts)}]" if isinstance(value, tuple) else texts[0]
    return [f"{key}={value}" for key, value in overrides.items()]


def each_of(value: Any) -> Iterable[Any]:
    """Return the items of a list, or the value alone."""
    return value if isinstance(value, tuple) else (value,)


def sets_of(job: Job, variables: Mapping[str, Any]) -> list[str]:
    """Return all `--set` texts of a run."""
    return [
        *(f"{key}={in_yaml(variables[key])}" for key in variables.get(MATRIX_KEYS, ())),
        *overrides_of(job, variables),
        f"record.run_dir={in_yaml(str(variables['output_dir']))}",
        "resume=auto",
    ]


def _train_words(job: Job, variables: Mapping[str, Any], config: str) -> list[str]:
    ranks = job.nproc or max(1, job.resources.gpus)
    sets = sets_of(job, variables)
    words = [config, *(word for text in sets for word in ("--set", text))]
    if "node_rank" in variables:
        options = {f"--{key.replace('_', '-')}": variables[key] for key in list(NODE_VARIABLES)[1:]}
        options |= {"--nnodes": variables["nodes"], "--nproc-per-node": ranks}
        torchrun = [f"{option}={value}" for option, value in options.items()]
        return ["torch.distributed.run", *torchrun, "-m", "instar.train", *words]
    words = ["instar.cli.main", "train", *words]
    return [*words, "--nproc", str(ranks)] if ranks > 1 else words


def combinations_of(spec: FleetSpec) -> Iterator[dict[str, Scalar]]:
    """Yield the combinations of the matrix, then those of `include`; or the trials of a search, whose
    values are not known yet."""
    if spec.search is not None:
        yield from (dict.fromkeys(spec.search.space) for _ in range(spec.search.count))
        return
    keys = list(spec.matrix)
    for values in itertools.product(*spec.matrix.values()):
        combination = dict(zip(keys, values, strict=True))
        if not any(
            excluded_values.items() <= combination.items() for excluded_values in spec.exclude
        ):
            yield combination
    yield from map(dict, spec.include)


def instances_from(
    spec: FleetSpec, combinations: Iterable[dict[str, Scalar]]
) -> Iterator[Instance]:
    """Yield an instance per combination."""
    for index, values in enumerate(combinations):
        variables: dict[str, Scalar] = {**spec.vars, **values, "name": spec.name, "index": index}
        variables["run_name"] = expand(spec.run_name, variables)
        variables["output_dir"] = expand(spec.output_dir, variables)
        yield Instance(
            index, values, str(variables["run_name"]), Path(str(variables["output_dir"])), variables
        )


def variables_of(instance: Instance, config_keys: Iterable[str]) -> dict[str, Any]:
    """Return an instance's variables, with the matrix keys that are keys of a run's config."""
    keys = set(config_keys)
    return {**instance.variables, MATRIX_KEYS: [key for key in instance.values if key in keys]}


def start_variables(spec: FleetSpec, name: str) -> dict[str, Any]:
    """Return the variables that a process has when it starts, with the values of a first attempt on an
    idle machine."""
    slot = FleetPlan(spec, (), 1).slot(0)
    gpus = {process: ",".join(map(str, indices)) for process, indices in slot.gpus.items()}
    variables: dict[str, Any] = {f"ports.{port}": n for port, n in slot.ports[name].items()}
    for service in spec.services:
        variables[f"services.{service}.gpus"] = gpus[service]
        variables |= {f"services.{service}.ports.{p}": n for p, n in slot.ports[service].items()}
    if (nodes := spec.processes[name].resources.nodes) > 1:
        values = (nodes, 0, "localhost", variables[f"ports.{MASTER}"])
        variables |= zip(NODE_VARIABLES, values, strict=True)
    return {**variables, "gpus": gpus[name], "attempt": 1}
