"""Is the best learning rate of a narrow GPT that of a wide one?

    python benchmarks/width_rates.py [--quick]

GPTs of 2 layers and three widths train under AdamW on characters of Python's standard library, at several rates: once with
the same rates at every width, and once with `optimizer.lr_base_width` of the narrowest, where the rates of matrices
fall with their fan-in. All have the same initial standard deviations, samples, warm-up and linear decay. The best rate
is the vertex of a parabola through the lowest validation loss and its neighbours, over the logarithm of the rate, or the
end of the grid; said is by which factor it differs from that of the narrowest, and what it costs to take that one's rate.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from instar.config.load import load_config
from instar.distributed.world import join_group
from instar.extensions.lab.find.training import final_loss, prepared_alone
from report import Case, case, options, parser, publish

NAMES = {False: "same rates", True: "lr_base_width"}


@dataclass(frozen=True)
class Effort:
    """How large and how long everything is."""

    widths: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int
    batch: int
    context: int
    data_bytes: int
    seeds: tuple[int, ...]


FULL = Effort(
    widths=(64, 128, 256),
    rates=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    steps=150,
    batch=8,
    context=48,
    data_bytes=1_000_000,
    seeds=(1, 2),
)
QUICK = replace(
    FULL,
    widths=(16, 32),
    rates=(1e-3, 4e-3, 16e-3),
    steps=3,
    batch=2,
    context=16,
    data_bytes=60_000,
    seeds=(1,),
)

Losses = Mapping[float, float]
"""Validation loss by learning rate."""


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    effort = QUICK if run_options.quick else FULL
    torch.set_num_threads(1)
    losses_by_run: dict[tuple[bool, int, int], Losses] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in effort.seeds:
            for width in effort.widths:
                for follows in (False, True):
                    base = follows and width > effort.widths[0]
                    if follows and not base:  # the narrowest is its own base
                        losses_by_run[True, width, seed] = losses_by_run[False, width, seed]
                        continue
                    keys = settings(effort, Path(folder), width, follows, seed)
                    losses_by_run[follows, width, seed] = losses(keys, effort)
                    print(
                        NAMES[follows], width, losses_by_run[follows, width, seed], file=sys.stderr
                    )
    publish("width_rates", cases(effort, losses_by_run), run_options, threads=1)
    if run_options.results is not None:
        runs = [
            {"arm": NAMES[follows], "width": width, "seed": seed, "losses": dict(run_losses)}
            for (follows, width, seed), run_losses in losses_by_run.items()
        ]
        text = json.dumps({"runs": runs}, indent=2)
        (run_options.results / "width_rates-runs.json").write_text(text + "\n", encoding="utf-8")


def settings(effort: Effort, folder: Path, width: int, follows: bool, seed: int) -> tuple[str, ...]:
    return (
        "model.n_layer=2",
        f"model.n_head={width // 16}",
        f"model.n_embd={width}",
        f"model.context={effort.context}",
        "model.norm=rmsnorm",
        "model.positions=rope",
        "model.bias=false",
        "model.tied=false",
        "data.tokenizer=char",
        f"data.max_bytes={effort.data_bytes}",
        f"data.path={folder / f'tokens-{seed}'}",
        f"train.until=[{effort.steps}it]",
        f"train.batch_size={effort.batch}",
        "learning_rate.shape=linear",
        "learning_rate.min_lr_ratio=0.0",
        f"learning_rate.warmup_iters={effort.steps // 10}",
        f"eval.eval_iters={effort.steps // 4 + 1}",
        f"record.out_dir={folder / 'runs'}",
        f"seed={seed}",
        "precision=fp32",
        "device=cpu",
        *([f"optimizer.lr_base_width={effort.widths[0]}"] if follows else []),
    )


def losses(keys: tuple[str, ...], effort: Effort) -> Losses:
    """Train at every rate."""
    loaded_config = load_config(None, keys)
    prepared_run = prepared_alone(loaded_config, lambda text: print(text, file=sys.stderr))
    losses_by_rate = {}
    with join_group(loaded_config.config.parallel, loaded_config.config.device) as world:
        for rate in effort.rates:
            optimizer = prepared_run.config.optimizer.model_copy(update={"lr": rate})
            config = prepared_run.config.model_copy(update={"optimizer": optimizer})
            losses_by_rate[rate] = final_loss(prepared_run, config, world, effort.steps)
    return losses_by_rate


def best(losses_by_rate: Losses) -> float:
    """The rate of the lowest loss, between those that were tried."""
    rates, values = zip(*sorted(losses_by_rate.items()), strict=True)
    at = min(range(len(rates)), key=values.__getitem__)
    if at in (0, len(rates) - 1):
        return rates[at]
    below, lowest, above = values[at - 1 : at + 2]
    if not math.isfinite(below + above):
        return rates[at]
    shift = (below - above) / (2 * (below - 2 * lowest + above))
    return rates[at] * (rates[at + 1] / rates[at]) ** shift


def loss_at(losses_by_rate: Losses, rate: float) -> float:
    """The loss at a rate, interpolated over the logarithm of the rate."""
    rates = sorted(losses_by_rate)
    above = next((n for n, candidate in enumerate(rates) if candidate >= rate), len(rates) - 1)
    low, high = rates[max(0, above - 1)], rates[above]
    share = math.log(rate / low) / math.log(high / low) if high > low else 1.0
    return losses_by_rate[low] + share * (losses_by_rate[high] - losses_by_rate[low])


def cases(effort: Effort, losses_by_run: Mapping[tuple[bool, int, int], Losses]) -> list[Case]:
    narrow, widest = effort.widths[0], effort.widths[-1]
    rates = {seed: best(losses_by_run[False, narrow, seed]) for seed in effort.seeds}
    excess_losses: dict[tuple[bool, int], list[float]] = {}
    case_list = []
    for width in effort.widths[1:]:
        for follows, name in NAMES.items():
            pairs = [(losses_by_run[follows, width, seed], rates[seed]) for seed in effort.seeds]
            rate_factors = [math.exp(abs(math.log(rate / best(losses)))) for losses, rate in pairs]
            excess_losses[follows, width] = [
                loss_at(losses, rate) - min(losses.values()) for losses, rate in pairs
            ]
            bar = 1.5 if follows and width == widest else None
            case_list.append(
                case(
                    f"{name}: best rates of {narrow} and {width} apart",
                    rate_factors,
                    "factor",
                    most=bar,
                )
            )
            case_list.append(
                case(
                    f"{name}: lost at {width} by the rate of {narrow}",
                    excess_losses[follows, width],
                    "nats",
                )
            )
    ratios = [
        a / b if b else 1.0
        for a, b in zip(excess_losses[True, widest], excess_losses[False, widest], strict=True)
    ]
    case_list.append(case(f"lost at {widest}: lr_base_width / same rates", ratios, "ratio"))
    return case_list


if __name__ == "__main__":
    main()
