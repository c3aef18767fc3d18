"""Between steps: the live objects, evaluation, and when and what to save."""
