"""A schedule of growth in a loop of one's own: the triggers and operations of `instar train`. With accelerate, saved and
loaded too."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from instar.config.budget import Counters
from instar.config.files import read_regular
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.growth.live.grow import (
    NO_MASKS,
    Ema,
    GrowthRequest,
    PreparedGrowth,
    optimizers_of,
    prepare_with,
)
from instar.growth.live.subject import Build, subject_of
from instar.growth.operators import OPERATORS, is_growth
from instar.growth.peers import Peers, peers_of
from instar.growth.plan import GrowthError
from instar.models.shape import Growable
from instar.schedule.aliases import translate
from instar.schedule.checks import mistakes
from instar.schedule.driver import attempt_change, next_due
from instar.schedule.operations import (
    Change,
    History,
    State,
    effective_changes,
    history_from_json,
    history_to_json,
)
from instar.schedule.settings import initial_settings
from instar.schedule.triggers import (
    AllOf,
    AnyOf,
    AtFraction,
    AtTokens,
    Entry,
    Moment,
    NoiseAbove,
    SlopeBelow,
    Trigger,
    due,
    last_step,
    remaining,
    schedule_entries,
    too_large,
)

logger = logging.getLogger(__name__)

_SKIPPED = "%s is skipped: %s; the model is as before"
HISTORY = "growth.json"
"""Beside the states of `Accelerator.save_state`."""

Sizes = Mapping[str, tuple[Any, Any]]
"""What operations changed of a shape, by its names: the value in a new run, and the last."""


Schedule = str | Path | Sequence[Mapping[str, Any]]
"""Path of a schedule file, or its entries."""


def schedule_text(schedule: Schedule) -> str:
    """Return a schedule as JSON.

    Raises:
        GrowthError: an entry holds what no file of a schedule could.
    """
    try:
        entries = str(schedule) if isinstance(schedule, str | Path) else [*map(dict, schedule)]
        return json.dumps(entries, default=os.fspath)
    except (TypeError, ValueError) as error:
        raise GrowthError(f"the entries of a schedule are JSON values: {error}") from None


class GrowthSchedule:
    """Grow a model when the triggers of a schedule fire.

    Call `step` after each update. A checkpoint holds `state_dict()`; to resume, build the model as for a new run, call
    `load_state_dict`, then `replay`, and load the tensors of the checkpoint.

    Args:
        schedule: path of a schedule file, or its entries. Only growth operations: batch size and learning rate
            are the loop's.
        steps: length of the run, for triggers with `at_fraction`.
        tokens_per_step: of all processes, for triggers with `at_tokens`.
        seed: of new values; the same in every process.
        shape, build: of a module of your own, as in `instar.growth.grow`; by default the attribute `shape` of the
            module and its class.

    Raises:
        ConfigError: lists every mistake of the schedule.
        GrowthError: an entry is the loop's, not a schedule's of growth.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        steps: int | None = None,
        tokens_per_step: int = 0,
        seed: int = 0,
        shape: Growable | None = None,
        build: Build | None = None,
    ) -> None:
        text = schedule_text(schedule)
        budget = [] if steps is None else [f"train.until=[{steps}it]"]
        loaded_config = load_config(
            None, [f"schedule={text}", *budget], (mistakes,), translate=translate
        )
        for note in loaded_config.notes:
            logger.warning("%s", note)
        self._config = loaded_config.config
        self.entries = schedule_entries(self._config)
        self.steps, self.tokens_per_step, self.seed = steps, tokens_per_step, seed
        self._check()
        self.history: History = ()
        self._first_shape, self._shape, self._build = shape, shape, build
        self._losses: tuple[tuple[int, float], ...] = ()
        self._parameters: int | None = None
        self._sizes: Sizes | None = {}
        self.pending: float | None = None
        """Loss of an evaluation of the present model that `step` was not told yet, in loops that evaluate between steps."""

    def step(
        self,
        model: Module,
        step: int,
        *,
        optimizer: Optimizer | Iterable[Optimizer] = (),
        loss: float | None = None,
        ema: Ema | None = None,
        probe: Any = None,
        wrapped: Module | None = None,
    ) -> tuple[Change, ...]:
        """Carry out what is due, and return it; empty: nothing.

        Args:
            step: number of updates done.
            loss: validation loss of an evaluation at this step. Every process passes one; that of the first counts.
            optimizer, ema, probe: see `instar.growth.grow`.
            wrapped: DDP around a module that has `model` inside it; by default `model` is passed with its wrappers.

        Raises:
            GrowthError, RuntimeError, MemoryError: an operation is not possible, broke its label, or lacks memory, and
                the entry's `on_failure` is not `skip`. Model and optimizer are as before.
        """
        peers = peers_of(model if wrapped is None else wrapped)
        if loss is not None:
            loss = peers.first(float(loss))  # of a tensor too, which no state could hold as JSON
            self._losses = (*self._losses, (step, loss))
        changes: list[Change] = []
        while due_now := next_due(
            self.entries, self.history, partial(self._due, model, step, loss, bool(changes))
        ):
            entry, reason = due_now
            operation = entry.operation
            change, growth = attempt_change(
                Change(operation, step, 0, entry.number, reason=reason),
                entry,
                partial(
                    self._prepare,
                    operation,
                    model,
                    optimizer,
                    peers,
                    ema=ema,
                    probe=probe,
                    allow_inexact=entry.allow_inexact,
                    refuses=partial(too_large, entry),
                ),
            )
            if growth is None:
                logger.warning(_SKIPPED, operation.name, change.skipped)
            else:
                before = self._values(model)
                self._swap(growth)
                self._note_sizes(before, self._values(model))
                self._parameters = _count(model)  # the next operation of this step may fail
            self.history = (*self.history, change)
            self.pending = None
            changes.append(change)
        self._parameters = _count(model)
        return tuple(changes)

    def set_steps(self, steps: int | None) -> None:
        """Set the number of updates of the training; None: it is not known.

        Raises:
            GrowthError: an operation needs to know it.
        """
        self.steps = steps
        self._check()

    def begin_anew(self, model: Module) -> None:
        """Forget a former training where another begins at step 0, unless its model has the operations of that one."""
        self._losses = ()
        if self.history and (problem := self._mismatch(model)):
            logger.warning("%s: another model's training begins, and its schedule anew", problem)
            self.history, self._shape = (), self._first_shape
            self._parameters, self._sizes, self.pending = None, {}, None

    def check_metric(self, name: str, metrics: Iterable[str]) -> None:
        """Raise GrowthError if an evaluation has no metric of this name, and an operation can only fire at its value."""
        if name not in metrics and (operation := self.find_waiting()):
            raise GrowthError(
                f"{operation} waits for {name}, and evaluations have {', '.join(metrics) or 'no metrics'}"
            )

    def find_waiting(self) -> str | None:
        """Return the name of the first operation ahead that can only fire at an evaluation."""
        names = (
            entry.operation.name
            for entry in remaining(self.entries, self.history)
            if entry.at_evaluations  # also of `any`: it is asked about at evaluations only
        )
        return next(names, None)

    def take_pending(self) -> float | None:
        loss, self.pending = self.pending, None
        return loss

    def replay(self, model: Module, optimizer: Optimizer | Iterable[Optimizer] = ()) -> None:
        """Grow a model built as for a new run by the history, so that the tensors of a checkpoint fit it; and
        an optimizer.

        Raises:
            GrowthError: the model is neither one built as for a new run nor the grown one.
        """
        sizes = {**(self._sizes or {})}
        problem = self._mismatch(model)
        now = self._values(model) if sizes else {}
        is_smaller = self._parameters is None or _count(model) <= self._parameters
        if problem and not (is_smaller and all(now.get(name) == sizes[name][0] for name in sizes)):
            raise GrowthError(
                f"{problem}: models do not shrink; build it as for a new run, then load the state"
            )
        # operations that change no size, such as resize_vocab to as many rows, do not show in a model
        if problem or (self._sizes is not None and not sizes):
            for change in effective_changes(self.history):
                peers = peers_of(model)
                growth = self._prepare(
                    change.operation, model, optimizer, peers, probe=False, replays=True
                )
                self._swap(growth)
        self.check(model)

    def check(self, model: Module) -> None:
        """Raise GrowthError unless a model has the shape that the history led to."""
        if problem := self._mismatch(model):
            raise GrowthError(f"{problem}: build it by from_pretrained(checkpoint), or by replay()")

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {
            "history": history_to_json(self.history),
            "losses": [list(point) for point in self._losses],
            "parameters": self._parameters,
            "pending": self.pending,
            "sizes": None if self._sizes is None else {**self._sizes},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = history_from_json(state["history"])
        self._losses = tuple((int(step), float(loss)) for step, loss in state["losses"])
        self._parameters, self.pending = state["parameters"], state.get("pending")
        # that of an older version has none: its operations are compared by the number of parameters
        sizes = state.get("sizes", None if self.history else {})
        if sizes is not None:
            # what this schedule has changed since is as at first in a model of that state
            earlier = {name: (first, first) for name, (first, _) in (self._sizes or {}).items()}
            sizes = {**earlier, **{name: (first, last) for name, (first, last) in sizes.items()}}
        self._sizes = sizes

    def _check(self) -> None:
        """Raise GrowthError for what a loop of one's own does itself, and for counts that nobody gave."""
        for entry in self.entries:
            operation, kinds = entry.operation, {type(part) for part in _parts(entry.trigger)}
            problems = {
                f"{operation.name} is no growth, and the loop's to change; here there are "
                f"{', '.join(OPERATORS)}": not is_growth(operation.name),
                "lr is the loop's: change its scheduler": "lr" in operation.options,
                NO_MASKS: "mask" in operation.options,
                "reevaluate is the loop's, which decides when to evaluate": entry.reevaluate,
                "at_fraction needs the length of the run (steps=, or max_steps of the trainer)": AtFraction
                in kinds
                and self.steps is None,
                "noise_scale is measured by instar train": NoiseAbove in kinds,
                "at_tokens needs tokens_per_step=": AtTokens in kinds and not self.tokens_per_step,
                "slope_below needs the FLOPs of a step, which only instar train counts": SlopeBelow
                in kinds,
            }
            if problems_found := [problem for problem, holds in problems.items() if holds]:
                raise GrowthError(f"{entry.place}: {'; '.join(problems_found)}")

    def _due(
        self, model: Module, step: int, loss: float | None, has_changed: bool, entry: Entry
    ) -> str | None:
        since = step - (last_step(self.history) or 0)
        share = None if self.steps is None else step / self.steps
        counters = Counters(step, tokens=step * self.tokens_per_step)
        moment = Moment(counters, share, since, loss, self._losses, has_changed)
        shape = self._shape or subject_of(model).shape
        state = State(initial_settings(self._config), shape, self._config)
        return due(entry, moment, state)

    def _values(self, model: Module) -> dict[str, Any]:
        """Return the shape of a model as JSON values, and its number of parameters."""
        shape = (self._shape or subject_of(model).shape).to_dict()
        return {**json.loads(json.dumps(shape, default=str)), "parameters": _count(model)}

    def _note_sizes(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        if self._sizes is None:
            return
        for name in {**before, **after}:
            first = before.get(name)
            if first != (last := after.get(name)):
                self._sizes = {**self._sizes, name: (self._sizes.get(name, (first,))[0], last)}

    def _mismatch(self, model: Module) -> str:
        """Return how a model differs from that of the history; empty: not at all."""
        if self._parameters is None:
            return ""
        sizes = {name: last for name, (_, last) in (self._sizes or {}).items()}
        sizes["parameters"] = self._parameters
        now = self._values(model) if len(sizes) > 1 else {"parameters": _count(model)}
        if not (odd := [name for name in sizes if now.get(name) != sizes[name]]):
            return ""
        before, after = (
            ", ".join(_size_text(name, values.get(name)) for name in odd) for values in (sizes, now)
        )
        return (
            f"after {len(self.history)} operations the model had {before}, and this one has {after}"
        )

    def _swap(self, growth: PreparedGrowth) -> None:
        growth.swap_in()
        if self._shape is not None:
            self._shape = growth.shape

    def _prepare(
        self,
        operation: Operation,
        model: Module,
        optimizer: Optimizer | Iterable[Optimizer],
        peers: Peers,
        **settings: Any,
    ) -> PreparedGrowth:
        request = GrowthRequest(
            operation,
            optimizers_of(optimizer),
            shape=self._shape,
            build=self._build,
            seed=self.seed,
            **settings,
        )
        growth = prepare_with(peers, model, request)
        if growth.refusal:  # here, where an entry may be skipped
            raise GrowthError(growth.refusal)
        return growth


def _count(model: Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _size_text(name: str, value: Any) -> str:
    return f"{value:,} parameters" if name == "parameters" else f"{name} {value}"


def _parts(trigger: Trigger) -> Iterator[Trigger]:
    """Yield a trigger and those that it consists of."""
    yield trigger
    if isinstance(trigger, AnyOf | AllOf):
        for part in trigger.triggers:
            yield from _parts(part)


def resume_across_growth(accelerator: Any, schedule: GrowthSchedule, optimizer: Optimizer) -> None:
    """Make `save_state` write the history of a schedule, and `load_state` grow the prepared model and its optimizer by
    it before their tensors are loaded."""

    def save(_models: Any, _weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            Path(folder, HISTORY).write_text(json.dumps(schedule.state_dict()), encoding="utf-8")

    def load(models: Any, folder: str) -> None:
        state_before = schedule.state_dict()
        schedule.load_state_dict(json.loads(read_regular(Path(folder, HISTORY))))
        try:
            schedule.replay(models[0], optimizer)
        except Exception:
            schedule.load_state_dict(state_before)  # the model is still that of this history
            raise

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
