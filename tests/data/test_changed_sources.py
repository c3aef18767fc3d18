"""Prepared data whose sources have changed since are not trained on without a word."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import parametrize_first

from instar.config.errors import ConfigError
from instar.config.language import DataConfig, MixturePart
from instar.config.schema import EvalSet
from instar.data.text import verify
from instar.data.text.dataset import create_dataset_files, missing, open_data, open_sets
from instar.data.text.foreign.chat_template import PLAIN
from instar.data.text.origin import default_path
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import open_dataset
from instar.data.text.tokenizer import train_bpe
from instar.data.text.verify import verify_tokens

TEXT = "some words of a text\n" * 60
OTHER = "more words of a tale\n" * 60


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two files and one that is held out, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("a", "b"):
        Path("texts", f"{name}.txt").write_text(TEXT)
    Path("held.txt").write_text(TEXT)
    return Path("texts")


def add() -> None:
    Path("texts/c.txt").write_text(OTHER)


def remove() -> None:
    Path("texts/b.txt").unlink()


def rewrite() -> None:
    assert len(OTHER) == len(TEXT)
    times = Path("texts/b.txt").stat()
    Path("texts/b.txt").write_text(OTHER)
    os.utime("texts/b.txt", ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_all() -> None:
    shutil.rmtree("texts")
    Path("texts").mkdir()
    Path("texts/z.txt").write_text(OTHER)


def retarget() -> None:
    Path("texts").rename("v1")
    shutil.copytree("v1", "v2")
    Path("v2/a.txt").write_text(OTHER)
    os.utime("v2/a.txt", ns=(Path("v1/a.txt").stat().st_mtime_ns,) * 2)
    Path("texts").symlink_to("v2")


def rewrite_held() -> None:
    Path("held.txt").write_text(OTHER)


CHANGES: list[tuple[Callable[[], object], str]] = [
    (add, r"data\.source texts have changed \(new: c\.txt\)"),
    (remove, r"data\.source texts have changed \(gone: b\.txt\)"),
    (rewrite, r"data\.source texts have changed \(changed: b\.txt\)"),
    (replace_all, r"data\.source texts have changed \(new: z\.txt; gone: a\.txt, b\.txt\)"),
    (retarget, r"data\.source texts have changed \(changed: a\.txt\)"),
    (rewrite_held, r"data\.val_source held\.txt have changed \(changed: held\.txt\)"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
@pytest.mark.parametrize("path", [None, "set"])
def test_a_new_run_is_refused_and_told_what_changed(
    change: Callable[[], object], says: str, path: str | None
) -> None:
    data = DataConfig(source="texts", val_source="held.txt", path=path)
    create_dataset_files(data, 1)
    assert missing(data, 1) == []
    change()
    for start in (create_dataset_files, missing):
        with pytest.raises(ConfigError, match=says) as error:
            start(data, 1)
        (problem,) = error.value.problems
        advice = "name another data.path" if path else "set data.if_changed: prepare"
        assert advice in problem.hint
        assert "data.if_changed: keep" in problem.hint


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
def test_they_are_prepared_anew_beside_what_earlier_runs_use(change: Callable[[], object]) -> None:
    data = DataConfig(source="texts", val_source="held.txt")
    create_dataset_files(data, 1)
    before, first = open_data(data, 1), default_path(data, 1)
    change()
    prepare_config = data.model_copy(update={"if_changed": "prepare"})
    messages: list[str] = []
    assert [str(path) for path in missing(prepare_config, 1, messages.append)] == [f"{first}.2"]
    create_dataset_files(prepare_config, 1, say=messages.append)
    assert "have changed" in messages[0]
    after = open_data(data, 1)
    assert str(after.path) == default_path(data, 1) == f"{first}.2"
    assert after.fingerprint != before.fingerprint
    assert open_data(data.model_copy(update={"path": first}), 1).fingerprint == before.fingerprint
    for config in (data, prepare_config):
        assert missing(config, 1) == []


def test_parts_of_mixtures_and_held_out_sets_are_prepared_anew() -> None:
    mixture = tuple(MixturePart(source=source) for source in ("texts", "held.txt"))
    sets = [EvalSet(name="extra", source="held.txt")]
    data = DataConfig(mixture=mixture)
    create_dataset_files(data, 1, sets=sets)
    before = open_data(data, 1).fingerprint, open_sets(data, 1, sets)["extra"].path
    with Path("held.txt").open("a") as file:
        file.write("one more line\n" * 5)
    with pytest.raises(ConfigError, match=r"held\.txt have changed") as error:
        create_dataset_files(data, 1, sets=sets)
    assert "set data.if_changed: prepare" in error.value.problems[0].hint
    prepare_config = data.model_copy(update={"if_changed": "prepare"})
    create_dataset_files(prepare_config, 1, sets=sets)
    after = open_data(data, 1).fingerprint, open_sets(data, 1, sets)["extra"].path
    assert after[0] != before[0]
    assert str(after[1]) == f"{before[1]}.2"
    assert missing(data, 1, sets=sets) == []


def test_what_was_prepared_is_kept_on_demand_and_said() -> None:
    data = DataConfig(source="texts")
    create_dataset_files(data, 1)
    before = open_data(data, 1).fingerprint
    add()
    messages: list[str] = []
    create_dataset_files(data.model_copy(update={"if_changed": "keep"}), 1, say=messages.append)
    assert "note: the files of data.source texts have changed (new: c.txt)" in messages[0]
    assert open_data(data, 1).fingerprint == before


def test_the_same_text_is_no_change_and_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(source="texts/*.txt", path="set")
    create_dataset_files(data, 1)
    os.utime("texts/a.txt", (1, 1))
    shutil.copy("texts/b.txt", "copy")
    Path("copy").replace("texts/b.txt")
    create_dataset_files(data, 1)

    def never(*_: Any) -> Any:
        raise AssertionError("a file was read again")

    monkeypatch.setattr(verify, "_record_file", never)
    create_dataset_files(data, 1)


def test_a_source_that_is_gone_is_mentioned() -> None:
    data = DataConfig(source="texts", path="set")
    create_dataset_files(data, 1)
    shutil.rmtree("texts")
    messages: list[str] = []
    create_dataset_files(data, 1, say=messages.append)
    assert messages == ["note: data.source texts is not there; the tokens in set are used"]


def test_a_file_that_is_written_to_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(sources: Any) -> Any:
        result = real(sources)
        rewrite()
        return result

    real = verify.survey
    monkeypatch.setattr("instar.data.text.prepare.survey", survey)
    with pytest.raises(ConfigError, match=r"b\.txt changed while it was prepared"):
        prepare_dataset(DataConfig(source="texts", path="set"), 1)
    assert not Path("set").exists()


def test_the_standard_library_of_another_python_is_another_source() -> None:
    data = DataConfig(max_bytes=2000, path="set")
    record = prepare_dataset(data, 1) / "dataset.json"
    content = json.loads(record.read_text())
    content["source"]["python"] = "3.4.1"
    record.unlink()
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"of Python 3\.\d+\.\d+, not of 3\.4\.1 any more"):
        prepare_dataset(data, 1)


def test_held_out_text_of_a_stream_is_compared() -> None:
    pq.write_table(pa.table({"text": ["a row of text"] * 90}), "rows.parquet")
    data = DataConfig(kind="stream", source="rows.parquet", val_source="held.txt", path="set")
    create_dataset_files(data, 1)
    rewrite_held()
    with pytest.raises(ConfigError, match=r"data\.val_source held\.txt have changed"):
        create_dataset_files(data, 1)


def test_rows_decide_where_files_have_other_columns() -> None:
    def write(rows: dict[str, list[Any]]) -> None:
        pq.write_table(pa.table(rows), "rows/a.parquet")

    Path("rows").mkdir()
    texts = [f"row {number} of text" for number in range(90)]
    write({"text": texts, "n": [1] * 90})
    data = DataConfig(kind="rows", source="rows", path="set")
    create_dataset_files(data, 1)
    write({"text": texts, "n": [2] * 90})
    create_dataset_files(data, 1)
    write({"text": texts[::-1], "n": [2] * 90})
    with pytest.raises(ConfigError, match=r"data\.source rows have changed \(changed: a\.parquet"):
        create_dataset_files(data, 1)


def conversation_set(tokenizer: Path) -> DataConfig:
    """Write a tokenizer with its template, and conversations."""
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(train_bpe([TEXT], 280).to_json())
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tokenizer / "chat_template.jinja").write_text(PLAIN)
    roles = {"user": "some words", "assistant": "of a text"}
    messages = [{"role": role, "content": content} for role, content in roles.items()]
    line = json.dumps({"messages": messages})
    Path("chats.jsonl").write_text(f"{line}\n" * 90)
    return DataConfig(kind="chat", source="chats.jsonl", tokenizer=str(tokenizer), path="set")


@parametrize_first("change", ["lines", "template", "special"], first=2)
def test_conversations_are_compared_with_their_template(tmp_path: Path, change: str) -> None:
    tokenizer = tmp_path / "model"
    data = conversation_set(tokenizer)
    line = Path("chats.jsonl").read_text().splitlines()[0]
    create_dataset_files(data, 1)
    create_dataset_files(data, 1)
    if change == "lines":
        Path("chats.jsonl").write_text(f"{line}\n" * 80)
    elif change == "template":
        with (tokenizer / "chat_template.jinja").open("a") as file:
            file.write("\n")
    else:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text())
        config["bos_token"] = "<|user|>"
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    says = (
        r"data\.source chats\.jsonl have changed" if change == "lines" else "chat template or its"
    )
    with pytest.raises(ConfigError, match=says):
        create_dataset_files(data, 1)


@pytest.mark.parametrize("name", ["train-00000.safetensors", "marks/train-00000.safetensors"])
def test_damaged_conversations_and_marks_are_found_whatever_their_times_say(
    tmp_path: Path, name: str
) -> None:
    data = conversation_set(tmp_path / "model")
    create_dataset_files(data, 1)
    file = Path("set", name)
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for check in (
        lambda: create_dataset_files(data, 1),
        lambda: verify_tokens(open_dataset("set")),
    ):
        with pytest.raises(ConfigError, match=rf"set/{name}: the tokens are not those that were"):
            check()
