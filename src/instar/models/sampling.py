"""Sampling from a language model: drawing tokens one by one, and turning them into text as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from instar.data.text.tokenizer import Tokenizer
from instar.models.gpt import GPT, named_generator
from instar.models.hf.module import PretrainedModel
from instar.models.module import enough_threads, evaluating
from instar.models.shape import count_parameters

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures count as 0: logits divided by them would overflow."""
_INCOMPLETE = "�"
"""what a tokenizer decodes the first bytes of a character to"""

LanguageModel = GPT | PretrainedModel
Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class SamplingOptions:
    """How texts are drawn from a model."""

    temperature: float = 1.0
    """0 takes the most likely token"""
    top_k: int | None = None
    """see `filter_logits`, as for `top_p`"""
    top_p: float | None = None
    stops: Sequence[str] = ()
    """a text ends before the first of these"""
    seed: int = 0


def generate(
    model: LanguageModel,
    tokens_BT: Tensor,
    n_new: int,
    options: SamplingOptions = SamplingOptions(),
    *,
    vocab_size: int | None = None,
    generator: Generators = None,
) -> Tensor:
    """Return `tokens_BT` followed by `n_new` tokens, see `stream`."""
    next_tokens = stream(model, tokens_BT, options, vocab_size=vocab_size, generator=generator)
    return torch.cat((tokens_BT, *(next_B[:, None] for next_B in islice(next_tokens, n_new))), 1)


def stream(
    model: LanguageModel,
    tokens_BT: Tensor,
    options: SamplingOptions = SamplingOptions(),
    *,
    vocab_size: int | None = None,
    generator: Generators = None,
) -> Iterator[Tensor]:
    """Yield the next token of each prompt (B,), and so on without end, each sampled given the last
    `context` tokens.

    The modes of the model are restored after every token.

    Args:
        tokens_BT: prompts, B ≥ 1, T ≥ 1.
        options: of which stops and seed have no effect here.
        vocab_size: sample ids below it only; a table may have more rows than the tokenizer.
        generator: one for all prompts, or one for each, whose draws then do not depend on the other
            prompts; its device draws the numbers; with one on the CPU all devices sample alike.

    Raises:
        ValueError: an argument is out of range.
        FloatingPointError: the logits are not finite.
    """
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    if tokens_BT.shape[-1] < 1:
        raise ValueError("a prompt needs at least one token")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, not {temperature:g}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p:g}")
    flops_per_token = 2.0 * count_parameters(model.arch).total
    context = model.arch.context
    tokens_BT = tokens_BT[:, -context:]
    cache = model.new_cache()
    while True:
        if len(cache) == context:  # positions are counted from the first token of the window
            cache = model.new_cache()
        new_BT = tokens_BT[:, len(cache) :]
        flops = flops_per_token * new_BT.numel()
        with evaluating(model), enough_threads(flops), torch.no_grad():
            logits_BV = model(new_BT, cache=cache)[:, -1].float()
        if not logits_BV.isfinite().all():
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        logits_BV = logits_BV[:, :vocab_size]
        if temperature < _MIN_TEMPERATURE:
            next_B = logits_BV.argmax(-1)
        else:
            next_B = _draw(filter_logits(logits_BV / temperature, top_k, top_p), generator)
        yield next_B
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), 1)[:, -context:]


def filter_logits(
    logits_BV: Tensor, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Set the logits of all tokens to −∞ but those of the `top_k` most likely, and of these the
    fewest whose probabilities sum to `top_p` at least (nucleus sampling, arXiv 1904.09751).

    Tokens as likely as the last of the `top_k` stay. As in transformers, temperature comes before.
    """
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if top_p is not None and top_p < 1:
        ascending_BV, order_BV = logits_BV.sort(-1)
        drops_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
        drops_BV[:, -1] = False
        logits_BV = logits_BV.masked_fill(drops_BV.scatter(1, order_BV, drops_BV), -torch.inf)
    return logits_BV


def _draw(logits_BV: Tensor, generator: Generators) -> Tensor:
    shares_BV = logits_BV.softmax(-1)
    if generator is None or isinstance(generator, torch.Generator):
        shares_BV = shares_BV if generator is None else shares_BV.to(generator.device)
        drawn_B1 = torch.multinomial(shares_BV, 1, generator=generator)
    else:
        samples = [
            torch.multinomial(shares_V.to(rng.device), 1, generator=rng)
            for shares_V, rng in zip(shares_BV, generator, strict=True)
        ]
        drawn_B1 = torch.stack(samples)
    return drawn_B1[:, 0].to(logits_BV.device)


@dataclass
class TextStream:
    """The text of tokens that come one by one.

    It ends before the first of the texts `stops`. A character is given when its last byte has come,
    and what may become the beginning of a stop text when it cannot any more.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    ended: bool = False
    """whether a stop text has come"""
    _ids: list[int] = field(default_factory=list)
    """the last tokens: a decoder may need those before"""
    _given: int = 0
    """how many of them are decoded"""
    _held: str = ""

    def add(self, token: int) -> str:
        """Return the text that is certain with this token; empty after the end."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids)
        if self.ended or text.endswith(_INCOMPLETE):
            return ""
        return self._cut(self._taken(text), last=False)

    def end(self) -> str:
        """Return the rest of the text: no token follows."""
        if self.ended:
            return ""
        return self._cut(self._taken(self.tokenizer.decode(self._ids)), last=True)

    def _taken(self, text: str) -> str:
        """Return what is new in the text of the last tokens."""
        new = text[len(self.tokenizer.decode(self._ids[: self._given])) :]
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return new

    def _cut(self, new: str, *, last: bool) -> str:
        text = self._held + new
        positions = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if positions:
            self.ended, text, last = True, text[: min(positions)], True
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def continuations(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    n_new: int,
    samples: int = 1,
    options: SamplingOptions = SamplingOptions(),
) -> Iterator[tuple[int, str]]:
    """Yield pieces of text that continue a prompt, each with the number of its sample.

    All samples are generated at once; the pieces of the first come as they are generated, those of
    the others after it. Sample i depends on (seed, i) alone, not on how many there are.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    device = next(model.parameters()).device
    next_tokens = stream(
        model,
        torch.tensor([list(prompt)] * samples, device=device),
        options,
        vocab_size=tokenizer.vocab_size,
        generator=[named_generator(options.seed, number) for number in range(samples)],
    )
    prompt_ids = [int(token) for token in prompt]
    texts = [
        TextStream(tokenizer, options.stops, _ids=list(prompt_ids), _given=len(prompt_ids))
        for _ in range(samples)
    ]
    waiting = [""] * samples
    for next_B in islice(next_tokens, n_new):
        for number, token in enumerate(next_B.tolist()):
            piece = texts[number].add(token)
            if number == 0 and piece:
                yield 0, piece
            elif number:
                waiting[number] += piece
        if all(text.ended for text in texts):
            break
    for number, text in enumerate(texts):
        yield number, waiting[number] + text.end()
