"""What other tools leave behind: checkpoints and data of nanoGPT, and records of runs."""

from instar.extensions import CommandSpec, Extension

_HERE = "instar.extensions.foreign"

EXTENSION = Extension(
    name="foreign",
    summary="checkpoints, data and records of other tools",
    commands={
        "logs import": CommandSpec(
            f"{_HERE}.cli:import_records",
            "Import what other tools recorded of their runs.",
            "export",
        )
    },
    events={"foreign": f"{_HERE}.records.event:ForeignMetrics"},
    checkpoints={".pt": f"{_HERE}.nanogpt.checkpoint:import_checkpoint"},
)
