"""`python -m instar.train CFG …`: what `torchrun` and `instar train --nproc` run in each rank."""

from __future__ import annotations

import os
import sys

from instar.cli.main import main
from instar.distributed.signals import follow_launcher, leave

if __name__ == "__main__":
    follow_launcher(os.environ)
    leave(main(["train", *sys.argv[1:]]))
