"""What a model of chats says ends by itself in transformers, with the settings that were exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import shortened
from small_models import CHANGES, SIZES
from tokenizer_layouts import LAYOUTS, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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


@shortened("kind", BASE_ENDS, first=1)
def test_an_answer_ends_where_the_chats_ended(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base(kind, tmp_path / "base")
    asked = [{"role": "user", "content": "say it"}]
    chats = [{"messages": [*asked, {"role": "assistant", "content": "the word"}]}] * 60
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    config = {
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
    model = AutoModelForCausalLM.from_pretrained("tuned")
    tokenizer: Any = AutoTokenizer.from_pretrained("tuned")
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=MOST)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).endswith(f"the word{CHAT_ENDS[kind]}")
    # the base model's end alone does not end it there
    ends = tokenizer.convert_tokens_to_ids(BASE_ENDS[kind])
    endless = model.generate(**prompt, max_new_tokens=MOST, eos_token_id=ends)
    assert endless.shape[1] > prompt["input_ids"].shape[1] + len(answer)
