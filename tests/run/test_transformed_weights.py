"""A transform that masks targets: what a step weighs is what it is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ways
from cases import parametrize_first
from forks import INSTAR, Forks

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.schema import SamplesConfig
from instar.data.source import InMemorySource, WeightedSource
from instar.data.text.dataset import create_dataset_files, open_data, unread_targets
from instar.data.text.targets import TokenTargets
from instar.data.text.tokenizer import train_bpe
from instar.data.user_sets import sample_set
from instar.run.state.gradient_stats import part_of

TRANSFORMS = """\
def half(sample, generator):
    sample["targets"][:8] = -1
    return sample


def most(sample, generator):
    if generator.random() < 0.7:
        sample["targets"][:] = -1
    return sample


def short(sample, generator):
    return {name: values[:8] for name, values in sample.items()}
"""
CONFIG = """\
name: masked
model: {n_layer: 1, n_head: 2, n_embd: 32, context: 16}
data: {source: text.txt, path: tokens, transform: "masks:half"}
train: {until: 6it, batch_size: 4}
optimizer: {lr: 1e-5}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 9, eval_iters: 1}
record: {log_interval: 1, sample_tokens: 0, report: false}
precision: fp32
device: cpu
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("masked")
    (place / "text.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(400)))
    (place / "masks.py").write_text(TRANSFORMS)
    (place / "run.yaml").write_text(CONFIG)
    return place


@pytest.fixture(scope="module")
def steps(place: Path, forks: Forks) -> Callable[..., list[dict[str, Any]]]:
    numbers = iter(range(99))

    def train_run(*arguments: str) -> list[dict[str, Any]]:
        run = f"run-{next(numbers)}"
        words = ["train", "run.yaml", "--set", f"record.run_dir={run}", *arguments]
        child = forks.start(INSTAR, words, place=place)
        assert child.finish() == 0, child.output()
        lines = (place / run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "train"]

    return train_run


def losses_of(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(step["step"], step["tokens"], step["loss"], step["grad_norm"]) for step in steps]


def test_loss_and_tokens_are_those_of_the_targets_that_are_left(
    steps: Callable[..., list[dict[str, Any]]],
) -> None:
    half = steps()
    assert [step["tokens"] for step in half] == [32, 64, 96, 128, 160, 192]
    # a model that knows nothing: ln 256 per target
    assert all(abs(step["loss"] - np.log(256)) < 0.1 for step in half)
    (plain_step, *_) = steps("--set", "data.transform=null", "--until", "1it")
    assert plain_step["tokens"] == 64
    assert 0.5 < half[0]["grad_norm"] / plain_step["grad_norm"] < 2


def test_the_forecast_counts_the_targets_that_a_run_trains_on(
    place: Path, steps: Callable[..., list[dict[str, Any]]], forks: Forks
) -> None:
    def forecast(*arguments: str) -> dict[str, Any]:
        words = ["train", "run.yaml", "--dry-run", "--json", *arguments]
        child = forks.start(INSTAR, words, place=place)
        assert child.finish() == 0, child.output()
        output = child.output()
        return json.loads(output[output.index("{") :])

    unread = forecast("--set", "data.path=not-prepared")
    assert unread["weight_remark"].startswith("an upper bound: data.transform may leave fewer")
    train_events, half, budget = steps(), forecast(), ("--until", "150tok")
    assert half["early"]["tokens"] == train_events[-1]["tokens"] == unread["early"]["tokens"] // 2
    assert "targets that data.transform leaves in 256 of the 463" in half["weight_remark"]
    # ends of tokens, too
    assert forecast(*budget)["early"]["steps"] == len(steps(*budget)) == 5
    sparse = forecast("--set", "data.transform=masks:most", "--until", "1ep")
    train_events = steps("--set", "data.transform=masks:most", "--until", "1ep")
    assert abs(sparse["early"]["tokens"] / train_events[-1]["tokens"] - 1) < 0.2


@pytest.mark.torture
def test_ranks_agree_on_what_a_step_weighs(steps: Callable[..., list[dict[str, Any]]]) -> None:
    transform = ("--set", "data.transform=masks:most")
    on_one_rank = losses_of(steps(*transform))
    assert len({step[1] for step in on_one_rank}) > 1
    for ways_of_two in ((), ("--set", "data.strategy=dispatched")):
        on_two_ranks = losses_of(steps(*transform, "--nproc", "2", *ways_of_two))
        assert [step[:2] for step in on_two_ranks] == [step[:2] for step in on_one_rank]
        assert np.allclose(
            [step[2:] for step in on_two_ranks], [step[2:] for step in on_one_rank], rtol=1e-4
        )
    rounds = ("--set", "parallel.strategy=diloco", "--set", "parallel.diloco.sync_every=2")
    diloco_losses = losses_of(steps(*transform, "--nproc", "2", *rounds))
    assert diloco_losses[-1][1] == on_one_rank[-1][1]


@parametrize_first(
    "way",
    [ways.Way(1), ways.Way(2), ways.Way(3), ways.Way(2, "dispatched"), ways.Way(1, workers=2)],
    first=8,
)
@pytest.mark.parametrize("kind", ["masked", "a masked stream", "a masked mixture"])
def test_a_step_weighs_the_targets_of_its_samples(tmp_path: Path, kind: str, way: ways.Way) -> None:
    more = {"a masked stream": "a stream", "a masked mixture": "a mixture"}
    base = more.get(kind, kind)
    data = ways.config(ways.make_rows(tmp_path), base, transform="feeds:masked")
    data = data.model_copy(update={"path": str(tmp_path / "set")})
    for batches in ways.take_steps(data, way, 6):
        targets = [
            micro.arrays["targets"][: micro.samples] for b in batches for micro in b.micro_batches
        ]
        n_targets = sum(int((part != -1).sum()) for part in targets)
        _, weight, _ = ways.invariants(batches)
        assert weight == n_targets


@pytest.mark.parametrize("kind", [*ways.KINDS])
def test_the_mean_targets_of_a_sample_are_those_of_an_epoch_or_said_to_be_a_bound(
    tmp_path: Path, kind: str
) -> None:
    data = ways.config(ways.make_rows(tmp_path), kind, path=str(tmp_path / "set"))
    create_dataset_files(data, 1)
    dataset, context = open_data(data, 1), ways.CONTEXT
    count = dataset.targets(context)
    if dataset.train_samples(context) is None:
        is_bound = data.packing is False
        assert (count.mean, "an upper bound" in count.remark) == (context, is_bound)
        masked = replace(dataset, data=data.model_copy(update={"transform": "feeds:masked"}))
        assert masked.targets(context).remark.startswith("an upper bound: data.transform")
        return
    source, order = dataset.train(context, 1)
    every = source.read(order.indices(0, 0, order.samples_per_epoch))
    mean = np.count_nonzero(every["targets"] != -1) / order.samples_per_epoch
    assert abs(count.mean / mean - 1) < (0.12 if data.transform else 0.05 if data.mixture else 0.02)


def test_of_conversations_the_assistant_s_tokens_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(["user assistant: a b c"], 260).to_json())
    turns = [{"role": role, "content": f"{role} a b c"} for role in ("user", "assistant")]
    rows = [json.dumps({"messages": turns * (1 + number % 3)}) for number in range(30)]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    data = DataConfig(
        kind="chat",
        source=str(tmp_path / "chats.jsonl"),
        path=str(tmp_path / "set"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        packing=False,
    )
    create_dataset_files(data, 1)
    dataset = open_data(data, 1)
    source, _ = dataset.train(64, 1)
    targets = source.read(np.arange(len(source)))["targets"]
    assert dataset.targets(64).mean == np.count_nonzero(targets != -1) / len(source) < 64
    assert "only the assistant's tokens" in unread_targets(data, 64).remark


def test_a_part_of_a_step_weighs_what_its_samples_do(tmp_path: Path) -> None:
    data = ways.config(ways.make_rows(tmp_path), "masked", path=str(tmp_path / "set"))
    ((batch,), *_) = ways.take_steps(data, ways.Way(1), 1)
    for micro in part_of(batch, keep_size=False).micro_batches:
        assert micro.weight == (micro.arrays["targets"][: micro.samples] != -1).sum()


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"inputs": np.arange(4)}, "there are no targets"),
        ({"inputs": np.arange(2), "targets": np.arange(2)}, r"inputs are int64\[2\], not integers"),
        ({"inputs": np.arange(4.0), "targets": np.arange(4)}, r"inputs are float64\[4\]"),
        (
            {"inputs": np.arange(4), "targets": np.full(4, -100)},
            "-100; tokens are 0 to 8, and -1 is",
        ),
        ({"inputs": np.arange(4) + 6, "targets": np.arange(4)}, "inputs have 9; tokens are 0 to 8"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused(sample: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TokenTargets(4, 9).check(sample)


def test_tokens_of_any_integers_are_trained_on_as_int64() -> None:
    tokens = {name: np.arange(4, dtype=np.uint16) for name in ("inputs", "targets")}
    sample = TokenTargets(4, 9).check({**tokens, "note": np.zeros(3, dtype=np.float32)})
    assert {name: str(array.dtype) for name, array in sample.items()} == {
        "inputs": "int64",
        "targets": "int64",
        "note": "float32",
    }


def test_a_transform_of_another_length_is_refused_before_anything_starts(
    steps: Callable[..., list[dict[str, Any]]],
) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)masks:short: inputs are int64\[8\].*Nothing was started"
    ):
        steps("--set", "data.transform=masks:short")


def test_a_source_with_weights_of_its_own_transforms_itself() -> None:
    numbers = np.arange(6)
    source = WeightedSource(InMemorySource({"x": numbers}), numbers)
    data = SamplesConfig(transform="feeds:masked")
    for sources in (source, {"train": source, "val": source}):
        with pytest.raises(ConfigError, match="which this source gives itself; transform in its"):
            sample_set(lambda: None, sources, (), data, 0)
