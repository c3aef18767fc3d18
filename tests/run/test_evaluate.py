"""Held-out metrics are exact: every token once, whatever the batch size and the number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import science
import torch
from cases import parametrize_first
from forks import children_as_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_run import codes, output_of

from instar.distributed.world import World
from instar.run import validation
from instar.run.step.evaluate import (
    ROUNDS_PER_REPORT,
    Evaluation,
    EvaluationOptions,
    Metric,
    evaluate_source,
    held_out_batches,
    held_out_indices,
)
from instar.run.trainer import Trainer
from instar.tasks import text
from instar.tasks.language import LanguageTask

Make = Callable[..., Trainer]


def measure(run: Trainer, batch_size: int, limit: int | None = None) -> Evaluation:
    evaluation = evaluate_source(
        run.parts.task,
        run.parts.stepper.unwrapped_model,
        run.parts.validation,
        EvaluationOptions(batch_size, run.parts.config.seed, limit, run.parts.stepper.autocast),
        run.parts.sync,
    )
    assert evaluation is not None
    return evaluation


def test_the_loss_is_the_mean_over_all_tokens(trainer: Make) -> None:
    run = trainer()
    split = run.parts.task.spec.dataset.dataset.split("val")  # type: ignore[attr-defined]
    tokens, context = split.read(0, len(split)).astype(np.int64), 16
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, context):
            window = torch.from_numpy(tokens[start : start + context + 1])[None]
            logits = run.parts.stepper.unwrapped_model(window[:, :-1]).double().log_softmax(-1)
            total -= logits.gather(-1, window[:, 1:, None]).sum().item()
    evaluation = measure(run, batch_size=5)
    assert evaluation.weight == len(tokens) - 1
    assert evaluation.loss == pytest.approx(total / (len(tokens) - 1), rel=1e-6)
    assert evaluation.values()["perplexity"] == math.exp(evaluation.loss)
    # each character of the text is a byte
    assert evaluation.values()["bits_per_byte"] == pytest.approx(
        evaluation.loss / math.log(2), rel=1e-9
    )
    assert evaluation.metrics["bits_per_byte"].weight == len(tokens) - 1


@pytest.mark.parametrize("limit", [None, 37])
def test_the_batch_size_does_not_matter(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """Neither for the loss nor for its standard error, which is told from fixed units of text."""
    monkeypatch.setattr(text, "UNIT_TOKENS", 5 * 16)
    run = trainer()
    metrics = [measure(run, size, limit).metrics["loss"] for size in (1, 3, 7, 1000)]
    assert [metric.value for metric in metrics] == pytest.approx([metrics[0].value] * 4, rel=1e-6)
    errors = [metric.standard_error for metric in metrics]
    assert errors[0]
    assert errors == pytest.approx([errors[0]] * 4, rel=1e-4)


def test_a_limited_evaluation_reads_the_same_samples_every_time(trainer: Make) -> None:
    run = trainer()
    first, second = measure(run, 4, limit=10), measure(run, 4, limit=10)
    assert (first.loss, first.samples) == (second.loss, 10)


def test_the_subset_is_the_same_whatever_the_batch_size_becomes(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = [
        {"name": "change_batch_size", "value": 2, "when": {"at_step": 2}},
        {"name": "change_eval_iters", "value": 3, "when": {"at_step": 5}},
    ]
    run = trainer(
        "eval.eval_iters=2",
        "eval.eval_interval=1",
        "eval.batch_size=5",
        "train.until=[6it]",
        f"schedule={json.dumps(schedule)}",
    )
    sizes = []

    def note_samples(*args: Any, **options: Any) -> Evaluation | None:
        result = evaluate_source(*args, **options)
        assert result is not None
        sizes.append(result.samples)
        return result

    monkeypatch.setattr(validation, "evaluate_source", note_samples)
    run.train()
    # batches of the 4 samples that the run began with; only eval_iters changes how many
    assert sizes == [8, 8, 8, 8, 8, 24]
    assert run.state.settings.batch_size == 8


def test_ranks_synchronize_after_many_micro_batches(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow network each time costs its latency."""
    run = trainer()
    times = []
    report = run.parts.sync.report
    monkeypatch.setattr(
        run.parts.sync, "report", lambda *a, **n: times.append(1) or report(*a, **n)
    )
    measure(run, batch_size=1, limit=40)
    assert len(times) == 1 + 40 // ROUNDS_PER_REPORT == 3


