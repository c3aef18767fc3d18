"""What is typed of the extension grpo: `python -m instar.recipes.grpo` and `….serve`."""
