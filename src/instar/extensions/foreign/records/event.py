"""The event of metrics that another tool recorded at steps without a loss."""

from __future__ import annotations

from typing import ClassVar

from instar.record.events import ExtensionEvent
from instar.record.format import step_text


class ForeignMetrics(ExtensionEvent, tag="foreign", frozen=True, kw_only=True):
    """Metrics of a step."""

    table: ClassVar[str] = "foreign"
    values: dict[str, float]
    """by their names"""

    def metrics(self) -> dict[str, float]:
        return self.values

    def line(self) -> str:
        return "  ".join(
            [step_text(self), *(f"{name} {value:.4g}" for name, value in self.values.items())]
        )
