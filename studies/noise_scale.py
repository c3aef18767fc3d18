"""Is the measured gradient noise scale the true one, and what does measuring it cost?

    python benchmarks/noise_scale.py [--quick]

The truth at fixed weights: the gradient of every single training sample, one after the other, their
mean G and the trace of their covariance Σ. Against it, tr(Σ) / |G|² as a run measures it with a learning rate of
0, what its record would show, averaged over the last measurements, and an estimate without additional gradients
that takes the mean gradient to stay from one step to the next. For the cost, every other step of a trainer
measures, and what it takes longer is spread over as many steps as there are between two by default.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import torch

from instar.config.sections import RecordConfig
from instar.run.state.gradient_stats import LayerStats, NoiseScale, noise_interval
from instar.run.step.stepper import to_device
from instar.run.trainer import Trainer
from instar.schedule.settings import learning_rate
from pauses import Size, trainer_of
from report import Case, case, options, parser, publish
from throughput import gpt

BATCH = 32
MODEL = (
    *gpt(2, 2, 32, 32, BATCH),
    "optimizer.lr=0.003",
    "train.until=[1000000it]",
)
LEARNT = (20, 300)
"""steps of training after which the noise is measured"""


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    quick = run_options.quick
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        cases = (
            accuracy(Path(folder), (2,), 20, max_samples=200)
            if quick
            else accuracy(Path(folder), LEARNT, 2000)
        )
        for size in (
            [Size("tiny", gpt(1, 1, 16, 16, 4), 25, 1)]
            if quick
            else [
                Size("0.2 M", gpt(4, 4, 64, 64, 16), 80, 1),
                Size("1 M", gpt(5, 4, 128, 128, 16), 40, 1),
            ]
        ):
            cases += cost(size, Path(folder))
    publish("noise_scale", cases, run_options)


def accuracy(
    folder: Path, learnt: Sequence[int], measurements: int, max_samples: int = sys.maxsize
) -> list[Case]:
    """Measured against true noise scales, over `max_samples` samples, of one run at several steps."""
    cases = []
    with ExitStack() as stack:
        trainer = trainer_of(Size("noise", MODEL, 0, 0), folder, quick=True)
        stack.callback(trainer.close)
        for steps in learnt:
            while trainer.state.step < steps:
                trainer.step()
            true = true_noise_scale(trainer, max_samples)
            means, running_scales = measure_noise_scale(trainer, measurements)
            where = f"after {steps} steps"
            cases += [
                case(f"{where}: true noise scale", [true], "samples"),
                case(f"{where}: measured / true, mean", [means / true], "ratio"),
                case(
                    f"{where}: off by a factor of",
                    [max(means / true, true / means)],
                    "ratio",
                    most=1.2,
                ),
                case(f"{where}: shown / true", [scale / true for scale in running_scales], "ratio"),
                case(
                    f"{where}: from successive steps / true",
                    [from_successive_steps(trainer, min(measurements, 60)) / true],
                    "ratio",
                ),
            ]
            print(where, file=sys.stderr)
    return cases


def true_noise_scale(trainer: Trainer, max_samples: int) -> float:
    """tr(Σ) / |G|² over all training samples, or the first `max_samples`."""
    stepper, task = trainer.parts.stepper, trainer.parts.task
    source, _ = task.train_samples()
    parameters = [*stepper.parameters.values()]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares, number = 0.0, min(max_samples, len(source) - 1)  # the last sample may be shorter
    for index in range(number):
        batch = to_device(source.read(np.array([index])), torch.device("cpu"))
        loss = task.loss_sum(stepper.unwrapped_model, batch) / source.weights(np.array([index]))
        gradients = torch.autograd.grad(loss, parameters)
        squares += sum(g.double().square().sum().item() for g in gradients)
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient
    of_mean = sum((gradient_sum / number).square().sum().item() for gradient_sum in total)
    trace = (squares / number - of_mean) * number / (number - 1)
    return trace / (of_mean - trace / number)


def measure_noise_scale(trainer: Trainer, measurements: int) -> tuple[float, list[float]]:
    """The noise scale by the means of all measurements at the present weights, and by the running
    averages that a run shows."""
    stepper, parts, cursor = trainer.parts.stepper, trainer.parts, trainer.state.progress.samples
    assert parts.loader is not None
    averages, trace, square, running_scales = NoiseScale(), 0.0, 0.0, []
    for step in range(measurements):
        batch = parts.loader.take(cursor, BATCH, BATCH, lambda: False)
        cursor += batch.plan.count
        result = stepper.step(batch, step, 0.0, lambda: None, measures_part=True)
        assert result.part is not None
        single = NoiseScale().with_measurement(result.part, batch.plan.count, result.norm.item())
        trace, square = trace + single.trace, square + single.square
        averages = averages.with_measurement(result.part, batch.plan.count, result.norm.item())
        if averages.settled is not None:
            running_scales.append(averages.settled)
    return trace / square, running_scales


class Capture:
    """Keeps the gradient of a step."""

    gradient: torch.Tensor

    def before(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        gradients = [p.grad.flatten().double() for p in parameters.values() if p.grad is not None]
        self.gradient = torch.cat(gradients)

    def after(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        pass


def from_successive_steps(trainer: Trainer, steps: int) -> float:
    """The noise scale if the mean gradient is taken to stay from one step to the next: what would cost
    no additional gradient, but the memory of one."""
    stepper, parts, state = trainer.parts.stepper, trainer.parts, trainer.state
    assert parts.loader is not None
    capture, before, products, squares = Capture(), None, [], []
    cursor = state.progress.samples
    for step in range(steps):
        batch = parts.loader.take(cursor, BATCH, BATCH, lambda: False)
        cursor += batch.plan.count
        stepper.layers = cast(LayerStats, capture)
        stepper.step(batch, step, learning_rate(state.settings, state.step), lambda: None)
        if before is not None:
            products.append((before @ capture.gradient).item())
        squares.append(capture.gradient.square().sum().item())
        before = capture.gradient
    stepper.layers = None
    square = statistics.fmean(products)
    return BATCH * (statistics.fmean(squares) - square) / square


def cost(size: Size, folder: Path) -> list[Case]:
    """What one measurement adds, spread over the steps from one to the next; in seconds of the CPU,
    which hardly depend on what else the machine does."""
    noisy_size = Size(
        size.name, (*size.overrides, "record.noise_every=2"), size.steps, size.repeats
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        trainer = trainer_of(noisy_size, folder, quick=True)
        stack.callback(trainer.close)
        for _ in range(4):
            trainer.step()
        for _ in range(2 * size.steps):
            start = time.process_time()
            trainer.step()
            seconds[trainer.state.step % 2 == 0].append(time.process_time() - start)
        config = trainer.parts.config
    by_default = config.model_copy(update={"record": RecordConfig()})
    every = noise_interval(by_default, config.train.batch_size, 1)
    assert every is not None
    step = statistics.median(seconds[False])
    extra = statistics.median(seconds[True]) - step
    print(size.name, file=sys.stderr)
    added_per_step = 1 + extra / step / every
    return [
        case(f"{size.name}: a measurement / a step", [extra / step], "ratio"),
        case(
            f"{size.name}: steps with measurements / without", [added_per_step], "ratio", most=1.01
        ),
    ]


if __name__ == "__main__":
    main()
