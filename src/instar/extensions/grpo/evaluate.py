"""Evaluation: pass@k on held-out questions, and the loss of their reference solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

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
    return {k: fmean(v) for k, v in by_k.items()}, {k: _standard_error(v) for k, v in by_k.items()}


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
    rows = [torch.tensor([*ids, *more]) for ids, more in zip(prompts, solutions, strict=True)]
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=pad_id).to(model.device)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(
        model.device
    )
    targets_BT = ids_BT.masked_fill(mask_BT == 0, -100)
    for row, prompt in enumerate(prompts):
        targets_BT[row, : len(prompt)] = -100
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, :-1]
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT[:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )
    return float(loss)


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
