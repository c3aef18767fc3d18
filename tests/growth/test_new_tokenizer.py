"""A model of transformers gets a new tokenizer: rows of shared tokens are kept, others are made of their pieces."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from instar.checkpoint.manifest import CheckpointError
from instar.cli.main import main
from instar.config.sections import Operation
from instar.growth import GrowthError, grow, plan_growth
from instar.growth.folders import grow_folder
from instar.growth.live.vocabulary import map_vocabulary
from instar.models.hf.pretrained_folder import open_folder

TEXTS = [
    "the grown model reads the pieces of the old one " * 3,
    "newer tokens wider rows naïve 東京",
]
ROWS = 288
"more than the old tokenizer has tokens, as tables often have"


def train_bytes(folder: Path, size: int, special: list[str]) -> Tokenizer:
    """A byte-level tokenizer, as of GPT-2 and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and another tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bytes(folder / "small", 280, ["<s>", "</s>"])
    train_bytes(folder / "new", 320, ["<pad>", "</s>", "<user>"])
    about = {"pad_token": {"content": "<pad>"}, "bos_token": "<gone>"}
    (folder / "new" / "tokenizer_config.json").write_text(json.dumps(about))
    sizes = {**SIZES, "vocab_size": ROWS, "pad_token_id": None}
    config = LlamaConfig(**sizes, bos_token_id=0, eos_token_id=[1])
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "small")
    settings = folder / "small" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0, "max_length": 9}))
    return folder


def test_each_row_is_that_of_its_token_or_the_mean_of_its_pieces(place: Path) -> None:
    old, new = (Tokenizer.from_file(str(place / n / "tokenizer.json")) for n in ("small", "new"))
    mapping = map_vocabulary(place / "small", place / "new")
    assert len(mapping.rows) == new.get_vocab_size() > 300
    pieces = {
        new.id_to_token(n): row
        for n, row in enumerate(mapping.rows)
        if n not in mapping.kept_tokens
    }
    assert {"<pad>", "<user>"} == {token for token, row in pieces.items() if not row}
    assert len(pieces) > 10
    for number in mapping.kept_tokens:
        assert old.id_to_token(mapping.rows[number][0]) == new.id_to_token(number)
    for token, row in pieces.items():
        if row:
            assert "".join(map(old.id_to_token, row)) == token
    operation = Operation("resize_vocab", {"tokenizer": str(place / "new")}, {})
    model = AutoModelForCausalLM.from_pretrained(place / "small")
    tables = [copy.deepcopy(e.weight.data) for e in (model.model.embed_tokens, model.lm_head)]
    grow(model, operation)
    for was, now in zip(tables, (model.model.embed_tokens, model.lm_head), strict=True):
        expected = [was[list(row)].mean(0) if row else was.mean(0) for row in mapping.rows]
        torch.testing.assert_close(now.weight.data, torch.stack(expected))
        kept_tokens = sorted(mapping.kept_tokens)
        assert torch.equal(
            now.weight[kept_tokens], was[[mapping.rows[number][0] for number in kept_tokens]]
        )
    assert model.config.eos_token_id == [new.token_to_id("</s>")]
    assert model.config.bos_token_id is None
    assert model.generation_config.eos_token_id == new.token_to_id("</s>")
    assert model.generation_config.pad_token_id == new.token_to_id("<pad>")


