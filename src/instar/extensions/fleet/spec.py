"""The schema of a fleet file: frozen pydantic models, torch-free.

The words are those of Compose (`depends_on`, `healthcheck`, `start_period`) and of run configs.
"""

from __future__ import annotations

import json
import math
import re
import signal as signal_numbers
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    field_validator,
    model_validator,
)

from instar.config.sections import MOST_PROCESSES, NonNegativeInt, PositiveInt, Section
from instar.extensions.fleet.engines import EngineName

MOST_INSTANCES = 100_000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d)", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])(i)?B?", re.ASCII)
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parts = _DURATION.findall(value.replace(" ", ""))
    if not parts or "".join(number + unit for number, unit in parts) != value.replace(" ", ""):
        raise ValueError("a duration is written like 500ms, 2s, 5m or 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("is longer than 0s")
    return seconds


def _signal(name: str) -> str:
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    if full not in signal_numbers.Signals.__members__:
        raise ValueError("no such signal; write e.g. SIGTERM or SIGINT")
    return full


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.replace(" ", ""))
    if match is None:
        raise ValueError("a size is written like 500MB, 16GB or 16GiB")
    power, base = " KMGT".index(match[2]), 1024 if match[3] else 1000
    return int(float(match[1]) * base**power)


def _choice(value: Any) -> Any:
    """A list becomes its YAML text, which is what `--set` reads and Optuna can store."""
    return json.dumps(value) if isinstance(value, list | tuple) else value


def _pruner(value: Any) -> Any:
    return {"name": value or "none"} if isinstance(value, str | None) else value


Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=1e8)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
SignalName = Annotated[str, AfterValidator(_signal)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
FleetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Scalar = str | int | float | bool | None
Choice = Annotated[Scalar, BeforeValidator(_choice)]
Bound = (
    Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
)
Values = Annotated[tuple[Scalar, ...], Strict(False)]
Words = Annotated[tuple[str, ...], Strict(False)]
Condition = Literal["service_started", "service_healthy", "completed"]
Port = Annotated[int, Field(ge=1, le=65535)]
MASTER = "master"
"""the name of the port at which the nodes of a job meet"""


class RayCluster(Section):
    """The cluster of the engine ray."""

    address: str = Field(
        "auto",
        description="HOST:PORT; auto: of this machine's cluster; local: of one to be started",
    )
    restarts: NonNegativeInt = Field(
        3, description="how often an instance is restarted after the loss of its node"
    )


class SlurmOptions(Section):
    """What is asked of SLURM for each instance, beside the resources of its processes."""

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    time: Duration | None = Field(None, description="limit; default: the partition's")
    warning: Duration = Field(
        120.0, description="how long before the limit an instance is stopped and queued again"
    )
    requeue: bool = Field(
        True, description="queue it again after the limit, a preemption or the loss of its node"
    )
    setup: Words = Field((), description="lines of the batch script before the instance")
    sbatch: Mapping[str, str | int | bool] = Field(
        default_factory=dict, description="further options of sbatch, e.g. qos: high"
    )


class Resources(Section):
    """What one process needs for itself."""

    nodes: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] = Field(
        1, description="hosts on which a job is started, once each; services run on the first"
    )
    gpus: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = Field(
        0,
        description="GPUs, on each of its nodes; where a fleet has runs only and none names any, one for each "
        "rank (engine local)",
    )
    cpus: Annotated[int, Field(gt=0, le=2**16)] | None = Field(
        None, description="cores; default: an equal share, without a reservation"
    )
    memory: Annotated[int, BeforeValidator(_size), Field(gt=0)] | None = Field(
        None, description="main memory that is reserved, e.g. 16GB"
    )


class StopPolicy(Section):
    """How a process is stopped."""

    signal: SignalName = Field("SIGTERM", description="the signal that asks it to end")
    grace: Duration = Field(10.0, description="time between this signal and SIGKILL")

    @property
    def number(self) -> signal_numbers.Signals:
        return signal_numbers.Signals[self.signal]


