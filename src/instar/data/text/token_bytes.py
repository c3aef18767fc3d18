"""Bytes of text that tokens stand for, by which losses of different tokenizers are compared."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from instar.data.text.tokenizer import BPETokenizer, CharTokenizer, Tokenizer


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return how many bytes of UTF-8 text each token stands for, [vocab_size]; None if unknown.

    They are known of bytes, of characters (one that the tokenizer does not know counts as 1), and
    of byte-level BPE, whose special tokens such as the end of a document stand for none.
    """
    if isinstance(tokenizer, CharTokenizer):
        return np.array([*(len(c.encode()) for c in tokenizer.characters), 1], dtype=np.int64)
    if not isinstance(tokenizer, BPETokenizer):
        return np.ones(tokenizer.vocab_size, dtype=np.int64)
    content = json.loads(tokenizer.to_json())
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or content["model"].get(
        "type"
    ) != "BPE":
        return None
    added_tokens = {token["content"]: token for token in content.get("added_tokens", ())}
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, number in tokenizer.vocabulary.items():
        # in byte-level BPE, each character of a token is a byte; added tokens are literal text
        size = len(token) if token not in added_tokens else len(token.encode())
        sizes[number] = 0 if added_tokens.get(token, {}).get("special") else size
    return sizes
