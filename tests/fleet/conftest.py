from __future__ import annotations

import os
from pathlib import Path

import pytest
from fleets import FleetPlace


@pytest.fixture
def place(tmp_path: Path) -> FleetPlace:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw") or 0)
    return FleetPlace(tmp_path, 21000 + 500 * worker)
