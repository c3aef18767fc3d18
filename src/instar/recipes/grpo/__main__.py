"""`python -m instar.recipes.grpo`: trains with GRPO, see `instar.extensions.grpo`."""

from instar.cli.main import run_program

if __name__ == "__main__":
    run_program("instar.recipes.grpo")
