"""The numbers of a measurement, by the names that metrics have everywhere."""

from __future__ import annotations

from instar.record.events import Eval, Event, Layers, Train

TRAIN_METRICS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait", "memory_bytes")
"""Fields of `Train`; what else it measured stands in `extra`."""


def metrics(event: Event) -> dict[str, float]:
    """`loss`, `lr`, … of `train`, `val/loss`, `val/loss:error`, … of `eval`, and
    `grad_norm/<group>`, `update_ratio/<group>` of `layers`; nothing of any other event.
    """
    if isinstance(event, Train):
        values = ((name, getattr(event, name)) for name in TRAIN_METRICS)
        return {name: value for name, value in values if value is not None} | extra(event)
    if isinstance(event, Eval):
        found = {"loss": event.loss}
        if event.standard_error is not None:
            found["loss:error"] = event.standard_error
        found |= {name: value for name, value in event.extra.items() if name != "loss"}
        found |= {f"{name}:error": value for name, value in event.errors.items()}
        return {f"{event.split}/{name}": value for name, value in found.items()}
    if isinstance(event, Layers):
        norms = {f"grad_norm/{group}": value for group, value in event.grad_norm.items()}
        return norms | {f"update_ratio/{group}": v for group, v in event.update_ratio.items()}
    return {}


def extra(event: Train) -> dict[str, float]:
    """What a step measured beside the fields that every one has."""
    return {name: value for name, value in event.extra.items() if name not in TRAIN_METRICS}
