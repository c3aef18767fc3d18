"""Settings in force at a step, and their learning rate.

The learning rate begins as `optimizer.lr` in the config and is changed only by operations in the
history (`schedule/operations.py`). `learning_rate` below computes its value at one step,
`run/step/stepper.py` writes it into the optimizer, and `run/output/run_logger.py` records it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from instar.config.errors import value_text
from instar.config.language import part_names
from instar.config.schema import RunConfig, Shape
from instar.config.sections import LARGEST
from instar.config.torch_optim.curves import CURVES
from instar.config.torch_optim.schedulers import complete_options

THAWED = "!"
"""Prefix of a pattern in `Settings.frozen` whose matches are trained again."""

CONTEXT = frozenset({"set_context", "change_context"})
"""Operations that change the length of samples: a stream restarts from its beginning."""

SET_MIXTURE = "set_mixture"

ADJUST_BATCH = "adjust_batch_size"
"""The operation whose batch is measured when it is carried out; its option `batch_size` says what was."""
AVERAGE = "average_checkpoints"

_BATCH = frozenset(
    {"set_batch_size", "change_batch_size", "set_grad_accum", "change_grad_accum", ADJUST_BATCH}
)

LR_RULES: Mapping[str, Callable[[float], float]] = {
    "keep": lambda _: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda ratio: ratio,
}
"""The factor of the learning rate for a factor of the global batch: the square root for Adam
(Malladi et al. 2022, arXiv 2205.10287), linear for SGD (Goyal et al. 2017, arXiv 1706.02677)."""


@dataclass(frozen=True)
class NewParamWarmup:
    """Parameters that one growth made, whose learning rate rises from 0 while others keep theirs."""

    step: int
    """Step of the growth."""
    iters: int
    """Steps until the rate is that of all others."""
    names: tuple[str, ...]
    """Names of the parameters in the present model."""

    @property
    def end(self) -> int:
        """First step at which the rate is that of all others."""
        return self.step + self.iters

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        return _rising(step - self.step, self.iters)


Intervals = tuple[int, int | None, int | None, tuple[tuple[str, Any], ...]]
"""(warmup_iters, lr_decay_iters, decay_every, lr_options): the steps of a learning rate schedule."""


@dataclass(frozen=True)
class Settings:
    """Every hyperparameter that an operation may change."""

    lr: float
    """Peak learning rate; the rates of Muon and of other groups keep their ratio to it."""
    lr_shape: Shape
    warmup_iters: int
    lr_decay_iters: int | None
    """Steps from `lr_start` to the end of the decay; None: it does not decay."""
    decay_fraction: float
    decay_every: int | None
    """Steps after which the rate is multiplied by gamma; None only if the schedule does not."""
    gamma: float
    min_lr_ratio: float
    lr_start: int
    """Step at which the learning rate schedule began; `reset_lr_schedule` sets it."""
    batch_size: int
    grad_accum: int
    eval_interval: int
    eval_iters: int | None
    """Validation samples, in units of the initial batch size; None: all."""
    context: int
    """Tokens per sample; at most the architecture's context length."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameter names; the last match decides, see `is_frozen`."""
    rewarm_start: int = 0
    """Step at which the latest rewarming began."""
    rewarm_iters: int = 0
    """Length of the rewarming in steps; 0: none."""
    new_param_warmups: tuple[NewParamWarmup, ...] = ()
    """Growths with `lr: {rewarm_new: n}`, the latest last; without those that had ended at a later growth."""
    interval_factor: float = 1.0
    """Product of the factors of `change_warmup_iters`."""
    unscaled_intervals: Intervals | None = None
    """Intervals without that factor; None: the present ones."""
    decay_start: int = 0
    """Step at which the last decay of a branch begins."""
    decay_iters: int = 0
    """Length of that decay in steps; 0: none."""
    lr_options: tuple[tuple[str, Any], ...] = ()
    """Options of a scheduler of torch and their values, with rates as shares of the peak."""
    mixture: tuple[float, ...] = ()
    """Weights of the parts of `data.mixture`, in its order; empty: they have none."""

    @property
    def intervals(self) -> Intervals:
        """The steps of the learning rate schedule."""
        return self.warmup_iters, self.lr_decay_iters, self.decay_every, self.lr_options

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.grad_accum

    def scheduled_step(self, step: int) -> int:
        """Return the step whose place in the schedule gives the rate of `step`: the schedule stands
        still in the last decay of a branch."""
        return min(step, self.decay_start) if self.decay_iters else step

    def with_restart(self, step: int) -> Settings:
        """Return the settings with a learning rate schedule that begins at `step`, which ends a decay."""
        decay_iters = self.decay_iters if step < self.decay_start else 0
        return replace(self, lr_start=step, decay_iters=decay_iters)

    def counts(self) -> list[int]:
        """All settings that are counts and not None."""
        limits = (self.lr_decay_iters, self.decay_every, self.eval_iters)
        counts = [self.warmup_iters, self.global_batch, self.eval_interval, self.context]
        return [*counts, *(count for count in limits if count is not None)]


