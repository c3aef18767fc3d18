"""The targets of text samples that a transform has changed: checked, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.data.columns import Columns
from instar.data.source import IGNORED


@dataclass(frozen=True)
class TokenTargets:
    """`Measure` of samples of `context` tokens out of a vocabulary: their weight is the number of targets."""

    context: int
    vocab_size: int

    def check(self, sample: Mapping[str, Any]) -> None:
        """Raise ValueError unless the sample has `inputs` and `targets`, integers [context] of the vocabulary;
        a target may be IGNORED."""
        for name, least in (("inputs", 0), ("targets", IGNORED)):
            if name not in sample:
                raise ValueError(f"there are no {name}")
            array = np.asarray(sample[name])
            if array.dtype.kind not in "iu" or array.shape != (self.context,):
                raise ValueError(
                    f"{name} are {array.dtype}{list(array.shape)}, not integers [{self.context}]; fill up "
                    f"inputs with any token, and targets with {IGNORED}, which is no target"
                )
            low, high = int(array.min()), int(array.max())
            if low < least or high >= self.vocab_size:
                wrong = low if low < least else high
                no_target = f", and {IGNORED} is no target" if name == "targets" else ""
                raise ValueError(
                    f"{name} have {wrong}; tokens are 0 to {self.vocab_size - 1}{no_target}"
                )

    def weights(self, columns: Columns) -> NDArray[np.float64]:
        """Return the targets of each sample, [samples]."""
        counts: NDArray[np.intp] = np.count_nonzero(columns["targets"] != IGNORED, axis=1)
        return counts.astype(np.float64)
