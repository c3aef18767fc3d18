"""Folders of small models of transformers with a tokenizer, as a person downloads them."""

from __future__ import annotations

from pathlib import Path

import torch
from small_models import CHANGES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from instar.data.text.tokenizer import train_bpe

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
CONFIG = """\
name: tuned
task: causal_lm
model: {from: model, context: 16}
data: {source: squares.txt, path: tokens}
train: {until: 40it, batch_size: 4}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 20, eval_iters: 2}
record: {log_interval: 1, sample_tokens: 0, report: false}
checkpoint: {every_steps: 5, keep_last: 9, on_best: false}
device: cpu
precision: fp32
"""


def write_model(kind: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A model of a family with random weights, its tokenizer and the files beside it."""
    tokenizer = train_bpe([TEXT], 280)
    sizes = {} if kind == "gpt2" else SIZES
    sizes = {**sizes, "vocab_size": 288, **CHANGES.get(kind, {})}
    config = AutoConfig.for_model(kind, **sizes)
    config.bos_token_id = config.eos_token_id = tokenizer.end_id
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    )
    return model


def write_place(kind: str, place: Path) -> Path:
    """A folder with a model, a text and a config."""
    write_model(kind, place / "model")
    (place / "squares.txt").write_text(TEXT)
    (place / "run.yaml").write_text(CONFIG)
    return place
