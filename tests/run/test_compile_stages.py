"""A run that compiled its stages beforehand finds their graphs in torch's cache when it grows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instar.config.fields import from_values
from instar.config.load import load_config
from instar.models.shape import mask_of
from instar.run.changes.scheduled import stages_ahead
from instar.run.start.build import compile_stages
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, on import of inductor
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch's cache on the disk, empty; and in this process nothing compiled. Graphs are cached
    whatever runs them: ATen's kernels spare the minutes in which a C++ compiler makes others."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    with config.patch(fallback_by_default=True):
        yield


def schedule(*entries: Any) -> str:
    return f"schedule={json.dumps([dict(entry) for entry in entries])}"


def at(step: int, name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "when": {"at_step": step}, **more}


def cache_counts() -> tuple[int, int]:
    """Graphs that were found in the cache, and graphs that were not, since this was last asked."""
    from torch._dynamo.utils import counters

    kinds = (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    counts = [sum(counters[of][f"{name}_{what}"] for of, name in kinds) for what in ("hit", "miss")]
    counters.clear()
    return counts[0], counts[1]


@pytest.mark.torture
def test_a_growth_after_it_finds_its_graphs(
    trainer: Make, losses: Callable[[str], list[float]]
) -> None:
    settings = (
        schedule(at(2, "widen_mlp", 192)),
        "model.n_layer=1",
        "train.until=[4it]",
        "learning_rate.lr_decay_iters=14",
        "checkpoint.every_minutes=null",
        "model.dropout=0.1",
    )
    compiled = trainer(*settings, "compile=true", "compile_stages=true", name="compiled")
    cache_counts()
    assert compile_stages(compiled.state, compiled.parts) == 2
    assert cache_counts()[1] > 0
    compiled.train()
    hits, misses = cache_counts()
    assert (hits >= 2, misses) == (True, 0)
    # dropout draws what it would have drawn: the random generators are as they were
    trainer(*settings, "compile=true", "train.until=[2it]", name="without").train()
    assert losses("compiled")[:2] == losses("without")


def test_nothing_is_compiled_unless_it_is_asked_for(trainer: Make) -> None:
    for name, keys in (("eager", ["compile_stages=true"]), ("without", ["compile=true"])):
        run = trainer("checkpoint.every_minutes=null", *keys, name=name)
        assert compile_stages(run.state, run.parts) == 0


def test_stages_are_those_that_the_schedule_will_make(trainer: Make) -> None:
    run = trainer(
        schedule(
            at(1, "change_lr", 0.5),
            at(2, "widen_mlp", 4096, max_params=40_000, on_failure="skip"),
            at(3, "insert_layers", 1, mask=2),
        )
    )
    stages = list(stages_ahead(run.state, run.parts))
    sizes = [stage.architecture.sizes() for stage in stages]
    assert [(size["layers"], size["mlp"]) for size in sizes] == [
        (2, 128),
        (2, 128),
        (3, 128),
        (3, 128),
    ]
    assert [mask_of(stage.architecture) is not None for stage in stages] == [
        False,
        False,
        True,
        False,
    ]
    assert stages[1].settings.lr == run.state.settings.lr / 2


def test_a_config_with_the_key_of_earlier_versions_loads(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("compile: true\ncompile_ahead: auto\n")
    config = load_config(str(file)).config
    assert config.compile
    values = {"compile": True, "compile_ahead": "auto"}
    assert from_values(type(config), values).compile
