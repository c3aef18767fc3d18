"""`data.bos` and `data.eos`: which tokens begin and end a document, where the tokenizer's folder says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CHANGES, SIZES
from tokenizer_layouts import LAYOUTS, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from instar.api import evaluate, train
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.load import load_config
from instar.data.text.dataset import create_dataset_files, open_data
from instar.data.text.tokenizer import (
    BPETokenizer,
    load_saved_tokenizer,
    named_tokenizer,
    prompt_tokens,
    separator_of,
    tokenizer_files,
)

OTHER = {
    "gpt2": ("<|endoftext|>", None),
    "llama": ("", "<|end_of_text|>"),
    "gemma2": ("", "<end_of_turn>"),
    "phi3": ("<s>", "<|end|>"),
    "olmo2": ("<|endoftext|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", None),
}
"""A beginning and an end that are not those of the family's folder; None: the folder's"""


@pytest.mark.parametrize("kind", OTHER)
def test_documents_begin_and_end_with_the_tokens_of_the_config(tmp_path: Path, kind: str) -> None:
    """As with transformers, in the data, in what is kept of the tokenizer, and in prompts."""
    write_tokenizer(kind, tmp_path / "model")
    reference: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [f"document {n} of the many" for n in range(40)]
    source = tmp_path / "docs.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    bos, eos = OTHER[kind]
    folder, path = str(tmp_path / "model"), str(tmp_path / "tokens")
    data = DataConfig(source=str(source), tokenizer=folder, path=path, bos=bos, eos=eos)
    create_dataset_files(data, 7)
    begin = [reference.convert_tokens_to_ids(bos)] if bos else []
    end = [reference.convert_tokens_to_ids(eos or reference.eos_token)]
    documents = [
        [*begin, *reference(text, add_special_tokens=False)["input_ids"], *end] for text in texts
    ]
    split = open_data(data, 7).dataset.split("train")
    ids = split.read(0, len(split)).tolist()
    assert ids[: len(documents[0])] in documents
    assert sum(_count(document, ids) for document in documents) > 30
    tokenizer = load_saved_tokenizer(tmp_path / "tokens")
    assert prompt_tokens(tokenizer, "a").tolist()[: len(begin)] == begin
    assert separator_of(tokenizer).tolist() == end
    resume_config = data.model_copy(update={"bos": tokenizer.bos, "eos": tokenizer.end_token})  # type: ignore[attr-defined]
    create_dataset_files(resume_config, 7)
    for change in ({"bos": None}, {"eos": None} if eos else {"eos": "<|endoftext|>"}):
        if kind != "gpt2" or "eos" not in change:
            with pytest.raises(ConfigError, match="is not the tokenizer that made the data set"):
                create_dataset_files(data.model_copy(update=change), 7)


def _count(part: list[int], tokens: list[int]) -> int:
    return sum(tokens[at : at + len(part)] == part for at in range(len(tokens)))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_the_folder_says_changes_nothing_where_the_config_repeats_it(
    tmp_path: Path, kind: str
) -> None:
    """As the config that a run writes does."""
    write_tokenizer(kind, tmp_path)
    tokenizer = load_saved_tokenizer(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.bos == (LAYOUTS[kind].bos if LAYOUTS[kind].adds_bos else "")
    same_tokenizer = named_tokenizer(str(tmp_path), tokenizer.bos, tokenizer.end_token)
    assert same_tokenizer is not None
    assert (same_tokenizer.fingerprint, tokenizer_files(same_tokenizer)) == (
        tokenizer.fingerprint,
        tokenizer_files(tokenizer),
    )


def test_a_tokenizer_that_ends_texts_itself_ends_them_with_the_token_of_the_config(
    tmp_path: Path,
) -> None:
    write_tokenizer("gemma2", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    around = content["post_processor"]
    around["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = named_tokenizer(str(tmp_path), None, "<end_of_turn>")
    assert tokenizer is not None
    bos, end = 2, 5
    assert tokenizer.encode("a").tolist()[0] == bos
    assert tokenizer.encode("a").tolist()[-1] == end
    assert separator_of(tokenizer).size == 0


REFUSED = {
    "a tokenizer without names": (
        ("data.tokenizer=char", "data.bos=x"),
        "data.bos: the tokenizer char has no tokens that begin or end a text",
    ),
    "chats": (
        ("data.tokenizer=model", "data.kind=chat", "data.source=a.jsonl", "data.eos=<eos>"),
        "data.eos: the chat template says what surrounds a conversation",
    ),
    "token ids": (
        ("data.tokenizer=model", "data.kind=rows", "data.source=a", "data.tokens_field=ids", "data.bos=''"),
        "data.bos: data.tokens_field holds token ids",
    ),
    "no end": (("data.tokenizer=model", "data.eos=''"), "data.eos"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_surround_nothing_are_refused(case: str) -> None:
    keys, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        load_config(None, keys)
    assert message in str(error.value)


def test_a_token_that_is_none_is_named_with_those_like_it(tmp_path: Path) -> None:
    write_tokenizer("gemma2", tmp_path)
    with pytest.raises(ConfigError, match=r"data\.eos.*'<end_turn>' is no token") as error:
        named_tokenizer(str(tmp_path), None, "<end_turn>")
    assert "special tokens: <end_of_turn>" in str(error.value)


def test_a_run_writes_what_surrounds_its_documents_and_its_export_does_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = write_tokenizer("gemma2", tmp_path / "base")
    sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), **CHANGES["gemma2"]}
    config = AutoConfig.for_model("gemma2", **sizes | {"num_hidden_layers": 1})
    config.eos_token_id = tokenizer.token_to_id("<eos>")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    Path("docs.jsonl").write_text("\n".join([json.dumps({"text": "the word"})] * 200))
    common = {
        "task": "causal_lm",
        "model": {"from": "base", "context": 16},
        "train": {"until": "40it", "batch_size": 4},
        "optimizer": {"lr": 0.01},
        "learning_rate": {"warmup_iters": 2},
        "eval": {"eval_interval": 40, "eval_iters": 1},
        "record": {"report": False, "sample_tokens": 0},
        "device": "cpu",
        "precision": "fp32",
    }
    configs = {}
    for name, around in {"plain": {}, "other": {"bos": "", "eos": "<end_of_turn>"}}.items():
        data = {"source": "docs.jsonl", "path": f"tokens-{name}", **around}
        train(
            {**common, "name": name, "data": data, "record": {**common["record"], "run_dir": name}}
        )  # type: ignore[dict-item]
        configs[name] = load_config(f"{name}/run.yaml").config.data  # type: ignore[attr-defined]
        assert main(["checkpoint", "export", name, f"{name}-hf", "--to", "hf"]) == 0
    assert (configs["plain"].bos, configs["plain"].eos) == ("<bos>", "<eos>")
    assert (configs["other"].bos, configs["other"].eos) == ("", "<end_of_turn>")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert Path("plain-hf", file).read_bytes() == Path("base", file).read_bytes()

    reference: Any = AutoTokenizer.from_pretrained("other-hf")
    assert reference.eos_token == "<end_of_turn>"
    assert (
        reference("the word")["input_ids"]
        == load_saved_tokenizer("other").encode("the word").tolist()
    )
    assert tokenizer.token_to_id("<bos>") not in reference("the word")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained("other-hf")
    prompt = reference("the", return_tensors="pt")
    text = reference.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert text == "the word<end_of_turn>"
    losses = torch.nn.functional.cross_entropy(
        model(**reference("the word", return_tensors="pt")).logits[0, :-1].float(),
        reference("the word", return_tensors="pt")["input_ids"][0, 1:],
    )
    assert evaluate("other", "the word").loss == pytest.approx(losses.item(), rel=1e-4)
    assert main(["resume", "other", "--until", "41it"]) == 0
