"""Runs on a part of their training split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import Forks
from tiny_run import CONFIG, TEXT, Place, codes, events, fingerprint, output_of, weights

from instar.config.load import load_config
from instar.data.text.dataset import create_dataset_files
from instar.run.start.preflight import preflight, prepare_run_data
from instar.schedule.render import render

STEPS = 12
SCHEDULE = [
    {"name": "change_context", "value": 2, "when": {"at_step": 4}},
    {"name": "change_batch_size", "value": 2, "when": {"at_step": 7}},
]
KEYS = (
    *("data.train_subset=0.25", "data.context=8", "eval.context=16", "model.dropout=0"),
    *("reproducible=elastic", f"train.until={STEPS}it", f"schedule={json.dumps(SCHEDULE)}"),
)


@pytest.fixture
def place(tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return Place(tmp_path, forks)


def ran(place: Place, name: str, *keys: str, ranks: int = 1) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *KEYS, *keys, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    return run_dir


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_stops_and_contexts_train_on_the_same_part(place: Place, ranks: int) -> None:
    one_rank = ran(place, "alone")
    expected = fingerprint(one_rank, STEPS)
    assert fingerprint(ran(place, "ranks", ranks=ranks), STEPS) == expected
    parts = ran(place, "stopped", "train.until=5it", ranks=ranks)
    children = place.resume(parts, "--until", f"{STEPS}it")
    assert codes(children) == [0], output_of(children)
    assert weights(parts, STEPS) == weights(one_rank, STEPS)
    assert fingerprint(ran(place, "all", "data.train_subset=null"), STEPS) != expected


def test_the_forecast_the_run_and_its_record_say_which_part(place: Place) -> None:
    loaded_config = load_config("run.yaml", KEYS)
    prepare_run_data(loaded_config, 1, lambda _: None)
    forecast, full_forecast = (
        preflight(load_config("run.yaml", [*KEYS, *more]), 1).forecast
        for more in ((), ("data.train_subset=null",))
    )
    tokens, all_tokens = forecast.dataset_tokens, full_forecast.dataset_tokens
    assert tokens is not None
    assert all_tokens is not None
    assert tokens == pytest.approx(all_tokens / 4, abs=1)
    assert forecast.samples_per_epoch == forecast.splits["train"] == -(-(tokens - 1) // 8)
    assert {**forecast.splits, "train": 0} == {**full_forecast.splits, "train": 0}
    remark = f"data.train_subset 0.25: {tokens:,} of {all_tokens:,} tokens of the training split"
    assert forecast.drawing == remark
    assert remark in " ".join(render(forecast).split())
    children = place.train(place.path / "run", *KEYS)
    assert codes(children) == [0], output_of(children)
    assert f"data  {remark}" in output_of(children)
    (start,) = events(place.path / "run", "run_started")
    assert (start["drawing"], start["splits"]["train"]) == (remark, forecast.splits["train"])
    (end,) = (event["epoch"] for event in events(place.path / "run", "train")[-1:])
    assert forecast.early is not None
    assert end == pytest.approx(forecast.early.epochs)


def test_another_part_is_other_data(place: Place) -> None:
    run = ran(place, "run", "train.until=3it")
    wider = ("--set", "data.train_subset=0.5", "--until", "5it")
    children = place.resume(run, *wider)
    assert codes(children) == [2]
    assert "data.train_subset was 0.25 when the run began and cannot become 0.5" in output_of(
        children
    )
    children = place.resume(run, *wider, "--allow", "data")
    assert codes(children) == [0], output_of(children)
    assert [event["step"] for event in events(run, "train")] == [1, 2, 3, 4, 5]


def test_data_are_prepared_once_for_any_part(place: Place) -> None:
    for size in ("0.25", "100", "null"):
        config = load_config("run.yaml", [f"data.train_subset={size}"]).config
        create_dataset_files(config.data, config.data_seed)  # type: ignore[arg-type]
    assert [path.name for path in place.path.iterdir() if path.is_dir()] == ["tokens"]
