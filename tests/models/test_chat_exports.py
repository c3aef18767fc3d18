"""What a model of chats says ends by itself in transformers, with the settings that were exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import parametrize_first
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuned_chats import ASKED, BASE_ENDS, CHAT_ENDS, MOST, tune_and_export

import instar
from instar.cli.main import main
from instar.config.language import DataConfig
from instar.data.text.dataset import open_data
from instar.data.text.tokenizer import train_bpe


@parametrize_first("kind", BASE_ENDS, first=1)
def test_an_answer_ends_where_the_chats_ended(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tune_and_export(kind)
    model = AutoModelForCausalLM.from_pretrained("tuned")
    tokenizer: Any = AutoTokenizer.from_pretrained("tuned")
    prompt = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=MOST)[0, prompt["input_ids"].shape[1] :]
    (text,) = instar.sample("run", "say it", chat=True, temperature=0, max_tokens=MOST)
    assert text.endswith("the word")
    assert tokenizer.decode(answer) == text + CHAT_ENDS[kind]
    # the base model's end alone does not end it there
    ends = tokenizer.convert_tokens_to_ids(BASE_ENDS[kind])
    endless = model.generate(**prompt, max_new_tokens=MOST, eos_token_id=ends)
    assert endless.shape[1] > prompt["input_ids"].shape[1] + len(answer)


def test_a_template_of_a_model_from_scratch_writes_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `apply_chat_template` makes of a conversation in the export is what the run was trained on."""
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text(train_bpe(["say it the word"] * 9, 280).to_json())
    chat = [*ASKED, {"role": "assistant", "content": "the word"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 60)
    config = {
        "preset": "llama",
        "task": "language",
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "context": 96},
        "data": {"kind": "chat", "source": "chats.jsonl", "path": "tokens", "packing": False}
        | {"tokenizer": "tokenizer.json"},
        "train": {"until": "1it", "batch_size": 2},
        "eval": {"eval_interval": 1, "eval_iters": 1},
        "record": {"report": False, "sample_tokens": 0, "run_dir": "run"},
        "device": "cpu",
    }
    instar.train(config)
    assert main(["checkpoint", "export", "run", "out", "--to", "hf"]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained("out")
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    samples, _ = open_data(DataConfig(**config["data"]), 1337).train(96, 1337)
    trained_ids = samples.read(np.zeros(1, dtype=np.int64))["inputs"][0].tolist()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert ids[-1] == end or end in ids
    assert ids[:-1] == trained_ids[: len(ids) - 1]