def initial_settings(config: RunConfig) -> Settings:
    """Return the settings of step 0 given by the config."""
    schedule = config.learning_rate
    return Settings(
        lr=config.optimizer.lr,
        lr_shape=schedule.shape,
        warmup_iters=schedule.warmup_iters,
        lr_decay_iters=schedule.lr_decay_iters,
        decay_fraction=schedule.decay_fraction,
        decay_every=schedule.decay_every,
        gamma=schedule.gamma,
        min_lr_ratio=schedule.min_lr_ratio,
        lr_options=tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in complete_options(
                schedule.shape, schedule.options, config.optimizer.lr
            ).items()
        ),
        lr_start=0,
        batch_size=config.train.batch_size,
        grad_accum=config.train.gradient_accumulation_steps,
        eval_interval=config.eval.eval_interval,
        eval_iters=config.eval.eval_iters,
        context=config.context,
        mixture=_weights(config),
    )


def mixture_names(config: RunConfig) -> list[str]:
    """Return the names of the parts of a mixture whose parts have weights; empty without one."""
    parts = getattr(config.data, "mixture", ())
    return part_names(parts) if _weights(config) else []


def with_mixture(settings: Settings, config: RunConfig, value: Mapping[str, float]) -> Settings:
    """Return the settings with other weights of the parts of the mixture.

    Raises:
        ValueError: there is no such mixture, or its parts have other names.
    """
    names = mixture_names(config)
    if not names:
        raise ValueError("data.mixture has no parts with weights")
    if value.keys() != set(names):
        unknown = [name for name in value if name not in names]
        problem = (
            f"no part is called {unknown[0]!r}"
            if unknown
            else "every part needs a weight, 0 to leave it out"
        )
        raise ValueError(f"{problem}; the parts of data.mixture are {', '.join(names)}")
    return replace(settings, mixture=tuple(float(value[name]) for name in names))


def _weights(config: RunConfig) -> tuple[float, ...]:
    """Return the weights of the parts of a config's mixture; empty if there is none, or they have none."""
    weights = [part.weight for part in getattr(config.data, "mixture", ())]
    return () if None in weights else tuple(weights)


def is_frozen(patterns: Sequence[str], name: str) -> bool:
    """Return whether a parameter is not trained: the last pattern that matches its name decides."""
    for pattern in reversed(patterns):
        if fnmatchcase(name, pattern.removeprefix(THAWED)):
            return not pattern.startswith(THAWED)
    return False


