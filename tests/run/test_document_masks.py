"""Runs with `data.document_masks`: evaluations are those of documents alone, on any ranks, of texts and of chats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import science
import tiny_run
import torch
from cases import parametrize_first
from pretrained import write_place
from torch import nn

import instar
from instar.data.source import IGNORED, Source
from instar.data.text.tokenizer import train_bpe
from instar.run.load_config import load_run_config
from instar.run.start.preflight import preflight

DOCUMENTS = [f"{n} squared is {n * n}" + ", and so on" * (n % 4) for n in range(400)]
CONFIG = """\
name: masked
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 48}
data: {source: squares.jsonl, path: tokens, tokenizer: bpe.json, document_masks: true}
train: {until: 4it, batch_size: 3, gradient_accumulation_steps: 3}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 2}
record: {log_interval: 1, sample_tokens: 0, report: false}
"""


def gpt(folder: Path) -> tiny_run.Place:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (folder / "squares.jsonl").write_text(lines)
    (folder / "bpe.json").write_text(train_bpe(DOCUMENTS, 300).to_json())
    (folder / "run.yaml").write_text(CONFIG)
    return tiny_run.Place(folder, science.forks())


CHAT = """\
name: chats
task: causal_lm
model: {from: model, context: 32}
data:
  kind: chat
  source: chats.jsonl
  path: tokens
  chat_template: plain.jinja
  document_masks: true
train: {until: 4it, batch_size: 3, gradient_accumulation_steps: 3}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 2}
record: {log_interval: 1, sample_tokens: 0, report: false}
device: cpu
precision: fp32
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][:1] + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
)


def chats(folder: Path) -> tiny_run.Place:
    write_place("llama", folder)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n * n}" + "!" * (n % 3)},
            ]
        }
        for n in range(300)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plain.jinja").write_text(TEMPLATE)
    (folder / "run.yaml").write_text(CHAT)
    return tiny_run.Place(folder, science.forks())


def pieces(source: Source) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the inputs and targets of every document of every sample, which begins where positions do."""
    columns = source.read(np.arange(len(source)))
    for inputs, targets, positions in zip(
        columns["inputs"], columns["targets"], columns["positions"], strict=True
    ):
        edges = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        for begin, end in pairwise(edges):
            part = slice(begin, end)
            yield torch.from_numpy(inputs[None, part]), torch.from_numpy(targets[None, part])


@torch.no_grad()
def loss_alone(model: nn.Module, source: Source) -> tuple[float, int]:
    """The mean loss of documents that are computed one by one, and the number of them."""
    sums, targets, count = [], 0, 0
    for inputs, expected in pieces(source):
        if number := int((expected != IGNORED).sum()):
            sums.append(model(inputs, expected).item())
            targets, count = targets + number, count + 1
    return math.fsum(sums) / targets, count


@parametrize_first("kind", ["gpt", "chats"], first=1)
def test_a_run_evaluates_documents_alone_on_any_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = gpt(tmp_path) if kind == "gpt" else chats(tmp_path)
    monkeypatch.chdir(tmp_path)
    curves = []
    for ranks in (1, 2):
        run = tmp_path / f"run-{ranks}"
        children = place.train(run, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
        events = [*tiny_run.events(run, "train"), *tiny_run.events(run, "eval")]
        curves.append([event["loss"] for event in events])
        prepared_run = preflight(load_run_config("run.yaml"), 1)
        source = prepared_run.spec.task(prepared_run.config).held_out("val")
        loss, documents = loss_alone(instar.load_model(run, "cpu"), source)
        assert documents > 1.3 * len(source), "samples hold several documents"
        assert tiny_run.events(run, "eval")[-1]["loss"] == pytest.approx(loss, rel=1e-6)
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[0][-1] < curves[0][-2], "it learns"


WAYS = {
    "fsdp": ("parallel.strategy=fsdp",),
    "dispatched": ("data.strategy=dispatched",),
    "workers": ("data.workers=1",),
    "growth": (
        "schedule=[{name: widen_mlp, value: x2, when: {at_step: 1}}, "
        "{name: insert_layers, value: 1, when: {at_step: 2}}]",
    ),
    "bf16": ("precision=bf16",),
}


@parametrize_first("way", [*WAYS], first=1)
def test_masks_hold_however_ranks_share_the_work(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks are one process, and the last evaluation is that of documents alone."""
    place = gpt(tmp_path)
    monkeypatch.chdir(tmp_path)
    shared = () if way in ("fsdp", "dispatched", "workers") else WAYS[way]
    curves = []
    for ranks, keys in ((1, shared), (2, WAYS[way])):
        run = tmp_path / f"run-{ranks}"
        children = place.train(run, *keys, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
        curves.append([event["loss"] for event in tiny_run.events(run, "train")])
    tolerance = 1e-2 if way == "bf16" else 1e-5
    assert curves[1] == pytest.approx(curves[0], rel=tolerance)
    prepared_run = preflight(load_run_config("run.yaml"), 1)
    source = prepared_run.spec.task(prepared_run.config).held_out("val")
    loss, _ = loss_alone(instar.load_model(tmp_path / "run-2", "cpu"), source)
    assert tiny_run.events(tmp_path / "run-2", "eval")[-1]["loss"] == pytest.approx(
        loss, rel=tolerance
    )
