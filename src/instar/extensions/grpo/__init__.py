"""GRPO on questions with exact answers: TRL's `GRPOTrainer`, seeds that reach the sampler, exact resume."""

from instar.extensions import Extension

EXTENSION = Extension(
    name="grpo",
    summary="TRL's GRPO on questions with exact answers",
    programs={
        "instar.recipes.grpo": "instar.extensions.grpo.cli:main",
        "instar.recipes.grpo.serve": "instar.extensions.grpo.cli:serve_model",
    },
)
