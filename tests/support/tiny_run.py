"""A real run that ends within a second, started through `forks`, and what it left behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from forks import INSTAR, Child, Forks, children_as_ranks

from instar.checkpoint.store import load_checkpoint

STEPS = 24
TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
CONFIG = f"""\
name: tortured
model: {{n_layer: 2, n_head: 2, n_embd: 32, context: 16, dropout: 0.1}}
data: {{source: squares.txt, path: tokens, tokenizer: char}}
train: {{until: {STEPS}it, batch_size: 13, gradient_accumulation_steps: 3, ema: 0.9}}
optimizer: {{name: muon}}
learning_rate: {{warmup_iters: 5, lr_decay_iters: {STEPS}}}
eval: {{eval_interval: 7}}
checkpoint: {{on_best: false}}
record: {{log_interval: 1, sample_tokens: 4, report: false}}
"""


@dataclass(frozen=True)
class Place:
    """A working directory with text, tokens and run.yaml in it, and commands typed there."""

    path: Path
    forks: Forks

    def instar(self, *words: object, ranks: int = 1, body: str = INSTAR) -> list[Child]:
        """`instar WORDS` in children; with several ranks, each child is one of them."""
        argv = [str(word) for word in words]
        return children_as_ranks(self.forks, ranks, body, argv, place=self.path)

    def train(
        self, run_dir: Path, *overrides: str, ranks: int = 1, body: str = INSTAR
    ) -> list[Child]:
        sets = [word for text in overrides for word in ("--set", text)]
        where = ("--set", f"record.run_dir={run_dir}")
        return self.instar("train", "run.yaml", *where, *sets, ranks=ranks, body=body)

    def resume(
        self, run_dir: Path, *words: object, ranks: int = 1, body: str = INSTAR
    ) -> list[Child]:
        return self.instar("resume", run_dir, *words, ranks=ranks, body=body)


def codes(children: Sequence[Child]) -> list[int]:
    """How they ended, by rank."""
    return [child.finish() for child in children]


def output_of(children: Sequence[Child]) -> str:
    """All that they said, for a message of what went wrong."""
    return "\n".join(child.output() for child in children)


def weights(run_dir: Path, step: int = STEPS) -> dict[str, bytes]:
    """Every tensor that all ranks share, as the bytes of its files, at the end of a run."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*.safetensors")
        if file.parent.name != "rng"
    }


def events(run_dir: Path, kind: str = "") -> list[dict[str, Any]]:
    """The run's events, or those of one kind; a last line that a death tore is none."""
    path = run_dir / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if kind in ("", event["kind"])]


def course(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind without those that a resume from an earlier step has undone."""
    rows: list[dict[str, Any]] = []
    for event in events(run_dir):
        if event["kind"] == "run_started":
            rows = [earlier for earlier in rows if earlier["step"] <= event["step"]]
        elif event["kind"] == kind:
            rows.append(event)
    return rows


def fingerprint(run_dir: Path, steps: int) -> str:
    """Of all that a run leaves which must not depend on the number of ranks, nor on kills."""
    digest = xxhash.xxh3_128()
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{steps}")
    for component in ("model", "optimizer", "ema"):
        for name, tensor in sorted(checkpoint.tensors(component).items()):
            digest.update(f"{component}/{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    train = [
        (event["step"], event["loss"], event["grad_norm"]) for event in course(run_dir, "train")
    ]
    assert [step for step, *_ in train] == list(range(1, steps + 1))
    held_out = {event["step"]: event["loss"] for event in course(run_dir, "eval")}
    digest.update(json.dumps([train, sorted(held_out.items())]).encode())
    return digest.hexdigest()


def acknowledged_step(run_dir: Path) -> int:
    """The step of the last save that the run said was made; 0: none."""
    return max((int(event["step"]) for event in events(run_dir, "checkpoint")), default=0)


Way = tuple[int, tuple[str, ...]]
"""The number of ranks, and the settings beside `CONFIG`."""


def start(place: Place, run_dir: Path, way: Way) -> list[Child]:
    size, overrides = way
    return place.train(run_dir, *overrides, ranks=size)


def weights_of_undisturbed(place: Place, way: Way) -> dict[str, bytes]:
    run_dir = place.path / "whole"
    ranks = start(place, run_dir, way)
    assert set(codes(ranks)) == {0}, output_of(ranks)
    tensors = weights(run_dir)
    assert {re.split("[./]", name)[0] for name in tensors} == {"model", "optimizer", "ema"}
    shutil.rmtree(run_dir)
    return tensors


def go_on(place: Place, run_dir: Path, way: Way) -> list[Child]:
    """Resume; a run of which nothing was saved yet is started again."""
    if acknowledged_step(run_dir):
        return place.resume(run_dir, ranks=way[0])
    shutil.rmtree(run_dir, ignore_errors=True)
    return start(place, run_dir, way)
