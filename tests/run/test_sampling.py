"""Runs whose training samples are drawn by weights, or classes equally often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import science
from needed import needs
from tiny_run import Place, codes, events, fingerprint, output_of, weights

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.data.columns import leaves
from instar.logs.text.format_event import EventFormatter
from instar.record.events import RunStarted, read_events
from instar.run.start.preflight import preflight
from instar.schedule.render import render

STEPS = 14
KEYS = (
    "task=sampled:Rare",
    "data.transform=sampled:jitter",
    f"train.until=[{STEPS}it]",
    "train.ema=0.9",
    "train.batch_size=10",  # of 36 samples an epoch
    "reproducible=elastic",
    "early_stopping.rules=[]",
    "checkpoint.on_best=false",
    "test.at_end=false",
    "data.stratify=side",
    "schedule=[{name: set_batch_size, value: 7, when: {at_step: 6}}, "
    "{name: widen, value: {axis: hidden, size: 32}, when: {at_step: 9}}]",
)
BALANCE, WEIGHTS = "data.balance=side", "data.sample_weights=weight"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return science.place(tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("drawing", [BALANCE, WEIGHTS])
def test_ranks_stops_batches_and_growth_change_no_bit(place: Place, drawing: str) -> None:
    def run(name: str, *keys: str, ranks: int) -> Path:
        run_dir = place.path / name
        children = place.train(run_dir, *KEYS, drawing, *keys, ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        return run_dir

    one_rank = run("alone", ranks=1)
    expected = fingerprint(one_rank, STEPS)
    assert fingerprint(run("two", ranks=2), STEPS) == expected
    assert fingerprint(run("sent", "data.strategy=dispatched", ranks=2), STEPS) == expected
    assert fingerprint(run("workers", "data.workers=1", ranks=1), STEPS) == expected
    parts = run("stopped", "train.until=[5it]", ranks=2)
    children = place.resume(parts, "--until", f"{STEPS}it", ranks=1)
    assert codes(children) == [0], output_of(children)
    assert weights(parts, STEPS) == weights(one_rank, STEPS)
    assert (
        fingerprint(run("plain", "data.sample_weights=null", "data.balance=null", ranks=1), STEPS)
        != expected
    )


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("drawing", [BALANCE, WEIGHTS])
def test_samples_of_steps_are_what_the_config_asks_for(drawing: str) -> None:
    """Rare samples are about half of an epoch: one of eight, seven times as often."""
    spec = preflight(load_config("run.yaml", [*KEYS, drawing]), 1).spec
    source, order = spec.train(1, seed=3)
    plain, in_turn = preflight(load_config("run.yaml", KEYS), 1).spec.train(1, seed=3)
    rare = int(np.sum(plain.read(in_turn.indices(0, 0, 36))["side"]))
    expected = 7 * rare / (7 * rare + 36 - rare) if drawing == WEIGHTS else 0.5
    shares = []
    for epoch in range(100):
        columns = source.read(order.indices(epoch, 0, order.samples_per_epoch), epoch)
        side = dict(leaves(columns))["side"]
        assert len(side) == spec.samples(1) == 36
        shares.append(side.mean())  # type: ignore[union-attr]
    assert sum(shares) / 100 == pytest.approx(expected, abs=0.03)
    assert (set(shares) == {0.5}) == (drawing == BALANCE)


def test_what_is_drawn_is_said_before_and_by_the_run_and_its_record(place: Place) -> None:
    keys = (*KEYS[:3], BALANCE)
    forecast = preflight(load_config("run.yaml", keys), 1).forecast
    text = "balanced by side, samples → draws of an epoch: class 0"
    assert forecast.drawing.startswith(text)
    assert " ".join(forecast.drawing.split()) in " ".join(render(forecast).split())
    assert forecast.to_dict()["drawing"] == forecast.drawing
    children = place.train(place.path / "run", *keys)
    assert codes(children) == [0], output_of(children)
    assert f"data  {forecast.drawing}" in output_of(children)
    (start,) = [
        e for e in read_events(place.path / "run" / "events.jsonl") if isinstance(e, RunStarted)
    ]
    assert start.drawing == forecast.drawing
    assert f"data  {forecast.drawing}" in EventFormatter(Path("run")).lines(start)
    assert preflight(load_config("run.yaml", KEYS[:3]), 1).forecast.drawing == ""


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((BALANCE, WEIGHTS), "data.balance and data.sample_weights both say how often samples"),
        ((BALANCE, "data.order=sequential"), "data.order is sequential, and data.balance draws"),
        ((BALANCE, "data.order=random"), "data.order is random, and data.balance draws samples"),
        ((WEIGHTS, "data.order=blocks"), "data.order is blocks, and data.sample_weights draws"),
    ],
)
def test_contradictions_are_found_in_the_config(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("run.yaml", [*KEYS, *keys])


@pytest.mark.usefixtures("place")
def test_drawing_by_weights_is_random_already() -> None:
    plain, random = (
        preflight(load_config("run.yaml", [*KEYS, WEIGHTS, f"data.order={order}"]), 1).spec.train(
            1, 0
        )[1]
        for order in ("shuffled", "random")
    )
    assert plain.indices(0, 0, 36).tolist() == random.indices(0, 0, 36).tolist()


def test_a_resume_with_another_drawing_is_refused_unless_it_is_allowed(place: Place) -> None:
    run = place.path / "run"
    keys = (*KEYS, BALANCE, "train.until=[5it]")
    assert codes(place.train(run, *keys)) == [0]
    other = ("--set", "data.balance=null", "--set", WEIGHTS, "--until", "7it")
    children = place.resume(run, *other)
    assert codes(children) == [2]
    assert "data.balance was 'side' when the run began and cannot become None" in output_of(
        children
    )
    children = place.resume(run, *other, "--allow", "data")
    assert codes(children) == [0], output_of(children)
    assert [event["step"] for event in events(run, "train")] == list(range(1, 8))


@needs("graphs")
@pytest.mark.parametrize("drawing", ["data.balance=side", "data.sample_weights=size"])
def test_graphs_are_drawn_so_too(place: Place, drawing: str) -> None:
    spec = preflight(load_config("graphs.yaml", [drawing]), 2).spec
    assert "side" in spec.drawing or "size" in spec.drawing
    assert codes(place.instar("train", "graphs.yaml", "--set", drawing, ranks=2)) == [0, 0]
