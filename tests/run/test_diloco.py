"""`parallel.strategy: diloco`: ranks that train apart for some steps, and then are the same again."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import science
import tiny_run
import torch
from cases import parametrize_first
from forks import INSTAR, children_as_ranks
from needed import needs

from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.distributed.world import World
from instar.record.format import bytes_text
from instar.run.parallel.diloco import DiLoCo
from instar.run.trainer import Trainer
from instar.schedule.checks import load_checked

STEPS = 20
ROUND = 5
DILOCO = ("parallel.strategy=diloco", f"parallel.diloco.sync_every={ROUND}")
KEYS = (
    "optimizer.name=adamw",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
)
AVERAGED = (
    *("parallel.strategy=diloco", "parallel.diloco.sync_every=1"),
    *("parallel.diloco.outer_lr=1.0", "parallel.diloco.outer_momentum=0.0"),
)
"""the outer optimizer takes the mean of the weights after each step"""
SGD = (
    *("optimizer.name=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9", "model.dropout=0.0"),
    *("train.clip=null", f"train.until=[{STEPS}it]", f"learning_rate.lr_decay_iters={STEPS}"),
)


@pytest.fixture
def place(tmp_path: Path) -> tiny_run.Place:
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    return tiny_run.Place(tmp_path, science.forks())


def train_run(place: tiny_run.Place, name: str, *keys: str, ranks: int, body: str = INSTAR) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *keys, ranks=ranks, body=body)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    return run_dir


def tensors(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{step}")
    return {
        f"{component}/{name}": tensor
        for component in ("model", "optimizer", "ema")
        for name, tensor in checkpoint.tensors(component).items()
    }


def steps_of(run_dir: Path, kind: str) -> list[int]:
    return [event["step"] for event in tiny_run.events(run_dir, kind)]


@parametrize_first("ranks", [1, 2, 3], first=1)
def test_rounds_of_one_step_whose_weights_are_averaged_are_ddp(
    place: tiny_run.Place, ranks: int
) -> None:
    """With SGD, whose update is linear in the gradient; of 39 samples, ranks have 19 and 20."""
    ddp = train_run(place, "ddp", *SGD, ranks=ranks)
    diloco_run = train_run(place, "apart", *SGD, *AVERAGED, ranks=ranks)
    expected, actual = tensors(ddp), tensors(diloco_run)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_between_rounds_ranks_do_not_communicate_and_differ(
    trainer: Callable[..., Trainer],
) -> None:
    """What a round of two replicas comes to, computed by hand from two runs of one rank."""
    run = trainer(*DILOCO, "optimizer.name=adamw", "parallel.diloco.outer_lr=0.5")
    start = {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}
    for _ in range(ROUND - 1):
        run.step()
    parameters = run.parts.stepper.parameters
    assert any(not torch.equal(parameters[name], before) for name, before in start.items())
    step = run.parts.stepper.strategy.rounds
    assert isinstance(step, DiLoCo)
    assert step.momentum == {}
    run.step()
    assert set(step.momentum) == set(start)
    for name, before in start.items():
        # of SGD with Nesterov momentum, whose first step is (1 + μ) · lr · gradient
        gradient = step.momentum[name]
        expected = before - 0.5 * (gradient + 0.9 * gradient)
        torch.testing.assert_close(parameters[name].detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_outer_optimizer_is_torchs_sgd(trainer: Callable[..., Trainer]) -> None:
    strategy = trainer(*DILOCO).parts.stepper.strategy
    assert isinstance(strategy, DiLoCo)
    name, parameter = next(iter(strategy.parameters.items()))
    reference = torch.nn.Parameter(parameter.detach().clone())
    outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    with torch.no_grad():
        for number in range(3):
            strategy._start = {name: parameter.detach().clone()}
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            )
            reference.grad = strategy._start[name] - parameter
            assert strategy.end({}, 0, 0).finite
            outer.step()
            torch.testing.assert_close(parameter, reference)


@pytest.mark.parametrize(("ranks", "bits"), [(1, "float32"), (3, "float32"), (4, "bfloat16")])
def test_the_mean_over_ranks_is_the_mean(place: tiny_run.Place, ranks: int, bits: str) -> None:
    children = children_as_ranks(place.forks, ranks, "apart:checks_means", bits, place=place.path)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)


@parametrize_first(
    ("optimizer", "exchange"),
    [("adamw", "float32"), ("muon", "bfloat16"), ("sgd", "float32")],
    first=1,
)
def test_a_run_that_was_killed_and_one_that_was_stopped_end_as_the_undisturbed_one(
    place: tiny_run.Place, optimizer: str, exchange: str
) -> None:
    """Stopped in the middle of a round, ranks train to its end; 23 steps end in the middle of one."""
    keys = (*DILOCO, f"optimizer.name={optimizer}", f"parallel.diloco.exchange={exchange}")
    keys = (*keys, "checkpoint.every_steps=4", "train.until=[23it]")
    keys = (*keys, "checkpoint.asynchronous=false")
    full_run = train_run(place, "whole", *keys, ranks=2)
    assert steps_of(full_run, "checkpoint") == [5, 10, 15, 20, 23]
    expected = tiny_run.weights(full_run, 23)
    assert any("outer_momentum" in name for name in tensors(full_run, 23))
    run_dir = place.path / "parts"
    kill_body = "failures:killed_at_step_18"
    children = place.train(run_dir, *keys, "parallel.timeout_s=10", ranks=2, body=kill_body)
    assert -signal.SIGKILL in tiny_run.codes(children)
    assert tiny_run.acknowledged_step(run_dir) == 15
    children = place.resume(run_dir, ranks=2, body="apart:stopped_at_step_17")
    assert tiny_run.codes(children) == [75, 75], tiny_run.output_of(children)
    assert tiny_run.acknowledged_step(run_dir) == 20
    children = place.resume(run_dir, ranks=2)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    assert tiny_run.weights(run_dir, 23) == expected
    expected_losses, losses = (
        {e["step"]: e["loss"] for e in tiny_run.events(run, "train")} for run in (full_run, run_dir)
    )
    assert losses == expected_losses


@pytest.mark.torture
def test_every_sample_is_taken_once_and_in_order_on_any_ranks_and_with_any_strategy(
    place: tiny_run.Place,
) -> None:
    """Two epochs and a bit, from one rank to three and to two with DDP."""
    keys = (*KEYS, "learning_rate.lr_decay_iters=45", "train.until=[45it]", "record.log_interval=9")
    single_rank = place.train(place.path / "whole", *keys, body="taken:report_samples")
    assert tiny_run.codes(single_rank) == [0]
    run_dir = place.path / "parts"
    ranks = place.train(run_dir, *keys, *DILOCO, "train.until=[13it]", body="taken:report_samples")
    assert tiny_run.codes(ranks) == [0], tiny_run.output_of(ranks)
    for size, until, words in (
        (3, 27, ()),
        (2, 38, ("--set", "parallel.strategy=ddp")),
        (2, 45, ("--set", "data.strategy=dispatched")),
    ):
        children = place.resume(
            run_dir, "--until", f"{until}it", *words, ranks=size, body="taken:report_samples"
        )
        assert set(tiny_run.codes(children)) == {0}, tiny_run.output_of(children)
        ranks += children
    expected, actual = (
        Counter(map(tuple, samples_of(processes))) for processes in (single_rank, ranks)
    )
    assert len(expected) > 700
    assert actual == expected
    outer = [name for name in tensors(run_dir, 38) if "outer_momentum" in name]
    assert outer == []
    assert any("outer_momentum" in name for name in tensors(run_dir, 45))


def samples_of(ranks: list[Any]) -> list[tuple[int, int]]:
    """Epoch and number of every sample that the ranks trained on."""
    lines = [
        json.loads(line)
        for rank in ranks
        for line in rank.output().splitlines()
        if '"epoch"' in line
    ]
    return [(line["epoch"], sample) for line in lines for sample in line["samples"]]


def test_what_is_due_in_a_round_comes_at_its_end(place: tiny_run.Place) -> None:
    keys = (*DILOCO, "eval.eval_interval=7", "record.log_interval=2", "checkpoint.every_steps=6")
    keys = (*keys, "checkpoint.keep_last=9")
    schedule = [
        {"name": "change_lr", "value": 0.5, "when": {"at_step": 4}},
        {"name": "freeze", "value": "blocks.0.mlp.*", "when": {"at_step": 10}},
    ]
    run_dir = train_run(
        place, "run", *keys, f"schedule={json.dumps(schedule)}", "train.until=[22it]", ranks=2
    )
    assert steps_of(run_dir, "eval") == [10, 15, 22]
    assert steps_of(run_dir, "train") == [5, 10, 15, 20, 22]
    assert steps_of(run_dir, "checkpoint") == [10, 15, 20, 22]
    assert steps_of(run_dir, "operation") == [5, 10]
    frozen = [
        torch.equal(tensor, tensors(run_dir, 22)[name])
        for name, tensor in tensors(run_dir, 10).items()
        if name.startswith("model/blocks.0.mlp.")
    ]
    assert frozen
    assert all(frozen)


@parametrize_first(
    ("strategy", "due"), [(DILOCO, [10, 20]), (("parallel.strategy=ddp",), [8, 16, 20])], first=1
)
def test_an_evaluation_that_a_stop_cut_short_is_made_by_the_resumed_run(
    place: tiny_run.Place, strategy: tuple[str, ...], due: list[int]
) -> None:
    """In a round it was due in the middle."""
    keys = (*KEYS, *strategy, "eval.eval_interval=8")
    run_dir = place.path / "run"
    children = place.train(run_dir, *keys, ranks=2, body="apart:stopped_in_its_first_evaluation")
    assert tiny_run.codes(children) == [75, 75], tiny_run.output_of(children)
    assert steps_of(run_dir, "eval") == []
    children = place.resume(run_dir, ranks=2)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    assert steps_of(run_dir, "eval") == due


@pytest.mark.torture
def test_a_model_grows_with_its_outer_momentum(place: tiny_run.Place) -> None:
    """Saves compare the ranks' tensors, so that they pass says that these are equal."""
    schedule = [
        {"name": "widen_mlp", "value": "x2", "moments": "mapped", "when": {"at_step": 5}},
        {"name": "insert_layers", "value": 1, "when": {"at_step": 11}},
    ]
    keys = (*KEYS, *DILOCO, f"schedule={json.dumps(schedule)}", "checkpoint.every_steps=5")
    run_dir = train_run(place, "run", *keys, "checkpoint.keep_last=9", ranks=2)
    assert steps_of(run_dir, "operation") == [5, 15]
    shapes = {name: tensor.shape for name, tensor in tensors(run_dir, 10).items()}
    outer = {n: shape for n, shape in shapes.items() if n.endswith("/outer_momentum")}
    assert len(outer) > 10
    for name, shape in outer.items():
        assert shape == shapes[name.replace("optimizer/", "model/").removesuffix("/outer_momentum")]
    assert len([n for n in tensors(run_dir, 20) if n.endswith("/outer_momentum")]) > len(outer)
    resumed_run = place.path / "again"
    shutil.copytree(run_dir, resumed_run)
    for step in (15, 20):
        shutil.rmtree(resumed_run / "checkpoints" / f"step-{step}")
    children = place.resume(resumed_run, ranks=2)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    assert tiny_run.weights(resumed_run, STEPS) == tiny_run.weights(run_dir, STEPS)


