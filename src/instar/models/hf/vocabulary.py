"""Which rows of a table of tokens a new tokenizer keeps, and of which old rows its other tokens are made, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPECIAL = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class VocabularyMap:
    """How the rows of a table of tokens are made."""

    rows: tuple[tuple[int, ...], ...]
    """for each new row, the old rows whose mean it is; none: all"""
    kept: frozenset[int]
    """new rows of tokens that both tokenizers have"""
    special: Mapping[str, int]
    """ids that the new tokenizer declares, by their keys in `config.json`"""

    def special_ids(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the ids of special tokens in a config with the new tokenizer: the same tokens if it has them, else
        its own, else None."""
        moved = {self.rows[new][0]: new for new in self.kept}
        found: dict[str, Any] = {}
        for key in (f"{name}_id" for name in SPECIAL):
            old = config.get(key)
            ids = old if isinstance(old, list) else [old]
            if old is None:
                continue
            new = [moved.get(each) if type(each) is int else None for each in ids]
            known = None not in new
            found[key] = (
                (new if isinstance(old, list) else new[0]) if known else self.special.get(key)
            )
        return found
