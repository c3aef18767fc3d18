from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from instar.cli.main import main


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "story.txt"
    path.write_text("".join(f"line {number} of a story\n" for number in range(200)))
    return path


def test_prepare_prints_the_folder_and_says_what_it_does_on_stderr(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", "--source", text.name]) == 0
    output = capsys.readouterr()
    folder = output.out.strip()
    assert folder.startswith("data/story-byte-")
    assert (text.parent / folder / "dataset.json").exists()
    assert "preparing story.txt: 1 document, " in output.err


def test_options_go_over_the_file(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(f"data:\n  source: {text.name}\n  tokenizer: char\n")
    options = ["--tokenizer", "bpe", "--vocab-size", "300", "--path", "*odd: name"]
    assert main(["data", "prepare", "run.yaml", *options, "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["tokenizer"], manifest["path"]) == ("bpe", "*odd: name")
    assert manifest["source"]["source"] == text.name


def test_inspect_shows_what_is_there(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "--source", text.name, "--path", "set"])
    capsys.readouterr()
    assert main(["data", "inspect", "set", "--sample", "6", "--verify"]) == 0
    output = capsys.readouterr().out
    assert "byte, vocabulary 256" in output
    assert "verified" in output
    assert '"line 0"' in output


def test_inspect_as_json(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "--source", text.name, "--path", "set"])
    capsys.readouterr()
    assert main(["data", "inspect", "set", "--json", "--sample", "4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    total = sum(split["tokens"] for split in facts["splits"].values())
    assert total == text.stat().st_size
    assert facts["sample"]["train"] == "line"


def test_verify_finds_a_flipped_bit(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "--source", text.name, "--path", "set"])
    shard = Path("set/val-00000.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    assert main(["data", "inspect", "set"]) == 0
    assert main(["data", "inspect", "set", "--verify"]) == 2
    assert "val-00000.safetensors: the tokens are not those" in capsys.readouterr().err


@pytest.fixture
def rows(text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parts as a stream reads them, and a file that is held out."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", text.parent / "cache")
    lines = [json.dumps({"text": line}) + "\n" for line in text.read_text().splitlines()]
    for number in range(3):
        Path(f"part-{number}.jsonl").write_text("".join(lines[number:180:3]))
    Path("held_out.jsonl").write_text("".join(lines[180:]))
    return text


STREAM = """\
data: {kind: stream, source: part-*.jsonl, val_source: held_out.jsonl, path: set, lanes: 3}
"""


def test_rows_become_token_shards(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("data: {kind: rows, source: part-*.jsonl, path: set}\n")
    assert main(["data", "prepare", "run.yaml"]) == 0
    assert capsys.readouterr().out == "set\n"
    assert main(["data", "inspect", "set", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], set(facts["splits"])) == ("rows", {"train", "val", "test"})
    tokens = sum(split["tokens"] for split in facts["splits"].values())
    # each document with a new line after it, but for the last of each split
    assert tokens + 3 == len("".join(rows.read_text().splitlines(True)[:180]))
    assert main(["data", "inspect", "set", "--verify"]) == 0
    summary = "rows: 180 documents of part-*.jsonl as token shards"
    assert summary in capsys.readouterr().out


def test_a_stream_is_counted_for_ranks_that_share_it(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(STREAM)
    assert main(["data", "prepare", "run.yaml"]) == 0
    assert main(["data", "inspect", "set"]) == 0
    assert "stream: part-*.jsonl, not read to its end yet" in capsys.readouterr().out
    assert main(["data", "prepare", "run.yaml", "--nproc", "3", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["elsewhere"]["tokens"]
    assert len(counts) == 3
    assert sum(counts) == len("".join(rows.read_text().splitlines(True)[:180])) - 3
    assert main(["data", "inspect", "set"]) == 0
    assert f"counted: {sum(counts):,} tokens in 3 lanes" in capsys.readouterr().out
    assert main(["data", "prepare", "run.yaml", "--nproc", "4"]) == 2
    assert "4 ranks cannot share 3 lanes" in capsys.readouterr().err


def test_each_part_of_a_mixture_has_a_folder(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.txt").write_text(text.read_text().upper())
    Path("run.yaml").write_text(
        "data: {path: set, mixture: [{source: story.txt}, {source: other.txt}]}\n"
    )
    assert main(["data", "prepare", "run.yaml"]) == 0
    assert capsys.readouterr().out == "set/0\nset/1\n"
    assert main(["data", "prepare", "run.yaml", "--json"]) == 0
    manifests = json.loads(capsys.readouterr().out)
    assert [manifest["source"]["source"] for manifest in manifests] == ["story.txt", "other.txt"]
    assert main(["data", "inspect", "set"]) == 2
    assert "several data sets; name one: set/0, set/1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prepare", "--source", "nowhere.txt"], "no file or folder nowhere.txt"),
        (["prepare", "--tokenizer", "word"], "data.tokenizer: no tokenizer: 'word'"),
        (["prepare", "nowhere.yaml"], "nowhere.yaml"),
        (["inspect", "nowhere"], "is not there"),
    ],
)
def test_bad_input_ends_with_exit_code_2(
    text: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text.exists()
    assert main(["data", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_help_is_light() -> None:
    program = (
        "import sys; from instar.cli.data import data\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("words", [["--source", "b"], ["--source=b"]])
def test_two_sources_are_refused_and_not_the_first_one_dropped(
    text: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["data", "prepare", "--source", text.name, *words, "--json"]) == 2
    assert "--source is given 2 times: story.txt, b; give one" in capsys.readouterr().err
