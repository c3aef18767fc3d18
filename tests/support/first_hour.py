"""Types the commands of docs/first-hour.md as they stand there, and prints the time of each step.

`python tests/support/first_hour.py`, in an environment with `instar` and the extras `plot` and `loops`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/first-hour.md"
STEP = re.compile(r"^## (\d+\. .*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Print each step's elapsed and processor seconds; return the exit code of the first that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for title, text in STEP.findall(PAGE.read_text("utf-8")):
            commands = "".join(COMMANDS.findall(text))
            if not commands:
                continue
            start_s, before = time.monotonic(), os.times()
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=folder,
                env=os.environ | {"PATH": path},
                stdout=subprocess.DEVNULL,
                check=False,
            )
            after = os.times()
            used_s = after.children_user + after.children_system
            used_s -= before.children_user + before.children_system
            print(f"{title:<24}{time.monotonic() - start_s:8.1f} s  processor {used_s:8.1f} s")
            if result.returncode:
                return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
