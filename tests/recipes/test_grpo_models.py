"""Models and tokenizers of folders, as exports leave them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pretrained import write_model

from instar.config.errors import ConfigError
from instar.recipes.grpo.models import Sampling, end_ids, load_model, sample


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
    model, loaded = load_model(str(folder), "arithmetic")
    assert loaded.eos_token_id == loaded.pad_token_id == 0
    assert end_ids(model) == (ids if isinstance(ids, list) else [0])
    (drawn,) = sample(model, loaded.pad_token_id, [[5, 6, 7]], 1, Sampling(4), seed=0)
    assert 1 <= len(drawn) <= 4


def test_a_model_without_an_end_is_refused_by_name(folder: Path) -> None:
    say_end(folder, tokenizer=None, ids=None)
    message = f"{re.escape(str(folder))} has no token that ends a text"
    with pytest.raises(ConfigError, match=message):
        load_model(str(folder), "arithmetic")


def test_a_tokenizer_that_fails_is_refused_before_transformers_uses_it(folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="the tokenizer cannot be used to encode text"):
        load_model(str(folder), "arithmetic")
