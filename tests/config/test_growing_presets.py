"""`preset: moult` and `preset: family`: the config names the final shape, and gets a schedule to it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.fields import values
from instar.config.growing import (
    FAMILY,
    GROWN_AT,
    MOULT,
    expansion,
    preset_conflicts,
    sizes,
    stage_starts,
)
from instar.config.language import LanguageConfig
from instar.config.load import Loaded, loaded_from_json
from instar.schedule.checks import load_checked

PRESETS = st.sampled_from([MOULT, FAMILY])
CONFIG = """\
preset: {preset}
model: {{n_layer: 8, n_head: 2, n_embd: 32, context: 32}}
train: {{until: 1000it, batch_size: 4}}
"""


def config(preset: str, layers: int, until: str = "1000it", **more: object) -> LanguageConfig:
    tree = {"preset": preset, "model": {"n_layer": layers}, "train": {"until": [until]}, **more}
    tree["learning_rate"] = {"shape": "wsd", "decay_fraction": 0.3}
    return LanguageConfig.model_validate(tree)


def load_preset(folder: Path, preset: str, *overrides: str) -> Loaded:
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(preset=preset), encoding="utf-8")
    return load_checked(str(path), overrides)


@pytest.mark.parametrize(
    ("preset", "layers", "expected"),
    [
        (MOULT, 8, (2, 4, 8)),
        (MOULT, 4, (1, 2, 4)),
        (MOULT, 6, (3, 6)),
        (MOULT, 10, (5, 10)),
        (MOULT, 7, (7,)),
        (MOULT, 0, (0,)),
        (FAMILY, 8, (2, 4, 8)),
        (FAMILY, 6, (3, 6)),
        (FAMILY, 9, (3, 9)),
        (FAMILY, 1, (1,)),
    ],
)
def test_default_sizes(preset: str, layers: int, expected: tuple[int, ...]) -> None:
    assert sizes(preset, layers) == expected


@given(PRESETS, st.integers(0, 400), st.integers(1, 10**7))
def test_growth_ends_with_the_final_shape_before_the_rate_decays(
    preset: str, layers: int, steps: int
) -> None:
    given_config = config(preset, layers, f"{steps}it")
    if list(preset_conflicts(given_config)):
        assert layers < 2 or all(layers % n for n in (2, 3))
        return
    settings = expansion(given_config)
    growths = [e for e in settings["schedule"] if e["name"] == "stack_layers"]
    assert settings["model.n_layer"] * math.prod(e["value"] for e in growths) == layers
    assert settings["model.n_layer"] * 4 >= layers
    at = [e["when"]["at_fraction"] for e in growths]
    assert at == sorted(set(at))
    assert at[-1] == GROWN_AT <= 0.7
    # a size of its own for each growth, which decays over 30 % of its steps
    branches = [e for e in settings["schedule"] if e["name"] == "branch"]
    assert len(branches) == (len(growths) if preset == FAMILY else 0)
    for branch, share in zip(branches, at, strict=False):
        trunk_steps = math.ceil(share * steps)
        assert branch["when"] == {"at_fraction": share}
        assert branch["iters"] == pytest.approx(0.3 * (trunk_steps + branch["iters"]), abs=1)


def test_growths_are_spread_evenly_up_to_the_last() -> None:
    assert stage_starts(2) == (0.7,)
    assert stage_starts(3) == (0.35, 0.7)
    assert all(math.isclose(b - a, 0.7 / 5) for a, b in pairwise((0.0, *stage_starts(6))))


@pytest.mark.parametrize(
    "until", ["1000it", "4000samples", "512ktok", "2000it, 512ktok", "10min, 1000it"]
)
def test_the_steps_of_a_family_come_from_any_counted_budget(tmp_path: Path, until: str) -> None:
    if until.startswith("512k") or "," in until:
        until = until.replace("512ktok", "128ktok")
    schedule = load_preset(tmp_path, FAMILY, f"train.until=[{until}]").config.schedule
    branches = [e.model_dump() for e in schedule if e.name == "branch"]
    assert [(e["value"], e["iters"]) for e in branches] == [("2L", 150), ("4L", 300)]


def test_the_final_shape_is_that_of_all_layers_merged(tmp_path: Path) -> None:
    loaded_config = load_preset(
        tmp_path, "[llama, moult]", "model.n_layer=12", "optimizer.name=adamw"
    )
    config = loaded_config.config
    assert isinstance(config, LanguageConfig)
    assert (config.model.n_layer, config.schedule[0].value) == (3, 2)
    assert (config.model.norm, config.preset, config.learning_rate.shape) == (
        "rmsnorm",
        ("llama",),
        "wsd",
    )
    assert {key for key, origin in loaded_config.origins.items() if origin == "preset moult"} == {
        *("preset", "sizes", "schedule", "model.n_layer"),
        *(f"learning_rate.{key}" for key in ("shape", "decay_fraction", "min_lr_ratio")),
    }
    assert loaded_config.origins["optimizer.name"] == "--set"


def test_sizes_may_be_given(tmp_path: Path) -> None:
    config = load_preset(tmp_path, FAMILY, "sizes=[1, 4, 8]").config
    assert [(e.name, e.value) for e in config.schedule] == [
        ("branch", "1L"),
        ("stack_layers", 4),
        ("branch", "4L"),
        ("stack_layers", 2),
    ]


@pytest.mark.parametrize("preset", [MOULT, FAMILY, "[moult, llama]"])
def test_a_result_is_not_expanded_again(tmp_path: Path, preset: str) -> None:
    loaded_config = load_preset(tmp_path, preset)
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded_config.to_yaml(), encoding="utf-8")
    second = load_checked(str(path))
    assert second.config == loaded_config.config == loaded_from_json(loaded_config.to_json()).config
    assert second.to_yaml(origin=False) == loaded_config.to_yaml(origin=False)
    # and a key set on top changes just this key
    longer = load_checked(str(path), ["train.until=[2000it]"])
    differing = {
        k for k, v in values(longer.config).items() if v != values(loaded_config.config)[k]
    }
    assert differing == {"train.until"}


def test_an_empty_schedule_is_the_final_shape_from_scratch(tmp_path: Path) -> None:
    loaded_config = load_preset(tmp_path, MOULT, "schedule=[]")
    assert isinstance(loaded_config.config, LanguageConfig)
    assert (loaded_config.config.model.n_layer, loaded_config.config.schedule) == (8, ())
    assert (
        loaded_config.config.optimizer.name,
        loaded_config.config.learning_rate.decay_fraction,
    ) == ("muon", 0.3)
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded_config.to_yaml(), encoding="utf-8")
    assert load_checked(str(path)).config == loaded_config.config


@pytest.mark.parametrize("preset", [MOULT, FAMILY, "[llama, moult]"])
def test_a_schedule_that_names_its_first_shape_replaces_the_presets(
    tmp_path: Path, preset: str
) -> None:
    file = tmp_path / "grow.yaml"
    entry = "{name: stack_layers, value: 8, when: {at_fraction: 0.5}}"
    file.write_text(f"model: {{n_layer: 1}}\nschedule:\n- {entry}\n", encoding="utf-8")
    loaded_config = load_preset(tmp_path, preset, f"schedule={file}")
    assert isinstance(loaded_config.config, LanguageConfig)
    assert loaded_config.config.model.n_layer == 1
    assert [operation.name for operation in loaded_config.config.schedule] == ["stack_layers"]
    # the recipe is the preset's, whose name is gone: n_layer is no longer the final shape
    assert loaded_config.config.preset == (("llama",) if "llama" in preset else ())
    assert loaded_config.config.learning_rate.decay_fraction == 0.3
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded_config.to_yaml(), encoding="utf-8")
    assert load_checked(str(path)).config == loaded_config.config


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        (MOULT, ["schedule=[{name: set_lr, value: 1e-3, when: {at_step: 3}}]"], "has its own"),
        (
            MOULT,
            ["model.n_layer=7"],
            "n_layer 7 has no half and no third to begin with; write 6 or 8",
        ),
        (FAMILY, ["model.n_layer=1"], "n_layer 1 has no half and no third to begin with; write 2"),
        (MOULT, ["model.n_layer=0"], "n_layer 0 has no half"),
        (
            MOULT,
            ["train.until=[10min, loss<3]"],
            "only time or the loss ends this run; add a number",
        ),
        (FAMILY, ["train.until=3ep"], "which epochs do not tell; write steps, tokens or samples"),
        (MOULT, ["model.from=there"], "not with the weights of model.from"),
        (MOULT, ["task=causal_lm"], "grows GPTs of task language, not models of task causal_lm"),
        ("[moult, fast]", [], "grows at 0.7 of the budget, and the rate decays from 0 on;"),
        ("[moult, plain]", [], "or list moult as the last preset"),
        (MOULT, ["learning_rate.decay_fraction=0.4"], "the rate decays from 0.6 on"),
        (FAMILY, ["learning_rate.lr_decay_iters=500"], "the rate decays from 0.35 on"),
        (FAMILY, ["learning_rate.shape=cosine"], "the rate decays from 0 on; write shape: wsd"),
        ("[moult, family]", [], "cannot be combined; family is moult with a branch"),
        ("llama", ["sizes=[2, 8]"], "sizes says nothing without a preset that grows"),
        (
            FAMILY,
            ["sizes=[2, 4]"],
            "sizes ends with 4 layers, and model.n_layer, the final shape, is 8",
        ),
        (FAMILY, ["sizes=[3, 8]"], "each a multiple of the one before, got [3, 8]"),
        (FAMILY, ["sizes=[8]"], "must be two or more"),
        (FAMILY, ["sizes=[8, 8]"], "must be two or more, each a multiple"),
        (FAMILY, ["sizes=[0, 8]"], "sizes[0] must be"),
        (
            FAMILY,
            ["checkpoint.save_rng_state=false"],
            "save_rng_state is false, and a branch begins",
        ),
    ],
)
def test_what_cannot_be_expanded(
    tmp_path: Path, preset: str, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_preset(tmp_path, preset, *settings)
    assert message in str(error.value)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_preset(
            tmp_path, MOULT, "model.n_layer=7", "train.until=[9min]", "optimizer.lr=x", "seeds=3"
        )
    assert len(error.value.problems) == 4
    # one at a value that is itself invalid is not a second one
    with pytest.raises(ConfigError) as error:
        load_preset(tmp_path, FAMILY, "model.n_layer=x", "train.until=[9m]")
    assert len(error.value.problems) == 2
