"""Trained models: loading, text, and loss on other text."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instar.checkpoint.listing import resolve_checkpoint
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.config.errors import ConfigError
from instar.config.fields import CAUSAL_LM, LANGUAGE
from instar.config.user_code.definitions import code_name
from instar.data.text.foreign.chat_template import template_beside
from instar.data.text.targets import token_bytes
from instar.data.text.tokenizer import BPETokenizer, Tokenizer, load_saved_tokenizer, prompt_tokens
from instar.models.shape import count_parameters
from instar.processes.cores import share_cores
from instar.record.progress import track_items

if TYPE_CHECKING:
    from torch import nn

    from instar.models.sampling import LanguageModel

Source = str | os.PathLike[str]
"""a checkpoint's folder; or a run, by what `load_run` returns, its folder, id or name, or `latest`: its latest checkpoint"""


def load_model(
    checkpoint: Source, device: str = "auto", *, task: type[Any] | str | None = None
) -> nn.Module:
    """Load the model of a checkpoint of any task in evaluation mode; its moving average if there is one.

    A language model is called with tokens, [B, T], and returns logits, [B, T, vocabulary]. A model of another task is
    what its `module` returns, with the trained values.

    Args:
        device: of torch, or auto: a GPU if there is one.
        task: class of a custom task, or its name "module:class", where it is not the run's; it builds the model.

    Raises:
        ConfigError: there is no such run, or the task cannot be imported.
        CheckpointError: there is no checkpoint, it is damaged, or it is of another model.
    """
    path = resolve_checkpoint(os.fspath(checkpoint))
    if _is_language_model(path):
        return _load(path, device)
    share_cores(os.environ)

    from instar.run.offline.saved_model import load_task_model

    name = code_name(task) if isinstance(task, type) else task
    return load_task_model(path, _device(device), name)


def load_tokenizer(checkpoint: Source) -> Tokenizer:
    """Load the tokenizer beside a model, with `encode(text)` and `decode(ids)`.

    Raises:
        ConfigError: there is no such run, or it has no tokenizer.
        CheckpointError: the run has no checkpoint.
    """
    return _tokenizer(_folder(checkpoint))


