"""Checkpoints of any strategy are loaded by any other, bit for bit."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import figures
import pytest
import xxhash
from forks import INSTAR
from tiny_run import Place, codes, events, output_of

from instar.checkpoint.listing import list_checkpoints
from instar.checkpoint.store import load_checkpoint

KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "one process": (("parallel.strategy=ddp", "parallel.fsdp.shards=null"), 1),
    "DDP 2": (("parallel.strategy=ddp", "parallel.fsdp.shards=null"), 2),
    "FSDP 4": (("parallel.strategy=fsdp", "parallel.fsdp.shards=null"), 4),
    "HSDP 2 × 2": (("parallel.strategy=hsdp", "parallel.fsdp.shards=2"), 4),
    "FSDP 2": (("parallel.strategy=fsdp", "parallel.fsdp.shards=null"), 2),
}
ELASTIC = (
    "reproducible=elastic",
    "optimizer.name=adamw",
    "train.batch_size=3",
    "train.gradient_accumulation_steps=9",
    "learning_rate.lr_decay_iters=40",
    "checkpoint.keep_last=2",
)


def turns() -> list[str]:
    """The kinds in an order in which each pair of neighbours, also of the same kind, is there once."""
    names = list(KINDS)
    cycle = [
        name
        for index, first in enumerate(names)
        for name in (first, *(x for second in names[index + 1 :] for x in (first, second)))
    ]
    # the last pairs are of several ranks each, and among the first: they are the short form
    cycle = cycle[-9:] + cycle[:-9]
    return [*cycle, cycle[0]][: 1 + figures.times(2, len(cycle))]


@pytest.mark.timeout(7200)
def test_any_strategy_loads_what_any_other_has_saved(place: Place) -> None:
    """One run, of which each makes a step: it saves what it has loaded, and trains on the next samples."""
    order = turns()
    run_dir = place.path / "run"
    keys, ranks = KINDS[order[0]]
    children = place.train(run_dir, *ELASTIC, *keys, "train.until=[1it]", ranks=ranks)
    assert set(codes(children)) == {0}, output_of(children)
    differing = []
    for step, (before, name) in enumerate(pairwise(order), start=1):
        keys, ranks = KINDS[name]
        words = [word for key in keys for word in ("--set", key)]
        digests_before = digests(list_checkpoints(run_dir)[-1])
        body = "failures:saves_what_it_loaded"
        resumed_children = place.resume(
            run_dir, "--until", f"{step + 1}it", *words, ranks=ranks, body=body
        )
        assert set(codes(resumed_children)) == {0}, output_of(resumed_children)
        step_checkpoints = [
            path for path in list_checkpoints(run_dir) if path.name.startswith(f"step-{step}")
        ]
        if digests(step_checkpoints[-1]) != digests_before:
            differing.append(f"{before} → {name}")
    steps = len(order)
    one_process_run = place.path / "alone"
    keys, ranks = KINDS["one process"]
    children = place.train(
        one_process_run, *ELASTIC, *keys, f"train.until=[{steps}it]", body=INSTAR
    )
    assert set(codes(children)) == {0}, output_of(children)
    ends = {digests(list_checkpoints(folder)[-1]) for folder in (run_dir, one_process_run)}
    losses = [
        [event["loss"] for event in events(folder, "train")]
        for folder in (run_dir, one_process_run)
    ]
    figures.write(
        "shard-matrix",
        [
            figures.none_of(
                steps - 1, "a checkpoint loaded by another strategy: other bits", differing
            ),
            figures.none_of(1, "runs of all of them: other weights at the end", [*ends][1:]),
            figures.none_of(
                steps,
                "steps of them: another loss than one process",
                [pair for pair in zip(*losses, strict=True) if pair[0] != pair[1]],
            ),
        ],
    )
    shutil.rmtree(run_dir)


def digests(path: Path) -> str:
    """Of every tensor of model, optimizer and average, and of the place in the data."""
    checkpoint = load_checkpoint(path)
    digest = xxhash.xxh3_128(str(checkpoint.state["progress"]["samples"]).encode())
    for component in ("model", "optimizer", "ema"):
        for name, tensor in sorted(checkpoint.tensors(component).items()):
            digest.update(f"{component} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
