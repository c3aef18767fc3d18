"""The trials of a search: what is checked before they start, and what the launcher asks of them: values for an
instance, whether to prune it, how it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from instar.config.errors import ConfigError, ConfigProblem, nearest_hint
from instar.config.fields import schema_keys
from instar.config.schema import RunConfig
from instar.extensions.fleet.plan import Instance, LoadedFleet, variables_in
from instar.extensions.fleet.spec import Scalar, Search
from instar.extensions.fleet.state import (
    FleetEvent,
    InstanceChanged,
    Phase,
    StateLog,
    TrialDrawn,
    TrialEvaluated,
    now,
)
from instar.logs.query.tail import LineFollower
from instar.record.control import send_request
from instar.record.events import VERSION, Placed, events_in, metrics
from instar.record.rundir import RunDir

METRICS_FILE = "metrics.jsonl"
"""what a command that is no Instar run appends to in its folder: {"step": 100, "val/loss": 2.1}"""
_READ_BYTES = 1 << 20
_EVAL = b'{"v":%d,"kind":"eval"' % VERSION


class Trials:
    """The trials of a search while a launcher runs them; close it at the end."""

    def __init__(
        self,
        search: Search,
        folder: Path,
        instances: Sequence[Instance],
        events: Sequence[FleetEvent],
        todo: Collection[int],
        say: Callable[[str], None],
    ) -> None:
        """Raise ConfigError if optuna is not installed, or the folder of a trial that has not begun
        holds a run: its evaluations would count as those of other values.

        Args:
            folder: of the fleet.
            events: of earlier launchers. Trials of which `todo` is to be run go on with their values;
                those that were pruned before are not pruned again.
            say: prints a line.
        """
        from instar.extensions.fleet.study import STUDY_FILE, Study, StudyFile

        self._search = search
        self._study = Study(search, folder.name)
        self._readers: dict[int, Evaluations] = {}
        self._spared = {
            event.instance
            for event in events
            if isinstance(event, InstanceChanged)
            and event.phase == "pruned"
            and event.instance in todo
        }
        self._replay(events, instances, todo)
        new = (
            instance.output_dir
            for instance in instances
            if instance.index in {*todo} - {*self._study.trials}
        )
        if occupied_folders := [path for path in new if RunDir(path).holds_run()]:
            raise ConfigError.of(
                f"{len(occupied_folders)} trials have folders with other runs, the first is {occupied_folders[0]}",
                where=str(folder),
                hint="move them elsewhere",
            )
        self._file = StudyFile(folder / STUDY_FILE, self._study.optuna, say)
        self.log: StateLog | None = None
        """where what is drawn and evaluated is kept; the launcher sets it"""

    def _replay(
        self, events: Sequence[FleetEvent], instances: Sequence[Instance], todo: Collection[int]
    ) -> None:
        study = self._study
        ends = {e.instance: n for n, e in enumerate(events) if isinstance(e, InstanceChanged)}
        for number, event in enumerate(events):
            match event:
                case TrialDrawn(instance=index, values=values):
                    if (
                        index in range(len(instances))
                        and index not in study.trials
                        and values.keys() == self._search.space.keys()
                        and all(self._search.space[key].holds(values[key]) for key in values)
                    ):
                        study.ask(index, instances[index].run_name, values)
                case TrialEvaluated(instance=index, step=step, value=value):
                    if index in study.trials and step > study.trials[index].step:
                        study.report(index, step, math.nan if value is None else value)
                case InstanceChanged(instance=index, phase=phase):
                    last = index in study.trials and ends[index] == number
                    if last and index not in todo and phase in ("succeeded", "failed", "pruned"):
                        study.tell(index, phase)

    def is_given_up(self, index: int) -> bool:
        """Return whether a trial is to be pruned."""
        trial = self._study.trials.get(index)
        return trial is not None and trial.given_up and index not in self._spared

    def begin(self, instance: Instance) -> Instance:
        """Return the instance with its values: those that it had, or new ones."""
        trial = self._study.trials.get(instance.index)
        if trial is None:
            trial = self._study.ask(instance.index, instance.run_name)
            assert self.log is not None
            event = TrialDrawn(now(), instance.index, dict(trial.values))
            self.log.write(event, durable=True)
            self._file.add(self._study.frozen_trial(instance.index))
        self._readers[instance.index] = Evaluations(
            instance.output_dir, self._search.metric, trial.step
        )
        return replace(
            instance, values=trial.values, variables={**instance.variables, **trial.values}
        )

    def look(self, instance: Instance) -> bool:
        """Read new evaluations; return whether the trial is to be pruned."""
        index = instance.index
        trial = self._study.trials[index]
        assert self.log is not None
        for step, value in self._readers[index].new():
            self._study.report(index, step, value)
            finite = value if math.isfinite(value) else None
            self.log.write(TrialEvaluated(now(), index, step, finite))
            self._file.add_evaluation(trial.optuna_trial.number, trial.evaluations, value)
        return self.is_given_up(index)

    def last_value(self, instance: Instance) -> str:
        """Say what a trial's last evaluation was."""
        trial = self._study.trials[instance.index]
        return f"{self._search.metric} {trial.value:.4g} at step {trial.step:,}"

    def ask_to_stop(self, instance: Instance) -> bool:
        """Ask the run of a trial to save and stop; False if there is no Instar run to ask."""
        run = RunDir(instance.output_dir)
        if not run.holds_run():
            return False
        try:
            send_request(run.control, "stop")
        except OSError:
            return False
        return True

    def end(self, instance: Instance, phase: Phase, reason: str) -> tuple[Phase, str]:
        """Return how a trial has ended: one without a value has failed."""
        index = instance.index
        if index not in self._study.trials:
            return phase, reason
        if index in self._readers:
            self.look(instance)
        trial = self._study.trials[index]
        if phase == "succeeded" and not math.isfinite(trial.value):
            phase, reason = "failed", self._no_value(index)
        if phase != "stopped":
            self._study.tell(index, phase)
            self._file.end(self._study.frozen_trial(index))
        return phase, reason

    def _no_value(self, index: int) -> str:
        trial, metric = self._study.trials[index], self._search.metric
        if trial.evaluations:
            return f"{metric} is not a number at step {trial.step:,}"
        names = ", ".join(sorted(self._readers[index].names)[:8])
        return f"it recorded no {metric}" + (f", only {names}" if names else "")

    def close(self) -> None:
        self._file.close()


