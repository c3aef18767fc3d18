"""Every kind of state that a module may have goes through a run as its parameters do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pytest
import states
import torch
from forks import Forks
from safetensors.torch import load_file
from states import STEPS
from tiny_run import Place, codes, events, output_of, weights

from instar.data.split import divide_samples

SEED = 1337
GROWTH = [{"name": "widen", "value": {"axis": "hidden", "size": 9}, "when": {"at_step": 5}}]


@pytest.fixture
def place(forks: Forks, tmp_path: Path) -> Place:
    (tmp_path / "run.yaml").write_text(states.CONFIG)
    return Place(tmp_path, forks)


def full_run(place: Place, kind: str, *settings: str, ranks: int = 1) -> dict[str, Any]:
    run_dir = place.path / "whole"
    children = place.train(run_dir, f"model.kind={kind}", *settings, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    return take_results(run_dir)


def interrupted_run(
    place: Place, kind: str, *settings: str, ranks: int = 1, at: int = 7
) -> dict[str, Any]:
    run_dir = place.path / "parts"
    settings = (f"model.kind={kind}", *settings, f"train.until=[{at}it]", "test.at_end=false")
    children = place.train(run_dir, *settings, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    words = ("--until", f"{STEPS}it", "--set", "test.at_end=true")
    children = place.resume(run_dir, *words, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    return take_results(run_dir)


def take_results(run_dir: Path) -> dict[str, Any]:
    """What must not depend on how the run got there; the folder is removed."""
    test = json.loads((run_dir / "test" / "result.json").read_text("utf-8"))
    results = {
        "weights": weights(run_dir, STEPS),
        "curve": {event["step"]: event["loss"] for event in events(run_dir, "train")},
        "held out": {e["step"]: e["loss"] for e in events(run_dir, "eval") if e["step"] % 4 == 0},
        "test": test["metrics"]["loss"]["value"],
    }
    shutil.rmtree(run_dir)
    return results


def is_resumed_exactly(place: Place, kind: str) -> bool:
    return interrupted_run(place, kind) == full_run(place, kind)


def is_resumed_exactly_on_two_ranks(place: Place, kind: str) -> bool:
    # or rank 1 reads buffers of its own until the next evaluation
    broadcast = "parallel.ddp.broadcast_buffers=true"
    return interrupted_run(place, kind, broadcast, ranks=2) == full_run(
        place, kind, broadcast, ranks=2
    )


def is_resumed_exactly_under_muon(place: Place, kind: str) -> bool:
    muon = "optimizer.name=muon"
    return interrupted_run(place, kind, muon) == full_run(place, kind, muon)


def is_resumed_exactly_under_sgd(place: Place, kind: str) -> bool:
    sgd = "optimizer.name=sgd"
    return interrupted_run(place, kind, sgd) == full_run(place, kind, sgd)


def is_resumed_exactly_on_shards_or_refused(place: Place, kind: str) -> bool:
    """By the name of the parameter that torch does not shard, before anything is made."""
    # elastic, or rank 1 reads buffers of its own
    shards = ("parallel.strategy=fsdp", "optimizer.name=muon", "reproducible=elastic")
    if (refusal := NOT_SHARDED.get(kind)) is None:
        return interrupted_run(place, kind, *shards, ranks=2) == full_run(
            place, kind, *shards, ranks=2
        )
    children = place.train(place.path / "whole", f"model.kind={kind}", *shards, ranks=2)
    return (
        codes(children) == [2, 2]
        and refusal in output_of(children)
        and not (place.path / "whole").exists()
    )


def trains_as_if_it_were_contiguous(place: Place, kind: str) -> bool:
    """However its parameters lie in memory, also in elastic runs, and grown."""
    return all(
        full_run(place, kind, *how)["curve"]
        == pytest.approx(full_run(place, "contiguous", *how)["curve"], rel=1e-4)
        for how in ((), ("reproducible=elastic",), (f"schedule={json.dumps(GROWTH)}",))
    )


def is_the_same_on_any_number_of_ranks(place: Place, kind: str) -> bool:
    """In elastic; test at W = 1 of a run at W = 2, and the other way round."""
    elastic = "reproducible=elastic"
    results_by_ranks = [full_run(place, kind, elastic, ranks=ranks) for ranks in (1, 2)]
    return results_by_ranks[0] == results_by_ranks[1]


def is_tested_as_plain_torch_does(place: Place, kind: str) -> bool:
    """The weights' moving average beside the buffers of the checkpoint."""
    results = full_run(place, kind)
    task = states.States(states.Model(kind=kind), states.SamplesConfig(), SEED)
    torch.manual_seed(SEED)
    model = task.module(task.shape())
    for name, content in results["weights"].items():
        (place.path / name).write_bytes(content)
    state = {**load_file(place.path / "model.safetensors")}
    state |= load_file(place.path / "ema.safetensors")
    for name, tensor in state.items():
        if "first" in name:
            model.middle.first = tensor  # torch loads nothing into None
    mismatch = model.load_state_dict(state, strict=False)
    assert not mismatch.unexpected_keys
    assert all(name in ("middle.b.weight",) for name in mismatch.missing_keys)
    columns = {name: torch.from_numpy(np.asarray(c)) for name, c in task.samples().items()}
    numbers = divide_samples(75, val=13, test=14, seed=SEED)["test"]
    batch = {name: column[torch.from_numpy(numbers)] for name, column in columns.items()}
    with torch.no_grad():
        expected = task.loss(model.eval(), batch).mean().item()
    return bool(
        results["test"] == pytest.approx(expected, rel=2e-2 if kind == "bfloat16" else 1e-5)
    )


