"""Rules that span several keys and need no data, no device and no torch."""

from __future__ import annotations

from instar.config.budget import Budget, parse_budget
from instar.config.clash import Clash
from instar.config.data_checks import data_checks, data_rank_checks
from instar.config.schema import RunConfig


def cross_checks(config: RunConfig) -> list[Clash]:
    """Everything in the config that contradicts itself."""
    return [*_shape(config), *data_checks(config.data), *_course(config), *_elastic(config)]


def rank_checks(config: RunConfig, world_size: int) -> list[Clash]:
    """Everything in the config that so many ranks contradict."""
    return [*_virtual_ranks(config, world_size), *data_rank_checks(config.data, world_size)]


def _virtual_ranks(config: RunConfig, world_size: int) -> list[Clash]:
    slices = config.distributed.elastic.virtual_ranks
    if config.reproducible == "fixed" or slices % world_size == 0:
        return []
    possible = [str(ranks) for ranks in range(1, slices + 1) if slices % ranks == 0]
    return [
        Clash(
            ("distributed.elastic.virtual_ranks", "reproducible"),
            f"{world_size} ranks cannot share {slices} virtual ranks evenly",
            f"use {', '.join(possible[:-1])} or {possible[-1]} ranks"
            if len(possible) > 1
            else "use 1 rank, or more virtual ranks in a new run",
        )
    ]


def _shape(config: RunConfig) -> list[Clash]:
    model, found = config.model, []
    heads, width = model.n_head, model.n_embd
    if width % heads:
        near = max(heads, round(width / heads) * heads)
        found.append(
            Clash(
                ("model.n_embd", "model.n_head"),
                f"model.n_embd ({width}) must be divisible by model.n_head ({heads})",
                f"n_embd {near} would be",
            )
        )
    elif model.positions == "rope" and (width // heads) % 2:
        found.append(
            Clash(
                ("model.n_embd", "model.n_head", "model.positions"),
                f"rope turns pairs of channels: model.n_embd / model.n_head must be even, "
                f"got {width} / {heads} = {width // heads}",
            )
        )
    if model.n_kv_head is not None and heads % model.n_kv_head:
        found.append(
            Clash(
                ("model.n_kv_head", "model.n_head"),
                f"model.n_head ({heads}) must be divisible by model.n_kv_head ({model.n_kv_head})",
            )
        )
    return found


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
    end = course.lr_decay_iters
    if course.shape == "constant":
        return found
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
    slices = config.distributed.elastic.virtual_ranks
    if slices & (slices - 1):
        below = 1 << (slices.bit_length() - 1)
        found.append(
            Clash(
                ("distributed.elastic.virtual_ranks", "reproducible"),
                f"distributed.elastic.virtual_ranks must be a power of two, got {slices}: gradients "
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
