"""Models and tokenizers of folders, as exports leave them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases import parametrize_first
from pretrained import write_model
from tokenizer_layouts import write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from instar.config.errors import ConfigError
from instar.extensions.grpo.models import (
    Sampling,
    TextEncoder,
    chat_prompt,
    end_ids,
    load_policy,
    sample_completions,
)
from instar.extensions.grpo.serve import ModelService


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model("llama", tmp_path / "model")
    return tmp_path / "model"


def say_end(folder: Path, *, tokenizer: str | None, ids: object) -> None:
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    about |= {} if tokenizer is None else {"eos_token": tokenizer}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({**content, "eos_token_id": ids, "pad_token_id": None})
        )


@pytest.mark.parametrize(("tokenizer", "ids"), [("<|end|>", None), (None, 0), (None, [0, 5])])
def test_the_end_that_only_one_of_them_has_is_that_of_both(
    folder: Path, tokenizer: str | None, ids: Any
) -> None:
    say_end(folder, tokenizer=tokenizer, ids=ids)
    model, loaded_tokenizer = load_policy(str(folder), "arithmetic")
    assert loaded_tokenizer.eos_token_id == loaded_tokenizer.pad_token_id == 0
    assert end_ids(model) == (ids if isinstance(ids, list) else [0])
    (completion,) = sample_completions(
        model, loaded_tokenizer.pad_token_id, [[5, 6, 7]], 1, Sampling(4), seed=0
    )
    assert 1 <= len(completion) <= 4


def test_what_a_model_says_of_generation_changes_no_sample(folder: Path) -> None:
    say_end(folder, tokenizer="<|end|>", ids=0)
    model, tokenizer = load_policy(str(folder), "arithmetic")
    prompts, samples = [[5, 6, 7], [5, 6]], []
    for sampling in (Sampling(24), Sampling(24, temperature=0.2, top_p=0.9)):
        for settings in (
            {},
            {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1},
            {"min_p": 0.5, "typical_p": 0.1, "num_beams": 2, "min_new_tokens": 20, "top_k": 1},
            {"suppress_tokens": [*range(1, 200)], "temperature": 9.0, "forced_eos_token_id": 250},
        ):
            own_config = GenerationConfig(eos_token_id=0, **settings)
            model.generation_config = own_config
            pad_id = tokenizer.pad_token_id
            samples.append(sample_completions(model, pad_id, prompts, 3, sampling, seed=0))
            assert model.generation_config is own_config
    assert samples == [samples[0]] * 4 + [samples[4]] * 4
    assert samples[0] != samples[4]


def test_a_model_without_an_end_is_refused_by_name(folder: Path) -> None:
    say_end(folder, tokenizer=None, ids=None)
    message = f"{re.escape(str(folder))} has no token that ends a text"
    with pytest.raises(ConfigError, match=message):
        load_policy(str(folder), "arithmetic")


@parametrize_first("kind", ["qwen3", "gemma2", "llama", "llama2"], first=1)
def test_texts_and_chats_become_what_transformers_makes_of_them(kind: str, tmp_path: Path) -> None:
    write_tokenizer(kind, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the words", "", "  naïve 再见 ✓\n", str(tokenizer.eos_token)]
    assert TextEncoder(tokenizer)(texts) == tokenizer(texts)["input_ids"]
    messages = [{"role": "user", "content": "2?"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat_prompt(tokenizer, "name", messages) == expected
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="name: the chat template refuses it: no"):
        chat_prompt(tokenizer, "name", messages)


def test_a_text_that_a_tokenizer_fails_on_is_an_answer_and_the_server_goes_on() -> None:
    model, tokenizer = load_policy("tiny", "arithmetic")
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer_json["normalizer"] = {"type": "Sequence", "normalizers": [doubling] * 40}
    hostile = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    app = ModelService("tiny", model, hostile).app()

    async def ask(prompts: list[Any]) -> list[tuple[int, str]]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            bodies = [json.dumps({"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
            bodies.append(" " * ((32 << 20) + 1))
            answers = [await client.post("/v1/completions", content=body) for body in bodies]
        return [(answer.status_code, answer.text) for answer in answers]

    failure, success, ids, large = asyncio.run(ask(["a", "1+2=", [3, 4]]))
    assert failure[0] == 400
    assert "the tokenizer cannot be used to encode text: it takes more than" in failure[1]
    assert (success[0], ids[0]) == (200, 200)
    assert large == (413, '{"error":"more than 33,554,432 bytes"}')


def test_a_tokenizer_that_fails_is_refused_before_transformers_uses_it(folder: Path) -> None:
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_json["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    with pytest.raises(ConfigError, match="the tokenizer cannot be used to encode text"):
        load_policy(str(folder), "arithmetic")
