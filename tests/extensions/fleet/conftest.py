from __future__ import annotations

from pathlib import Path

import pytest
from fleets import FleetPlace, first_port


@pytest.fixture
def place(tmp_path: Path) -> FleetPlace:
    return FleetPlace(tmp_path, first_port())
