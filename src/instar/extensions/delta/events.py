"""The event of a link in a run's record: its metrics, and its line of text."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from instar.record.events import Count, ExtensionEvent
from instar.record.format import duration, si, step_text


class Delta(ExtensionEvent, tag="delta", frozen=True, kw_only=True):
    """A link of the run's chain of weight deltas is on disk, `checkpoint.delta`."""

    table: ClassVar[str] = "deltas"

    number: Count
    anchor: bool
    """It holds all weights, not their changes."""
    size_bytes: Count
    seconds: float
    """From the copy of the weights to the file on disk."""
    stall_s: float
    """For which training paused."""
    density: float | None = None
    """Share of the weights whose bits changed since the link before, 0 to 1; None for an anchor."""
    overlap: float | None = None
    """Weights changed by both this link and the one before, as a share of those changed by either
    (Jaccard index), 0 to 1; None if one of the two is an anchor."""
    layers: dict[str, float] = msgspec.field(default_factory=dict)
    """Density of each parameter group: a block, the embeddings, the head."""

    def metrics(self) -> dict[str, float]:
        """Return `delta_density`, `delta_overlap`, `delta_bytes` and `delta_density/<group>`."""
        optional = {"delta_density": self.density, "delta_overlap": self.overlap}
        shares = {name: value for name, value in optional.items() if value is not None}
        by_layer = {f"delta_density/{group}": value for group, value in self.layers.items()}
        return {"delta_bytes": float(self.size_bytes)} | shares | by_layer

    def line(self) -> str:
        """Return `  1,000  anchor 20  248MB  1.3s` or `  1,001  delta 21  2.1MB  changed 1.2%  0.4s`."""
        parts = [f"{step_text(self)}  {'anchor' if self.anchor else 'delta'} {self.number:,}"]
        parts.append(f"{si(self.size_bytes)}B")
        if self.density is not None:
            parts.append(f"changed {100 * self.density:.3g}%")
        return "  ".join([*parts, duration(self.seconds)])


def gap_text(missing: tuple[int, int], before: str) -> str:
    """`the deltas of steps 5 to 7 are missing before anchor-5.safetensors: …`."""
    first, last = missing
    steps = f"step {first:,} is" if first == last else f"steps {first:,} to {last:,} are"
    return (
        f"the state of {steps} missing in the chain of deltas, before {before}: it was never saved"
    )
