import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sized import spec_for_tokens

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.language import LanguageConfig, ModelConfig
from instar.config.load import load_config
from instar.config.schema import OptimizerConfig, TrainConfig
from instar.models.cost import flops_per_token
from instar.models.shape import count_parameters
from instar.record.format import bytes_text, scientific, si
from instar.schedule.forecast import Forecast, ScheduleError, checked_forecast, forecast
from instar.schedule.render import render
from instar.tasks.language import described_shape


def foretold(world_size: int = 1, samples: int | None = 1000, **settings: object) -> Forecast:
    config = LanguageConfig.model_validate(settings)
    return forecast(config, spec_for_tokens(config, samples and samples * 128, 256), world_size)


def refusal_of(
    *schedule: dict[str, Any], samples: int = 1000, world_size: int = 1
) -> ConfigProblem:
    """The one mistake in a schedule whose entries wait a step each."""
    with pytest.raises(ScheduleError) as caught:
        foretold(
            world_size, samples, schedule=[{"max_wait_iters": 1} | entry for entry in schedule]
        )
    (clash,) = caught.value.problems
    return clash


def test_totals_follow_from_the_steps() -> None:
    forecast = foretold(train=TrainConfig(until=("2ep",), batch_size=16))
    stage, totals = forecast.stages[0], forecast.early
    assert totals is not None
    assert totals == forecast.late
    assert (stage.steps_per_epoch, forecast.steps) == (63, 126)
    assert (totals.steps, totals.samples, totals.epochs) == (126, 2000, 2.0)
    assert totals.tokens == 2000 * 128
    assert totals.flops == totals.tokens * stage.flops_per_token


def test_the_stage_describes_the_shape() -> None:
    stage = foretold().stages[0]
    assert (stage.first_step, stage.latest_step) == (0, 0)
    assert stage.parameters == count_parameters(stage.architecture)
    assert stage.flops_per_token == flops_per_token(stage.architecture)


def test_samples_that_are_the_unit_are_counted_once_and_no_row_is_empty() -> None:
    plain = foretold()
    shapeless = replace(plain.stages[0], style=[("shape", [""])])
    forecast = replace(
        plain, stages=(shapeless,), unit="sample", dataset_tokens=48, samples_per_epoch=48
    )
    lines = render(forecast).splitlines()
    assert "data        48 samples" in lines
    assert "shape" not in lines
    weighted = render(replace(forecast, dataset_tokens=60))
    assert "data        60 samples, 48 samples" in weighted


def test_totals_stay_open_when_only_the_clock_ends_the_run() -> None:
    forecast = foretold(train=TrainConfig(until=("10min", "loss<3.0")))
    assert (forecast.steps, forecast.early, forecast.late) == (None, None, None)
    assert "only the clock or the loss" in render(forecast)


def test_the_global_batch_does_not_depend_on_the_ranks_but_a_ranks_share_does() -> None:
    train = TrainConfig(batch_size=16, gradient_accumulation_steps=2)
    single, two, eight = (foretold(world, train=train) for world in (1, 2, 8))
    assert {forecast.stages[0].settings.global_batch for forecast in (single, two, eight)} == {32}
    assert [forecast.stages[0].batch_size for forecast in (single, two, eight)] == [16, 16, 4]

    def activations(forecast: Forecast) -> int:
        return forecast.stages[0].memory_bytes["activations"]

    assert activations(single) == activations(two) == 4 * activations(eight)


def test_memory_follows_the_settings() -> None:
    def memory(**settings: object) -> dict[str, int]:
        return foretold(**settings).stages[0].memory_bytes

    plain = memory()
    assert memory(train=TrainConfig(ema=0.99))["ema"] == plain["weights"]
    assert memory(optimizer=OptimizerConfig(name="muon"))["optimizer"] < plain["optimizer"]
    assert memory(precision="bf16")["activations"] < plain["activations"]
    frugal = memory(train=TrainConfig(gradient_checkpointing=True))
    assert frugal["activations"] < plain["activations"]


