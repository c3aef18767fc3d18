"""The schedules and growth runs that come with Instar are sound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sized import spec_for_tokens

from instar.config.sections import PlateauTrigger, ScheduledOperation, When
from instar.growth.operators import OPERATORS
from instar.models.shape import count_parameters
from instar.schedule.checks import load_checked
from instar.schedule.forecast import Forecast, checked_forecast
from instar.schedule.operations import operation_names
from instar.schedule.render import render

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "configs").iterdir())
RUNS = sorted((ROOT / "examples/growth").glob("*.yaml"))


def told(config: Path | None, *options: str) -> Forecast:
    loaded = load_checked(config and str(config), options)
    data = loaded.config.data
    vocabulary = data.vocab_size if data.tokenizer == "bpe" else 256
    return checked_forecast(loaded, spec_for_tokens(loaded.config, 10**7, vocabulary), world_size=2)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_schedule_makes_a_run_to_its_last_operation(path: Path) -> None:
    forecast = told(None, f"schedule={path}", "train.until=1Mit")
    assert len(forecast.stages) > 4
    assert all(stage.latest_step is not None for stage in forecast.stages)
    assert max(map(len, render(forecast).splitlines())) <= 80


def test_the_samples_in_yaml_and_json_are_the_same() -> None:
    yaml, json = (
        load_checked(None, [f"schedule={ROOT}/configs/sample_scaling_schedule.{kind}"]).config
        for kind in ("yaml", "json")
    )
    assert yaml == json


def test_the_multipliers_are_the_seed_s() -> None:
    path = ROOT / "configs/multiplier_operations_example.yaml"
    entries = load_checked(None, [f"schedule={path}"]).config.schedule
    assert [(e.name, e.value, e.trigger_loss, e.max_wait_iters, e.reevaluate) for e in entries] == [
        ("change_lr", 2.0, 6.0, 50_000, False),
        ("change_batch_size", 1.5, 5.5, 75_000, False),
        ("change_eval_interval", 2.0, 5.0, 100_000, False),
        ("change_eval_iters", 1.5, 4.5, 125_000, True),
        ("change_warmup_iters", 0.8, 4.0, 150_000, False),
    ]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_growth_run_reaches_every_stage_before_it_ends(path: Path) -> None:
    forecast = told(path)
    assert all(stage.latest_step is not None for stage in forecast.stages)
    sizes = [stage.parameters.total for stage in forecast.stages]
    assert sizes == sorted(sizes)
    assert {stage.label for stage in forecast.stages} == {"", "exact"}
    assert max(map(len, render(forecast).splitlines())) <= 80


def test_the_run_on_a_cpu_changes_all_that_it_says() -> None:
    first, *_, last = told(ROOT / "examples/growth/cpu.yaml").stages
    assert last.architecture.n_layer == 2 * first.architecture.n_layer
    assert last.architecture.n_mlp > first.architecture.n_mlp
    assert last.architecture.n_embd == 2 * first.architecture.n_embd
    assert last.settings.batch_size == 2 * first.settings.batch_size
    assert last.settings.lr == first.settings.lr / 2


def test_the_family_has_three_sizes_that_all_decay() -> None:
    forecast = told(ROOT / "examples/growth/family.yaml")
    small, medium = forecast.branches
    sizes = [each.parameters.total for each in (small, medium, forecast.stages[-1])]
    assert sizes == sorted(set(sizes))
    assert small.decay == small.iters
    assert medium.decay == medium.iters
    settings = forecast.stages[-1].settings
    assert settings.lr_shape == "wsd"
    assert settings.decay_fraction * 600 <= 600 - (medium.first_step or 600)


def test_the_large_one_ends_as_gpt2() -> None:
    architecture = told(ROOT / "examples/growth/gpt2-124m.yaml").stages[-1].architecture
    assert (architecture.n_layer, architecture.n_embd, architecture.n_head) == (12, 768, 12)
    assert (architecture.n_mlp, architecture.head_dim, architecture.context) == (3072, 64, 1024)
    # what transformers counts in `gpt2`
    assert count_parameters(architecture).total == 124_439_808


def test_the_page_names_every_operation_option_trigger_and_guard() -> None:
    # those of adapters have a page of their own
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("schedule.md", "lora.md")]
    said = set(re.findall(r"\w+", "\n".join(pages)))
    assert {*operation_names()} - {"fold_masks"} <= said
    assert {option for operator in OPERATORS.values() for option in operator.options} <= said
    for section in (ScheduledOperation, When, PlateauTrigger):
        assert set(section.model_fields) <= said
