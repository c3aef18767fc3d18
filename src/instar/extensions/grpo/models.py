"""The model and the tokenizer that a name stands for, and completions sampled from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from instar.config.errors import ConfigError
from instar.data.text.foreign.chat_template import ChatTemplate, Messages
from instar.data.text.foreign.engine import engine_of
from instar.data.text.foreign.special_tokens import added_to_text
from instar.data.text.tokenizer import TOKENIZER_FILE, load_saved_tokenizer
from instar.extensions.grpo.data import load_questions, texts

Ids = list[int]
INITIAL = "initial"
"""the weights of a server to which none were sent"""
TINY = "tiny"
"""a model made on the spot: for tests, examples, and machines without a hub"""
_ROWS_AT_ONCE = 256
_TRIED_TOKENS = 1000
_VOCABULARY = 512
_SPECIAL = ["<pad>", "<eos>", "<unk>"]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


def load_policy(model: str, dataset: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer.

    Args:
        model: `tiny`, a folder, or a name on the hub.
        dataset: what the tokenizer of `tiny` is trained on.

    Raises:
        ConfigError: it cannot be loaded.
    """
    kind = getattr(torch, dtype)
    if model == TINY:
        tiny_model, tokenizer = make_tiny(texts(load_questions(dataset)))
        return tiny_model.to(kind), tokenizer

    if (Path(model) / TOKENIZER_FILE).is_file():
        _try_tokenizer(Path(model), [*texts(load_questions(dataset))])
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=kind)
    except (OSError, ValueError) as error:
        message = f"{model} cannot be loaded: {str(error).splitlines()[0][:300]}"
        hint = f"write {TINY}, a folder, or a name on the Hugging Face hub"
        raise ConfigError.of(message, "--model", hint) from error
    _agree_on_end(policy, tokenizer, model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


def _try_tokenizer(folder: Path, questions: list[str]) -> None:
    """Encode the questions and decode tokens by a folder's tokenizer, within limits; transformers has none.

    Raises:
        ConfigError: that fails.
    """
    tokenizer = load_saved_tokenizer(folder)
    tokenizer.encode_batch(questions)
    tokenizer.decode(range(min(tokenizer.vocab_size, _TRIED_TOKENS)))


def chat_prompt(tokenizer: Any, name: str, messages: Messages) -> str:
    """Return what `apply_chat_template` makes of messages, rendered within limits.

    Args:
        name: of the model, for messages.

    Raises:
        ConfigError: the template refuses them, or takes too much.
    """
    template = ChatTemplate(
        tokenizer.get_chat_template(), tokenizer.special_tokens_map, origin=name
    )
    try:
        return template.prompt(messages)
    except ValueError as error:
        raise ConfigError.of(str(error), where=name) from None


class TextEncoder:
    """The ids that a tokenizer of transformers makes of texts, by the library in a process with limits.

    Raises:
        ValueError: it does more than put ids around a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        text = tokenizer.backend_tokenizer.to_str()
        content = json.loads(text)
        self._before, self._after = added_to_text(content["post_processor"])
        self._engine = engine_of(text, content)

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. Raises ConfigError if the library fails."""
        pieces = self._engine.parse(texts)
        return [[*self._before, *ids.tolist(), *self._after] for ids, _ in pieces]


def _agree_on_end(model: Any, tokenizer: Any, name: str) -> None:
    """Give tokenizer and model the end of a text that one of them has.

    Raises:
        ConfigError: neither has one.
    """
    ends = end_ids(model)
    if tokenizer.eos_token is None and ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.eos_token is None:
        message = f"{name} has no token that ends a text, so that no completion would end"
        hint = 'name one of its tokens in its tokenizer_config.json: {"eos_token": "…"}'
        raise ConfigError.of(message, "--model", hint)
    if not ends:
        model.generation_config.eos_token_id = tokenizer.eos_token_id


def make_tiny(texts: Iterable[str]) -> tuple[Any, Any]:
    """Return a Qwen2 of two layers with random weights, and a tokenizer trained on texts.

    Both are functions of the texts alone, so that a trainer and its server make the same.
    """
    bpe_tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    bpe_tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=_SPECIAL, show_progress=False
    )
    bpe_tokenizer.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,  # with the usual 0.02, so small a model hardly sees its input
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    return model, tokenizer


def sample_completions(
    model: Any, pad_id: int, prompts: Sequence[Ids], n: int, sampling: Sampling, seed: int
) -> list[Ids]:
    """Draw n completions of each prompt, in the order of the prompts.

    They are a function of the arguments alone: the process's generators are left as they are. Of what the model's
    own generation config says, only the ends of a text count: the loss knows no penalties and no tokens held back.

    Returns:
        len(prompts) · n lists of ids, each up to and including the first end-of-text.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    completions: list[Ids] = []
    was_training, own_config, ends = model.training, model.generation_config, end_ids(model)
    model.eval()
    # generate() fills what another config leaves open from that of the model
    model.generation_config = GenerationConfig(eos_token_id=ends)
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode():
            torch.manual_seed(seed)
            at_once = max(1, _ROWS_AT_ONCE // n)
            for begin in range(0, len(prompts), at_once):
                completions += _sample(model, pad_id, prompts[begin : begin + at_once], n, sampling)
    finally:
        model.train(was_training)
        model.generation_config = own_config
    return completions


def _sample(
    model: Any, pad_id: int, prompts: Sequence[Ids], n: int, sampling: Sampling
) -> list[Ids]:
    rows = [torch.tensor(ids) for ids in prompts for _ in range(n)]
    ids_BT = pad_sequence(rows, True, pad_id, "left").to(model.device)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left").to(model.device)
    ends = end_ids(model)
    generated_rows = model.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        generation_config=GenerationConfig(
            do_sample=True,
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            eos_token_id=ends,
            pad_token_id=pad_id,
        ),
    )
    return [_up_to_end(row, ends) for row in generated_rows[:, ids_BT.shape[1] :].tolist()]


def end_ids(model: Any) -> Ids:
    """Return the ids that end a text."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or [])


def _up_to_end(ids: Ids, ends: Sequence[int]) -> Ids:
    return next((ids[: at + 1] for at, token in enumerate(ids) if token in ends), ids)


class Unfit(ValueError):  # noqa: N818
    """Weights are not those of this model."""


def get_weights(model: Any, dtype: str) -> bytes:
    """Return all parameters, converted to a dtype."""
    kind = getattr(torch, dtype)
    return save(
        {name: p.detach().to("cpu", kind).contiguous() for name, p in model.named_parameters()}
    )


def put_weights(model: Any, content: bytes) -> str:
    """Set all parameters, or none; return the name of the weights.

    Raises:
        Unfit: a name, shape or dtype differs, or a value is not finite.
    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise Unfit(f"not safetensors: {error}") from error
    parameters = dict(model.named_parameters())
    if different := sorted(parameters.keys() ^ tensors.keys()):
        raise Unfit(f"{different[0]} is {'missing' if different[0] in parameters else 'unknown'}")
    for name, parameter in parameters.items():
        if (form := _form(tensors[name])) != _form(parameter):
            raise Unfit(f"{name} is {form}, not {_form(parameter)}")
        if not torch.isfinite(tensors[name]).all():
            raise Unfit(f"{name} has values that are not finite")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return name_of_weights(content)


def name_of_weights(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def size_bytes(model: Any) -> int:
    """Return the size of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _form(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
