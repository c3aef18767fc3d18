"""Models of which each rank holds some rows grow in every way as whole ones do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import figures
import pytest
import torch
from forks import INSTAR, Forks
from tiny_run import Place, codes, events, output_of
from torch import Tensor

from instar.checkpoint.store import load_checkpoint

BAR = 1e-5
GROWN_AT = 3
STEPS = 6
GROWTH = [
    ("insert_layers", 1, {"where": "even"}),
    ("widen_mlp", 192, {"how": "split"}),
    ("widen_hidden", 48, {}),
    ("grow_head_dim", 20, {}),
    ("resize_vocab", 64, {}),
    ("extend_context", 24, {}),
    ("set_lora_rank", {"target": "attn", "rank": 3}, {}),
    ("change_lora_rank", {"target": "attn", "factor": 2}, {}),
    ("merge_lora", None, {}),
    ("insert_layers", 1, {"from": "average", "where": [1]}),
    ("stack_layers", 2, {}),
    ("add_heads", 4, {"mask": 2}),
]
SCHEDULE = [
    {"name": name, "value": value, **options, "when": {"at_step": GROWN_AT}}
    for name, value, options in GROWTH
]
SETTINGS = (
    "model.n_layer=1",
    "optimizer.name=adamw",
    "optimizer.eps=1e-6",  # by default, gradients that are only rounding make steps of their own size
    "precision=fp32",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    f"checkpoint.every_steps={GROWN_AT}",
    "checkpoint.keep_last=9",
)
GROWS = f"schedule={json.dumps(SCHEDULE)}"
ELASTIC = "reproducible=elastic"
FSDP = ("parallel.strategy=fsdp",)
HSDP = ("parallel.strategy=hsdp", "parallel.fsdp.shards=2")


def train_run(place: Place, name: str, *keys: str, ranks: int) -> Path:
    run_dir = place.path / name
    body = "collectives:train" if ranks > 1 else INSTAR
    children = place.train(run_dir, *SETTINGS, *keys, ranks=ranks, body=body)
    assert set(codes(children)) == {0}, output_of(children)
    return run_dir


def tensors(run_dir: Path, step: int) -> Iterator[tuple[str, Tensor]]:
    """The weights, moments and average of a checkpoint."""
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{step}")
    for component in ("model", "optimizer", "ema"):
        for name, tensor in sorted(checkpoint.tensors(component).items()):
            yield f"{component}/{name}", tensor


def same(run_dir: Path, other: Path, step: int) -> bool:
    return all(
        a == b and torch.equal(x, y)
        for (a, x), (b, y) in zip(tensors(run_dir, step), tensors(other, step), strict=True)
    )


def differences(run_dir: Path, other: Path, step: int) -> Iterator[float]:
    """The largest of a component's elements, and of all its elements relative to their norm.

    Not relative to each tensor: AdamW makes steps of the learning rate of gradients that are only
    rounding, such as those of the keys' biases, which softmax ignores.
    """
    pairs = list(zip(tensors(run_dir, step), tensors(other, step), strict=True))
    assert all(a == b for (a, _), (b, _) in pairs)
    for component in ("model", "optimizer", "ema"):
        of = [(x, y) for (name, x), (_, y) in pairs if name.startswith(f"{component}/")]
        a, b = (
            torch.cat([t.double().flatten() for t in tensors_of_run])
            for tensors_of_run in zip(*of, strict=True)
        )
        yield (a - b).abs().max().item()
        yield ((a - b).norm() / a.norm()).item()


@pytest.fixture(scope="module")
def fsdp_run(data_dir: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose shards grow in every way."""
    path = tmp_path_factory.mktemp("sharded")
    shutil.copytree(data_dir, path, dirs_exist_ok=True)
    return train_run(Place(path, forks), "run", GROWS, *FSDP, ranks=2)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_every_kind_of_growth_is_that_of_whole_models(place: Place, fsdp_run: Path) -> None:
    """Up to rounding where `reproducible` is fixed; bit for bit where it is elastic."""
    ddp_run = train_run(place, "whole", GROWS, ranks=2)
    operations = events(fsdp_run, "operation")
    assert [operation["name"] for operation in operations] == [name for name, _, _ in GROWTH] + [
        "fold_masks"
    ]
    exact = [operation for operation in operations if operation["preserves"] == "exact"]
    assert len(exact) == len(operations) - 3, (
        "a larger vocabulary, means and copies of blocks are not"
    )
    # few operations, but more runs, are compared in tests/run/test_sharded.py
    ways = [((), 1), (FSDP, 2), (FSDP, 4), (HSDP, 4)][: figures.times(0, 4)]
    elastic = [
        train_run(place, f"{n}", GROWS, ELASTIC, *w, ranks=r) for n, (w, r) in enumerate(ways)
    ]
    figures.write(
        "sharded-growth",
        [
            figures.at_most(
                f"{len(GROWTH)} kinds of growth, FSDP against DDP: weights, moments, average",
                list(differences(ddp_run, fsdp_run, STEPS)),
                "difference",
                BAR,
            ),
            figures.at_most(
                "outputs before and after exact operations on shards",
                [operation["proof"]["max_logit_diff_relative"] for operation in exact],
                "relative",
                BAR,
            ),
            figures.none_of(
                len(ways),
                "elastic runs that grow on one rank or on shards: other bits",
                [operation.name for operation in elastic if not same(elastic[0], operation, STEPS)],
            ),
        ],
    )


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_checkpoint_of_shards_grows_on_disk_to_the_same_bits(
    place: Place, fsdp_run: Path
) -> None:
    before = train_run(place, "before", *FSDP, f"train.until=[{GROWN_AT}it]", ranks=2)
    operations: list[object] = []
    for name, value, options in GROWTH:
        words = [f"{key}={json.dumps(option)}" for key, option in options.items()]
        operations += ["--op", " ".join([f"{name}={json.dumps(value)}", *words])]
    (child,) = place.instar("grow", before, place.path / "disk", *operations)
    assert child.finish() == 0, child.output()
    assert same(fsdp_run, place.path / "disk", GROWN_AT)
