"""Every recipe in examples/schedules trains to its last operation, on a small model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import parametrize_first
from ruamel.yaml import YAML
from started import run_ranks
from tiny_trainers import config_in, corpus

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.load import Loaded

__all__ = ["config_in", "corpus"]

FOLDER = Path(__file__).parents[2] / "examples/schedules"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
WSD = ("learning_rate.shape=wsd", "optimizer.name=muon")
KEYS = {
    "speedrun": (*WSD, "learning_rate.decay_fraction=0.3", "model.context=128", "data.context=64"),
    "loops": (*WSD, "model.n_layer=6", "train.ema=0.9"),
    "mixture": (*WSD, "learning_rate.decay_fraction=0.2", "data.tokenizer=byte"),
    "family": (*WSD, "learning_rate.decay_fraction=0.2"),
    "lora": (),
}


@parametrize_first("name", RECIPES, first=3)
def test_a_recipe_is_carried_out_to_its_last_line(
    config_in: Callable[..., Loaded], tmp_path: Path, name: str
) -> None:
    keys = [*KEYS[name], f"schedule={RECIPES[name]}", "train.until=[40it]"]
    if name == "mixture":
        for part in ("web", "books"):
            (tmp_path / f"{part}.txt").write_text(f"what is in the {part} is this\n" * 400)
        parts = [
            {"source": str(tmp_path / f"{part}.txt"), "name": part, "weight": 1}
            for part in ("web", "books")
        ]
        keys += ["data.source=stdlib", f"data.mixture={json.dumps(parts)}"]
        keys += [f"data.path={tmp_path / 'tokens'}"]
    path = tmp_path / "run.yaml"
    path.write_text(config_in(tmp_path, *keys).to_yaml(origin=False), encoding="utf-8")
    run_dir = tmp_path / "run"
    run_ranks(1, tmp_path, "train", path, "--set", f"record.run_dir={run_dir}")
    checkpoint = load_checkpoint(latest_checkpoint(run_dir))
    entries: list[dict[str, Any]] = YAML(typ="safe").load(RECIPES[name])
    history = [change for change in checkpoint.manifest.history if change["entry"] is not None]
    assert [change["operation"]["name"] for change in history] == [e["name"] for e in entries]
    assert not any(change["skipped"] for change in history)
    assert checkpoint.manifest.step == 40
    events = (run_dir / "events.jsonl").read_text("utf-8").splitlines()
    losses = [event["loss"] for event in map(json.loads, events) if event["kind"] == "train"]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    if name == "family":
        for branch in ("short", "middle"):
            steps = load_checkpoint(latest_checkpoint(tmp_path / f"run.{branch}")).manifest.step
            assert steps == {"short": 18, "middle": 34}[branch]


def test_every_recipe_names_what_it_follows_and_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text("utf-8")
    assert RECIPES.keys() == KEYS.keys()
    for name, path in RECIPES.items():
        assert f"[{name}.yaml]({name}.yaml)" in table
        comment = path.read_text("utf-8").split("- {", 1)[0]
        assert "arXiv" in comment or "pull request" in comment