class Healthcheck(Section):
    """When a service counts as ready, and as alive."""

    http: str | None = Field(
        None, description="path that must answer with status 200, e.g. /health"
    )
    port: str | None = Field(None, description="name of the port; default: the service's first")
    probe: Literal["completion"] | None = Field(
        None, description="completion: the server must also answer a request for one token"
    )
    model: str | None = Field(
        None, description="the model that the probe names; default: the first that the server lists"
    )
    tcp: bool = Field(False, description="the port must accept a connection")
    command: str | None = Field(None, description="a command that must end with exit code 0")
    interval: PositiveDuration = Field(2.0, description="time between checks")
    timeout: PositiveDuration = Field(1.0, description="limit of a check of a ready service")
    start_period: Duration = Field(300.0, description="time in which it must become ready")
    retries: Annotated[int, Field(gt=0, le=1000)] = Field(
        3, description="failed checks in a row after which a ready service is unhealthy"
    )


class RestartPolicy(Section):
    """What happens when a service ends or becomes unhealthy."""

    policy: Literal["no", "on-failure", "always"] = Field("no", description="when it is restarted")
    max: NonNegativeInt = Field(3, description="restarts of an instance's service")
    backoff: Duration = Field(1.0, description="wait before the first restart; doubled each time")


class RetryPolicy(Section):
    """What happens when a job fails."""

    max: NonNegativeInt = Field(0, description="further attempts after a failure")
    backoff: Duration = Field(1.0, description="wait before the first retry; doubled each time")


class Process(Section):
    """What services and jobs have in common."""

    command: str | Words | None = Field(None, description="words, or one line split as by a shell")
    resources: Resources = Field(default_factory=Resources)
    env: Mapping[str, str] = Field(default_factory=dict, description="environment variables")
    cwd: str | None = Field(None, description="working directory; default: the launcher's")
    ports: Annotated[tuple[Name, ...], Strict(False)] | Mapping[Name, Port] = Field(
        (), description="names of ports it needs, or names with the first number to try"
    )
    depends_on: Mapping[Name, Condition] = Field(
        default_factory=dict, description="what must be reached before it starts"
    )
    stop: StopPolicy = Field(default_factory=StopPolicy)

    @property
    def first_ports(self) -> dict[str, int | None]:
        """The names of its ports, with the first number to try."""
        master: dict[str, int | None] = {} if self.resources.nodes == 1 else {MASTER: None}
        ports = self.ports
        return master | (dict(ports) if isinstance(ports, Mapping) else dict.fromkeys(ports))


class Service(Process):
    """A server that lives as long as its instance."""

    healthcheck: Healthcheck | None = Field(None, description="none: ready once it is started")
    restart: RestartPolicy = Field(default_factory=RestartPolicy)


class Job(Process):
    """What an instance is for: a command, or a training run (`run`)."""

    run: str | None = Field(None, description="a run config instead of a command")
    set: Mapping[str, Scalar | Values] = Field(
        default_factory=dict, description="values of keys of the run config"
    )
    nproc: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] | None = Field(
        None, description="ranks of the run; default: one per GPU, or one"
    )
    on_dependency_failure: Literal["restart_pair", "fail", "wait"] = Field(
        "fail",
        description="when a service it depends on is lost: restart both, fail, or keep running",
    )
    retry: RetryPolicy = Field(default_factory=RetryPolicy)


class Stagger(Section):
    """Pauses between starts, so that they do not all load at once."""

    services: Duration = Field(0.0, description="between the starts of services")
    jobs: Duration = Field(0.0, description="between the starts of jobs")


class FailurePolicy(Section):
    """When failed instances stop the fleet."""

    policy: Literal["continue", "fail_fast"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "continue", description="continue, fail_fast, or the share of instances that may fail"
    )


