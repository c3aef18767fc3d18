"""What a run will be before it starts: its shape, its steps, its FLOPs and its memory."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from instar.config.budget import Budget, parse_budget
from instar.config.schema import RunConfig
from instar.models.architecture import (
    Architecture,
    ParameterCount,
    count_parameters,
    flops_per_token,
    resolve,
)
from instar.models.memory import memory_estimate
from instar.record.amounts import bytes_text, count_text, flops_text


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one shape, from `first_step` up to `end_step` (None: open)."""

    first_step: int
    end_step: int | None
    architecture: Architecture
    parameters: ParameterCount
    flops_per_token: int
    memory_bytes: dict[str, int]
    """by part, at the peak of a step on one rank"""


@dataclass(frozen=True)
class Forecast:
    """A run's stages and their sums; totals are None where only time or the loss ends the run."""

    stages: tuple[Stage, ...]
    world_size: int
    batch_size: int
    """samples that a rank runs at once, at most"""
    global_batch: int
    """samples of a step, over all ranks"""
    tokens_per_step: int
    dataset_tokens: int
    samples_per_epoch: int
    steps_per_epoch: int
    until: tuple[str, ...]
    steps: int | None
    samples: int | None
    tokens: int | None
    epochs: float | None
    flops: int | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


def budget_steps(
    budgets: Iterable[Budget], *, global_batch: int, tokens_per_sample: int, samples_per_epoch: int
) -> int | None:
    """Steps after which the tightest of the budgets is used up; None if none counts steps, tokens,
    samples or epochs.

    An epoch's last step takes what is left, so that an epoch is ⌈samples / global batch⌉ steps.
    """
    counts = []
    for budget in budgets:
        amount = Fraction(
            str(budget.amount)
        )  # 0.1 epochs of 30 samples are 3, not 3.0000000000000004
        if budget.kind == "steps":
            counts.append(math.ceil(amount))
            continue
        if budget.kind == "samples":
            samples = math.ceil(amount)
        elif budget.kind == "tokens":
            samples = math.ceil(amount / tokens_per_sample)
        elif budget.kind == "epochs":
            samples = math.ceil(amount * samples_per_epoch)
        else:
            continue
        epochs, rest = divmod(samples, samples_per_epoch)
        per_epoch = math.ceil(samples_per_epoch / global_batch)
        counts.append(epochs * per_epoch + math.ceil(rest / global_batch))
    return min(counts, default=None)


def samples_after(steps: int, *, global_batch: int, samples_per_epoch: int) -> int:
    """Samples that so many steps consume, epochs' last steps being smaller."""
    epochs, rest = divmod(steps, math.ceil(samples_per_epoch / global_batch))
    return epochs * samples_per_epoch + rest * global_batch


def forecast(
    config: RunConfig,
    dataset_tokens: int,
    samples_per_epoch: int,
    vocab_size: int,
    world_size: int,
) -> Forecast:
    """The run that a config makes of `dataset_tokens` training tokens, cut into
    `samples_per_epoch` samples, on `world_size` ranks.

    `vocab_size` is the tokenizer's. Raises ArchitectureError for impossible shapes, ValueError for
    text that is no budget.
    """
    train = config.train
    architecture = resolve(config.model, vocab_size)
    global_batch = train.batch_size * train.gradient_accumulation_steps
    elastic = config.reproducible == "elastic"
    slices = config.distributed.elastic.virtual_ranks if elastic else world_size
    batch_size = min(train.batch_size, math.ceil(global_batch / slices))
    steps = budget_steps(
        map(parse_budget, train.until),
        global_batch=global_batch,
        tokens_per_sample=architecture.context,
        samples_per_epoch=samples_per_epoch,
    )
    stage = Stage(
        first_step=0,
        end_step=steps,
        architecture=architecture,
        parameters=count_parameters(architecture),
        flops_per_token=flops_per_token(architecture),
        memory_bytes=memory_estimate(
            architecture,
            batch_size=batch_size,
            precision=config.precision,
            optimizer=config.optimizer.name,
            ema=train.ema is not None,
            gradient_checkpointing=train.gradient_checkpointing,
            device="cuda" if config.device.startswith("cuda") else "cpu",
        ),
    )
    samples = tokens = epochs = flops = None
    if steps is not None:
        samples = samples_after(
            steps, global_batch=global_batch, samples_per_epoch=samples_per_epoch
        )
        tokens = samples * architecture.context
        epochs = samples / samples_per_epoch
        flops = tokens * stage.flops_per_token
    return Forecast(
        stages=(stage,),
        world_size=world_size,
        batch_size=batch_size,
        global_batch=global_batch,
        tokens_per_step=global_batch * architecture.context,
        dataset_tokens=dataset_tokens,
        samples_per_epoch=samples_per_epoch,
        steps_per_epoch=math.ceil(samples_per_epoch / global_batch),
        until=tuple(train.until),
        steps=steps,
        samples=samples,
        tokens=tokens,
        epochs=epochs,
        flops=flops,
    )


