"""The gradient noise scale: what is measured of a batch, and that it is the true one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from instar.data.loader import MicroBatch, StepBatch
from instar.data.order import StepPlan
from instar.run.start.preflight import Prepared
from instar.run.state.gradient_stats import NoiseScale, PartNorm, noise_interval, part_of
from instar.run.step.stepper import to_device
from instar.run.trainer import Trainer


def test_estimates_have_no_bias() -> None:
    """Of samples whose gradients have a mean of length 1 and a covariance with a trace of 40."""
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(2000):
        gradients = torch.randn(32, 10, generator=generator, dtype=torch.float64) * 2
        gradients[:, 0] += 1
        part_norm, batch_norm = (gradients[:n].mean(0).norm().item() for n in (2, 32))
        estimates.append(NoiseScale().with_measurement(PartNorm(2, part_norm), 32, batch_norm))
    share = 1 - 0.95  # of the first measurement in the average
    trace = sum(estimate.trace for estimate in estimates) / len(estimates) / share
    square = sum(estimate.square for estimate in estimates) / len(estimates) / share
    assert trace == pytest.approx(40, rel=0.03)
    assert square == pytest.approx(1, rel=0.08)


def test_what_cannot_be_measured_leaves_the_average_as_it_is() -> None:
    before = NoiseScale().with_measurement(PartNorm(1, 3.0), 4, 2.0)
    assert before.value == pytest.approx((9 - 4) / (1 - 1 / 4) / ((4 * 4 - 9) / 3))
    for part, norm in (
        (PartNorm(4, 3.0), 2.0),
        (PartNorm(0, 3.0), 2.0),
        (PartNorm(1, 3.0), np.inf),
    ):
        assert before.with_measurement(part, 4, norm) is before
    assert NoiseScale().value is None
    assert NoiseScale(trace=2.0, square=-1.0, count=9).value is None
    assert before.settled is None
    assert NoiseScale(trace=2.0, square=1.0, count=8).settled == 2.0


def step_of(*slices: list[int]) -> StepBatch:
    """A step with slices of micro-batches of so many samples."""
    micro_batches = [
        MicroBatch({"x": np.arange(max(1, samples))}, float(samples), samples, rank, 0)
        for rank, sizes in enumerate(slices)
        for samples in sizes
    ]
    count = sum(map(sum, slices))
    return StepBatch(
        StepPlan(0, 0, 0, count), tuple(micro_batches), float(count), tuple(map(len, slices)), 99
    )


@pytest.mark.parametrize(
    ("slices", "keep_size", "sizes"),
    [
        ([[32, 32]], False, [4]),
        ([[8]], False, [1]),
        ([[8]], True, [8]),
        ([[8, 8]], True, [8]),
        ([[40], [40]], False, [2, 2]),
        ([[40], [40]], True, [40, 0]),
        ([[1], [1], [1], [0]], False, [1, 0, 1, 0]),
        ([[2], [1], [2], [1]], False, [1, 0, 1, 0]),
    ],
)
def test_a_part_has_samples_of_every_slice(
    slices: list[list[int]], keep_size: bool, sizes: list[int]
) -> None:
    part = part_of(step_of(*slices), keep_size=keep_size)
    assert [micro.samples for micro in part.micro_batches] == sizes
    assert [micro.rank for micro in part.micro_batches] == list(range(len(slices)))
    assert part.passes == (1,) * len(slices)
    if not keep_size:
        assert [len(micro.arrays["x"]) for micro in part.micro_batches] == [
            max(1, n) for n in sizes
        ]


def test_small_slices_are_measured_less_often(prepare_run: Callable[..., Prepared]) -> None:
    config = prepare_run().config
    intervals = {batch: noise_interval(config, batch, 4) for batch in (1, 4, 6, 8, 64)}
    assert intervals == {1: None, 4: 100, 6: 67, 8: 50, 64: 50}


@pytest.mark.torture
def test_it_is_the_noise_scale_of_the_samples(trainer: Callable[..., Trainer]) -> None:
    run = trainer("train.batch_size=32", "train.gradient_accumulation_steps=1")
    parts = run.parts
    run.train()
    source, _ = parts.task.train_samples()
    gradients = []
    for index in range(len(source) - 1):  # the last sample may be shorter
        batch = to_device(source.read(np.array([index])), torch.device("cpu"))
        loss = parts.task.loss_sum(parts.stepper.unwrapped_model, batch) / parts.task.context
        sample_gradients = torch.autograd.grad(loss, [*parts.stepper.parameters.values()])
        gradients.append(torch.cat([g.flatten() for g in sample_gradients]).double())
    samples = torch.stack(gradients)
    trace = samples.var(0).sum().item()
    true = trace / (samples.mean(0).square().sum().item() - trace / len(samples))

    traces = squares = 0.0
    cursor = run.state.progress.samples
    assert parts.loader is not None
    for step in range(150):
        step_batch = parts.loader.take(cursor, 32, 32, lambda: False)
        cursor += step_batch.plan.count
        result = parts.stepper.step(step_batch, step, 0.0, lambda: None, measures_part=True)
        assert result.part is not None
        estimate = NoiseScale().with_measurement(
            result.part, step_batch.plan.count, result.norm.item()
        )
        traces, squares = traces + estimate.trace, squares + estimate.square
    assert traces / squares == pytest.approx(true, rel=0.2)
