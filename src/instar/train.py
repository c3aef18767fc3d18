"""`python -m instar.train CFG …`: what `torchrun` and `instar train --nproc` run in each rank."""

from __future__ import annotations

import sys

from instar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
