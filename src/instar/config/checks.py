"""Rules that span several keys and need no data, no device and no torch."""

from __future__ import annotations

from collections.abc import Iterator

from instar.config.budget import Budget, parse_budget
from instar.config.clash import Clash
from instar.config.explain import nearest
from instar.config.parallel_checks import parallel_checks
from instar.config.schema import RunConfig


def cross_checks(config: RunConfig) -> list[Clash]:
    """Everything in the config that contradicts itself."""
    rules = (_metrics, _course, _elastic, parallel_checks)
    return [*config.clashes(), *(clash for rule in rules for clash in rule(config))]


def rank_checks(config: RunConfig, world_size: int) -> list[Clash]:
    """Everything in the config that so many ranks contradict."""
    return [*_virtual_ranks(config, world_size), *config.rank_clashes(world_size)]


def _metrics(config: RunConfig) -> Iterator[Clash]:
    """Metrics that are asked for and that the task does not measure."""
    known = config.metrics
    plateau = "learning_rate.plateau.metric"
    asked = [(plateau, plateau, config.learning_rate.plateau.metric)]
    asked += [
        (f"early_stopping.rules[{index}].metric", "early_stopping.rules", rule.metric)
        for index, rule in enumerate(config.early_stopping.rules)
    ]
    asked += [
        (f"checkpoint.best_of[{index}]", "checkpoint.best_of", metric)
        for index, metric in enumerate(config.checkpoint.best_of)
    ]
    best_of = config.checkpoint.best_of
    if len(set(best_of)) < max(1, len(best_of)):
        yield Clash(
            ("checkpoint.best_of",),
            "checkpoint.best_of must name one metric or several, each once",
            "e.g. [loss]",
        )
    if config.test.at_end and config.test.weights == "best" and not config.checkpoint.on_best:
        yield Clash(
            ("test.weights", "checkpoint.on_best", "test.at_end"),
            "test.weights is best, and checkpoint.on_best false: no best checkpoint will be there",
            "say checkpoint.on_best: true, or test.weights: last",
        )
    for key, whole, metric in asked:
        if metric not in known:
            meant = nearest(metric, known)
            yield Clash(
                (key, whole),
                f"{key}: this run has no metric '{metric}'",
                f"did you mean '{meant}'?" if meant else f"there are {', '.join(known)}",
            )


def _virtual_ranks(config: RunConfig, world_size: int) -> list[Clash]:
    slices = config.parallel.elastic.virtual_ranks
    if config.reproducible == "fixed" or slices % world_size == 0:
        return []
    possible = [str(ranks) for ranks in range(1, slices + 1) if slices % ranks == 0]
    return [
        Clash(
            ("parallel.elastic.virtual_ranks", "reproducible"),
            f"{world_size} ranks cannot share {slices} virtual ranks evenly",
            f"use {', '.join(possible[:-1])} or {possible[-1]} ranks"
            if len(possible) > 1
            else "use 1 rank, or more virtual ranks in a new run",
        )
    ]


def _course(config: RunConfig) -> list[Clash]:
    course, found = config.learning_rate, []
    budgets: list[Budget] = []
    for index, text in enumerate(config.train.until):
        try:
            budgets.append(parse_budget(text))
        except ValueError as error:
            key = f"train.until[{index}]"
            found.append(Clash((key, "train.until"), f"{key}: {error}"))
    if not config.train.until:
        found.append(
            Clash(("train.until",), "train.until is empty: the run would never end", "e.g. 2000it")
        )
    if course.shape in ("step", "exponential") and course.decay_every is None:
        found.append(
            Clash(
                ("learning_rate.decay_every", "learning_rate.shape"),
                f"learning_rate.decay_every is needed: with shape {course.shape}, the rate is "
                f"multiplied by gamma ({course.gamma:g}) every so many steps",
                "e.g. a third of the run's steps",
            )
        )
    if not course.has_end:
        return found
    end = course.lr_decay_iters
    if end is None:
        if budgets and not found and all(budget.kind in ("seconds", "loss") for budget in budgets):
            found.append(
                Clash(
                    ("learning_rate.lr_decay_iters", "train.until", "learning_rate.shape"),
                    f"learning_rate.lr_decay_iters is needed: a {course.shape} course must know "
                    f"its last step, and train.until has only {', '.join(map(str, budgets))}",
                    "give it, add a budget such as 2000it, or choose shape constant",
                )
            )
        return found
    if course.warmup_iters >= end:
        found.append(
            Clash(
                ("learning_rate.warmup_iters", "learning_rate.lr_decay_iters"),
                f"learning_rate.warmup_iters ({course.warmup_iters}) must be less than "
                f"learning_rate.lr_decay_iters ({end})",
            )
        )
    return found


def _elastic(config: RunConfig) -> list[Clash]:
    if config.reproducible == "fixed":
        return []
    found = []
    slices = config.parallel.elastic.virtual_ranks
    if slices & (slices - 1):
        below = 1 << (slices.bit_length() - 1)
        found.append(
            Clash(
                ("parallel.elastic.virtual_ranks", "reproducible"),
                f"parallel.elastic.virtual_ranks must be a power of two, got {slices}: gradients "
                "are added in pairs, and pairs of pairs",
                f"{below} or {2 * below} would be",
            )
        )
    if config.compile:
        found.append(
            Clash(
                ("compile", "reproducible"),
                "compile: true does not go with reproducible: elastic: which kernels a compiled "
                "model runs depends on the shapes it has met since its process began",
                "leave one of them out",
            )
        )
    return found
