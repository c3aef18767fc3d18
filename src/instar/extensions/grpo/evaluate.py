"""Evaluation: pass@k on held-out questions, and the loss of their reference solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from instar.extensions.grpo.answers import is_correct
from instar.extensions.grpo.data import Question
from instar.extensions.grpo.models import Ids
from instar.extensions.grpo.samplers import Sampler

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class PassRates:
    """The result of one evaluation."""

    pass_at: dict[int, float]
    """By k."""
    standard_errors: dict[int, float]
    """Over the questions, by k."""
    loss: float
    """Of the reference solutions, mean per token, nats."""
    tokens: int
    """Of the reference solutions."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the probability that k completions, drawn without
    replacement from n of which `correct` are correct, contain a correct one.

    Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"no pass@{k} of {correct} among {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate_pass_rates(
    questions: Sequence[Question],
    prompts: Sequence[Ids],
    sampler: Sampler,
    decode: Callable[[Ids], str],
    *,
    samples: int,
    ks: Sequence[int],
    seed: int,
    step: int,
) -> tuple[dict[int, float], dict[int, float]]:
    """Return pass@k and its standard errors over the questions, by k."""
    completions = sampler.draw(prompts, samples, seed, step).ids
    correct = [
        sum(
            is_correct(decode(ids), question.answer)
            for ids in completions[i * samples : (i + 1) * samples]
        )
        for i, question in enumerate(questions)
    ]
    by_k = {k: [pass_at_k(samples, count, k) for count in correct] for k in ks}
    return {k: _mean(v) for k, v in by_k.items()}, {k: _standard_error(v) for k, v in by_k.items()}


def reference_loss(
    model: Any, pad_id: int, prompts: Sequence[Ids], solutions: Sequence[Ids]
) -> tuple[float, int]:
    """Return the mean loss per token of solutions given their prompts, nats, and their tokens."""
    total, tokens = 0.0, sum(map(len, solutions))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for begin in range(0, len(prompts), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            total += _loss_sum(model, pad_id, prompts[rows], solutions[rows])
    model.train(was_training)
    return total / max(1, tokens), tokens


def _loss_sum(model: Any, pad_id: int, prompts: Sequence[Ids], solutions: Sequence[Ids]) -> float:
    rows = [[*prompt, *solution] for prompt, solution in zip(prompts, solutions, strict=True)]
    longest = max(map(len, rows))
    device = model.device
    ids_BT = torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in rows], device=device)
    kept_BT = torch.tensor(
        [[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows], device=device
    )
    targets_BT = ids_BT.clone()
    for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        targets_BT[row, : len(prompt)] = -100
        targets_BT[row, len(ids) :] = -100
    logits_BTV = model(input_ids=ids_BT, attention_mask=kept_BT).logits[:, :-1]
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT[:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )
    return float(loss)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