def grows_alike(place: Place, kind: str, *settings: str, ranks: int = 1) -> bool:
    """Widened by an operation whose label is proved, with resumes before and after it."""
    settings = (f"schedule={json.dumps(GROWTH)}", *settings)
    expected = full_run(place, kind, *settings, ranks=ranks)
    return all(
        interrupted_run(place, kind, *settings, ranks=ranks, at=at) == expected
        for at in (7, 3)[: figures.times(1, 2)]
    )


def grows_alike_on_two_ranks(place: Place, kind: str) -> bool:
    return grows_alike(place, kind, "parallel.ddp.broadcast_buffers=true", ranks=2)


def grows_alike_on_shards(place: Place, kind: str) -> bool:
    return grows_alike(place, kind, "parallel.strategy=fsdp", "reproducible=elastic", ranks=2)


def grows_alike_under(name: str) -> Callable[[Place, str], bool]:
    return lambda place, kind: grows_alike(place, kind, f"optimizer.name={name}")


WAYS: dict[str, Callable[[Place, str], bool]] = {
    "resumed": is_resumed_exactly,
    "resumed, W = 2": is_resumed_exactly_on_two_ranks,
    "elastic, W = 1 and 2": is_the_same_on_any_number_of_ranks,
    "muon": is_resumed_exactly_under_muon,
    "sgd": is_resumed_exactly_under_sgd,
    "shards, W = 2": is_resumed_exactly_on_shards_or_refused,
    "as contiguous": trains_as_if_it_were_contiguous,
    "final test": is_tested_as_plain_torch_does,
    "growth": grows_alike,
    "growth, W = 2": grows_alike_on_two_ranks,
    "growth on shards": grows_alike_on_shards,
    "growth, muon": grows_alike_under("muon"),
    "growth, sgd": grows_alike_under("sgd"),
}
NOT_SHARDED = {
    "mixed": "and sharded models gather them together, as one type",
    "channels last": "blocks.0.conv.weight is not contiguous",
    "transposed": "up.weight is not contiguous",
    "with gaps": "up.weight is not contiguous",
    "alternating": "scale is a single number",
    "empty": "the parameter odd is empty",
    "a number": "odd is a single number",
}
TRIALS = [
    (kind, way)
    for kind in states.KINDS
    for way in WAYS
    if not (way.startswith("growth") and kind not in states.GROWING)
    and not (way == "growth on shards" and kind in NOT_SHARDED)
    and not (way == "as contiguous" and kind not in states.LAYOUTS)
    # plain torch draws for all samples at once, and loads nothing into an expanded tensor
    and not (way == "final test" and kind in ("noise", "view as buffer"))
]
SHORT = [
    ("batch norm", "resumed, W = 2"),
    ("noise", "elastic, W = 1 and 2"),
    ("frozen", "growth"),
    ("channels last", "resumed, W = 2"),
    ("transposed", "muon"),
    ("transposed", "as contiguous"),
    ("empty", "shards, W = 2"),
]


@pytest.mark.timeout(7200)
def test_every_kind_of_state_is_part_of_the_model(place: Place) -> None:
    trials = TRIALS if figures.FULL else SHORT
    differing = []
    for kind, way in trials:
        try:
            if not WAYS[way](place, kind):
                differing.append(f"{kind}, {way}: other numbers")
        except AssertionError as error:
            differing.append(f"{kind}, {way}: {error}")
            for name in ("whole", "parts"):
                shutil.rmtree(place.path / name, ignore_errors=True)
    figures.write(
        "module-state",
        [figures.none_of(len(trials), "kinds of state × ways of a run: other numbers", differing)],
    )


@pytest.mark.parametrize("kind", states.REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_made(
    place: Place, kind: str
) -> None:
    children = place.train(place.path / "run", f"model.kind={kind}")
    assert codes(children) == [2], output_of(children)
    assert states.REFUSED[kind][1] in output_of(children)
    assert not (place.path / "run").exists()
