"""Configs of runs: schema, loading, validation and explanation; presets and starters."""

from __future__ import annotations

from pathlib import Path

PRESETS = Path(__file__).parent / "presets"
"""Folder of predefined settings, which a config selects with `preset`."""
STARTERS = Path(__file__).parent / "starters"
"""Folder of what `instar init` writes; each file begins with the commands to type."""

CONFIG_VARIABLE = "INSTAR_LOADED_CONFIG"
"""Names the file in which a launcher passes a loaded and checked config to its ranks."""


def names_in(folder: Path) -> list[str]:
    """Return the names of the YAML files in a folder, without suffix."""
    return sorted(path.stem for path in folder.glob("*.yaml"))
