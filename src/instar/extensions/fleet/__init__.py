"""Many runs side by side with the servers they need: here, on Ray or on SLURM"""

from instar.extensions import CommandSpec, Extension

_HERE = "instar.extensions.fleet"

EXTENSION = Extension(
    name="fleet",
    summary="many runs side by side with the servers they need",
    commands={
        "fleet": CommandSpec(
            f"{_HERE}.cli:fleet", "Run a matrix of trainings with the servers they need.", "control"
        )
    },
    run_sets={"fleet.json": f"{_HERE}.view.reader:fleet_runs"},
    catalogs={"fleets": f"{_HERE}.view.site:FleetCatalog"},
)
