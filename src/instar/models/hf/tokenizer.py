"""Tokenizers of Instar in the format of the tokenizers library, and back; torch-free."""

from __future__ import annotations

import json

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG
from instar.data.text.tokenizer import (
    UNKNOWN,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)

CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_IDS = "special_ids.json"
"""In a run of an imported model: ids of special tokens as the config of its folder has them, perhaps among others."""
COMPANIONS = (
    TOKENIZER_CONFIG,
    "generation_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)
"""Files beside a tokenizer.json of transformers that belong to it or its model; no other is copied."""


def to_fast(tokenizer: Tokenizer) -> str:
    """Return the equivalent tokenizer in the JSON of the tokenizers library."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Fast(models.BPE({letter(byte): byte for byte in range(256)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharTokenizer):
        names = [*tokenizer.characters, UNKNOWN]
        ids = {name: number for number, name in enumerate(names)}
        fast = Fast(models.WordLevel(ids, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
    else:
        return tokenizer.to_json()
    return str(fast.to_str())


def from_fast(tokenizer: Tokenizer) -> Tokenizer:
    """Inverse of `to_fast`; a tokenizer that `to_fast` did not write is returned as it is."""
    text = tokenizer.to_json()
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    if text == to_fast(ByteTokenizer()):
        return ByteTokenizer()
    if (vocabulary := json.loads(text)["model"]).get("type") == "WordLevel":
        names = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
        chars = CharTokenizer("".join(names[:-1]))
        return chars if text == to_fast(chars) else tokenizer
    return tokenizer


def same_vocabulary(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers have the same tokens with the same ids, whatever wrote their files."""
    first, second = from_fast(first), from_fast(second)
    if isinstance(first, BPETokenizer) and isinstance(second, BPETokenizer):
        return first.vocabulary == second.vocabulary
    return first == second


def letter(byte: int) -> str:
    """Return the character of a byte in byte-level tokenizers, as in GPT-2: itself if it is
    printable, else one from code point 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [code for code in range(256) if code not in visible]
    return chr(byte if byte in visible else 256 + hidden.index(byte))
