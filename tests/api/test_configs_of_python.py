"""Configs as Python has them are what their YAML would be; what cannot be one is refused by its key."""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from instar.api.as_config import as_arguments
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.custom import CustomTask

PLAIN = {
    "model": {"n_layer": 2, "n_head": 2},
    "optimizer": {"lr": 0.003},
    "train": {"until": ["5it", "1ep"], "ema": None},
    "data": {"path": "folder/of data"},
    "schedule": [{"name": "stack", "value": 2, "when": {"at_step": 3}}],
}


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.003


class Model(BaseModel):
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 7


class Size(enum.IntEnum):
    TWO = 2


OTHERS: dict[str, dict[str, Any]] = {
    "numpy": {
        "optimizer": {"lr": np.float64(0.003)},
        "model": {"n_layer": np.int64(2), "n_head": 2},
    },
    "dataclass": {"optimizer": Optimizer()},
    "pydantic": {"model": Model(n_layer=2, n_head=2)},  # what is not set keeps Instar's default
    "namespaces": {"optimizer": Namespace(lr=0.003), "model": SimpleNamespace(n_layer=2, n_head=2)},
    "mappings": {
        "model": OrderedDict(n_head=2, n_layer=2),
        "optimizer": MappingProxyType({"lr": 0.003}),
    },
    "path": {"data": {"path": Path("folder/of data")}},
    "enum": {"model": {"n_layer": Size.TWO, "n_head": 2}},
    "schema": {"$schema": "instar.json"},
    "tuple": {"train": {"until": ("5it", "1ep"), "ema": None}},
}


def load(config: Any) -> Any:
    path, texts = as_arguments(config)
    assert path is None
    return load_config(None, texts).config


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_is_what_plain_data_are(kind: str) -> None:
    assert load(PLAIN | OTHERS[kind]) == load(PLAIN)


@pytest.mark.parametrize("make", [Namespace, SimpleNamespace, MappingProxyType, dict])
def test_the_whole_may_be_an_object(make: Any) -> None:
    config = make(PLAIN) if make in (MappingProxyType, dict) else make(**PLAIN)
    assert load(config) == load(PLAIN)


def test_a_config_of_instar_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {n_layer: 2, n_head: 2}\noptimizer: {lr: 0.003}\nschedule: [{name: stack, value: 2, when: {at_step: 3}}]\n"
    )
    loaded_config = load_config(str(file))
    assert load(loaded_config) == load(loaded_config.config) == loaded_config.config
    assert loaded_config.config.schedule[0].name == "stack"


def test_overrides_may_be_values_by_key() -> None:
    assert as_arguments("run.yaml", {"optimizer.lr": 1e-3, "train.until": ["5it"]}) == (
        "run.yaml",
        ["optimizer.lr=0.001", "train.until=[5it]"],
    )
    assert as_arguments(Path("run.yaml"), ["a=b"]) == ("run.yaml", ["a=b"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(1), "optimizer.lr is a Tensor"),
        ({1, 2}, "optimizer.lr is a set"),
        (b"x", "optimizer.lr is a bytes"),
        (object(), "optimizer.lr is a object"),
    ],
)
def test_what_yaml_cannot_hold_is_refused_by_its_key(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"not made of plain data: {message}"):
        as_arguments({"optimizer": {"lr": value}})


def test_classes_are_named_if_their_name_leads_to_them() -> None:
    assert as_arguments({"task": CustomTask})[1] == ['task="instar.tasks.custom:CustomTask"']

    class Inner(CustomTask):
        pass

    with pytest.raises(ConfigError, match=r"Inner cannot be found.*top level of a cell"):
        as_arguments({"task": Inner})
    with pytest.raises(ConfigError, match="a path, or keys with their values, not a list"):
        as_arguments([1])  # type: ignore[arg-type]
