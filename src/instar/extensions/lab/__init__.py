"""Short trainings that answer questions: what growth saves, which schedule is best, a learning rate, a micro-batch"""

from instar.extensions import CommandSpec, Extension

_HERE = "instar.extensions.lab"

EXTENSION = Extension(
    name="lab",
    summary="short trainings that answer questions: pilots, searches, finders",
    commands={
        "find": CommandSpec(
            f"{_HERE}.find.cli:find",
            "Find a learning rate or a batch size by short trainings.",
            "test",
        ),
        "doctor": CommandSpec(
            f"{_HERE}.find.cli:doctor",
            "Check what this machine has for training, and how fast.",
            "find",
        ),
        "schedule pilot": CommandSpec(
            f"{_HERE}.cli:pilot",
            "Measure by short runs how much compute the schedule of growth saves.",
        ),
        "schedule search": CommandSpec(
            f"{_HERE}.cli:search",
            "Find the schedule of growth that leads to CONFIG's final shape with the least compute.",
        ),
    },
    forecast=f"{_HERE}.expected:saving_note",
)
