"""Context and batch that grow while a run trains: exact on resume and on ranks, as forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forks
from tiny_run import CONFIG, STEPS, TEXT, Place, codes, events, output_of, weights

from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.run.start.preflight import Prepared

CONTEXT = [
    {"name": "change_context", "value": 2, "tokens": "keep", "when": {"waited": 6}, "repeat": 2}
]
RAMP = ("data.context=4", "train.batch_size=16", "eval.context=16", "model.dropout=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Place:
    path = tmp_path_factory.mktemp("ramps")
    (path / "squares.txt").write_text(TEXT, encoding="utf-8")
    (path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return Place(path, forks)


def schedule_setting(schedule: object) -> str:
    return f"schedule={json.dumps(schedule)}"


def ran(place: Place, name: str, *settings: str, ranks: int = 1) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *settings, ranks=ranks)
    assert set(codes(children)) == {0}, output_of(children)
    return run_dir


def test_a_ramp_of_the_context_keeps_tokens_per_step_and_resumes_bit_for_bit(place: Place) -> None:
    settings = (*RAMP, schedule_setting(CONTEXT))
    full_run = ran(place, "whole", *settings)
    train = events(full_run, "train")
    assert {event["tokens"] for event in train} == {192 * (n + 1) for n in range(STEPS)}
    assert [event["samples"] for event in train[::6]] == [48, 6 * 48 + 24, 432 + 12, 504 + 12]
    changes = [(event["step"], event["change"]) for event in events(full_run, "operation")]
    assert changes == [(6, "batch_size 16→8, context 4→8"), (12, "batch_size 8→4, context 8→16")]
    assert len({event["eval_tokens"] for event in events(full_run, "eval")}) == 1

    part = ran(place, "part", *settings, "train.until=9it")
    children = place.resume(part, "--set", f"train.until={STEPS}it")
    assert codes(children) == [0], output_of(children)
    assert weights(part) == weights(full_run)

    two = ran(place, "two", *settings, ranks=2)
    losses = [event["loss"] for event in train]
    assert [event["loss"] for event in events(two, "train")] == pytest.approx(losses, rel=1e-3)


def test_lengths_that_do_not_divide_are_refused_before_the_start(
    prepare_run: Callable[..., Prepared],
) -> None:
    ramp = {"name": "set_context", "value": 12, "tokens": "keep", "when": {"at_step": 2}}
    with pytest.raises(ConfigError, match="make the batch size then a multiple of 3") as caught:
        prepare_run("data.context=8", schedule_setting([ramp]))
    assert "schedule[0].tokens" in str(caught.value)
    with pytest.raises(ConfigError, match="is 17, but the model reads at most 16"):
        prepare_run("data.context=17")
    with pytest.raises(ConfigError, match="context has 16 tokens; extend_context first"):
        prepare_run(
            "data.context=4", "train.batch_size=8", schedule_setting([{**CONTEXT[0], "repeat": 3}])
        )


def test_evaluations_follow_the_training_samples_unless_told_otherwise(
    prepare_run: Callable[..., Prepared],
) -> None:
    short, full = (
        prepare_run("data.context=4", *more).spec.split_sizes(4)["val"]
        for more in ((), ("eval.context=16",))
    )
    assert short is not None
    assert full is not None
    assert short == pytest.approx(4 * full, abs=4)
    ramp = ("data.context=4", "train.batch_size=16", schedule_setting(CONTEXT))
    (warning,) = prepare_run(*ramp).warnings
    assert "change_context changes held-out samples too" in warning
    assert prepare_run(*ramp, "eval.context=16").warnings == []


BATCH = [
    {
        "name": "change_batch_size",
        "value": 2,
        "lr": "sqrt",
        "when": {"noise_scale": {"above": 1e-4}},
        "repeat": 3,
    }
]
NOISE_STEPS = 17
ELASTIC_NOISE = (
    f"train.until={NOISE_STEPS}it",
    "train.batch_size=4",
    "record.noise_every=1",
    "eval.eval_interval=3",
    "reproducible=elastic",
    schedule_setting(BATCH),
)


def tensors(run_dir: Path) -> dict[str, bytes]:
    """Weights and moments at the end of a run, however they are divided among files."""
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{NOISE_STEPS}")
    return {
        f"{part}/{name}": tensor.numpy().tobytes()
        for part in ("model", "optimizer")
        for name, tensor in checkpoint.tensors(part).items()
    }


def noise(run_dir: Path) -> list[float | None]:
    return [event["extra"].get("noise_scale") for event in events(run_dir, "train")]


@pytest.fixture(scope="module")
def follows_the_noise(place: Place) -> Path:
    """A run on one rank whose batch does."""
    return ran(place, "follows", *ELASTIC_NOISE)


@pytest.mark.torture
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_batch_that_follows_the_noise_is_the_same_on_resume_and_on_ranks(
    place: Place, follows_the_noise: Path, strategy: str
) -> None:
    full_run = follows_the_noise
    changes = events(full_run, "operation")
    # eight measurements come first, then one operation an evaluation
    assert [(event["step"], event["change"][:17]) for event in changes] == [
        (9, "lr 0.001→0.001414"),
        (12, "lr 0.001414→0.002"),
        (15, "lr 0.002→0.002828"),
    ]
    assert all(value is not None for value in noise(full_run)[8:])

    settings = (*ELASTIC_NOISE, f"parallel.strategy={strategy}", "train.until=12it")
    part = ran(place, strategy, *settings, ranks=2)
    children = place.resume(part, "--set", f"train.until={NOISE_STEPS}it", ranks=2)
    assert set(codes(children)) == {0}, output_of(children)
    assert tensors(part) == tensors(full_run)
    assert noise(part) == noise(full_run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_measuring_the_noise_changes_no_bit_of_training(place: Place, ranks: int) -> None:
    steps = 12
    settings = (f"train.until={steps}it", "train.batch_size=8")
    settings += ("train.gradient_accumulation_steps=2",)
    noisy = ran(place, f"measured-{ranks}", *settings, "record.noise_every=1", ranks=ranks)
    plain = ran(place, f"plain-{ranks}", *settings, "record.noise_every=0", ranks=ranks)
    assert noise(plain) == [None] * steps
    assert len(set(noise(noisy))) > 3
    assert weights(noisy, steps) == weights(plain, steps)
