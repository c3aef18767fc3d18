"""A language model as lm-evaluation-harness asks for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from instar.data.text.tokenizer import Tokenizer, separator_of
from instar.models.gpt import named_generator
from instar.models.module import evaluating
from instar.models.sampling import LanguageModel, SamplingOptions, stream

Pair = tuple[tuple[str, str], list[int], list[int]]
"""A text and what goes on with it, and the tokens of both."""
_MOST_TOKENS = 256
"""Default number of tokens of an answer, which the harness's own models have too."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Scores and writes texts with a model and the tokenizer that it was trained with.

    A text begins with what the tokenizer adds before one, as in training.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        end = self._tokenizer.end_id
        return int(separator_of(self._tokenizer)[-1]) if end is None else end

    @property
    def prefix_token_id(self) -> int:
        before = self._tokenizer.before
        return int(before[-1]) if before.size else self.eot_token_id

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> list[int]:
        (ids,) = self._tokenizer.encode_batch([string])
        before = self._tokenizer.before if add_special_tokens is not False else ()
        return [*map(int, before), *map(int, ids)]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Return of each pair the log-likelihood of what goes on, and whether each of its tokens is the likeliest."""
        context = self._model.arch.context
        answers: list[tuple[float, bool]] = []
        for begin in range(0, len(requests), self._batch_size):
            batch = requests[begin : begin + self._batch_size]
            rows = [(before + after)[-(context + 1) :] for _, before, after in batch]
            width = max(map(len, rows)) - 1
            inputs = torch.zeros(len(rows), width, dtype=torch.long)
            for row, tokens in zip(inputs, rows, strict=True):
                row[: len(tokens) - 1] = torch.tensor(tokens[:-1])
            with evaluating(self._model):
                logits = self._model(inputs.to(self._device)).float()
            shares = logits.log_softmax(-1).cpu()
            for row, tokens, pair in zip(shares, rows, batch, strict=True):
                after = pair[2]
                count = min(len(after), len(tokens) - 1)
                scores = row[len(tokens) - 1 - count : len(tokens) - 1]
                expected = torch.tensor(tokens[-count:])
                total = scores.gather(1, expected[:, None]).sum().item()
                answers.append((total, bool((scores.argmax(-1) == expected).all())))
        return answers

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        """Return the log-likelihood of each whole text, of which every token is scored once."""
        totals = []
        for request in requests:
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    self.tok_encode(request.args[0], add_special_tokens=False),
                    self.prefix_token_id,
                    self._model.arch.context,
                    1,
                ),
            )
            pairs = [(("", ""), before, after) for before, after in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """Return what the model writes after each text, up to the first stop: the likeliest tokens, or drawn ones, which
        depend on a request's number and not on the process."""
        return [self._answer(index, *request.args) for index, request in enumerate(requests)]

    def _answer(self, index: int, text: str, options: dict[str, Any]) -> str:
        settings: dict[str, Any] = {**normalize_gen_kwargs(options, _MOST_TOKENS)}
        stops = [stop for stop in settings["until"] if stop]
        start = torch.tensor([self.tok_encode(text)], device=self._device)
        end, tokenizer = self.eot_token_id, self._tokenizer
        sampling = _sampling(settings)
        tokens = stream(
            self._model,
            start,
            sampling,
            vocab_size=tokenizer.vocab_size,
            generator=named_generator(sampling.seed, index),
        )
        ids: list[int] = []
        answer = ""
        for token in islice(tokens, settings["max_gen_toks"]):
            if (number := int(token[0])) == end:
                break
            ids.append(number)
            answer = tokenizer.decode(ids)
            if any(stop in answer for stop in stops):
                break
        places = [place for stop in stops if (place := answer.find(stop)) >= 0]
        return answer[: min(places, default=len(answer))]


def _sampling(settings: Mapping[str, Any]) -> SamplingOptions:
    """Return how a task wants tokens drawn. What leaves a limit open is None there, or none at all: a top_k of 0 or -1."""
    if not settings["do_sample"]:
        return SamplingOptions(temperature=0.0)
    top_k, top_p = settings.get("top_k") or 0, settings.get("top_p")
    return SamplingOptions(
        temperature=float(settings.get("temperature", 1.0)),
        top_k=int(top_k) if top_k > 0 else None,
        top_p=None if top_p is None else float(top_p),
    )
