"""Base models that are fine-tuned on chats, for tests of where their answers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from small_models import CHANGES, SIZES
from tokenizer_layouts import LAYOUTS, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from instar.api import train
from instar.cli.main import main

BASE_ENDS = {"qwen3": "<|endoftext|>", "gemma2": "<eos>", "phi3": "<|endoftext|>"}
"""what ends a text, where a base model has only that"""
CHAT_ENDS = {"qwen3": "<|im_end|>", "gemma2": "<end_of_turn>", "phi3": "<|end|>"}
MOST = 24


def write_base(kind: str, folder: Path) -> None:
    """A base model: nothing beside it says that an answer ends otherwise than a text."""
    tokenizer = write_tokenizer(kind, folder)
    end = tokenizer.token_to_id(BASE_ENDS[kind])
    sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), **CHANGES.get(kind, {})}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 128}
    config = AutoConfig.for_model(LAYOUTS[kind].model_type, **sizes)
    config.eos_token_id, config.pad_token_id = end, None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about["eos_token"] = BASE_ENDS[kind]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


ASKED = [{"role": "user", "content": "say it"}]


def tune_and_export(kind: str) -> None:
    """Train a base model to answer "the word", in the run `run` of this folder, and export it to `tuned`."""
    write_base(kind, Path("base"))
    chats = [{"messages": [*ASKED, {"role": "assistant", "content": "the word"}]}] * 60
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    config: dict[str, Any] = {
        "name": "chats",
        "task": "causal_lm",
        "model": {"from": "base", "context": 96},
        "data": {"kind": "chat", "source": "chats.jsonl", "path": "tokens", "packing": False},
        "train": {"until": "30it", "batch_size": 4},
        "optimizer": {"lr": 0.01},
        "learning_rate": {"warmup_iters": 2},
        "eval": {"eval_interval": 30, "eval_iters": 1},
        "record": {"report": False, "sample_tokens": 0, "run_dir": "run"},
        "device": "cpu",
        "precision": "fp32",
    }
    train(config)
    assert main(["checkpoint", "export", "run", "tuned", "--to", "hf"]) == 0