def test_what_stands_still_has_no_gradient_and_what_never_trained_no_moments() -> None:
    begin = {"when": {"at_step": 0}}
    forecast = foretold(
        schedule=[
            {"name": "set_lora_rank", "value": {"target": "attn", "rank": 4}, **begin},
            {"name": "freeze", "value": "*.weight", **begin},
            {"name": "freeze", "value": "*.bias", **begin},
            {"name": "unfreeze", "value": "blocks.0.*", "when": {"at_step": 50}},
            {"name": "freeze", "value": "blocks.0.*", "when": {"at_step": 90}},
        ]
    )
    last = forecast.stages[-1].architecture.parameters()
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in last.items()}
    adapters = sum(size for name, size in sizes.items() if ".lora_" in name)
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    other = sum(
        size for n, size in sizes.items() if ".lora_" in n and not n.startswith("blocks.0.")
    )
    adapters_only, more, less = (stage.memory_bytes for stage in forecast.stages[3:])
    assert adapters_only["weights"] == more["weights"] == less["weights"] == sum(sizes.values())
    assert (adapters_only["gradients"], adapters_only["optimizer"]) == (adapters, 2 * adapters)
    assert (more["gradients"], more["optimizer"]) == (block + other, 2 * (block + other))
    assert (less["gradients"], less["optimizer"]) == (other, 2 * (block + other))


GROWN = [
    {"name": "insert_layers", "value": 2, "when": {"at_step": 500}},
    {
        "name": "change_batch_size",
        "value": 2,
        "when": {"any": [{"loss_below": 3.0}, {"waited": 600}]},
    },
    {"name": "widen_mlp", "value": "x2", "when": {"loss_below": 2.5}},
]


def test_each_stage_stands_on_the_one_before() -> None:
    forecast = foretold(schedule=GROWN)
    shapes = [(stage.architecture.n_layer, stage.architecture.n_mlp) for stage in forecast.stages]
    assert shapes == [(4, 512), (6, 512), (6, 512), (6, 1024)]
    assert [stage.settings.batch_size for stage in forecast.stages] == [16, 16, 32, 32]
    assert [stage.label for stage in forecast.stages] == ["", "exact", "", "exact"]
    assert [stage.first_step for stage in forecast.stages] == [0, 500, 500, 500]
    assert [stage.latest_step for stage in forecast.stages] == [0, 500, 1250, None]
    for stage in forecast.stages:
        assert stage.parameters == count_parameters(stage.architecture)
        assert stage.flops_per_token == flops_per_token(stage.architecture)


def test_flops_are_summed_over_the_stages() -> None:
    forecast = foretold(schedule=GROWN)
    (first, second, third, last), per_step = forecast.stages, 16 * 128
    assert forecast.early is not None
    assert forecast.late is not None
    # 1,000 samples an epoch are 62 steps of 16 and one of 8, or 31 of 32 and one of 8
    tokens = samples_in(500, 16) * 128
    assert forecast.early.flops - tokens * first.flops_per_token == (
        (forecast.early.tokens - tokens) * last.flops_per_token
    )
    at_1250 = samples_in(1250, 16) * 128
    assert forecast.late.flops == (
        tokens * first.flops_per_token
        + (at_1250 - tokens) * second.flops_per_token
        + (forecast.late.tokens - at_1250) * third.flops_per_token
    )
    assert forecast.late.tokens > at_1250 + 700 * per_step


def samples_in(steps: int, batch: int) -> int:
    samples = 0
    for _ in range(steps):
        samples += min(batch, 1000 - samples % 1000)
    return samples


def test_shorter_samples_cost_less_and_make_longer_epochs() -> None:
    short = {"name": "set_context", "value": 64, "when": {"at_step": 10}}
    first, second = foretold(schedule=[short]).stages
    assert second.architecture == first.architecture
    assert second.flops_per_token == flops_per_token(first.architecture, 64)
    assert (first.steps_per_epoch, second.steps_per_epoch) == (63, 125)
    assert second.memory_bytes["activations"] < first.memory_bytes["activations"]


def test_a_mask_is_gone_before_the_next_growth() -> None:
    masked = {"name": "insert_layers", "value": 1, "mask": 50, "when": {"waited": 10}}
    forecast = foretold(schedule=[masked, masked])
    assert [stage.architecture.n_layer for stage in forecast.stages] == [4, 5, 6]
    assert [stage.first_step for stage in forecast.stages] == [0, 10, 60]


