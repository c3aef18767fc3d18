"""The starter of a graph network."""

from __future__ import annotations

import re
from pathlib import Path

from instar.config.load import load_config
from instar.config.schema import Watch
from instar.config.writers.starter import starter
from instar.extensions.graphs.config import HeadConfig


def told(text: str) -> str:
    """What the comments say, on one line."""
    said = " ".join(re.sub(r"^\s*#", "", line) for line in text.splitlines())
    return re.sub(r"\s+", " ", said)


def test_the_template_of_a_graph_network_explains_the_keys_of_heads_and_of_rules() -> None:
    said = told(starter("graph", "graph.yaml"))
    for section in (HeadConfig, Watch):
        for name, field in section.model_fields.items():
            assert f"{name}: {field.description}" in said


def test_heads_and_rules_are_written_a_line_each_and_read_back_equal(tmp_path: Path) -> None:
    lines = starter("graph", "graph.yaml").splitlines()
    heads = lines.index("  heads:")
    assert [line.split(",")[0] for line in lines[heads + 1 : heads + 4]] == [
        "    - {name: manifold",
        "    - {name: dimension",
        "    - {name: ordering_fraction",
    ]
    assert lines[lines.index("  rules:") + 1].startswith("    - {metric: manifold/accuracy,")
    path, written = tmp_path / "graph.yaml", tmp_path / "run.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    loaded = load_config(str(path))
    written.write_text(loaded.to_yaml(), encoding="utf-8")
    assert load_config(str(written)).config == loaded.config
    assert [head.name for head in loaded.config.model.heads] == [
        "manifold",
        "dimension",
        "ordering_fraction",
    ]
    assert loaded.config.early_stopping.rules[0].metric == "manifold/accuracy"


def test_the_template_names_the_commands_to_type() -> None:
    assert "instar test latest" in starter("graph", "graph.yaml")
