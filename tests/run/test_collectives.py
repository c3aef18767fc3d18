"""What ranks send each other in an ordinary step, by strategy and by the way samples reach them.

Counted in torch's traces of real ranks, whose numbers are exact on any machine.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from cases import parametrize_first
from forks import Forks
from tiny_run import codes, output_of
from traced import WAIT

STEPS = 3
KEYS = (
    *("optimizer.name=adamw", "train.until=[16it]", "train.batch_size=4", "train.ema=null"),
    "train.gradient_accumulation_steps=2",
    *("eval.eval_interval=1000", "record.sample_tokens=0", "checkpoint.on_best=false"),
    # a line of the log adds the losses of all ranks, which is one message more
    "record.log_interval=16",
)
FLAGS = 6
"""float64 numbers of a rank: how many ranks stop, how many failed, a save request, a cancelled wait, whether
people ask for operations, and the weight of its samples"""
KINDS = ("all_gather", "all_reduce")
_SIZES = {"float": 4, "double": 8, "unsigned char": 1, "c10::BFloat16": 2}


@dataclass(frozen=True)
class Sent:
    """An operation of the process group in a trace."""

    kind: str
    begin: float
    numel: int
    size: int
    """bytes"""


@pytest.fixture
def place(tmp_path: Path, forks: Forks) -> tiny_run.Place:
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    return tiny_run.Place(tmp_path, forks)


def trace_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    path = run_dir / "profile" / f"rank_{rank}.json.gz"
    trace: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return trace


def messages_of(trace: list[dict[str, Any]]) -> list[Sent]:
    """In the order in which they began."""
    messages = []
    for event in trace:
        if event.get("name", "").startswith("gloo:"):
            shape, kind = event["args"]["Input Dims"][0], event["args"]["Input type"][0]
            numel = math.prod(shape)
            name = event["name"].removeprefix("gloo:")
            messages.append(Sent(name, event["ts"], numel, numel * _SIZES[kind]))
    return sorted(messages, key=lambda message: message.begin)


def traces_of(place: tiny_run.Place, *keys: str, name: str = "run") -> list[list[dict[str, Any]]]:
    """The traces of both ranks."""
    run_dir = place.path / name
    sets = [word for text in (*KEYS, *keys) for word in ("--set", text)]
    words = ("train", "run.yaml", "--profile", f"{STEPS}it", "--set", f"record.run_dir={run_dir}")
    children = place.instar(*words, *sets, ranks=2, body="traced:with_shapes")
    assert codes(children) == [0, 0], output_of(children)
    return [trace_of(run_dir, rank) for rank in range(2)]


@parametrize_first(
    "keys", [(), ("data.strategy=dispatched",)], first=1, ids=["sharded", "dispatched"]
)
@parametrize_first("micro_batches", [3, 1], first=1)
def test_ddp_sends_the_flags_and_the_gradients_once(
    place: tiny_run.Place, keys: tuple[str, ...], micro_batches: int
) -> None:
    keys = (*keys, f"train.gradient_accumulation_steps={2 * micro_batches}")
    for trace in traces_of(place, *keys):
        # rank 0 may send samples of several steps at once, whenever it has read them
        messages = [
            message for message in messages_of(trace) if message.kind not in ("send", "recv")
        ]
        assert Counter(message.kind for message in messages) == {
            "all_gather": STEPS,
            "all_reduce": STEPS,
        }
        sizes = {
            kind: {message.size for message in messages if message.kind == kind} for kind in KINDS
        }
        assert sizes["all_gather"] == {8 * FLAGS}
        assert len(sizes["all_reduce"]) == 1


@pytest.mark.torture
def test_gradients_travel_in_half_as_many_bytes(place: tiny_run.Place) -> None:
    sizes = []
    for exchange in ("float32", "bfloat16"):
        traces = traces_of(place, f"parallel.ddp.exchange={exchange}", name=exchange)
        of_ranks = [{s.size for s in messages_of(t) if s.kind == "all_reduce"} for t in traces]
        assert of_ranks[0] == of_ranks[1]
        sizes.append(*of_ranks[0])
    assert sizes[0] == 2 * sizes[1]
    losses = [
        [event["loss"] for event in tiny_run.events(place.path / name, "train")]
        for name in ("float32", "bfloat16")
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.torture
def test_flags_travel_while_the_model_computes(place: tiny_run.Place) -> None:
    """They are sent before the first forward pass of a step, and nobody waits for them before its last
    backward pass, so that only the exchange of the gradients takes time of its own."""
    keys = ("train.gradient_accumulation_steps=6",)
    for trace in traces_of(place, *keys):
        gathers, reductions = (
            sorted(e["ts"] for e in trace if e.get("name") == name)
            for name in ("c10d::allgather_", "c10d::allreduce_")
        )
        assert len(gathers) == len(reductions) == STEPS
        waits = sorted(e["ts"] for e in trace if e.get("name") == WAIT)
        forward = [e["ts"] for e in trace if e.get("name") == "aten::embedding"]
        backward = [e["ts"] for e in trace if "EmbeddingBackward" in e.get("name", "")]
        assert len(waits) == STEPS
        for flags, gradients, wait in zip(gathers, reductions, waits, strict=True):
            passes = [at for at in forward if flags < at < gradients]
            assert len(passes) == 3
            assert max(passes) < wait < gradients
            # the backward pass of all micro-batches but the last
            backward_passes = {at for at in backward if flags < at < wait}
            assert backward_passes


@parametrize_first(
    ("keys", "expected"),
    [
        # weights of the root and of two blocks, the blocks' again backward; norms; gradients of three
        (("parallel.strategy=fsdp",), {"all_gather": 7, "all_to_all": 3}),
        (
            ("parallel.strategy=fsdp", "parallel.fsdp.reshard_after_forward=false"),
            {"all_gather": 5, "all_to_all": 3},
        ),
        # the tree of four slices: a half of the gradients to either side, and the sums back
        (("reproducible=elastic",), {"all_gather": 1, "send": 2, "recv": 2}),
    ],
    first=1,
    ids=["fsdp", "kept whole", "elastic"],
)
def test_other_strategies_send_as_often_as_their_pages_say(
    place: tiny_run.Place, keys: tuple[str, ...], expected: dict[str, int]
) -> None:
    for trace in traces_of(place, *keys):
        counts = Counter(message.kind for message in messages_of(trace))
        assert counts == {kind: STEPS * number for kind, number in expected.items()}


@pytest.mark.torture
def test_local_steps_send_nothing_before_their_round_ends(place: tiny_run.Place) -> None:
    """Steps 7 to 9 of rounds of 3: flags, counts, and the mean of weights and states in two messages."""
    keys = ("parallel.strategy=diloco", "parallel.diloco.sync_every=3")
    for trace in traces_of(place, *keys):
        counts = Counter(message.kind for message in messages_of(trace))
        assert counts == {"all_gather": 3, "all_to_all": 1}


@pytest.mark.torture
def test_rounded_gradients_that_are_not_finite_are_skipped_by_all_and_a_resumed_run_is_the_same(
    place: tiny_run.Place,
) -> None:
    keys = ("parallel.ddp.exchange=bfloat16",)
    full_run, parts = place.path / "whole", place.path / "parts"
    body = "failures:last_rank_has_nan_once"
    children = place.train(full_run, *keys, ranks=2, body=body)
    assert codes(children) == [0, 0], output_of(children)
    assert [event["step"] for event in tiny_run.events(full_run, "skip")] == [8]
    children = place.train(parts, *keys, "train.until=[12it]", ranks=2, body=body)
    assert codes(children) == [0, 0], output_of(children)
    until = ("--set", f"train.until=[{tiny_run.STEPS}it]")
    children = place.resume(parts, *until, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    assert tiny_run.weights(parts) == tiny_run.weights(full_run)
