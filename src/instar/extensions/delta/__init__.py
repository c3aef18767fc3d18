"""Delta checkpoints: the weights of every step, stored as what changed since the step before."""

from instar.extensions import CommandSpec, Extension, MetricName, SectionSpec

_HERE = "instar.extensions.delta"

EXTENSION = Extension(
    name="delta",
    summary="the weights of every step, as what changed since the step before",
    commands={
        "delta": CommandSpec(
            f"{_HERE}.cli:delta",
            "Save weights as what changed, and rebuild them bit for bit.",
            "checkpoint",
        )
    },
    sections={
        "checkpoint.delta": SectionSpec(
            f"{_HERE}.config:DeltaConfig", "the weights of every step, as deltas"
        )
    },
    conflicts=f"{_HERE}.config:delta_conflicts",
    missing=f"{_HERE}.config:missing_library",
    hook=f"{_HERE}.config:open_deltas",
    events={"delta": f"{_HERE}.events:Delta"},
    metrics={
        "delta_density": MetricName(
            "share of weights changed", layers="Share of weights changed, by layer"
        ),
        "delta_overlap": MetricName("overlap with the changes before"),
        "delta_bytes": MetricName("size of a delta", is_bytes=True),
    },
)