@pytest.mark.torture
def test_a_compiled_model_trains_alike(place: tiny_run.Place) -> None:
    keys = (*KEYS, *DILOCO, "model.dropout=0.0")
    plain = tensors(train_run(place, "plain", *keys, ranks=2))
    body = "failures:graphs_run_as_they_are"
    compiled = tensors(train_run(place, "compiled", *keys, "compile=true", ranks=2, body=body))
    assert (place.path / "graphs").exists()
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_replica_skips_a_step_that_is_not_finite_and_the_others_do_not(
    place: tiny_run.Place,
) -> None:
    run_dir = train_run(
        place, "run", *KEYS, *DILOCO, ranks=2, body="failures:last_rank_has_nan_once"
    )
    assert [(e["step"], e["consecutive"]) for e in tiny_run.events(run_dir, "skip")] == [(10, 1)]
    states = tensors(run_dir)
    assert all(tensor.isfinite().all() for tensor in states.values())
    (count,) = {float(tensor) for name, tensor in states.items() if name.endswith("/step")}
    assert count == STEPS - 0.5


@pytest.mark.torture
def test_a_replica_all_of_whose_first_steps_were_skipped_gets_the_others_state(
    place: tiny_run.Place,
) -> None:
    """Its optimizer has none to be averaged."""
    keys = (*KEYS, *AVERAGED)
    run_dir = train_run(place, "run", *keys, ranks=2, body="apart:rank_1_has_nan_in_step_1")
    assert steps_of(run_dir, "skip") == [1]
    plain_run = train_run(place, "whole", *keys, ranks=2)
    assert tensors(run_dir).keys() == tensors(plain_run).keys()


