"""The next model's graphs are compiled beside training, and found when the model has grown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instar.config.language import LanguageConfig
from instar.data.workers import Workers
from instar.distributed.world import World
from instar.models.mask import mask_of
from instar.run import ahead
from instar.run.ahead import next_shape
from instar.run.precompile import Call, Precompiled, Recipe, call_of, namesake
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]

BUCKET_MB = 1

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, on import of inductor
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's cache on the disk, empty; and in this process nothing compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()


@pytest.fixture
def group() -> Iterator[None]:
    """The process group of a world of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def schedule(*entries: Any) -> str:
    return f"schedule={json.dumps([dict(entry) for entry in entries])}"


def at(step: int, name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "when": {"at_step": step}, **more}


def looked_up() -> tuple[int, int]:
    """Graphs that were found in the cache, and graphs that were not, since this was last asked."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    counters.clear()
    return found


def test_a_compiled_model_grows_like_an_eager_one_and_finds_its_graphs(
    trainer: Make, losses: Callable[[str], list[float]]
) -> None:
    few = (
        schedule(at(2, "widen_mlp", 192)),
        "train.until=[4it]",
        "learning_rate.lr_decay_iters=14",
        "checkpoint.every_minutes=null",
    )
    trainer(*few, name="eager").train()
    compiled = trainer(*few, "compile=true", "compile_ahead=true", name="compiled")
    compiled.step()
    looked_up()
    assert compiled.ahead.pending is not None
    compiled.ahead.pending.result()
    compiled.train()
    assert looked_up() == (2, 0)  # forward and backward
    assert losses("compiled") == pytest.approx(losses("eager"), rel=1e-4)


def test_nothing_is_compiled_of_what_nobody_will_run(trainer: Make) -> None:
    grows = schedule(at(2, "widen_mlp", 192))
    for name, more in (("eager", ()), ("without", ("compile=true", "compile_ahead=false"))):
        made = trainer(
            "train.until=[4it]", "checkpoint.every_minutes=null", grows, *more, name=name
        )
        assert not made.ahead.on


def test_by_itself_only_an_idle_processor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LanguageConfig.model_validate({"compile": True})
    threads = torch.get_num_threads()
    world = World(0, 0, 1, torch.device("cpu"), "none")
    for idle in (False, True):
        monkeypatch.setattr(ahead, "cores", lambda idle=idle: threads + idle)
        assert ahead.is_wanted(config, world) == idle
        assert not ahead.is_wanted(config, replace(world, rank=1, local_rank=1))
        assert not ahead.is_wanted(config.model_copy(update={"compile": False}), world)
        for said in (False, True):
            assert ahead.is_wanted(config.model_copy(update={"compile_ahead": said}), world) == said


def test_what_comes_next_is_the_first_growth_that_will_be_made(trainer: Make) -> None:
    made = trainer(
        schedule(
            at(1, "change_lr", 0.5),
            at(2, "widen_mlp", 4096, max_params=40_000, on_failure="skip"),
            at(3, "insert_layers", 1, mask=2),
        )
    )
    after = next_shape(made)
    assert after is not None
    sizes = after.architecture.sizes()
    assert (sizes["layers"], sizes["mlp"]) == (3, 128)
    assert mask_of(after.architecture) is not None
    assert after.settings.lr == made.settings.lr / 2

    made.in_force = after
    folded = next_shape(made)
    assert folded is not None
    assert mask_of(folded.architecture) is None
    assert next_shape(trainer(name="constant")) is None


class Shared(nn.Module):
    """Two layers of one matrix, that need more than DDP's first bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(512, 512), nn.Linear(512, 512)
        self.last = nn.Linear(512, 512)
        self.last.weight = self.first.weight
        self.register_buffer("offset", torch.ones(512))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        hidden: torch.Tensor = self.other(self.first(x).relu()).relu() + self.offset
        out: torch.Tensor = self.last(hidden)
        return out.sum() * scale


@pytest.mark.usefixtures("group")
def test_graphs_of_any_model_are_found_as_ddp_cuts_them() -> None:
    with torch.device("meta"):
        blank = Shared()
    blank.other.bias.requires_grad_(False)
    inputs = torch.randn(8, 512)
    call = call_of(lambda model: model(inputs, scale=2.0))
    threads = torch.get_num_threads()
    recipe = Recipe(
        blank, call, torch.device("cpu"), torch.bfloat16, threads, BUCKET_MB << 20, namesake()
    )
    Workers(partial(Precompiled, recipe), 1).close()

    model = Shared()
    model.other.bias.requires_grad_(False)
    wrapped = DistributedDataParallel(
        cast(nn.Module, torch.compile(model)), bucket_cap_mb=BUCKET_MB
    )
    looked_up()
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(inputs, scale=2.0)
    loss.backward()
    hits, misses = looked_up()
    assert (hits > 2, misses) == (True, 0)


def test_a_call_is_seen_without_a_model_and_a_task_that_makes_none_is_told() -> None:
    call = call_of(lambda model: model(torch.ones(2, 3), None, flag=True))
    assert call == Call((call.args[0], None), {"flag": True})
    assert (call.args[0].shape, call.args[0].dtype) == ((2, 3), torch.float32)
    with pytest.raises(ValueError, match="the model is not called"):
        call_of(lambda model: model.training)