def sample(
    checkpoint: Source,
    prompt: str = "\n",
    *,
    max_tokens: int = 200,
    num: int = 1,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    chat: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> list[str]:
    """Generate texts, each with the prompt at its beginning, as `instar sample` does.

    Args:
        max_tokens: length of each text, without the prompt.
        num: number of texts.
        temperature: 0 takes the most likely token.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the most likely tokens whose probabilities sum to this (nucleus).
        stop: a text ends before the first of these.
        chat: `prompt` is what a user says, and each text the model's answer alone, as its chat template has them.

    Raises:
        ConfigError: there is no such run, the prompt or a stop text is empty, or the chat template refuses it.
        CheckpointError: there is no checkpoint, it is damaged, or its logits are not finite.
    """
    texts = [""] * num
    pieces = stream_samples(
        checkpoint,
        prompt,
        max_tokens=max_tokens,
        num=num,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        chat=chat,
        seed=seed,
        device=device,
    )
    for number, piece in pieces:
        texts[number] += piece
    return texts


def stream_samples(
    checkpoint: Source,
    prompt: str,
    *,
    max_tokens: int,
    num: int = 1,
    device: str = "auto",
    stop: Sequence[str] = (),
    chat: bool = False,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Yield pieces of the texts of `sample` as they are generated, each with the number of its text.

    The first piece of a text is the prompt, without `chat`; a text is complete when the next begins.
    """
    path = _folder(checkpoint)

    from instar.models.sampling import SamplingOptions, continuations

    tokenizer = _tokenizer(path)
    if chat:
        tokens, end = _begin_conversation(path, tokenizer, prompt)
        stop = (*stop, *end)
    else:
        tokens = prompt_tokens(tokenizer, prompt).tolist()
    if not tokens or "" in stop:
        where = "stop" if tokens else "prompt"
        raise ConfigError.of(
            f"the {where} text is empty", where=f"--{where}", hint="give at least one token"
        )
    model = _load(path, device)
    sampling = SamplingOptions(stops=stop, **options)
    pieces = continuations(model, tokenizer, tokens, max_tokens, num, sampling)
    last = -1
    try:
        for number, piece in pieces:
            if number > last:
                last = number
                yield number, "" if chat else tokenizer.decode(tokens[tokenizer.before.size :])
            yield number, piece
    except FloatingPointError as error:
        raise CheckpointError(f"{path}: {error}; use an earlier checkpoint") from error


@dataclass(frozen=True)
class TextLoss:
    """How well a model predicts a text."""

    loss: float
    """mean over tokens, nats"""
    tokens: int
    """predicted: all but the first, which may be one that the tokenizer adds to a text"""
    bytes: int | None
    """of UTF-8 text that the predicted tokens stand for; None if unknown, as in training"""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers: the metric of that name in training; None where that is absent."""
        return self.loss * self.tokens / self.bytes / math.log(2) if self.bytes else None


def evaluate(checkpoint: Source, text: str, device: str = "auto") -> TextLoss:
    """Measure how well a model predicts a text, window by window of its context.

    Raises:
        ConfigError: there is no such run, or the text has fewer than two tokens.
        CheckpointError: there is no checkpoint, it is damaged, or it is no language model.
    """
    path = _folder(checkpoint)

    import torch

    from instar.models.module import enough_threads

    tokenizer = _tokenizer(path)
    ids = tokenizer.encode(text).tolist()
    if len(ids) < 2:
        raise ConfigError.of(f"the text has {len(ids)} tokens; give at least two")
    model = _load(path, device)
    place = next(model.parameters()).device
    context = model.arch.context
    total = 0.0
    begins = range(0, len(ids) - 1, context)
    flops = 2.0 * count_parameters(model.arch).total * min(len(ids), context)
    with torch.no_grad(), enough_threads(flops):
        for begin in track_items(begins, "evaluating", "windows", len(begins)):
            window_1T = torch.tensor([ids[begin : begin + context + 1]], device=place)
            total += float(model(window_1T[:, :-1], window_1T[:, 1:]))
    token_sizes = token_bytes(tokenizer)
    size = None if token_sizes is None else int(token_sizes[ids[1:]].sum())
    return TextLoss(total / (len(ids) - 1), len(ids) - 1, size)


def _folder(checkpoint: Source) -> Path:
    """Return the folder of a checkpoint of a language model.

    Raises:
        CheckpointError: it is one of another task.
    """
    path = resolve_checkpoint(os.fspath(checkpoint))
    if not _is_language_model(path):
        raise CheckpointError(
            f"{path}: a model of task {_task_of(path)}, not a language model; instar.load_model loads it"
        )
    return path


def _task_of(path: Path) -> str:
    return str(read_manifest(path).config.get("task", LANGUAGE))


def _is_language_model(path: Path) -> bool:
    return _task_of(path) in (LANGUAGE, CAUSAL_LM)


def _tokenizer(path: Path) -> Tokenizer:
    return load_saved_tokenizer(path.absolute().parent.parent)


def _begin_conversation(
    path: Path, tokenizer: Tokenizer, message: str
) -> tuple[list[int], list[str]]:
    """Return the tokens of a conversation up to the answer, and the texts that end one."""
    run_dir = path.absolute().parent.parent
    if not isinstance(tokenizer, BPETokenizer):
        raise ConfigError.of("the tokenizer has no special tokens", where="--chat")
    try:
        text, end = template_beside(run_dir, tokenizer).around_answer(message)
    except (ValueError, ImportError) as error:
        raise ConfigError.of(str(error), where="--chat") from None
    ends = filter(None, dict.fromkeys((end, tokenizer.end_token)))
    ((ids, _),) = tokenizer.engine.parse([text])
    return ids.tolist(), list(ends)


def _load(path: Path, device: str) -> LanguageModel:
    share_cores(os.environ)

    from instar.models.hf.module import load_language_model

    return load_language_model(path, _device(device))


def _device(name: str) -> str:
    """Return a device of torch; of auto, a GPU if there is one."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
