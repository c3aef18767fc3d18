"""The memory of ranks, measured in real ones as tensors come and go, against what the forecast says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import pytest
import science
import tiny_run
from cases import parametrize_first
from forks import children_as_ranks

from instar.config.load import load_config
from instar.run.start.preflight import preflight, prepare_run_data
from instar.schedule.forecast import Stage
from instar.schedule.memory import RankMemory, Strategy

KEYS = (
    "name=measured",
    "precision=fp32",
    "optimizer.name=adamw",
    "model.n_layer=2",
    "model.n_embd=128",
    "model.context=32",
    "model.dropout=0.0",
    "train.ema=null",
    "train.batch_size=8",
    "train.gradient_accumulation_steps=1",
    "schedule=[{name: widen_mlp, value: x2, when: {at_step: 2}}]",
)
WAYS: Mapping[tuple[Strategy, int], tuple[str, ...]] = {
    ("ddp", 4): (),
    ("fsdp", 4): ("parallel.strategy=fsdp",),
    ("hsdp", 4): ("parallel.strategy=hsdp", "parallel.fsdp.shards=2"),
    ("fsdp", 2): ("parallel.strategy=fsdp",),
}


class Measured(NamedTuple):
    highest: Mapping[str, int]
    """within each moment, on the rank with the most"""
    at_end: Mapping[str, int]
    """at its end"""
    forecast: RankMemory
    after_growth: RankMemory
    largest: int
    """of the tensors of the grown model, twice that of the tensors before"""


Measure = Callable[[tuple[Strategy, int]], Measured]


@pytest.fixture(scope="module")
def measure_way(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Runs one of `WAYS`, once."""
    place = tmp_path_factory.mktemp("measured")
    (place / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (place / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    text = [f"data.source={place / 'squares.txt'}", f"data.path={place / 'tokens'}", *KEYS]

    @cache
    def measure(way: tuple[Strategy, int]) -> Measured:
        strategy, ranks = way
        keys = [*text, *WAYS[way]]
        loaded_config = load_config(str(place / "run.yaml"), keys)
        prepare_run_data(loaded_config, 1, lambda _: None)
        argv = (str(place), name := f"{strategy}-{ranks}", keys)
        children = children_as_ranks(science.forks(), ranks, "peaks:run", *argv, place=place)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
        peaks_by_rank = [
            json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(ranks)
        ]
        highest, at_end = (
            {
                moment: max(peaks[of][moment] for peaks in peaks_by_rank)
                for moment in peaks_by_rank[0][of]
            }
            for of in ("highest", "at_end")
        )
        small, large = preflight(loaded_config, ranks).forecast.stages
        return Measured(
            highest, at_end, small.memory[strategy], large.memory[strategy], largest(large)
        )

    return measure


def largest(stage: Stage) -> int:
    shapes = (entry.shape for entry in stage.architecture.parameters().values())
    return max(4 * math.prod(shape) for shape in shapes)


@parametrize_first("way", WAYS, first=1, ids=lambda way: f"{way[0]}-{way[1]}")
def test_a_rank_has_the_weights_gradients_and_moments_that_were_forecast(
    measure_way: Measure, way: tuple[Strategy, int]
) -> None:
    """When the gradients are reduced, nothing else of a step is left."""
    actual = measure_way(way)
    assert actual.at_end["gradients"] == pytest.approx(actual.forecast.kept_bytes, rel=0.15)


@pytest.mark.torture
def test_four_ranks_that_share_a_model_have_a_quarter_each(
    measure_way: Measure,
) -> None:
    ddp, fsdp = measure_way(("ddp", 4)), measure_way(("fsdp", 4))
    assert fsdp.at_end["gradients"] <= 0.30 * ddp.at_end["gradients"]
    assert fsdp.at_end["step"] <= 0.30 * ddp.at_end["step"], "gradients held between steps included"


@parametrize_first("way", WAYS, first=2, ids=lambda way: f"{way[0]}-{way[1]}")
def test_a_step_stays_below_its_forecast(measure_way: Measure, way: tuple[Strategy, int]) -> None:
    """Which adds parts up that do not all have their peak at once."""
    actual = measure_way(way)
    assert 0.6 <= actual.highest["step"] / sum(actual.forecast.step.values()) <= 1.05


@parametrize_first("way", WAYS, first=2, ids=lambda way: f"{way[0]}-{way[1]}")
def test_growth_stays_below_its_forecast(measure_way: Measure, way: tuple[Strategy, int]) -> None:
    """Until the proof, both models are all that a rank has of them, and one tensor that is grown."""
    actual = measure_way(way)
    peak = max(actual.highest["growth"], actual.highest["proof"])
    assert 0.75 <= peak / actual.after_growth.growth <= 1.05
    if way[0] != "ddp":
        old, new = (
            sum(model.step[part] for part in ("weights", "optimizer"))
            for model in (actual.forecast, actual.after_growth)
        )
        # the tensor that is read, and what is made of it, are whole
        assert old + new <= actual.highest["growth"] <= 1.01 * (old + new) + 2.5 * actual.largest
        assert actual.at_end["growth"] == pytest.approx(new, rel=0.05), "the old model is gone"


@parametrize_first("ranks", [4, 2], first=1)
def test_a_sharded_model_is_never_built_whole(measure_way: Measure, ranks: int) -> None:
    actual = measure_way(("fsdp", ranks))
    weights = actual.forecast.step["weights"]
    messages = 16 << 10  # of ranks that agree; how many are in memory at once depends on the moment
    assert weights <= actual.highest["start"] <= 1.02 * weights + actual.largest / 2 + messages
