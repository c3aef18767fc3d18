"""What a model of chats says ends by itself in transformers, with the settings that were exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuned_chats import ASKED, BASE_ENDS, CHAT_ENDS, MOST, tune_and_export

import instar


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
