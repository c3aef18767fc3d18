"""Tokenizers of anyone: whatever their files do to the tokenizers library is an error in one line, within limits."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.dataset import create_dataset_files
from instar.data.text.foreign import engine, limited
from instar.data.text.foreign.engine import Limited, Local, is_harmless
from instar.data.text.tokenizer import (
    BPETokenizer,
    load_saved_tokenizer,
    parse_tokenizer,
    train_bpe,
)
from instar.processes.child import GONE, process_state

TEXT = "so good a word, naïve 再见 ✓\n" * 200
OWN: dict[str, Any] = json.loads(train_bpe([TEXT], 300).to_json())
AFFECTED: dict[str, Any] = {"normalizer": {"type": "NFC"}}
"""A change that makes a file not one of known parts."""


def tokenizer_json(**changes: Any) -> str:
    return json.dumps({**OWN, **changes})


def chain(pattern: object, content: str) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [replace] * 5}


BACKTRACKING = "(a|a)*(a|a)*(a|a)*(a|a)*$b"
HOSTILE = {
    "a charsmap that does not parse": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "cannot be loaded: Precompiled",
    ),
    "a charsmap that aborts": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "cannot be loaded: it takes more than 832 MiB of memory, or aborts",
    ),
    "pieces of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "cannot be used to encode text: ",
    ),
    "replacements of replacements": (
        {"normalizer": chain({"String": "o"}, "o" * 100)},
        "cannot be used to encode text: it takes more than 832 MiB of memory, or aborts",
    ),
    "a decoder that strips more than there is": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}},
        "cannot be used to decode tokens: ",
    ),
    "no unknown piece": (
        {
            "model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]]},
            "added_tokens": [],
        },
        "cannot be used to encode text: Encountered an unknown token but `unk_id` is missing",
    ),
    "no unknown word": (
        {
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"},
            "added_tokens": [],
        },
        "cannot be used to encode text: WordLevel error: Missing",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_file_does_to_the_library_is_an_error_in_one_line(
    tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, message = HOSTILE[case]
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(**changes))
    with pytest.raises(ConfigError) as error:
        use(tmp_path)
    (problem,) = error.value.problems
    assert f"the tokenizer {message}" in problem.message
    assert "\n" not in problem.message
    assert capfd.readouterr() == ("", "")  # panics are not printed


def use(folder: Path) -> None:
    tokenizer = load_saved_tokenizer(folder)
    tokenizer.encode(TEXT)
    tokenizer.decode([OWN["model"]["vocab"]["a"]] * 3)


def test_what_takes_too_long_is_ended_and_its_tokenizer_goes_on() -> None:
    limited_engine = Limited(tokenizer_json(**AFFECTED), limit_s=1)
    with pytest.raises(ConfigError, match="cannot be used to encode text: it takes more than 1 s"):
        limited_engine.encode([TEXT * 3000])
    assert limited_engine.decode([65, 66]) == parse_tokenizer(tokenizer_json()).decode([65, 66])


def test_a_request_has_a_gibibyte_at_most() -> None:
    limited_engine = Limited(tokenizer_json(**AFFECTED))
    limited_engine.encode([TEXT])
    data_limit, _ = resource.prlimit(limited_engine.process.pid, resource.RLIMIT_DATA)
    assert limited.LIMIT_BYTES < data_limit < 1 << 30


def test_preparing_data_names_the_fault(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        tokenizer_json(pre_tokenizer={"type": "FixedLength", "length": 0})
    )
    (tmp_path / "a.txt").write_text(TEXT)
    data = DataConfig(
        source=str(tmp_path / "a.txt"), tokenizer=str(tmp_path), path=str(tmp_path / "tokens")
    )
    with pytest.raises(ConfigError, match="the tokenizer cannot be used to encode text"):
        create_dataset_files(data, 7)
    assert not (tmp_path / "tokens").exists()


CHANGED: list[dict[str, Any]] = [
    AFFECTED,
    {"decoder": None},
    {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": {**OWN["pre_tokenizer"], "add_prefix_space": True}},
    {"post_processor": {"type": "TemplateProcessing"}},
    {"model": {**OWN["model"], "type": "WordPiece"}},
    {"model": {**OWN["model"], "byte_fallback": True}},
    {"model": {**OWN["model"], "dropout": 0.5}},
    {"model": {**OWN["model"], "continuing_subword_prefix": "##"}},
    {"model": {**OWN["model"], "vocab": {"a": 0}}},
    {"added_tokens": [{**OWN["added_tokens"][0], "lstrip": True}]},
    {"added_tokens": [{**OWN["added_tokens"][0], "content": ""}]},
    {"truncation": {"max_length": 3}},
]


def test_only_files_of_known_parts_are_run_in_this_process() -> None:
    assert is_harmless(OWN)
    assert is_harmless({**OWN, "post_processor": OWN["pre_tokenizer"]})
    assert not any(is_harmless({**OWN, **change}) for change in CHANGED)


def test_both_engines_are_alike() -> None:
    local_tokenizer, limited_tokenizer = (
        parse_tokenizer(tokenizer_json()),
        parse_tokenizer(tokenizer_json(**AFFECTED)),
    )
    assert isinstance(local_tokenizer, BPETokenizer)
    assert isinstance(limited_tokenizer, BPETokenizer)
    assert (type(local_tokenizer.engine), type(limited_tokenizer.engine)) == (Local, Limited)
    texts = [TEXT, "", "<|end|>a", "  \n\n x"]
    for result, other in zip(
        local_tokenizer.encode_batch(texts), limited_tokenizer.encode_batch(texts), strict=True
    ):
        assert result.tolist() == other.tolist()
    for result, other in zip(
        local_tokenizer.engine.parse(texts), limited_tokenizer.engine.parse(texts), strict=True
    ):
        assert [part.tolist() for part in result] == [part.tolist() for part in other]
    assert local_tokenizer.encode_batch([]) == limited_tokenizer.encode_batch([]) == []
    assert local_tokenizer.vocabulary == limited_tokenizer.vocabulary
    assert limited_tokenizer.decode(limited_tokenizer.encode(TEXT).tolist()) == TEXT
    assert limited_tokenizer.engine.parse(["<|end|>"])[0][0].tolist() == [local_tokenizer.end_id]


def test_many_texts_are_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = parse_tokenizer(tokenizer_json(**AFFECTED))
    texts = [f"{n} words " * (n % 5) for n in range(40)]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    monkeypatch.setattr(engine, "_REQUEST_BYTES", 50)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


def test_a_process_that_is_gone_is_started_anew_and_ends_with_its_tokenizer() -> None:
    limited_engine = Limited(tokenizer_json(**AFFECTED, version="1.0"))
    pid = limited_engine.process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="its process was killed by SIGKILL"):
        limited_engine.decode([1])
    assert limited_engine.decode([65]) == parse_tokenizer(tokenizer_json()).decode([65])
    pid = limited_engine.process.pid
    del limited_engine
    gc.collect()
    assert process_state(pid) == GONE


def test_signals_to_the_whole_job_leave_the_tokenizer_to_its_run() -> None:
    limited_engine = Limited(tokenizer_json(**AFFECTED))
    pid = limited_engine.process.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert limited_engine.decode([65]) == parse_tokenizer(tokenizer_json()).decode([65])
    assert limited_engine.process.pid == pid


def test_a_fork_has_a_process_of_its_own() -> None:
    limited_engine = Limited(tokenizer_json(**AFFECTED))
    expected, process = limited_engine.decode([65, 66]), limited_engine.process.pid
    child = os.fork()
    if child == 0:
        os._exit(
            not (
                limited_engine.decode([65, 66]) == expected
                and limited_engine.process.pid != process
            )
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert limited_engine.decode([65, 66]) == expected
