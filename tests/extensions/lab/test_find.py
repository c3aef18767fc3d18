"""Finders: the search itself, and the short trainings that it compares."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from instar.config.schema import RunConfig
from instar.distributed.world import World
from instar.extensions.lab.find import batch_size
from instar.extensions.lab.find.batch_size import BatchTried
from instar.extensions.lab.find.learning_rate import BUDGET, search_rate
from instar.extensions.lab.find.training import final_loss, shorten_config
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.settings import initial_settings, learning_rate

STEPS = 400


def valley(best: float, *, diverges: float = math.inf) -> Callable[[float, int], float]:
    """A loss that is lowest at `best` after all steps, and at higher rates after fewer."""

    def loss(lr: float, steps: int) -> float:
        if lr > diverges:
            return math.inf
        octaves = math.log2(lr / best) - 0.5 * math.log2(STEPS / steps)
        return 2.0 + 0.05 * octaves**2 * (2.0 if octaves > 0 else 1.0)

    return loss


@pytest.mark.parametrize("best", [3e-4, 1e-3, 2.3e-3, 0.07])
def test_the_minimum_is_found_within_a_third_of_an_octave(best: float) -> None:
    result = search_rate(valley(best), 1e-3, STEPS, BUDGET * STEPS)
    assert result.finished
    assert abs(math.log2(result.lr / best)) < 1 / 3
    assert result.steps <= BUDGET * STEPS


def test_a_start_far_above_or_below_is_left_behind() -> None:
    for best in (1e-7, 30.0):
        result = search_rate(valley(best, diverges=100 * best), 1e-3, STEPS, 20 * STEPS)
        assert result.finished
        assert abs(math.log2(result.lr / best)) < 1 / 3


def test_rates_that_win_early_do_not_hide_the_one_that_wins_late() -> None:
    """Losses of a small GPT after 50 to 400 steps: early, two valleys, and the wrong one deeper."""
    losses = {
        100: [4.2766, 3.5496, 2.9592, 2.6635, 2.6346, 2.6321, 2.5891, 2.7364],
        200: [3.5287, 2.9109, 2.5062, 2.3757, 2.4666, 2.5095, 2.4869, 2.5989],
        400: [2.8776, 2.4375, 2.1944, 2.0684, 2.0995, 2.2685, 2.2778, 2.4731],
    }

    def loss(lr: float, steps: int) -> float:
        place = round(math.log2(lr / 5e-4))
        return losses[steps][place] if 0 <= place < 8 else 9.0 + abs(place)

    result = search_rate(loss, 1e-3, 400, BUDGET * 400)
    assert 4e-3 < result.lr < 6e-3


def test_a_budget_is_kept_and_what_was_seen_is_used() -> None:
    result = search_rate(valley(1e-3), 1e-3, STEPS, 3 * STEPS)
    assert not result.finished
    assert result.steps <= 3 * STEPS
    assert 5e-4 <= result.lr <= 4e-3
    with pytest.raises(ValueError, match="no training had a finite loss"):
        search_rate(valley(1e-3, diverges=0.0), 1e-3, STEPS, 3 * STEPS)


def test_a_short_training_has_the_schedule_in_small(prepare_run: Callable[..., Prepared]) -> None:
    config = prepare_run(
        "train.until=[200it]", "learning_rate.warmup_iters=20", "train.ema=0.99"
    ).config
    short = shorten_config(config, 2 * config.optimizer.lr, 50, 200, 3)

    def rate(of: RunConfig, step: int) -> float:
        return learning_rate(initial_settings(of), step)

    assert rate(short, 2) == pytest.approx(2 * rate(config, 11), rel=0.05)
    assert rate(short, 25) == pytest.approx(2 * rate(config, 100), rel=0.05)
    assert rate(short, 49) == pytest.approx(2 * rate(config, 199), rel=0.05)
    assert short.train.ema == pytest.approx(0.96)
    assert (short.eval.eval_iters, short.compile) == (3, False)


def test_a_training_of_full_length_is_the_run_itself(
    prepare_run: Callable[..., Prepared], trainer: Callable[..., Trainer]
) -> None:
    run = trainer("optimizer.lr=0.004", "eval.eval_iters=5", "optimizer.name=muon")
    run.train()
    preparation = prepare_run(
        "eval.eval_iters=5", "optimizer.name=muon", "optimizer.lr=0.002", "optimizer.muon_lr=0.01"
    )
    world = World(0, 0, 1, torch.device("cpu"), "none")
    short = shorten_config(preparation.config, 0.004, 8, 8, 100)
    assert final_loss(preparation, short, world, 8) == run.state.evaluated_metrics["loss"]


@pytest.mark.parametrize(("true", "limit"), [(1, 64), (11, 64), (37, 10**6), (64, 64), (50, 50)])
def test_the_largest_micro_batch_is_found_by_trial(true: int, limit: int) -> None:
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= true

    largest = batch_size.largest_by_trial(fits, limit)
    assert largest <= min(true, limit) <= largest * 1.13
    assert max(sizes) <= 2 * true
    assert batch_size.largest_by_trial(lambda _: False, limit) == 0


def test_memory_is_never_used_up_to_find_out_how_much_there_is() -> None:
    """1,000 bytes, and 100 more for each sample; 10,000 in all."""
    trials: dict[int, BatchTried] = {}

    def fits(size: int) -> bool:
        trials[size] = BatchTried(size, per_s=size, memory_bytes=1000 + 100 * size)
        return trials[size].memory_bytes <= 10_000

    assert batch_size.largest_by_forecast(fits, trials, 10**6, 10_000) == 90
    assert max(trials) == 64
    trials.clear()
    assert batch_size.largest_by_forecast(fits, trials, 24, 10_000) == 24
    assert batch_size.largest_by_forecast(lambda _: False, {}, 100, 10_000) == 0


def test_the_search_ends_where_larger_micro_batches_are_not_faster() -> None:
    trials: dict[int, BatchTried] = {}

    def fits(size: int) -> bool:
        trials[size] = BatchTried(size, per_s=min(size, 8), memory_bytes=1000 + 100 * size)
        return True

    assert batch_size.largest_by_forecast(fits, trials, 10**6, 10**8) == 999_990
    assert max(trials) == 32
    assert batch_size.fastest_of(list(trials.values())) == 8
