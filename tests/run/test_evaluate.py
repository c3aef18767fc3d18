"""Held-out loss is exact: every token once, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instar.run.evaluate import Evaluation, evaluate, held_out_batches, held_out_indices
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]


def measure(run: Trainer, batch_size: int, limit: int | None = None) -> Evaluation:
    found = evaluate(
        run.task,
        run.stepper.bare_model,
        run.validation,
        run.world,
        batch_size=batch_size,
        limit=limit,
        seed=run.config.seed,
        autocast=run.stepper.autocast,
        safe=run.safe,
    )
    assert found is not None
    return found


def test_the_loss_is_the_mean_over_all_tokens(trainer: Make) -> None:
    run = trainer()
    split = run.task.dataset.dataset.split("val")  # type: ignore[attr-defined]
    tokens, context = split.read(0, len(split)).astype(np.int64), 16
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, context):
            window = torch.from_numpy(tokens[start : start + context + 1])[None]
            logits = run.stepper.bare_model(window[:, :-1]).double().log_softmax(-1)
            total -= logits.gather(-1, window[:, 1:, None]).sum().item()
    found = measure(run, batch_size=5)
    assert found.weight == len(tokens) - 1
    assert found.loss == pytest.approx(total / (len(tokens) - 1), rel=1e-6)


def test_the_batch_size_does_not_matter(trainer: Make) -> None:
    run = trainer()
    found = [measure(run, batch_size).loss for batch_size in (1, 7, 1000)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_a_limited_evaluation_reads_the_same_samples_every_time(trainer: Make) -> None:
    run = trainer()
    one, other = measure(run, 4, limit=10), measure(run, 4, limit=10)
    assert (one.loss, one.samples) == (other.loss, 10)


def test_the_subset_is_spread_and_without_repeats() -> None:
    chosen = held_out_indices(1000, 100, seed=3)
    assert len(set(chosen.tolist())) == 100
    assert chosen.min() < 100
    assert chosen.max() > 900
    assert held_out_indices(50, 100, seed=3).tolist() == list(range(50))


@given(total=st.integers(1, 500), batch_size=st.integers(1, 40))
def test_held_out_samples_are_cut_evenly_for_any_number_of_ranks(
    total: int, batch_size: int
) -> None:
    batches = held_out_batches(np.arange(total), batch_size)
    assert np.concatenate(batches).tolist() == list(range(total))
    sizes = {len(batch) for batch in batches}
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert len(batches) % 8 == 0 or sizes == {1}


def test_evaluating_does_not_touch_training(trainer: Make) -> None:
    plain, watched = trainer(name="plain"), trainer("eval.eval_interval=1", name="watched")
    plain.train()
    watched.train()
    for name, parameter in plain.stepper.parameters.items():
        assert torch.equal(parameter, watched.stepper.parameters[name])
    assert watched.stepper.bare_model.training
