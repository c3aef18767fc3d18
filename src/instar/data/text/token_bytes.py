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
    saved = json.loads(tokenizer.to_json())
    if (saved.get("decoder") or {}).get("type") != "ByteLevel" or saved["model"].get(
        "type"
    ) != "BPE":
        return None
    added = {each["content"]: each for each in saved.get("added_tokens", ())}
    found = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, number in tokenizer.vocabulary.items():
        # in byte-level BPE, each character of a token is a byte; added tokens are literal text
        size = len(token) if token not in added else len(token.encode())
        found[number] = 0 if added.get(token, {}).get("special") else size
    return found