def test_a_limit_that_may_be_passed_over_is_and_says_so() -> None:
    limited_entry = {"name": "insert_layers", "value": 4, "max_params": 10**6, "max_wait_iters": 10}
    clash = refusal_of(limited_entry)
    assert clash.keys[0] == "schedule[0].max_params"
    assert "there would be 1.64M parameters, more than max_params 1.00M" in clash.message
    forecast = foretold(schedule=[limited_entry | {"on_failure": "skip"}, GROWN[0]])
    assert forecast.stages[1].skipped == "1.64M parameters, more than max_params 1.00M"
    assert [stage.architecture.n_layer for stage in forecast.stages] == [4, 4, 6]
    assert "skipped     1.64M parameters" in render(forecast)


@pytest.mark.parametrize(
    ("schedule", "place", "message"),
    [
        ([{"name": "widen_mlp", "value": 256}], "schedule[0].value", "only grows"),
        ([{"name": "widen_hidden", "value": 64}], "schedule[0].value", "only grows"),
        ([{"name": "stack_layers", "value": [0, 1, 2, 3, 4]}], "schedule[0].value", "no layer 4"),
        (
            [{"name": "insert_layers", "value": 1, "where": [9]}],
            "schedule[0].where",
            "schedule[0].where is not possible here",
        ),
        ([{"name": "merge_lora"}], "schedule[0].name", "is not possible here"),
        ([{"name": "split_kv_heads", "value": 3}], "schedule[0].value", "is not possible here"),
        ([{"name": "freeze", "value": "lm_head"}], "schedule[0].value", "no parameter matches"),
        (
            [{"name": "change_lr", "value": 1e12}] * 26,
            "schedule[25].value",
            "out of range",
        ),
        (
            [{"name": "widen_mlp", "value": "x2"}, {"name": "widen_mlp", "value": 1000}],
            "schedule[1].value",
            "1,024 already",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_refused_where_it_stands(
    schedule: list[dict[str, Any]], place: str, message: str
) -> None:
    clash = refusal_of(*schedule)
    assert clash.keys[0] == place
    assert message in clash.message


def test_impossible_operations_are_told_together_up_to_the_first_growth() -> None:
    trigger = {"max_wait_iters": 1}
    with pytest.raises(ScheduleError) as caught:
        foretold(
            world_size=4,
            schedule=[
                {"name": "freeze", "value": "lm_head", **trigger},
                {"name": "set_batch_size", "value": 2, **trigger},
                {"name": "widen_mlp", "value": 8, **trigger},
                {"name": "widen_mlp", "value": 9, **trigger},
            ],
        )
    places = [clash.keys[0] for clash in caught.value.problems]
    assert places == ["schedule[0].value", "schedule[1].value", "schedule[2].value"]


def test_ranks_and_data_must_suffice_for_every_stage() -> None:
    smaller = {"name": "set_batch_size", "value": 2}
    assert "leaves some of 4 ranks without any" in refusal_of(smaller, world_size=4).message
    longer = [{"name": "extend_context", "value": 4096}, {"name": "set_context", "value": 4096}]
    assert "the training data has 3,840" in refusal_of(*longer, samples=30).message


def test_mistakes_that_need_no_model_are_found_here_too() -> None:
    assert "must be an operation" in refusal_of({"name": "grow_a_tail"}).message


def test_without_data_everything_but_epochs_is_known() -> None:
    forecast = foretold(samples=None, schedule=GROWN)
    assert (forecast.dataset_tokens, forecast.samples_per_epoch) == (None, None)
    assert forecast.early is not None
    assert (forecast.early.steps, forecast.early.epochs) == (2000, None)
    assert "not prepared yet" in render(forecast)


def test_a_mistake_points_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "grow.yaml"
    path.write_text("schedule:\n  - {name: widen_mlp, value: 8, max_wait_iters: 9}\n")
    loaded_config = load_config(str(path))
    assert isinstance(loaded_config.config, LanguageConfig)
    with pytest.raises(ConfigError) as caught:
        checked_forecast(loaded_config, spec_for_tokens(loaded_config.config, None, 256), 1)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:2:30"
    with pytest.raises(ConfigError, match="too few for a tokenizer"):
        described_shape(load_config(None, ["model.vocab_size=9"]), 256)


def test_what_stays_is_not_told_again() -> None:
    text = render(foretold(schedule=GROWN))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("style ") == 1
    assert [line.split(maxsplit=2)[2] for line in text.splitlines() if line[:5] == "stage"] == [
        "as the config says",
        "insert_layers 2 (exact)",
        "change_batch_size 2",
        "widen_mlp x2 (exact)",
    ]
    for line in (
        "trigger     val < 3 or 600 steps after the last operation",
        "begins      at step 500 at the earliest, 1,250 at the latest",
        "settings    batch_size 16 → 32",
        "begins      at step 500 at the earliest, perhaps never",
    ):
        assert line in text.splitlines()
    assert "if every operation fires at its earliest" in " ".join(text.split())


def test_every_kind_of_change_has_words() -> None:
    trigger = {"max_wait_iters": 1}
    text = render(
        foretold(
            schedule=[
                {"name": "insert_layers", "value": 1, "lr": {"rewarm_new": 20}, **trigger},
                {"name": "freeze", "value": "blocks.*", **trigger},
                {"name": "set_lora_rank", "value": {"target": "attn", "rank": 4}, **trigger},
                {"name": "widen_mlp", "value": "x2", "lr": {"rewarm": 30}, **trigger},
                {"name": "change_warmup_iters", "value": 0.5, **trigger},
                {"name": "unfreeze", "value": "*", "when": {"at_step": 5000}},
            ]
        )
    )
    for line in (
        "frozen nothing → blocks.*",
        "set_lora_rank {target: attn, rank: 4} (exact)",
        "adapters    attn of rank 4, alpha 8",
        "widen_mlp x2, lr {rewarm: 30} (exact)",
        "lr rises from 0 again over 30 steps",
        "lr of what is new rises from 0 over 20 steps",
        "warm-up 100 → 50",
        "frozen blocks.* → blocks.*, !*.lora_a, !*.lora_b",
        "frozen blocks.*, !*.lora_a, !*.lora_b → nothing",
        "not reached within 2,000 steps",
    ):
        assert line in text, line


def test_the_forecast_is_json() -> None:
    forecast = json.loads(json.dumps(foretold().to_dict()))
    assert forecast["stages"][0]["architecture"]["n_embd"] == 128
    assert forecast["until"] == ["2000it"]


def test_the_text_fits_80_columns_and_says_what_matters() -> None:
    model = ModelConfig(
        n_layer=12,
        n_head=12,
        n_kv_head=4,
        n_embd=768,
        context=1024,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        qk_norm=True,
        dropout=0.1,
    )
    train = TrainConfig(until=("10Btok", "10min"), batch_size=32, gradient_accumulation_steps=16)
    config = LanguageConfig(model=model, train=train)
    text = render(forecast(config, spec_for_tokens(config, 10**10, 50_304), world_size=8))
    assert max(map(len, text.splitlines())) <= 80
    for fact in ("12 layers × 768 wide", "114M", "19,074 steps", "10.0B tokens", "8.0e18 FLOPs"):
        assert fact in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (si(999), "999"),
        (si(12_600_000), "12.6M"),
        (si(999_700), "1.00M"),
        (si(0), "0"),
        (bytes_text(1.2 * 2**30), "1.20 GiB"),
        (bytes_text(512), "512 B"),
        (scientific(3.4e15), "3.4e15"),
    ],
)
def test_numbers_are_short(text: str, expected: str) -> None:
    assert text == expected


def test_no_torch_is_needed() -> None:
    code = "import sys, instar.schedule.render; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_evaluations_may_come_after_epochs() -> None:
    forecast = foretold(
        samples=40,
        train={"batch_size": 4, "until": ["100it"]},
        eval={"eval_epochs": 2, "eval_interval": 7},
        schedule=[{"name": "change_lr", "value": 0.5, "trigger_loss": 1.0, "max_wait_iters": 50}],
    )
    assert (forecast.stages[1].first_step, forecast.stages[1].latest_step) == (0, 60)
