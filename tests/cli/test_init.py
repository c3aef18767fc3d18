from pathlib import Path

import pytest

from instar.cli.main import main
from instar.config import STARTERS, names_in
from instar.config.load import load
from instar.schedule.checks import load_checked

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_gpt_yaml_and_names_the_next_command(here: Path, capsys: Captured) -> None:
    assert main(["init"]) == 0
    assert capsys.readouterr() == ("", "wrote gpt.yaml   next: instar train gpt.yaml\n")
    assert load(str(here / "gpt.yaml")).config.data.tokenizer == "bpe"


def test_init_writes_where_it_is_told(here: Path) -> None:
    assert main(["init", "gpt", "small.yaml", "--preset", "llama"]) == 0
    config = load(str(here / "small.yaml")).config
    assert config.preset == ("llama",)
    assert config.model.norm == "rmsnorm"


def test_init_writes_every_kind(here: Path) -> None:
    for kind in names_in(STARTERS):
        assert main(["init", kind]) == 0
        assert load_checked(str(here / f"{kind}.yaml")).config.name == kind


def test_init_overwrites_nothing_unless_forced(here: Path, capsys: Captured) -> None:
    file = here / "gpt.yaml"
    file.write_text("name: mine\n")
    assert main(["init", "gpt"]) == 2
    assert "gpt.yaml: the file already exists; --force overwrites it" in capsys.readouterr().err
    assert file.read_text() == "name: mine\n"
    assert main(["init", "gpt", "--force"]) == 0
    assert load(str(file)).config.name == "gpt"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["gpt", "no/such/gpt.yaml"], "no/such/gpt.yaml: cannot be written"),
        (["gtp"], "'gtp' is not"),
        (["gpt", "--preset", "lama"], "'lama' is not one of"),
        (["graph", "--preset", "llama"], "presets are for language models, not for task graph"),
    ],
)
def test_what_cannot_be_written_ends_in_2(
    args: list[str], said: str, here: Path, capsys: Captured
) -> None:
    assert main(["init", *args]) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []
