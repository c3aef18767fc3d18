"""`python -m instar.train CFG …`: what `torchrun` and `instar train --nproc` run in each rank."""

from __future__ import annotations

import os
import re
import sys

from instar.cli.main import main
from instar.distributed.signals import follow_launcher, leave

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""What `python -m torch.distributed.launch` tells each rank, which is in LOCAL_RANK as well."""

if __name__ == "__main__":
    follow_launcher(os.environ)
    leave(main(["train", *(word for word in sys.argv[1:] if not _LOCAL_RANK.fullmatch(word))]))
