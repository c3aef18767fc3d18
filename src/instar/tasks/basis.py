"""The basis of an evaluation: everything that its metrics depend on but the weights.

Two evaluations of a run can be compared only if their bases are equal. Best values, early stopping,
plateaus and triggers begin anew at the first evaluation on another basis, whatever has changed it: an
operation, a value that a resume sets, other data, or an edit of a custom task. `basis_of` makes one; readers
of records, which know no config, compare them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import xxhash

Basis = Mapping[str, str]
"""What a metric depends on, by name."""

SAMPLES = "held-out samples"
NUMBER = "evaluated samples"
TOKENIZER = "tokenizer"
CHOICE = "seed of their choice"
SOURCE = "source of the task"
_UNTOLD = (SAMPLES, TOKENIZER, SOURCE)


def incomparable(before: Basis, after: Basis) -> tuple[str, ...]:
    """Return why evaluations on two bases cannot be compared; empty: they can.

    >>> incomparable({"vocabulary": "256"}, {"vocabulary": "300"})
    ('vocabulary 256 → 300',)
    """
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = tuple(
        f"{name} {before.get(name) or '-'} → {after.get(name) or '-'}"
        for name in names
        if name not in (*_UNTOLD, CHOICE if len(names) > 1 else "")
    )
    if SOURCE in names:
        changes = (*changes, "the source of the task has changed")
    if TOKENIZER in names:
        return (*changes, "another tokenizer")
    # another length makes other samples of the same text
    return changes or tuple(f"other {name}" for name in names)


def without_seed(basis: Basis, *, with_folds: bool = False) -> Basis:
    """Return a basis without what a seed may decide: also a tokenizer, which may be trained on the samples that
    are not held out; `with_folds`: and without the number of samples, which differs by one between folds."""
    by_seed = (SAMPLES, CHOICE, TOKENIZER, *((NUMBER,) if with_folds else ()))
    return {name: value for name, value in basis.items() if name not in by_seed}


def digest(basis: Basis) -> str:
    """Return a short text that is equal for equal bases; empty for an empty one."""
    content = json.dumps(dict(basis), sort_keys=True).encode()
    return xxhash.xxh3_64_hexdigest(content) if basis else ""