@pytest.mark.parametrize("moments", ["asymmetric", "mapped"])
def test_moments_go_with_their_rows(place: Path, moments: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "small")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 280, (4, 24), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    old = copy.deepcopy(optimizer.state[model.lm_head.weight])
    mapping = map_vocabulary(place / "small", place / "new", 384)
    value = {"tokenizer": str(place / "new"), "rows": 384}
    grow(model, "resize_vocab", value, optimizer=optimizer, moments=moments)
    state = optimizer.state[model.lm_head.weight]
    assert model.config.vocab_size == len(mapping.rows) == 384
    for name in ("exp_avg", "exp_avg_sq"):
        expected = torch.stack(
            [old[name][list(row)].mean(0) if row else old[name].mean(0) for row in mapping.rows]
        )
        if name == "exp_avg" and moments == "asymmetric":
            expected[[number for number in range(384) if number not in mapping.kept_tokens]] = 0.0
        torch.testing.assert_close(state[name], expected)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_a_folder_gets_the_tokenizer_and_the_same_rows(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    operations = ("--op", f"resize_vocab={{tokenizer: {place / 'new'}}}", "--op", "widen_mlp=x2")
    assert main(["grow", str(place / "small"), str(out), *operations]) == 0
    assert "from pieces, 2 from the mean of all" in capsys.readouterr().err
    assert (out / "tokenizer.json").read_bytes() == (place / "new/tokenizer.json").read_bytes()
    loaded_model = AutoModelForCausalLM.from_pretrained(out)
    live = AutoModelForCausalLM.from_pretrained(place / "small")
    grow(live, "resize_vocab", {"tokenizer": str(place / "new")})
    assert torch.equal(loaded_model.lm_head.weight, live.lm_head.weight)
    assert loaded_model.config.eos_token_id == live.config.eos_token_id == [1]
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings == {"eos_token_id": 1, "pad_token_id": 0, "max_length": 9}


def test_tokens_with_marked_spaces_are_those_of_bytes(tmp_path: Path, place: Path) -> None:
    """As of Llama 2 and Gemma: `▁the` is `Ġthe`, and `<0xE6>` a byte."""
    (tmp_path / "marked").mkdir()
    tokens = {"<unk>": 0, "▁the": 1, "<0xE6>": 2, "rows": 3, "x▁the": 4}
    tokenizer = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "marked/tokenizer.json"))
    old = Tokenizer.from_file(str(place / "small/tokenizer.json"))
    rows = map_vocabulary(place / "small", tmp_path / "marked").rows
    assert [*map(old.id_to_token, rows[1])] == ["Ġthe"]
    assert [*map(old.id_to_token, rows[2])] == ["æ"]
    assert [*map(old.id_to_token, rows[4])] == ["x", "Ġthe"]


def broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def gaping(folder: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 10**8}, [])).save(str(folder / "tokenizer.json"))


def touch_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").touch()


@pytest.mark.parametrize(
    ("write", "more", "message"),
    [
        (broken, {}, r"tokenizer\.json: not a tokenizer"),
        (gaping, {}, "2 tokens with ids up to 100,000,000"),
        (touch_sentencepiece, {}, r"tokenizer\.json: missing"),
        (
            touch_sentencepiece,
            {"from": "/nowhere"},
            r"no tokenizer\.json of the old tokenizer in /nowhere",
        ),
        (touch_sentencepiece, {"size": 3}, "has no option 'size'"),
        (None, {"rows": 300}, r"3\d\d tokens do not fit into 300 rows"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    write: Callable[[Path], object] | None,
    more: dict[str, Any],
    message: str,
    place: Path,
    tmp_path: Path,
) -> None:
    if write is not None:
        write(tmp_path)
    folder = place / "new" if write is None else tmp_path
    value = {"tokenizer": str(folder), "from": str(place / "small"), **more}
    config = AutoModelForCausalLM.from_pretrained(place / "small").config
    with pytest.raises(GrowthError, match=message):
        plan_growth(config, "resize_vocab", value)


def test_a_table_smaller_than_the_old_tokenizer_is_refused(place: Path) -> None:
    config = {**open_folder(place / "small").shape.to_dict(), "vocab_size": 200}
    value = {"tokenizer": str(place / "new"), "from": str(place / "small")}
    with pytest.raises(
        GrowthError, match=r"the old tokenizer has a token .*, and the table 200 rows"
    ):
        plan_growth(config, "resize_vocab", value)
    with pytest.raises(GrowthError, match=r"no tokenizer\.json of the old tokenizer: say from"):
        plan_growth(config, "resize_vocab", {"tokenizer": str(place / "new")})


def test_a_tokenizer_that_cannot_encode_is_refused(place: Path, tmp_path: Path) -> None:
    Tokenizer(models.Unigram([("a", 0.0)])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot encode: .*unknown token"):
        map_vocabulary(tmp_path, place / "new")


def test_ids_that_are_none_are_those_of_the_new_tokenizer(place: Path) -> None:
    mapping = map_vocabulary(place / "small", place / "new")
    ids = {"eos_token_id": [[1]], "pad_token_id": {"id": 0}, "bos_token_id": 10**9}
    assert mapping.special_ids(ids) == {
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": None,
    }


def test_a_table_may_become_smaller(place: Path, tmp_path: Path) -> None:
    train_bytes(tmp_path / "less", 258, ["</s>", "<s>"])
    operation = Operation("resize_vocab", {"tokenizer": str(tmp_path / "less")}, {})
    growth = grow_folder(open_folder(place / "small"), tmp_path / "out", [operation])
    assert growth.proof is not None
    assert growth.proof.label == "lossy"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 258