def test_a_rank_that_has_to_stop_skips_the_rest(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer()
    calls = []

    def stops(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            run.parts.sync.request_stop("enough")
        return LanguageTask.measure(run.parts.task, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setitem(vars(run.parts.task), "measure", stops)
    with pytest.raises(AssertionError):
        measure(run, batch_size=1, limit=40)
    assert len(calls) == 3
    assert run.parts.sync.stop_requested
    assert run.parts.sync.decision().reason == "enough"


def test_the_subset_is_spread_and_without_repeats() -> None:
    indices = held_out_indices(1000, 100, seed=3)
    assert len(set(indices.tolist())) == 100
    assert indices.min() < 100
    assert indices.max() > 900
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
    plain, evaluating = trainer(name="plain"), trainer("eval.eval_interval=1", name="watched")
    plain.train()
    evaluating.train()
    for name, parameter in plain.parts.stepper.parameters.items():
        assert torch.equal(parameter, evaluating.parts.stepper.parameters[name])
    assert evaluating.parts.stepper.unwrapped_model.training


ALONE = World(0, 0, 1, torch.device("cpu"), "none")


def plain(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Metric:
    """A ratio of sums and its standard error, from residuals; what weighs nothing is left out."""
    v, w = values[weights > 0], weights[weights > 0]
    if not w.size:
        return Metric(math.nan, None, 0.0)
    ratio = v.sum() / w.sum()
    if w.size == 1:
        return Metric(ratio, None, w.sum())
    residuals = np.sum((v - ratio * w) ** 2)
    return Metric(ratio, np.sqrt(w.size / (w.size - 1) * residuals) / w.sum(), w.sum())


@given(
    samples=st.integers(1, 60),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 70),
    unit=st.integers(1, 20),
)
@example(samples=1, seed=0, batch_size=1, unit=1)
@example(samples=1, seed=0, batch_size=1, unit=5)
def test_metrics_and_their_errors_are_those_of_plain_numpy(
    samples: int, seed: int, batch_size: int, unit: int
) -> None:
    columns = science.tally_columns(samples, seed)
    evaluation = science.evaluate_columns(ALONE, columns, batch_size, unit)
    assert list(evaluation.metrics) == ["loss", "score"]
    assert evaluation.samples == samples
    for name, metric in evaluation.metrics.items():
        sums, weights = columns[name].astype(np.float64).T
        places = range(0, samples, unit)
        sums = np.add.reduceat(np.where(weights > 0, sums, 0.0), places)
        expected = plain(sums, np.add.reduceat(weights, places))
        assert metric.weight == expected.weight
        assert metric.value == pytest.approx(expected.value, rel=1e-12, nan_ok=True)
        if expected.standard_error is None:
            assert metric.standard_error is None
        else:
            assert metric.standard_error == pytest.approx(
                expected.standard_error, rel=1e-6, abs=1e-7 * abs(expected.value)
            )


def test_of_equal_weights_the_error_is_the_one_of_textbooks() -> None:
    values = np.random.default_rng(0).normal(size=50)
    tally = np.stack([values, np.ones(50)], 1)
    metric = science.evaluate_columns(ALONE, {"loss": tally, "score": tally}, 7).metrics["score"]
    assert metric.value == pytest.approx(values.mean(), rel=1e-12)
    assert metric.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(50), rel=1e-12)


CASES = [
    (samples, size, unit)
    for samples in (1, 2, 3, 5, 17, 60)
    for size in (1, 3, 64)
    for unit in (1, 4)
]
"""many with fewer samples, fewer micro-batches or fewer units than ranks"""


def test_any_number_of_ranks_gets_the_same_bits(tmp_path: Path) -> None:
    outputs = set()
    for ranks in (2, 3, 4):
        arguments = "science:evaluate_all", str(tmp_path), CASES
        children = children_as_ranks(science.forks(), ranks, *arguments, place=tmp_path)
        assert codes(children) == [0] * ranks, output_of(children)
        outputs |= {(tmp_path / f"w{ranks}-{rank}").read_text() for rank in range(ranks)}
    (output,) = outputs
    expected = [
        science.evaluate_columns(ALONE, science.tally_columns(n), size, unit)
        for n, size, unit in CASES
    ]
    assert output.splitlines() == [repr(evaluation.metrics) for evaluation in expected]


@parametrize_first("every", [1, 2], first=5)
@pytest.mark.parametrize("batch_size", [5, 8, 12, 36, 50])
def test_evaluations_by_epochs_are_at_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, batch_size: int
) -> None:
    """36 samples to train on: with and without a last batch that is partial, and as it changes."""
    science.place(tmp_path)
    schedule = [
        {"name": "set_batch_size", "value": 7, "when": {"at_step": 3}},
        {"name": "set_grad_accum", "value": 2, "when": {"at_step": 9}},
        {"name": "set_batch_size", "value": 40, "when": {"at_step": 22}},
    ]
    with science.trainer(
        tmp_path / "run",
        f"train.batch_size={batch_size}",
        f"eval.eval_epochs={every}",
        "train.until=[8ep]",
        "early_stopping.rules=[]",
        f"schedule={json.dumps(schedule)}",
    ) as run:
        at = []

        def note_samples(*args: Any, **options: Any) -> Evaluation | None:
            at.append(run.state.progress.samples)
            return evaluate_source(*args, **options)

        monkeypatch.setattr(validation, "evaluate_source", note_samples)
        run.train()
    assert at == list(range(36 * every, 36 * 8 + 1, 36 * every))
    assert len(run.state.history) >= 2
