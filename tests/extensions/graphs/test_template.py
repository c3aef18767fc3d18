"""The starter of a graph network."""

from __future__ import annotations

import re
from pathlib import Path

from instar.config.load import load_config
from instar.config.schema import Watch
from instar.config.writers.starter import starter
from instar.extensions.graphs.config import HeadConfig


def comments_of(text: str) -> str:
    """What the comments say, on one line."""
    comments = " ".join(re.sub(r"^\s*#", "", line) for line in text.splitlines())
    return re.sub(r"\s+", " ", comments)


def test_the_template_of_a_graph_network_explains_the_keys_of_heads_and_of_rules() -> None:
    comments = comments_of(starter("graph", "graph.yaml"))
    for section in (HeadConfig, Watch):
        for name, field in section.model_fields.items():
            assert f"{name}: {field.description}" in comments


def test_heads_and_rules_are_written_a_line_each_and_read_back_equal(tmp_path: Path) -> None:
    lines = starter("graph", "graph.yaml").splitlines()
    heads = lines.index("  heads:")
    assert [line.split(",")[0] for line in lines[heads + 1 : heads + 4]] == [
        "    - {name: manifold",
        "    - {name: dimension",
        "    - {name: ordering_fraction",
    ]
    assert lines[lines.index("  rules:") + 1].startswith("    - {metric: manifold/accuracy,")
    path, run_path = tmp_path / "graph.yaml", tmp_path / "run.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    run_config = load_config(str(path))
    run_path.write_text(run_config.to_yaml(), encoding="utf-8")
    assert load_config(str(run_path)).config == run_config.config
    assert [head.name for head in run_config.config.model.heads] == [
        "manifold",
        "dimension",
        "ordering_fraction",
    ]
    assert run_config.config.early_stopping.rules[0].metric == "manifold/accuracy"


def test_the_template_names_the_commands_to_type() -> None:
    assert "instar test latest" in starter("graph", "graph.yaml")
