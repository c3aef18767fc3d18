"""Operations that name the folder of a tokenizer, which is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.config.sections import Operation
from instar.data.text.tokenizer import TOKENIZER_FILE
from instar.growth.operators import check
from instar.growth.plan import GrowthError
from instar.models.hf.tokens import map_vocabulary


def with_vocabulary(operation: Operation, home: Path | None) -> Operation:
    """Returns the operation with the map of its new tokenizer, if it names one.

    Args:
        home: folder of the old tokenizer, unless the operation says `from`.

    Raises:
        GrowthError: a tokenizer is missing or cannot be read.
    """
    value = operation.value
    if operation.name != "resize_vocab" or not isinstance(value, Mapping):
        return operation
    check(operation)
    old = Path(value["from"]) if "from" in value else home
    if old is None or not (old / TOKENIZER_FILE).is_file():
        raise GrowthError(
            f"resize_vocab: no {TOKENIZER_FILE} of the old tokenizer{f' in {old}' if old else ''}: say from, its folder"
        )
    try:
        made = map_vocabulary(old, Path(value["tokenizer"]), value.get("rows"))
    except CheckpointError as error:
        raise GrowthError(f"resize_vocab: {error}") from error
    return replace(operation, value=made)
