"""What is known of a task whose samples come one by one, before torch is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from instar.data.division import SampleSet


@dataclass(frozen=True, eq=False)
class SamplesBlueprint:
    """The part of a `Blueprint` that follows from samples which are split."""

    data: SampleSet

    @property
    def kept(self) -> dict[str, Path]:
        return {}

    def check_test(self) -> None:
        self.data.held_out("test")

    def samples(self, context: int) -> int:  # noqa: ARG002
        return self.data.splits["train"].size
