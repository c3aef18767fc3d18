"""Every documented variant of a config, grown by every operation and published without a proof: transformers loads the same
model, or the label says otherwise, or it was refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import figures
from cases import parametrize_first
from config_variants import GROWN, VARIANTS, outcomes

FEW = figures.times(1, len(GROWN))
"""operations for each variant; `make test` goes round them"""
ROUND = figures.times(6, 1)
"""variants that all families share are tried with every sixth of these in `make test`"""


def operations_of(kind: str) -> Iterator[tuple[str, list[str]]]:
    operations = list(GROWN)
    families = list(VARIANTS)
    for number, name in enumerate(VARIANTS[kind]):
        shared = sum(name in VARIANTS[other] for other in families) > 3
        if shared and (number + families.index(kind)) % ROUND:
            continue
        at = (5 * number + families.index(kind)) % len(operations)
        yield name, (operations[at:] + operations[:at])[:FEW]


@parametrize_first("kind", VARIANTS, first=2)
def test_each_variant_of_a_config_grows_as_its_label_says(kind: str, tmp_path: Path) -> None:
    wrong, trials = [], 0
    for name, operations in operations_of(kind):
        place = tmp_path / "place"
        for operation, what in outcomes(kind, name, operations, place):
            trials += 1
            if what not in ("equal", "other") and not what.startswith("refused: "):
                wrong.append((name, operation, what))
        shutil.rmtree(place, ignore_errors=True)
    assert wrong == []
    assert trials > 3