_LABEL = 12
"""columns of a row's label"""


def render(told: Forecast) -> str:
    """The forecast as lines of at most 80 columns."""
    rows: list[tuple[str, str]] = []
    for number, stage in enumerate(told.stages):
        if len(told.stages) > 1:
            end = "the end" if stage.end_step is None else f"{stage.end_step:,}"
            rows.append((f"stage {number + 1}", f"steps {stage.first_step:,} to {end}"))
        rows += _stage_rows(stage)
    ranks = f"{told.world_size} rank" + "s" * (told.world_size > 1)
    rows += [
        (
            "step",
            f"{told.global_batch:,} samples, {count_text(told.tokens_per_step)} tokens, "
            f"on {ranks}, at most {told.batch_size:,} samples at once",
        ),
        (
            "epoch",
            f"{told.steps_per_epoch:,} steps, {told.samples_per_epoch:,} samples "
            f"of {count_text(told.dataset_tokens)} tokens",
        ),
        ("until", " or ".join(told.until)),
    ]
    if told.steps is None or told.tokens is None or told.flops is None:
        rows.append(("total", "open: only the clock or the loss ends this run"))
    else:
        rows.append(
            (
                "total",
                f"{told.steps:,} steps, {count_text(told.tokens)} tokens, "
                f"{told.epochs:.2f} epochs, {flops_text(told.flops)} FLOPs",
            )
        )
    lines = []
    for label, text in rows:
        for line in textwrap.wrap(text, 80 - _LABEL):
            lines.append(f"{label:<{_LABEL}}{line}")
            label = ""
    return "\n".join(lines)


def _stage_rows(stage: Stage) -> list[tuple[str, str]]:
    arch, count, memory = stage.architecture, stage.parameters, stage.memory_bytes
    heads = f"{arch.n_head} heads"
    if arch.n_kv_head < arch.n_head:
        heads += f" ({arch.n_kv_head} for keys and values)"
    style = [arch.norm, arch.activation, f"{arch.positions} positions"]
    style += ["biases"] * arch.bias + ["QK-norm"] * arch.qk_norm
    style += ["tied head" if arch.tied else "untied head"]
    style += [f"dropout {arch.dropout:g}"] * (arch.dropout > 0)
    parts = [f"{name} {bytes_text(size)}" for name, size in memory.items() if size]
    return [
        ("shape", f"{arch.n_layer} layers × {arch.n_embd} wide, {heads} of {arch.head_dim}"),
        (
            "",
            f"MLP {arch.n_mlp:,}, context {arch.context:,}, vocabulary {arch.vocab_size:,}",
        ),
        ("", ", ".join(style)),
        (
            "parameters",
            f"{count_text(count.total)}, {count_text(count.non_embedding)} without embeddings",
        ),
        ("compute", f"{flops_text(stage.flops_per_token)} FLOPs per token, forward and backward"),
        ("memory", f"about {bytes_text(sum(memory.values()))} of tensors on each rank:"),
        ("", ", ".join(parts)),
    ]
