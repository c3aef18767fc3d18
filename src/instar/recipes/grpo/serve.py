"""`python -m instar.recipes.grpo.serve`: a server that takes new weights while it runs, see `instar.extensions.grpo`."""

from instar.cli.main import run_program

if __name__ == "__main__":
    run_program("instar.recipes.grpo.serve")