class Evaluations:
    """Reads the values of one metric while a run appends them: new bytes only, once. Steps that were returned
    before are passed over, as a resumed run repeats them."""

    def __init__(self, folder: Path, metric: str, after: int = 0) -> None:
        """`after`: the last step that is known already."""
        self.metric = metric
        self.names: set[str] = set()
        """metrics that the run has recorded"""
        self._after = after
        self._followers = [LineFollower(RunDir(folder).events), LineFollower(folder / METRICS_FILE)]

    def new(self) -> Iterator[tuple[int, float]]:
        """Yield the step and the value of each new evaluation."""
        for follower in self._followers:
            parse = _plain if follower.path.name == METRICS_FILE else _event
            while lines := follower.lines(_READ_BYTES):
                for evaluation in filter(None, map(parse, lines)):
                    step, values = evaluation
                    self.names.update(values)
                    if step > self._after and self.metric in values:
                        self._after = step
                        yield step, values[self.metric]


def _event(line: bytes) -> tuple[int, dict[str, float]] | None:
    if not line.startswith(_EVAL):
        return None
    events = (event for _, event in events_in([line]) if isinstance(event, Placed))
    return next(((event.step, metrics(event)) for event in events), None)


def _plain(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        data = json.loads(line)
        step = data.pop("step")
        return int(step), {k: float(v) for k, v in data.items() if isinstance(v, int | float)}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


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
        hint = nearest_hint(search.metric, directions, f"there are {', '.join(directions)}")
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
