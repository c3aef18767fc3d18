"""Sampling from a language model, one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from instar.models.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens_BT: Tensor,
    n_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`tokens_BT` (B ≥ 1, T ≥ 1) followed by `n_new` tokens, each drawn from the model's
    distribution given the last `context` tokens before it.

    Temperature 0 takes the most likely token; `top_k` leaves only the k most likely ones. Numbers
    are drawn where `generator` lives (on the CPU: the same on every device). The model's mode,
    train or eval, is put back as it was. Raises ValueError for values that make no sense.
    """
    if tokens_BT.shape[-1] < 1:
        raise ValueError("a prompt needs at least one token")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, not {temperature:g}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}")
    was_training = model.training
    model.eval()
    try:
        for _ in range(n_new):
            logits_BV = model(tokens_BT[:, -model.arch.context :])[:, -1].float()
            next_B1 = _draw(logits_BV, temperature, top_k, generator)
            tokens_BT = torch.cat((tokens_BT, next_B1), 1)
    finally:
        model.train(was_training)
    return tokens_BT


def _draw(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    probabilities_BV = F.softmax(logits_BV / temperature, -1)
    if generator is not None:
        probabilities_BV = probabilities_BV.to(generator.device)
    return torch.multinomial(probabilities_BV, 1, generator=generator).to(logits_BV.device)