def patterns_of(names_to_match: Collection[str], names: Collection[str]) -> tuple[str, ...]:
    """Return few patterns that match `names_to_match` and no other of `names`: whole modules, such as
    `blocks.0.*`, parameters with the same last name, such as `*.bias`, and single names."""
    other_names = [name for name in names if name not in names_to_match]
    kept_apart = {name.rpartition(".")[2] for name in other_names}
    by_end: dict[str, None] = {}
    by_module: dict[str, None] = {}
    for name in names:
        if name in names_to_match:
            end = name.rpartition(".")[2]
            parts = name.split(".")
            modules = (".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
            module_name = next(
                (m for m in modules if not any(o.startswith(m) for o in other_names)), None
            )
            module = escape(name) if module_name is None else f"{escape(module_name)}*"
            by_module[module] = None
            by_end[f"*.{escape(end)}" if "." in name and end not in kept_apart else module] = None
    return tuple(by_module if len(by_module) <= len(by_end) else by_end)


def learning_rate(settings: Settings, step: int, share: float | None = None) -> float:
    """Return the learning rate of the update in step `step` (counted from 0).

    It is the peak `lr` times a share, which a custom task may give. Otherwise: in the warm-up, w = `warmup_iters` steps from `lr_start` on,
    the share of step n (from 0) is (n + 1) / w. Then, with m = `min_lr_ratio`, e =
    `lr_decay_iters`, and p = (n - w) / (e - w):

    - *cosine*: m + (1 - m) (1 + cos πp) / 2 (SGDR, arXiv 1608.03983, eq. 5, one cycle).
    - *linear*: 1 - (1 - m) p.
    - *wsd*: 1, and over the last `decay_fraction` of e steps linear from 1 to m (MiniCPM, arXiv
      2404.06395).
    - *step*: `gamma` to the power of floor((n - w) / `decay_every`), at least m.
    - *exponential*: `gamma` to the power of (n - w) / `decay_every`, at least m.
    - *constant*: 1.
    - *schedulers of torch*: as `torch.optim.lr_scheduler` has it at step n - w, at least m; see `CURVES`.

    From step e on, the first three stay at m, and without e they stay at 1; the others do not use e.

    Rewarming multiplies this by a factor that rises from 0 to 1 over `rewarm_iters` steps, while
    the schedule continues (arXiv 2308.04014, which begins at 0 or the lowest rate; here 0). The rate of
    parameters of a `NewParamWarmup` is this times its factor.

    In the last decay of a branch, the share falls linearly from that of its first step to m.

    Args:
        share: of `settings.scheduled_step(step)`.
    """
    steps_done = settings.scheduled_step(step) - settings.lr_start
    if share is None and steps_done < settings.warmup_iters:
        share = (steps_done + 1) / settings.warmup_iters
    elif share is None:
        share = _share_of_peak(settings, steps_done)
    rewarm_share = _rising(step - settings.rewarm_start, settings.rewarm_iters)
    return settings.lr * _decay(settings, step, share) * rewarm_share


def early_end_of_decay(settings: Settings, steps: int | None, *, is_set: bool = False) -> str:
    """Describe a decay that ends before a run of so many steps; empty if it does not.

    Args:
        is_set: a resume has just set its end.
    """
    if settings.decay_iters:  # the schedule stands still in it, whatever its end
        last = settings.decay_start + settings.decay_iters
        if steps is None or last >= steps:
            return ""
        return (
            f"the last decay of this branch ends at step {last:,}, and the rate stays at its lowest until step {steps:,}; "
            "reset_lr_schedule begins a schedule anew"
        )
    end = settings.lr_decay_iters
    if settings.lr_shape not in ("cosine", "linear", "wsd") or end is None or steps is None:
        return ""
    last = settings.lr_start + end
    if last >= steps:
        return ""
    return (
        f"the learning rate's decay ends at step {last:,}{'' if is_set else ' as before'}, and the rate stays at its lowest until step "
        f"{steps:,}; to decay until then: --set learning_rate.lr_decay_iters={steps - settings.lr_start}"
    )


def refused_options(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each option that an operation on settings does not have, or whose value is invalid, with
    the message."""
    choices: dict[str, tuple[str, ...]] = {}
    counts: tuple[str, ...] = ()
    if name in CONTEXT:
        choices = {"tokens": ("change", "keep")}
    elif name in _BATCH:
        choices = {"lr": tuple(LR_RULES)}
        counts = ("max", "batch_size") if name == ADJUST_BATCH else ()
    for option, value in options.items():
        if option in counts:
            if type(value) is not int or not 0 < value <= LARGEST:
                yield option, f"must be a positive whole number, got {value_text(value)}"
        elif option not in choices:
            allowed = ", ".join((*choices, *counts))
            has = f"whose options are {allowed}" if counts else f"whose option is {allowed}"
            yield option, f"is not an option of {name}, {has if allowed else 'which has none'}"
        elif option == "lr" and (exponent := _exponent(value)) is not None:
            if not 0 <= exponent <= 2:
                yield option, f"must have an exponent from 0 to 2, got {value_text(exponent)}"
        elif not (isinstance(value, str) and value in choices[option]):
            *words, last = [*choices[option], *(["{exponent: 0.6}"] if option == "lr" else [])]
            yield option, f"must be {', '.join(words)} or {last}, got {value_text(value)}"


def _exponent(rule: Any) -> float | None:
    """Return the exponent of `{exponent: 0.6}`; None for other rules."""
    if not isinstance(rule, Mapping) or [*rule] != ["exponent"]:
        return None
    exponent = rule["exponent"]
    is_number = isinstance(exponent, int | float) and not isinstance(exponent, bool)
    return float(exponent) if is_number else None


def _lr_factor(rule: Any, ratio: float) -> float:
    """Return the factor of the learning rate for a factor of the global batch."""
    exponent = _exponent(rule)
    return LR_RULES[rule](ratio) if exponent is None else math.pow(ratio, exponent)


def with_options(before: Settings, after: Settings, options: Mapping[str, Any]) -> Settings:
    """Return the settings after an operation and its options.

    Raises:
        ValueError: the tokens per step cannot be kept.
    """
    if options.get("tokens") == "keep":
        after = _same_tokens(before, after)
    if {"batch_size", "max"} & options.keys():
        fitting = options.get("batch_size", after.batch_size)
        after = replace(after, batch_size=min(fitting, options.get("max", fitting)))
    ratio = after.global_batch / before.global_batch
    factor = _lr_factor(options["lr"], ratio) if "lr" in options else 1.0
    return after if factor == 1.0 else dataclasses.replace(after, lr=after.lr * factor)


def _decay(settings: Settings, step: int, share: float) -> float:
    """Return the share in the last decay of a branch, which began with `share`."""
    if not settings.decay_iters or step <= settings.decay_start:
        return share
    progress = min(1.0, (step - settings.decay_start) / settings.decay_iters)
    return share - (share - min(share, settings.min_lr_ratio)) * progress


def _rising(steps_done: int, iters: int) -> float:
    return (steps_done + 1) / iters if 0 <= steps_done < iters else 1.0


def _share_of_peak(settings: Settings, steps_done: int) -> float:
    match settings.lr_shape:
        case "step" | "exponential":
            return _share_after_falls(settings, steps_done - settings.warmup_iters)
        case "cosine" | "linear" | "wsd":
            return _falling(settings, steps_done)
        case "constant":
            return 1.0
    share = CURVES[settings.lr_shape](dict(settings.lr_options), steps_done - settings.warmup_iters)
    return max(settings.min_lr_ratio, share)


def _share_after_falls(settings: Settings, steps_done: int) -> float:
    """Step or exponential decay by gamma, without an end."""
    every = settings.decay_every
    if every is None:
        return 1.0
    falls = steps_done // every if settings.lr_shape == "step" else steps_done / every
    return max(settings.min_lr_ratio, math.pow(settings.gamma, falls))


def _falling(settings: Settings, steps_done: int) -> float:
    """Decay to the lowest rate, which is reached at the end."""
    if settings.lr_decay_iters is None:
        return 1.0
    end, lowest = settings.lr_decay_iters, settings.min_lr_ratio
    begin = settings.warmup_iters
    if settings.lr_shape == "wsd":
        begin = max(begin, end - round(settings.decay_fraction * end))
    if steps_done >= end:
        return lowest
    if steps_done < begin:
        return 1.0
    progress = (steps_done - begin) / (end - begin)
    if settings.lr_shape == "cosine":
        return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (1.0 - lowest) * progress


def _same_tokens(before: Settings, after: Settings) -> Settings:
    """Change the batch size inversely to the context."""
    tokens = before.batch_size * before.context
    batch_size, remainder = divmod(tokens, after.context)
    if remainder or not batch_size:
        multiple = after.context // math.gcd(after.context, before.context)
        raise ValueError(
            f"a batch of {before.batch_size} samples of {before.context} tokens cannot have as many "
            f"tokens with samples of {after.context}: make the batch size then a multiple of {multiple}, "
            "or choose another context"
        )
    return dataclasses.replace(after, batch_size=batch_size)
