"""The models that clients run."""

from __future__ import annotations

import pytest
from exported import Exported, export_all


@pytest.fixture(scope="session")
def exported_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    return export_all(tmp_path_factory.mktemp("runs"))


@pytest.fixture(params=["gpt2", "llama", "grown"])
def model(request: pytest.FixtureRequest, exported_models: dict[str, Exported]) -> Exported:
    return exported_models[request.param]
