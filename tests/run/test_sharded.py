"""`parallel.strategy: fsdp`: the same runs as with whole models, by ranks that each hold some rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import science
import states
import tiny_run
import torch
from torch import nn

from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.load import Loaded, load_config
from instar.distributed.world import World
from instar.record.format import bytes_text
from instar.run.parallel.sharded import blocks, check_groups
from instar.run.start import rank_consistency
from instar.run.start.preflight import (
    FORECAST_SHARE,
    check_memory,
    preflight,
    suggestion,
)

STEPS = 6
KEYS = (
    "optimizer.name=adamw",
    "model.conv_size=3",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "eval.eval_interval=4",
    "train.clip=0.5",
    "record.sample_every=3",
    "record.layers_every=3",
    "record.analyze_every=3",
)
FIXED = (*KEYS, "model.dropout=0.0")
GROWTH = [
    {"name": "insert_layers", "value": 1, "from": "average", "where": [1], "lr": {"rewarm_new": 4}},
    {"name": "widen_mlp", "value": "x2", "how": "split", "lr": {"rewarm_new": 3}},
]
ELASTIC = (
    *KEYS,
    "reproducible=elastic",
    # four ranks have slices of 3 and 4 samples, in one and two micro-batches
    "train.batch_size=3",
    "train.gradient_accumulation_steps=5",
    f"schedule={json.dumps([{**entry, 'when': {'at_step': 3}} for entry in GROWTH])}",
    "optimizer.lr_base_width=16",
)
FSDP = ("parallel.strategy=fsdp",)
HSDP = ("parallel.strategy=hsdp", "parallel.fsdp.shards=2")


@pytest.fixture
def place(tmp_path: Path) -> tiny_run.Place:
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    return tiny_run.Place(tmp_path, science.forks())


def train_run(place: tiny_run.Place, name: str, *keys: str, ranks: int) -> Path:
    run_dir = place.path / name
    children = place.train(run_dir, *keys, ranks=ranks)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    return run_dir


def curve(run_dir: Path) -> list[float]:
    """Losses and norms of all steps, and held-out losses."""
    train, held_out = tiny_run.events(run_dir, "train"), tiny_run.events(run_dir, "eval")
    assert [event["step"] for event in train] == list(range(1, STEPS + 1))
    steps = [value for event in train for value in (event["loss"], event["grad_norm"])]
    return [*steps, *(event["loss"] for event in held_out)]


def saved_bytes(
    run_dir: Path, step: int = STEPS, components: tuple[str, ...] = ("model", "optimizer", "ema")
) -> dict[str, dict[str, bytes]]:
    """The bytes of every tensor at a step, whoever saved which rows of it."""
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{step}")
    return {
        component: {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in checkpoint.tensors(component).items()
        }
        for component in components
    }


def left_out(run_dir: Path) -> set[int]:
    """The steps whose analysis a warning says to be missing, because the machine was too busy for it."""
    messages = " ".join(event["message"] for event in tiny_run.events(run_dir, "warning"))
    patterns = (r"step ([\d,]+): no analysis", r"weights of step ([\d,]+) is not recorded")
    return {int(step.replace(",", "")) for form in patterns for step in re.findall(form, messages)}


def analysis_numbers(run_dir: Path, without: Collection[int] = ()) -> dict[str, float]:
    """Every number that the analyses of a run's weights have found, by its place, but of biases of keys: they
    change no output, so that their gradients are rounding, which AdamW makes steps of."""
    numbers: dict[str, float] = {}

    def collect(place: str, value: Any) -> None:
        if isinstance(value, dict) and str(value.get("name")).endswith(".attn.key.bias"):
            return
        if isinstance(value, dict | list):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                collect(f"{place}.{key}", entry)
        elif isinstance(value, int | float):
            numbers[place] = value

    for event in tiny_run.events(run_dir, "analysis"):
        if event["step"] not in without:
            collect(str(event["step"]), event["findings"])
    assert len(numbers) > 20
    return numbers


def share_of(run_dir: Path, rank: int, ranks: int) -> float:
    """The share of all that a run saved of its tensors that one rank saved, and so holds."""
    entries = load_checkpoint(run_dir / "checkpoints" / f"step-{STEPS}").manifest.files
    sizes = {name: entry.size_bytes for name, entry in entries.items() if entry.parts}
    rank_sizes = [
        size for name, size in sizes.items() if name.endswith(f"{rank}-of-{ranks}.safetensors")
    ]
    assert len(rank_sizes) == 3
    return sum(rank_sizes) / sum(sizes.values())


def files(run_dir: Path, component: str) -> list[str]:
    folder = run_dir / "checkpoints" / f"step-{STEPS}"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"{component}*/*"))


def test_sharded_ranks_are_the_same_run_up_to_rounding(place: tiny_run.Place) -> None:
    ranks = 2
    ddp_run = train_run(place, "ddp", *FIXED, ranks=ranks)
    fsdp_run = train_run(place, "fsdp", *FIXED, *FSDP, ranks=ranks)
    assert curve(fsdp_run) == pytest.approx(curve(ddp_run), rel=1e-5)
    texts = [tiny_run.events(run, "sample") for run in (ddp_run, fsdp_run)]
    assert [len(samples) for samples in texts] == [2, 2]
    assert files(fsdp_run, "ema") == [f"ema/{rank}-of-{ranks}.safetensors" for rank in range(ranks)]
    (child,) = place.instar("checkpoint", "diff", ddp_run, fsdp_run)
    assert child.finish() == 0, child.output()
    assert "only in" not in child.output().replace("only in A  only in B", "")
    missing = left_out(ddp_run) | left_out(fsdp_run)
    for kind, without in (("layers", set()), ("analysis", missing)):
        expected, actual = (
            [event["step"] for event in tiny_run.events(run, kind) if event["step"] not in without]
            for run in (ddp_run, fsdp_run)
        )
        assert actual == expected != []
    assert analysis_numbers(fsdp_run, missing) == pytest.approx(
        analysis_numbers(ddp_run, missing), rel=1e-3, abs=1e-6
    )


@pytest.mark.torture
def test_elastic_runs_are_one_run_bit_for_bit(place: tiny_run.Place) -> None:
    """On one rank, on four that share a model, and on ranks with replicas of shards, with whole models, with
    shards, and on one in turn, which takes over in the middle of a new block's warm-up. More are in tests/torture."""
    one_rank = train_run(place, "alone", *ELASTIC, ranks=1)
    run_dirs = {
        "fsdp": train_run(place, "fsdp", *ELASTIC, *FSDP, ranks=4),
        "in turn": train_run(place, "in-turn", *ELASTIC, *HSDP, "train.until=[2it]", ranks=4),
    }
    for until, strategy, ranks in ((4, "ddp", 2), (5, "fsdp", 2), (STEPS, "ddp", 1)):
        keys = ("--set", f"parallel.strategy={strategy}", "--set", "parallel.fsdp.shards=null")
        run_dir = run_dirs["in turn"]
        children = place.resume(run_dir, "--until", f"{until}it", *keys, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    missing = left_out(run_dirs["fsdp"]) | left_out(one_rank)
    assert analysis_numbers(run_dirs["fsdp"], missing) == pytest.approx(
        analysis_numbers(one_rank, missing), rel=1e-6
    )
    expected = saved_bytes(one_rank)
    assert [len(component) for component in expected.values()] == [55, 165, 55]
    for name, other in run_dirs.items():
        assert saved_bytes(other) == expected, name
    largest = max(share_of(run_dirs["fsdp"], rank, 4) for rank in range(4))
    assert largest <= 0.30, "of weights, moments and average together"
    del run_dirs["in turn"]  # which is also evaluated at each of its ends
    for name, other in run_dirs.items():
        assert json.dumps(curve(other)) == json.dumps(curve(one_rank)), name


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (
            ("model.n_embd=8", "model.n_head=1", "model.n_layer=8"),
            64,
            "cannot be divided among 64 ranks",
        ),
        (("parallel.strategy=hsdp", "parallel.fsdp.shards=4"), 6, "6 ranks cannot be divided"),
        ((), 1, "divides the model among ranks, and there is one"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_the_start(
    config: Callable[..., Loaded], keys: tuple[str, ...], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(config(*FIXED, *FSDP, *keys, "train.batch_size=64"), ranks)


def test_a_resumed_run_may_go_on_alone(config: Callable[..., Loaded]) -> None:
    assert preflight(config(*FIXED, *FSDP), 1, new=False).forecast.world_size == 1


def test_a_task_may_refuse_to_be_sharded(tmp_path: Path) -> None:
    """Together with whatever else is wrong, each with its line."""
    science.place(tmp_path)
    text = (tmp_path / "run.yaml").read_text() + "parallel: {strategy: fsdp}\n"
    lines = text.replace("science:Halves", "science:Whole").splitlines()
    (tmp_path / "run.yaml").write_text("\n".join(lines) + "\n")
    loaded_config = load_config(str(tmp_path / "run.yaml"), ["train.batch_size=2"])
    with pytest.raises(ConfigError) as caught:
        preflight(loaded_config, 4)
    message = str(caught.value)
    assert f"run.yaml:{len(lines)}" in message
    assert "refuses parallel.strategy fsdp: it looks at all rows of a weight" in message
    assert "leaves some of 4 ranks" in message
    preflight(load_config(str(tmp_path / "run.yaml"), ["parallel.strategy=ddp"]), 4)


SCHEDULE = """schedule=[
  {name: widen_mlp, value: x2, when: {at_step: 2}},
  {name: stack_layers, value: 2, how: interpolate, when: {at_step: 3}},
  {name: upcycle, value: 3, when: {at_step: 4}},
  {name: widen_hidden, value: x2, when: {at_step: 4}},
  {name: resize_vocab, value: 64, when: {at_step: 4}},
  {name: freeze, value: "*embedding*", when: {at_step: 5}},
]"""


@pytest.mark.torture
def test_a_sharded_model_grows_bit_for_bit_as_a_whole_one(place: tiny_run.Place) -> None:
    """Its optimizer state, that of Muon and of AdamW, and its moving average as well; on replicas of
    shards, then on shards, and then with whole models."""
    keys = (*ELASTIC, "optimizer.name=muon", SCHEDULE)
    one_rank = train_run(place, "alone", *keys, ranks=1)
    shards_run = train_run(place, "grown", *keys, *HSDP, "train.until=[3it]", ranks=4)
    for until, strategy, ranks in ((5, "fsdp", 2), (STEPS, "ddp", 1)):
        keys = ("--set", f"parallel.strategy={strategy}", "--set", "parallel.fsdp.shards=null")
        children = place.resume(shards_run, "--until", f"{until}it", *keys, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    assert saved_bytes(shards_run) == saved_bytes(one_rank)
    proofs = [
        [
            (op["name"], op["proof"])
            for op in tiny_run.events(run, "operation")
            if op["name"] != "override"
        ]
        for run in (one_rank, shards_run)
    ]
    assert [name for name, _ in proofs[0]][-1] == "freeze"
    assert proofs[0] == proofs[1]


def test_ranks_whose_rounding_differs_prove_a_growth_together(place: tiny_run.Place) -> None:
    """Sharded ranks compute together: one that compared again in float64, alone, would wait for ever."""
    grows = [{"name": "widen_mlp", "value": "x2", "when": {"at_step": 1}}]
    keys = (
        *KEYS,
        *FSDP,
        "train.until=[2it]",
        f"schedule={json.dumps(grows)}",
        "record.run_dir=run",
    )
    words = [word for key in keys for word in ("--set", key)]
    children = place.instar(
        "train", "run.yaml", *words, ranks=2, body="failures:rank_1_rounds_more"
    )
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    (operation,) = tiny_run.events(place.path / "run", "operation")
    assert operation["proof"]["max_logit_diff_relative"] < 1e-10


@pytest.mark.torture
def test_blocks_are_compiled_each_and_share_a_graph(place: tiny_run.Place) -> None:
    """Also new ones: the grown model has six blocks of one shape."""
    keys = (*FIXED, "train.gradient_accumulation_steps=2")  # samples of one shape
    grows = "schedule=[{name: stack_layers, value: 3, when: {at_step: 4}}]"
    eager = train_run(place, "eager", *keys, grows, *FSDP, ranks=2)
    run_dir, body = place.path / "compiled", "failures:graphs_run_as_they_are"
    children = place.train(run_dir, *keys, grows, *FSDP, "compile=true", ranks=2, body=body)
    assert tiny_run.codes(children) == [0, 0], tiny_run.output_of(children)
    assert curve(run_dir) == pytest.approx(curve(eager), rel=1e-6)
    graphs = (place.path / "graphs").read_text(encoding="utf-8").splitlines()
    assert len(graphs) == 2 * 2, "on each of two ranks, of the model before and after its growth"


@pytest.mark.torture
def test_parameters_with_fewer_rows_than_shards_and_buffers(tmp_path: Path) -> None:
    """A user's task whose last layer has two rows, on four ranks; its test runs on the best weights,
    which are read into shards as well."""
    place = science.place(tmp_path)
    keys = (
        "task=science:Normed",
        "reproducible=elastic",
        "optimizer.name=sgd",
        "checkpoint.on_best=true",
        "data.samples=84",
    )
    keys += ("test.at_end=true", "record.layers_every=3", "train.until=[20it]")
    outcomes = []
    for name, more, ranks in (("one", (), 1), ("four", FSDP, 4)):
        run_dir = tmp_path / name
        children = place.train(run_dir, *keys, *more, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
        last = tiny_run.acknowledged_step(run_dir)
        metrics = science.result(run_dir)["metrics"]
        outcomes.append((saved_bytes(run_dir, last, ("model", "optimizer")), last, metrics))
    assert outcomes[0] == outcomes[1]


def test_what_sharded_parameters_do_not_support_is_explained(tmp_path: Path) -> None:
    place = science.place(tmp_path)
    children = place.train(tmp_path / "run", "task=mistaken:Penalty", *FSDP, ranks=2)
    assert tiny_run.codes(children) == [4, 4], tiny_run.output_of(children)
    assert "sharded parameters are DTensors" in children[0].output()


def test_blocks_are_gathered_alone_unless_they_share_parameters() -> None:
    def layers(*modules: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleList(modules))

    first, second, shared = (nn.Linear(2, 2) for _ in range(3))
    assert blocks(layers(first, second)) == [first, second]
    assert blocks(layers(first, first, second)) == [first, second]
    pair = nn.Sequential(shared, nn.ReLU(), shared)
    assert blocks(layers(first, pair)) == [first, pair]
    assert blocks(layers(first, pair, shared)) == [first, shared]
    tied = nn.Linear(2, 2)
    tied.weight = first.weight
    assert blocks(layers(first, second, tied)) == [second]
    nested = layers(first, second)
    assert blocks(layers(nested, nn.ReLU())) == [nested]
    assert blocks(layers(nn.ModuleDict({"a": nn.Linear(2, 2)}), first)) == [first], (
        "a dict is not called"
    )


NOT_SHARDED = {
    "channels last": "blocks.0.conv.weight is not contiguous",
    "transposed": "up.weight is not contiguous",
    "empty": "odd is empty",
    "a number": "odd has no dimension",
    "mixed": "middle.bias is of torch.float32 and down.bias is of torch.float64",
}


@pytest.mark.parametrize("kind", [*NOT_SHARDED, "plain", "tied", "double", "contiguous"])
def test_what_torch_does_not_shard_is_refused_by_name(kind: str) -> None:
    message = NOT_SHARDED.get(kind)
    expectation = pytest.raises(ValueError, match=message) if message else nullcontext()
    with expectation:
        check_groups(states.KINDS[kind](6))


def test_a_sharded_rank_needs_its_share_of_the_memory(config: Callable[..., Loaded]) -> None:
    ddp, fsdp = (
        preflight(config(*FIXED, *keys), 4).forecast.stages[0].memory_bytes for keys in ((), FSDP)
    )
    for part in ("weights", "gradients", "optimizer"):
        assert fsdp[part] == pytest.approx(ddp[part] / 4, rel=0.1), "rows of a rank are whole"
    assert fsdp["activations"] == ddp["activations"]


def test_several_micro_batches_keep_whole_gradients_unless_each_is_reduced(
    config: Callable[..., Loaded],
) -> None:
    keys = (*FIXED, *FSDP, "train.batch_size=2", "train.gradient_accumulation_steps=8")
    reduce_setting = "parallel.fsdp.reduce_each_micro_batch=true"
    loaded_config = config(*keys)
    usual, lean = (
        preflight(way, 4).forecast for way in (loaded_config, config(*keys, reduce_setting))
    )
    usual_bytes, lean_bytes = (forecast.stages[0].memory["fsdp"].step for forecast in (usual, lean))
    assert usual_bytes == {**lean_bytes, "accumulated": usual_bytes["accumulated"]}
    assert 0.5 < usual_bytes["accumulated"] / (4 * usual_bytes["gradients"]) < 1, (
        "those of the blocks"
    )
    fits = round(lean.peak_bytes("fsdp") / FORECAST_SHARE) + 1
    advice = suggestion(loaded_config, usual, fits)
    assert advice.startswith("fsdp.reduce_each_micro_batch: true over 4 ranks needs")


def test_auto_shards_where_the_whole_model_does_not_fit(
    config: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by one of two ranks that are alike."""
    loaded_config = config(*FIXED, "parallel.strategy=auto")
    world = World(0, 0, 2, torch.device("cpu"), "none")
    monkeypatch.setattr(rank_consistency, "gather", lambda _, value: [value, value])
    prepared_run = preflight(loaded_config, 2)
    total_bytes = sum(prepared_run.forecast.stages[0].memory_bytes.values())
    strategies = {}
    for share, memory in (("little", total_bytes), ("much", 4 * total_bytes)):
        monkeypatch.setattr(rank_consistency, "host_bytes", lambda memory=memory: memory)
        on_two_ranks = rank_consistency.resolve_strategy(loaded_config, prepared_run, world)
        strategies[share] = on_two_ranks.config.parallel.strategy
    assert strategies == {"little": "fsdp", "much": "ddp"}
    on_one_rank = rank_consistency.resolve_strategy(
        loaded_config, prepared_run, replace(world, size=1)
    )
    assert on_one_rank.config.parallel.strategy == "ddp"
    monkeypatch.setattr(rank_consistency, "host_bytes", lambda: 1 << 16)
    with pytest.raises(ConfigError, match=r"no strategy fits: .* with fsdp over 2 ranks, and the"):
        rank_consistency.resolve_strategy(loaded_config, prepared_run, world)


def test_what_does_not_fit_is_told_what_would(config: Callable[..., Loaded]) -> None:
    loaded_config = config(*FIXED, "model.n_embd=512", "model.n_layer=8")
    forecast = preflight(loaded_config, 4).forecast
    ddp_bytes, fsdp_bytes = forecast.peak_bytes("ddp"), forecast.peak_bytes("fsdp")
    assert fsdp_bytes < 0.5 * ddp_bytes
    needs = bytes_text(fsdp_bytes)
    assert f"strategy: fsdp over 4 ranks needs {needs} of" in suggestion(
        loaded_config, forecast, ddp_bytes
    )
    assert suggestion(loaded_config, forecast, 2 * ddp_bytes) == ""
    least_bytes = forecast.stages[0].memory["ddp"].kept_bytes
    with pytest.raises(ConfigError, match=f"strategy: fsdp over 4 ranks needs {needs} of"):
        check_memory(loaded_config, forecast, "cuda", least_bytes - 1)
