"""Graph networks and causal sets: a task with its model, its data and its section of the config"""

from pathlib import Path

from instar.extensions import Extension, TaskNames

_HERE = "instar.extensions.graphs"

EXTENSION = Extension(
    name="graphs",
    summary="graph networks and causal sets",
    tasks={
        "graph": TaskNames(
            f"{_HERE}.config:GraphConfig", f"{_HERE}.spec:GraphSpec", f"{_HERE}.shape:GraphShape"
        )
    },
    starters={"graph": Path(__file__).with_name("starter.yaml")},
)