def test_a_replica_that_is_never_finite_again_ends_the_run_for_all(place: tiny_run.Place) -> None:
    children = place.train(
        place.path / "run", *KEYS, *DILOCO, ranks=2, body="failures:rank_1_has_nan_for_good"
    )
    assert tiny_run.codes(children) == [4, 4], tiny_run.output_of(children)
    assert "step 15: the gradient was not finite for 8 steps in a row" in children[0].output()


def test_a_round_that_is_not_finite_is_taken_back(trainer: Callable[..., Trainer]) -> None:
    # fewer than the steps of a round: one that is taken back is one update that is skipped
    run = trainer(
        *DILOCO, "optimizer.name=adamw", "train.until=[15it]", "train.max_skipped_steps=2"
    )
    for _ in range(ROUND):
        run.step()
    before = {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}
    for _ in range(ROUND - 1):
        run.step()
    with torch.no_grad():
        run.parts.stepper.parameters["blocks.0.mlp.up.weight"].fill_(torch.inf)
    run.step()
    for name, parameter in run.parts.stepper.parameters.items():
        assert torch.equal(parameter, before[name]), name
    assert run.state.skipped_in_a_row == 1
    run.train()
    assert run.state.skipped_in_a_row == 0


@parametrize_first("step", [2, 5, 8], first=1)
def test_all_ranks_end_and_name_the_one_that_cannot_read(place: tiny_run.Place, step: int) -> None:
    """The others come to where their round ends."""
    words = ["train", "run.yaml", *sets(*KEYS, *DILOCO, "record.run_dir=run")]
    body = "failures:rank_1_cannot_read_step"
    ranks = children_as_ranks(place.forks, 2, body, words, step, place=place.path)
    assert tiny_run.codes(ranks) == [4, 4], tiny_run.output_of(ranks)
    end = -(-step // ROUND) * ROUND
    log = (place.path / "run" / "logs" / "rank_0.log").read_text("utf-8")
    assert re.search(rf"rank 1 failed while in step {end}: OSError", log), log


@pytest.mark.parametrize(("strategy", "step"), [(DILOCO, 10), (("parallel.strategy=ddp",), 7)])
def test_all_ranks_end_and_name_the_one_that_cannot_evaluate(
    place: tiny_run.Place, strategy: tuple[str, ...], step: int
) -> None:
    """They hear of it where they synchronize, after some micro-batches or at the end."""
    run_dir = place.path / "run"
    keys = (*KEYS, *strategy, "eval.batch_size=4")
    ranks = place.train(run_dir, *keys, ranks=2, body="apart:rank_1_cannot_evaluate")
    assert tiny_run.codes(ranks) == [4, 4], tiny_run.output_of(ranks)
    log = (run_dir / "logs" / "rank_0.log").read_text("utf-8")
    assert f"rank 1 failed while in evaluation at step {step}: OSError: the disk is gone" in log


@pytest.mark.torture
def test_a_rank_that_dies_or_freezes_in_a_round_is_named(place: tiny_run.Place) -> None:
    for body, silence, message in (
        ("apart:rank_1_dies_at_step_7", 60, "rank 1 is gone"),
        ("apart:rank_1_freezes_at_step_7", 2, "rank 1 has sent no heartbeat"),
    ):
        keys = (*KEYS, *DILOCO, f"parallel.silence_s={silence}")
        children = place.train(place.path / body, *keys, ranks=2, body=body)
        assert children[0].finish(30) == 4, tiny_run.output_of(children)
        children[1].signal(signal.SIGKILL)
        children[1].finish()
        assert message in (place.path / body / "logs" / "rank_0.log").read_text("utf-8")


def test_hooks_around_steps_do_not_make_ranks_wait_for_each_other(place: tiny_run.Place) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, *KEYS, *DILOCO, ranks=2, body="apart:counts_messages")
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    counts = [list(map(int, re.findall(r"messages (\d+)", c.output()))) for c in children]
    for of_rank in counts:
        assert len(of_rank) == STEPS
        assert [bool(count) for count in of_rank] == [False, False, False, False, True] * 4


