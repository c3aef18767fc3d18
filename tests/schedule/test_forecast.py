import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.budget import Budget, parse_budget
from instar.config.schema import ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from instar.models.architecture import count_parameters, flops_per_token
from instar.record.amounts import bytes_text, count_text, flops_text
from instar.schedule.forecast import (
    Forecast,
    budget_steps,
    forecast,
    render,
    samples_after,
)


def foretold(world_size: int = 1, samples: int = 1000, **settings: object) -> Forecast:
    config = RunConfig.model_validate(settings)
    return forecast(config, samples * 128, samples, vocab_size=256, world_size=world_size)


def steps(*budgets: str, samples: int = 100, batch: int = 8, context: int = 10) -> int | None:
    return budget_steps(
        [parse_budget(text) for text in budgets],
        global_batch=batch,
        tokens_per_sample=context,
        samples_per_epoch=samples,
    )


def test_steps_are_themselves() -> None:
    assert steps("2000it") == 2000


def test_an_epoch_ends_with_a_smaller_step() -> None:
    assert steps("1ep") == 13
    assert steps("2ep") == 26
    assert steps("0.5ep") == 7


def test_a_part_of_an_epoch_is_exact_in_decimals() -> None:
    assert steps("0.1ep", samples=30, batch=1) == 3


def test_samples_and_tokens_count_over_smaller_steps() -> None:
    assert steps("100samples") == 13
    assert steps("108samples") == 14
    assert steps("1000tok") == 13
    assert steps("1001tok") == 14


def test_the_tightest_budget_counts() -> None:
    assert steps("2000it", "1ep", "10min") == 13


def test_time_and_loss_say_nothing_about_steps() -> None:
    assert steps("10min", "loss<3.0") is None


def test_a_batch_larger_than_the_data_makes_one_step_an_epoch() -> None:
    assert steps("3ep", samples=5, batch=8) == 3


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 5000))
def test_the_steps_of_a_budget_are_the_least_that_use_it_up(
    samples_per_epoch: int, global_batch: int, amount: int
) -> None:
    def consumed(steps: int) -> int:
        return samples_after(steps, global_batch=global_batch, samples_per_epoch=samples_per_epoch)

    needed = budget_steps(
        [Budget("samples", amount)],
        global_batch=global_batch,
        tokens_per_sample=7,
        samples_per_epoch=samples_per_epoch,
    )
    assert needed is not None
    assert consumed(needed - 1) < amount <= consumed(needed)


def test_totals_follow_from_the_steps() -> None:
    told = foretold(train=TrainConfig(until=("2ep",), batch_size=16))
    stage = told.stages[0]
    assert (told.steps_per_epoch, told.steps, told.samples, told.epochs) == (63, 126, 2000, 2.0)
    assert told.tokens == 2000 * 128
    assert told.flops == told.tokens * stage.flops_per_token


def test_the_stage_describes_the_shape() -> None:
    stage = foretold().stages[0]
    assert (stage.first_step, stage.end_step) == (0, 2000)
    assert stage.parameters == count_parameters(stage.architecture)
    assert stage.flops_per_token == flops_per_token(stage.architecture)


def test_totals_stay_open_when_only_the_clock_ends_the_run() -> None:
    told = foretold(train=TrainConfig(until=("10min", "loss<3.0")))
    assert (told.steps, told.tokens, told.epochs, told.flops) == (None, None, None, None)
    assert "only the clock or the loss" in render(told)


def test_the_global_batch_does_not_depend_on_the_ranks_but_a_ranks_share_does() -> None:
    train = TrainConfig(batch_size=16, gradient_accumulation_steps=2)
    one, two, eight = (foretold(world, train=train) for world in (1, 2, 8))
    assert {one.global_batch, two.global_batch, eight.global_batch} == {32}
    assert [one.batch_size, two.batch_size, eight.batch_size] == [16, 16, 4]

    def activations(told: Forecast) -> int:
        return told.stages[0].memory_bytes["activations"]

    assert activations(one) == activations(two) == 4 * activations(eight)


def test_memory_follows_the_settings() -> None:
    def memory(**settings: object) -> dict[str, int]:
        return foretold(**settings).stages[0].memory_bytes

    plain = memory()
    assert memory(train=TrainConfig(ema=0.99))["ema"] == plain["weights"]
    assert memory(optimizer=OptimizerConfig(name="muon"))["optimizer"] < plain["optimizer"]
    assert memory(precision="bf16")["activations"] < plain["activations"]
    frugal = memory(train=TrainConfig(gradient_checkpointing=True))
    assert frugal["activations"] < plain["activations"]


def test_the_forecast_is_json() -> None:
    told = json.loads(json.dumps(foretold().to_dict()))
    assert told["stages"][0]["architecture"]["n_embd"] == 128
    assert told["until"] == ["2000it"]


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
    config = RunConfig(model=model, train=train)
    text = render(forecast(config, 10**10, 9_765_625, vocab_size=50_304, world_size=8))
    assert max(map(len, text.splitlines())) <= 80
    for fact in ("12 layers × 768 wide", "114M", "19,074 steps", "10.0B tokens", "8.0e18 FLOPs"):
        assert fact in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count_text(999), "999"),
        (count_text(12_600_000), "12.6M"),
        (count_text(999_700), "1.00M"),
        (count_text(0), "0"),
        (bytes_text(1.2 * 2**30), "1.20 GiB"),
        (bytes_text(512), "512 B"),
        (flops_text(3.4e15), "3.4e15"),
    ],
)
def test_numbers_are_short(text: str, expected: str) -> None:
    assert text == expected


def test_no_torch_is_needed() -> None:
    code = "import sys, instar.schedule.forecast; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
