"""A tiny language model, made on the spot: for tests, examples, and machines without a hub."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TINY = "tiny"
_VOCABULARY = 512
_SPECIAL = ["<pad>", "<eos>", "<unk>"]


def make_tiny(texts: Iterable[str]) -> tuple[Any, Any]:
    """Return a Qwen2 of two layers with random weights, and a tokenizer trained on texts.

    Both are functions of the texts alone, so that a trainer and its server make the same.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    trained.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=_SPECIAL, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
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