def test_a_model_that_communicates_in_its_forward_pass_is_refused() -> None:
    world = World(0, 0, 1, torch.device("cpu"), "none")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="SyncBatchNorm communicates"):
        DiLoCo(load_config(None, [*DILOCO]).config, world, model)


def test_settings_that_need_ranks_to_meet_at_every_step_are_refused_at_once() -> None:
    keys = [
        "reproducible=elastic",
        "precision=fp16",
        "record.noise_every=10",
    ]
    keys += ["parallel.fsdp.offload=true", "device=cuda"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*DILOCO, *keys])
    text = str(caught.value)
    for message in (
        "reproducible: elastic",
        "use precision: bf16",
        "record.noise_every",
        "needs strategy fsdp or hsdp",
    ):
        assert message in text
    assert text.count("diloco") >= 4
    noisy = "schedule=[{name: change_batch_size, value: 4, when: {noise_scale: {above: 1.0}}}]"
    with pytest.raises(ConfigError, match="use another strategy than diloco"):
        load_checked(None, [*DILOCO, noisy])


@needs("delta")
def test_deltas_are_those_of_whole_rounds() -> None:
    with pytest.raises(ConfigError, match="use a multiple of 5"):
        load_config(None, [*DILOCO, "checkpoint.delta.every=7"])
    load_config(None, [*DILOCO, "checkpoint.delta.every=10"])


def test_the_forecast_says_what_is_kept_and_what_is_sent(place: tiny_run.Place) -> None:
    """Held against what the ranks' models and optimizers have."""
    run_dir = train_run(place, "run", *KEYS, *DILOCO, ranks=2)
    sizes = Counter[str]()
    for name, tensor in tensors(run_dir).items():
        component, _, state = name.partition("/")
        outer = state.endswith("/outer_momentum")
        if tensor.ndim:  # counts of steps are compared, not sent
            sizes["outer" if outer else component] += tensor.numel() * 4
    (child,) = place.instar("train", "run.yaml", "--nproc", 2, "--dry-run", *sets(*KEYS, *DILOCO))
    assert child.finish() == 0
    rows = dict(
        re.findall(r"^ +(outer|sent / step) +\S+ \S+ +(\S+ \S+)", child.output(), re.MULTILINE)
    )
    # the weights at the beginning of the round, too
    assert rows["outer"] == bytes_text(2 * sizes["outer"])
    # of two ranks, each sends half of all to the other, and the other half's mean
    assert rows["sent / step"] == bytes_text(round((sizes["model"] + sizes["optimizer"]) / ROUND))


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
