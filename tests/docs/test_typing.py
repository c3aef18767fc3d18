"""The documented class of a custom task passes `mypy --strict`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_mypy_accepts_the_documented_task(tmp_path: Path) -> None:
    """With the settings and the cache of the package, which is strict too."""
    page = (ROOT / "docs/custom-task.md").read_text(encoding="utf-8")
    for name in ("net", "spirals"):
        (text,) = re.findall(
            rf"cat > {name}\.py <<'EOF'\n(.*?)^EOF$", page, re.DOTALL | re.MULTILINE
        )
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "spirals.py")]
    options = ["--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", "pyproject.toml"]
    process = subprocess.run(
        [*command, str(tmp_path / "net.py"), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
