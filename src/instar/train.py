"""`python -m instar.train CFG …`: what `torchrun` and `instar train --nproc` run in each rank."""

from __future__ import annotations

import os
import re
import sys

from instar.cli.main import main
from instar.distributed.signals import exit_now, exit_with_parent
from instar.processes.cores import share_cores
from instar.processes.interrupt import ignore_stop_signals

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""the argument that `python -m torch.distributed.launch` passes beside LOCAL_RANK"""

if __name__ == "__main__":
    exit_with_parent(os.environ)
    share_cores(os.environ)
    code = main(["train", *(word for word in sys.argv[1:] if not _LOCAL_RANK.fullmatch(word))])
    ignore_stop_signals()
    exit_now(code)
