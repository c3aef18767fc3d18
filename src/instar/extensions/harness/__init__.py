"""Tasks of lm-evaluation-harness within a run."""

from instar.extensions import Extension

EXTENSION = Extension(name="harness", summary="tasks of lm-evaluation-harness within a run")
