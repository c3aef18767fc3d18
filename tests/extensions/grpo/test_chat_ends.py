"""GRPO's samples of an exported model of chats end where its answers do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import parametrize_first
from tuned_chats import ASKED, BASE_ENDS, CHAT_ENDS, MOST, tune_and_export

import instar
from instar.extensions.grpo.models import (
    Sampling,
    TextEncoder,
    chat_prompt,
    load_policy,
    sample_completions,
)


@parametrize_first("kind", BASE_ENDS, first=1)
def test_samples_end_where_an_answer_of_the_run_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tune_and_export(kind)
    model, tokenizer = load_policy("tuned", "arithmetic")
    (prompt,) = TextEncoder(tokenizer)([chat_prompt(tokenizer, "tuned", ASKED)])
    sampling = Sampling(MOST, temperature=0.01)
    drawn = sample_completions(model, tokenizer.pad_token_id, [prompt], 2, sampling, seed=0)
    (text,) = instar.sample("run", "say it", chat=True, temperature=0, max_tokens=MOST)
    assert text.endswith("the word")
    assert [tokenizer.decode(ids) for ids in drawn] == [text + CHAT_ENDS[kind]] * 2