class Dimension(Section):
    """The values that a search draws for one key: a range, or choices."""

    low: Bound | None = Field(None, description="least value; whole numbers make a whole range")
    high: Bound | None = Field(None, description="largest value")
    step: Annotated[Bound, Field(gt=0)] | None = Field(None, description="distance of values")
    log: bool = Field(False, description="draw the logarithm uniformly")
    choices: Annotated[tuple[Choice, ...], Strict(False)] | None = Field(
        None, description="the values themselves"
    )

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        low, high = self.low, self.high
        if self.choices is not None:
            if not self.choices:
                raise ValueError("there are no choices")
            if self.log or (low, high, self.step) != (None, None, None):
                raise ValueError("choices have no low, high, step or log")
        elif low is None or high is None:
            raise ValueError("write low and high, or choices")
        elif low > high:
            raise ValueError("low is larger than high")
        elif self.log and low <= 0:
            raise ValueError("low must be positive for log: true")
        elif self.log and self.step is not None:
            raise ValueError("log: true has no step")
        return self

    @property
    def is_integer(self) -> bool:
        """Whether it is a range of whole numbers."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    def bounds(self) -> tuple[Scalar, ...]:
        """Return its choices, or the ends of its range."""
        return (self.low, self.high) if self.choices is None else self.choices

    def grid(self) -> tuple[Scalar, ...]:
        """Return all its values; none of a range without steps."""
        if self.choices is not None or self.low is None or self.high is None:
            return self.choices or ()
        step = self.step or (1 if self.is_integer else None)
        if step is None or self.high - self.low > step * MOST_INSTANCES:
            return ()
        count = int((self.high - self.low) / step + 1e-9) + 1
        return tuple(
            self.low + i * step if self.is_integer else round(self.low + i * step, 12)
            for i in range(count)
        )

    def holds(self, value: Scalar) -> bool:
        """Return whether a value is one of these."""
        if self.choices is not None:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        low, high, kinds = self.low, self.high, int if self.is_integer else int | float
        assert low is not None
        assert high is not None
        return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high

    def __str__(self) -> str:
        if self.choices is not None:
            return ", ".join(map(str, self.choices))
        step = "" if self.step is None else f" by {self.step}"
        return f"{self.low} to {self.high}{step}{' (log)' if self.log else ''}"


class Pruner(Section):
    """Which trials are stopped early; Optuna's names, and its defaults. Evaluations are counted."""

    name: Literal["hyperband", "successive_halving", "median", "none"] = "hyperband"
    min_resource: PositiveInt | None = Field(
        None, description="evaluations before a trial can be pruned; default 1"
    )
    max_resource: PositiveInt | None = Field(
        None, description="evaluations of a whole run; default: of the first that has succeeded"
    )
    reduction_factor: Annotated[int, Field(ge=2, le=1000)] | None = Field(
        None, description="one of this many trials continues; default 3, successive_halving 4"
    )
    n_startup_trials: NonNegativeInt | None = Field(
        None, description="trials that must have succeeded before one is pruned; default 5"
    )
    n_warmup_steps: NonNegativeInt | None = Field(
        None, description="evaluations of a trial during which it is not pruned; default 0"
    )

    @model_validator(mode="after")
    def _own_settings(self) -> Self:
        setting_names = _PRUNER_SETTINGS[self.name]
        for setting in self.settings:
            if setting not in setting_names:
                raise ValueError(
                    f"{self.name} has no {setting}, only {', '.join(setting_names) or 'a name'}"
                )
        if self.max_resource is not None and self.max_resource < (self.min_resource or 1):
            raise ValueError("max_resource is smaller than min_resource")
        return self

    @property
    def settings(self) -> dict[str, int]:
        """What differs from Optuna's defaults."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


_PRUNER_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "hyperband": ("min_resource", "max_resource", "reduction_factor"),
    "successive_halving": ("min_resource", "reduction_factor"),
    "median": ("n_startup_trials", "n_warmup_steps"),
    "none": (),
}


class Search(Section):
    """Instances are trials, whose values a sampler draws from what earlier ones have reached."""

    metric: str = Field("val/loss", description="metric of the run's evaluations")
    direction: Literal["minimize", "maximize"] = "minimize"
    trials: Annotated[int, Field(gt=0, le=MOST_INSTANCES)] | None = Field(
        None, description="number of trials; default for a grid: all combinations"
    )
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of the sampler")
    pruner: Annotated[Pruner, BeforeValidator(_pruner)] = Field(default_factory=Pruner)
    space: Annotated[Mapping[str, Dimension], Field(min_length=1)] = Field(
        description="keys of the run config, or names for ${…}"
    )

    @model_validator(mode="after")
    def _is_countable(self) -> Self:
        if self.sampler == "grid":
            for key, dimension in self.space.items():
                if not dimension.grid():
                    raise ValueError(f"a grid needs choices or a step of {key}")
            if self.combinations > 2**53 or self.count > MOST_INSTANCES:
                raise ValueError(f"the grid has {self.combinations:,} combinations: write trials")
        elif self.trials is None:
            raise ValueError("trials is missing")
        return self

    @property
    def combinations(self) -> int:
        """The number of combinations of a grid."""
        return math.prod(len(dimension.grid()) for dimension in self.space.values())

    @property
    def count(self) -> int:
        """The number of trials."""
        every = self.combinations if self.sampler == "grid" else MOST_INSTANCES
        return min(self.trials or every, every)

    def __str__(self) -> str:
        dimensions = "; ".join(f"{key}: {dimension}" for key, dimension in self.space.items())
        goal = f"{self.direction} {self.metric}, pruner {self.pruner.name}"
        return f"{self.sampler} draws {dimensions} ({goal})"


class FleetSpec(Section):
    """A fleet: a matrix of instances, each with the same services and jobs."""

    name: FleetName = Field(description="name of the fleet, and of its folder in `fleets`")
    engine: EngineName = Field(
        "local", description="what runs the instances: this machine, a Ray cluster, or SLURM"
    )
    ray: RayCluster = Field(default_factory=RayCluster)
    slurm: SlurmOptions = Field(default_factory=SlurmOptions)
    vars: Mapping[Name, Scalar] = Field(default_factory=dict, description="values for ${…}")
    matrix: Mapping[str, Values] = Field(
        default_factory=dict, description="one instance per combination of these values"
    )
    include: Annotated[tuple[Mapping[str, Scalar], ...], Strict(False)] = Field(
        (), description="further combinations"
    )
    exclude: Annotated[tuple[Mapping[str, Scalar], ...], Strict(False)] = Field(
        (), description="combinations, or parts of them, that are left out"
    )
    search: Search | None = Field(None, description="search for values instead of a matrix")
    max_parallel: Annotated[int, Field(gt=0, le=MOST_INSTANCES)] | None = Field(
        None,
        description="instances at a time; default: as many as there are the resources for that they name, "
        "or one for each core if they name none",
    )
    run_name: str = Field("${name}-${index}", description="name of each instance, unique")
    output_dir: str = Field("runs/${run_name}", description="folder of each instance, unique")
    first_port: Port = Field(8000, description="the lowest port that is tried")
    services: Mapping[Name, Service] = Field(default_factory=dict)
    jobs: Mapping[Name, Job] = Field(default_factory=dict)
    stagger: Stagger = Field(default_factory=Stagger)
    failure: FailurePolicy = Field(default_factory=FailurePolicy)

    @field_validator("matrix")
    @classmethod
    def _not_empty(cls, matrix: Mapping[str, Values]) -> Mapping[str, Values]:
        for key, values in matrix.items():
            if not values:
                raise ValueError(f"{key} has no values")
        return matrix

    @property
    def processes(self) -> dict[str, Process]:
        """Services, then jobs, by name."""
        return {**self.services, **self.jobs}
