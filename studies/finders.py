"""How far is the rate that `instar find lr` finds from the best of a grid of full trainings?

    python benchmarks/finders.py [--quick]

Three small models: a GPT on the standard library's source code, a graph network on causal sets and an
MLP of a custom task. The grid: whole trainings at rates a factor 2 apart over a range of 256, judged
by their final validation loss. The finder may train for half as many steps at most, and begins 16
times too low or too high. The figure is the factor between both rates; the bar is 2. Beside it: how
much higher the grid's loss is at the rate found, and what a range test (the rate rises in one training;
the suggestion is the steepest point of the smoothed loss) would have suggested.
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from instar.config.load import load_config
from instar.distributed.world import World
from instar.extensions.lab.find.learning_rate import BUDGET, search_rate
from instar.extensions.lab.find.training import final_loss, open_trainer, shorten_config
from instar.run.start.preflight import Prepared, preflight, prepare_run_data
from report import Case, case, options, parser, publish

WORLD = World(0, 0, 1, torch.device("cpu"), "none")
_HELD_OUT = 24
"""micro-batches of the validation subset"""


@dataclass(frozen=True)
class Model:
    """A run, and the grid's lowest rate."""

    name: str
    overrides: tuple[str, ...]
    lowest: float
    start: float
    """where the finder begins"""


@dataclass(frozen=True)
class Effort:
    """Steps of a training, rates of the grid, and how much there is to train on."""

    steps: int
    rates: int
    text_bytes: int
    causal_sets: int


FULL = Effort(400, 9, text_bytes=1 << 20, causal_sets=1500)
QUICK = Effort(8, 3, text_bytes=1 << 16, causal_sets=200)

HEADS = (
    "[{name: manifold, kind: classification, classes: 2}, "
    "{name: dimension, kind: classification, classes: 3}]"
)


def models(folder: Path, effort: Effort) -> list[Model]:
    """The three runs; their data are put into `folder`."""
    text = folder / "library.py"
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text.write_bytes(b"".join(source.read_bytes() for source in sources[:60])[: effort.text_bytes])
    shared = ("learning_rate.warmup_iters=20", "record.log_interval=1", "precision=fp32")
    gpt = (
        "preset=llama",
        "model={n_layer: 2, n_head: 2, n_embd: 32, context: 32}",
        f"data={{source: {text}, path: {folder / 'tokens'}, tokenizer: byte}}",
        "train.batch_size=16",
    )
    graph = (
        "task=graph",
        f"data={{path: {folder / 'sets'}, val: 0.3, test: 0.1}}",
        f"data.causal_sets={{sets: {effort.causal_sets}, min_points: 8, max_points: 16}}",
        f"model={{layer: sage, n_layer: 2, width: 24, heads: {HEADS}}}",
        "train.batch_size=32",
    )
    mlp = ("task=noisy_waves:Waves", "data={val: 0.3, test: 0.1}", "train.batch_size=32")
    return [
        Model("GPT", (*gpt, *shared), 2.5e-4, 4e-3 / 16),
        Model("graph network", (*graph, *shared), 5e-4, 8e-3 / 16),
        Model("MLP", (*mlp, *shared), 2.5e-4, 4e-3 * 16),
    ]


def compare_rates(model: Model, effort: Effort) -> list[Case]:
    """The finder's rate against the grid's."""
    loaded_config = load_config(
        None,
        [*model.overrides, f"train.until=[{effort.steps}it]", f"optimizer.lr={model.start}"],
    )
    prepare_run_data(loaded_config, 1, print)
    prepared_run = preflight(loaded_config, 1, new=False)

    def loss(lr: float, steps: int) -> float:
        short = shorten_config(prepared_run.config, lr, steps, effort.steps, _HELD_OUT)
        return final_loss(prepared_run, short, WORLD, steps)

    rates = [model.lowest * 2.0**n for n in range(effort.rates)]
    grid = {lr: loss(lr, effort.steps) for lr in rates}
    best = min(grid, key=grid.__getitem__)
    half = effort.steps // 2
    search_result = search_rate(loss, model.start, half, BUDGET * half)
    range_rate = range_test(prepared_run, effort.steps // 4)
    lowest = grid[best]
    print(
        f"{model.name}: " + "  ".join(f"{lr:.2g} {grid_loss:.4f}" for lr, grid_loss in grid.items())
    )
    print(
        f"{model.name}: best {best:.3g}, found {search_result.lr:.3g}, range test {range_rate:.3g}"
    )
    above = 100 * max(0.0, loss(search_result.lr, effort.steps) / lowest - 1)
    name = model.name
    return [
        case(
            f"{name}: rate found / best of the grid",
            [factor_between(search_result.lr, best)],
            "×",
            most=2.0,
        ),
        case(f"{name}: loss there", [above], "% more"),
        case(f"{name}: steps of the search", [search_result.steps / effort.steps], "runs"),
        case(f"{name}: rate of a range test / best", [factor_between(range_rate, best)], "×"),
    ]


def factor_between(rate: float, other: float) -> float:
    """The factor between two rates, at least 1."""
    return max(rate / other, other / rate)


def range_test(prepared_run: Prepared, steps: int) -> float:
    """The rate of the steepest fall of the smoothed loss while the rate rises from 1e-6 to 1."""
    rates = np.geomspace(1e-6, 1.0, steps)
    losses: list[float] = []
    config = shorten_config(prepared_run.config, prepared_run.config.optimizer.lr, steps, steps, 1)
    with open_trainer(prepared_run, config, WORLD) as trainer:
        for lr in rates:
            settings = replace(
                trainer.state.settings, lr=float(lr), lr_shape="constant", warmup_iters=0
            )
            trainer.state = replace(
                trainer.state, in_force=replace(trainer.state.in_force, settings=settings)
            )
            trainer.step()
            loss = trainer.parts.logger.last_loss
            assert loss is not None
            if not loss < 4 * min([*losses, loss]):
                break
            losses.append(loss)
    return float(rates[_steepest(losses)])


def _steepest(losses: Sequence[float]) -> int:
    smooth, mean = [], losses[0]
    for loss in losses:
        mean = 0.9 * mean + 0.1 * loss
        smooth.append(mean)
    lowest = int(np.argmin(smooth))
    return int(np.argmin(np.gradient(smooth)[: max(2, lowest)]))


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    effort = QUICK if run_options.quick else FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            model_case
            for model in models(Path(folder), effort)
            for model_case in compare_rates(model, effort)
        ]
    publish("finders", cases, run_options, steps=effort.steps, rates=effort.rates)


if __name__ == "__main__":
    main()
