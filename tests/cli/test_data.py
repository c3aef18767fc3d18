from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    said = capsys.readouterr()
    folder = said.out.strip()
    assert folder.startswith("data/story-byte-")
    assert (text.parent / folder / "dataset.json").exists()
    assert "preparing story.txt: 1 document, " in said.err


def test_options_go_over_the_file(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(f"data:\n  source: {text.name}\n  tokenizer: char\n")
    options = ["--tokenizer", "bpe", "--vocab-size", "300", "--path", "*odd: name"]
    assert main(["data", "prepare", "run.yaml", *options, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["tokenizer"], made["path"]) == ("bpe", "*odd: name")
    assert made["source"]["source"] == text.name


def test_inspect_shows_what_is_there(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "--source", text.name, "--path", "set"])
    capsys.readouterr()
    assert main(["data", "inspect", "set", "--sample", "6", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "byte, vocabulary 256" in shown
    assert "verified" in shown
    assert '"line 0"' in shown


def test_inspect_as_json(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "prepare", "--source", text.name, "--path", "set"])
    capsys.readouterr()
    assert main(["data", "inspect", "set", "--json", "--sample", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    total = sum(split["tokens"] for split in shown["splits"].values())
    assert total == text.stat().st_size
    assert shown["sample"]["train"] == "line"


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
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
