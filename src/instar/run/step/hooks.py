"""Hooks: a user's functions that a run calls around steps, evaluations, saves and growth.

A hook is any object with some of the methods of `METHODS`, each of which takes a `HookContext`. All
ranks call the same hooks in the same order. With `state_dict` and `load_state_dict` its state is
part of every checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch.nn import Module

from instar.config.errors import ConfigError, InstarError
from instar.config.schema import RunConfig
from instar.config.user_code.failures import what_happened
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.failure import UserCodeFailed, exits_fail
from instar.distributed.world import World
from instar.run.state.gradient_stats import GradNorm
from instar.run.state.run_state import RunState
from instar.run.step.stepper import Stepper
from instar.tasks.logged import Logged, log, log_image, log_table, recording

T = TypeVar("T")

METHODS = (
    "on_train_begin",
    "on_train_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate_begin",
    "on_evaluate_end",
    "on_save_begin",
    "on_save_end",
    "on_growth_end",
)


@dataclass(frozen=True)
class HookContext:
    """A run at the moment of a hook."""

    step: int
    """optimizer steps so far"""
    samples: int
    tokens: int
    """loss weight consumed"""
    epochs: float
    rank: int
    world_size: int
    device: torch.device
    config: RunConfig
    folder: Path
    """the run's"""
    model: Module
    """without wrappers; another object after growth"""
    optimizers: Sequence[torch.optim.Optimizer]
    stop: Callable[[str], None]
    """ends the run after this step, for a reason; one rank is enough"""
    grad_norm: float | None = None
    """`on_step_end`: before clipping; not finite if the step was skipped"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`on_evaluate_end`: of this evaluation"""
    reason: str = ""
    """`on_save_begin`, `on_save_end`: why the checkpoint is saved"""
    operation: str = ""
    """`on_growth_end`: the operation's name"""
    log = staticmethod(log)
    log_image = staticmethod(log_image)
    log_table = staticmethod(log_table)


def check_hooks(hooks: Sequence[object], world: World) -> None:
    """Check the hooks of a run before it creates anything. A collective.

    Raises:
        ConfigError, PeerError: a method is unknown, or the ranks have different hooks.
    """
    hook_names = _by_name(hooks)
    with raise_on_all_ranks(world, "checking hooks"):
        for name, hook in hook_names.items():
            _check(name, hook)
    states = ("state_dict", "load_state_dict")  # saving one is a collective
    descriptions = {
        name: [m for m in (*METHODS, *states) if hasattr(h, m)] for name, h in hook_names.items()
    }
    everyones = gather(world, descriptions)
    if any(other != everyones[0] for other in everyones):
        rank_texts = "; ".join(
            f"rank {rank}: {names_text}" for rank, names_text in enumerate(everyones)
        )
        raise ConfigError.of(
            f"the ranks have different hooks: {rank_texts}",
            where="hooks",
            hint="each rank must pass the same hooks; a hook can see its rank",
        )


class Hooks:
    """The hooks of a run."""

    def __init__(
        self,
        hooks: Sequence[object],
        world: World,
        config: RunConfig,
        folder: Path,
        values: Logged,
        stop: Callable[[str], None],
    ) -> None:
        self.world, self.config, self.folder = world, config, folder
        self.logged_values, self.stop = values, stop
        self.hooks = _by_name(hooks)

    def call(
        self,
        method: str,
        state: RunState,
        stepper: Stepper,
        *,
        norm: GradNorm | None = None,
        **facts: Any,
    ) -> None:
        """Call a method of all hooks that have it. A collective if there is one, but for those around the
        steps of a round: there a rank whose hook raises ends by itself, and the others lose it.

        Raises:
            UserCodeFailed, PeerError: a hook raised on a rank; names the hook.
        """
        functions = {
            n: getattr(hook, method) for n, hook in self.hooks.items() if hasattr(hook, method)
        }
        if not functions:
            return
        context = HookContext(
            step=state.step,
            samples=state.progress.samples,
            tokens=state.progress.tokens,
            epochs=state.epochs,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.world.device,
            config=self.config,
            folder=self.folder,
            model=stepper.unwrapped_model,
            optimizers=stepper.optimizers,
            stop=self.stop,
            grad_norm=None if norm is None else norm.item(),
            **facts,
        )
        is_local = stepper.strategy.rounds is not None and method.startswith("on_step_")
        for name, function in functions.items():
            what = f"{name}.{method}"
            shared = (
                nullcontext() if is_local else raise_on_all_ranks(self.world, f"running {what}")
            )
            with shared, recording(self.logged_values):
                _run(what, partial(function, context))

    def have(self, method: str) -> bool:
        """Return whether `call` would call anything."""
        return any(hasattr(hook, method) for hook in self.hooks.values())

    def state(self) -> dict[str, list[str]]:
        """Return the `state_dict` of every hook on each rank, as JSON texts. A collective."""
        if not any(hasattr(hook, "state_dict") for hook in self.hooks.values()):
            return {}
        states: dict[str, str] = {}
        with raise_on_all_ranks(self.world, "saving the state of hooks"):
            for name, hook in self.hooks.items():
                if (get := getattr(hook, "state_dict", None)) is not None:
                    states[name] = _run(f"{name}.state_dict", partial(_to_text, get))
        everyones = cast(list[dict[str, str]], gather(self.world, states))
        return {name: [rank_states[name] for rank_states in everyones] for name in states}

    def restore(self, saved_states: object) -> list[str]:
        """Load what `state` returned; on another number of ranks, each gets the state of rank 0.

        Returns:
            warnings: states without a hook.
        """
        states = msgspec.convert(saved_states, dict[str, list[str]])
        for name, texts in states.items():
            load = getattr(self.hooks.get(name), "load_state_dict", None)
            if load is not None:
                text = texts[self.world.rank if len(texts) == self.world.size else 0]
                _run(f"{name}.load_state_dict", partial(load, json.loads(text)))
        unknown_hooks = sorted(states.keys() - self.hooks.keys())
        message = (
            f"the checkpoint has the state of hooks that this run lacks: {', '.join(unknown_hooks)}"
        )
        return [message] if unknown_hooks else []


def _by_name(hooks: Sequence[object]) -> dict[str, object]:
    """Return the hooks by the name of their class; numbered if a class has several."""
    counts: Counter[str] = Counter()
    names = {}
    for hook in hooks:
        name = type(hook).__qualname__
        counts[name] += 1
        names[name if counts[name] == 1 else f"{name} {counts[name]}"] = hook
    return names


def _check(name: str, hook: object) -> None:
    unknown = [m for m in dir(hook) if m.startswith("on_") and m not in METHODS]
    if unknown:
        raise ConfigError.of(
            f"the hook {name} has {', '.join(unknown)}, which is never called",
            where="hooks",
            hint=f"there are {', '.join(METHODS)}",
        )
    if hasattr(hook, "state_dict") != hasattr(hook, "load_state_dict"):
        raise ConfigError.of(
            f"the hook {name} has only one of state_dict and load_state_dict", where="hooks"
        )


def _to_text(state_dict: Callable[[], object]) -> str:
    return json.dumps(state_dict())


def _run(what: str, call: Callable[[], T]) -> T:
    """Call a user's function; its errors name it."""
    try:
        with exits_fail(what):
            return call()
    except InstarError:
        raise
    except Exception as error:
        raise UserCodeFailed(f"the hook {what} failed: {what_happened(error)}") from error
